"""The k largest magnitudes, by every search, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from jgc.backend import plain_operations
from jgc.selection.ranges import Range
from jgc.selection.top_k import (
    largest_by_sorting,
    largest_in_ranges,
    largest_plain,
)
from jgc.selection.top_k_cpu import block_of, largest_by_blocks
from jgc.selection.top_k_gpu import largest_on_gpu

SEARCHES = {
    "blocks": largest_by_blocks,
    "threshold": lambda v, ranges: largest_by_blocks(v, ranges, 1),
    "sort": largest_by_sorting,
    "plain": largest_plain,
    "gpu blocks": lambda v, ranges: largest_on_gpu(v, ranges, block_of(ranges)),
    "gpu threshold": lambda v, ranges: largest_on_gpu(v, ranges, 1),
}
TUNED = ["blocks", "threshold", "sort"]
TINY, INF, NAN = np.float32(1e-45), np.inf, np.nan


def reference(values: np.ndarray, k: int) -> list[int]:
    """By magnitude, then by position."""
    magnitudes = np.abs(np.asarray(values, np.float32)).view(np.int32).astype(np.int64)  # denormals are not flushed
    return np.sort(np.lexsort((np.arange(values.size), -magnitudes))[:k]).tolist()


def vectors(n: int) -> dict[str, np.ndarray]:
    """What a gradient may look like, f32[n] each."""
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n).astype(np.float32)
    rare = np.where(rng.random(n) < 0.01, normal, 0)
    edges = rng.choice(np.array([0.0, -0.0, 1.0, -1.0, INF, -INF, 3e38, 1e-38], np.float32), n)
    return {"normal": normal, "few kinds": np.round(2 * normal), "zeros": 0 * normal, "equal": np.full(n, -2, "f"),
            "mostly zeros": rare, "edges": edges, "rising": np.arange(n, dtype=np.float32), "bf16": np.asarray(
                jnp.asarray(normal, jnp.bfloat16).astype(jnp.float32))}  # fmt: skip


CASES = [("blocks", 2, 1), ("blocks", 3001, 1), ("blocks", 5000, 7), ("blocks", 9999, 999),
         ("gpu blocks", 5003, 7), ("threshold", 257, 256), ("gpu threshold", 3000, 40),
         ("plain", 3000, 40)]  # fmt: skip


@pytest.mark.parametrize("search, n, k", CASES)
def test_top_k_variants_match_numpy_with_ties_to_lower_position(search, n, k):
    select = jax.jit(lambda v: SEARCHES[search](v, [Range(0, n, k)]))
    for name, v in vectors(n).items():
        found = select(v)
        assert found.dtype == jnp.int32 and found.tolist() == reference(v, k), name


FLOATS = st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, 1e-38, 1e-45]) | st.floats(width=32, allow_nan=False)


@pytest.mark.parametrize("search", TUNED)
@settings(max_examples=30, deadline=None)
@given(kinds=st.lists(FLOATS, min_size=1, max_size=20), seed=st.integers(0, 2**32 - 1), k=st.sampled_from([9, 60]))
def test_any_values_with_many_ties(search, kinds, seed, k):
    v = np.random.default_rng(seed).choice(np.array(kinds, np.float32), 300)
    assert COMPILED(v, k, search).tolist() == reference(v, k)


COMPILED = jax.jit(lambda v, k, search: SEARCHES[search](v, [Range(0, v.size, k)]), static_argnums=(1, 2))


@pytest.mark.parametrize("search", TUNED)
def test_the_same_as_lax_top_k_with_denormals(search):
    v = np.tile(np.array([0.0, TINY, 3 * TINY, -2 * TINY, 1e-40], np.float32), 100)
    assert COMPILED(v, 150, search).tolist() == reference(v, 150)


@pytest.mark.parametrize("search", TUNED)
@pytest.mark.parametrize("k", [2, 50])
def test_nan_is_the_largest_and_positions_stay_in_range(search, k):
    v = np.ones(700, np.float32)
    v[[3, 400]] = NAN, -NAN
    others = [i for i in range(700) if i not in (3, 400)]
    assert COMPILED(v, k, search).tolist() == sorted([3, 400] + others[: k - 2])
    assert COMPILED(np.full(700, NAN, np.float32), k, search).tolist() == list(range(k))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_ranges_of_all_sizes_at_once(blocks, plain):
    v = vectors(40_000)["few kinds"]
    ranges = [Range(5, 20_000, 20), Range(20_005, 12_345, 200), Range(32_350, 3, 1), Range(39_990, 4, 4),
              Range(100, 10, 0), Range(32_353, 513, 100)]  # fmt: skip
    with plain_operations(plain):
        found = jax.jit(lambda v: largest_in_ranges(v, ranges, blocks))(v).tolist()
    assert found == [start + i for start, size, k in ranges for i in reference(v[start : start + size], k)]


def test_nothing_is_found_in_no_ranges():
    assert largest_in_ranges(jnp.zeros(3), []).shape == (0,)


@pytest.mark.parametrize("search", ["blocks", "threshold"])
def test_top_k_is_equal_under_vmap_and_on_mesh(search):
    rows = np.stack(list(vectors(2000).values()))
    expected = [reference(row, 30) for row in rows]
    select = lambda row: SEARCHES[search](row, [Range(0, row.size, 30)])  # noqa: E731
    assert jax.jit(jax.vmap(select))(rows).tolist() == expected
    devices = jax.devices()[: 2 if len(jax.devices()) > 1 else 1]
    mesh = jax.make_mesh((len(devices),), ("nodes",), (jax.sharding.AxisType.Auto,), devices=devices)
    on_nodes = jax.shard_map(jax.vmap(select), mesh=mesh, in_specs=P("nodes"), out_specs=P("nodes"), check_vma=True)
    assert jax.jit(on_nodes)(rows).tolist() == expected


def test_blocks_are_as_many_as_the_values_taken_at_least():
    for size in (1, 5, 100, 10_001, 10**6):
        for k in {1, max(1, size // 3), max(1, size // 2), max(1, size - 1)}:
            b = block_of([Range(0, size, k)])
            assert -(-size // b) >= k


@pytest.mark.parametrize("k", [-1, 4])
def test_bad_k_is_named(k):
    with pytest.raises(ValueError, match=f"k must be between 0 and 3, the number of values, got {k}"):
        largest_in_ranges(jnp.zeros(3), [Range(0, 3, k)])


def test_bad_range_is_named():
    with pytest.raises(ValueError, match="within the 3 values, got start 2 and size 2"):
        largest_in_ranges(jnp.zeros(3), [Range(2, 2, 1)])
