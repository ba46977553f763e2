"""Selection as on TPUs gives the positions that `lax.top_k` gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default

from jgc.selection import top_k
from jgc.selection.ranges import Range
from jgc.selection.top_k import largest_in_ranges
from jgc.selection.top_k_tpu import largest_on_tpu


def expected(x: np.ndarray, k: int) -> np.ndarray:
    """Ascending; ties go to the lower place."""
    return np.sort(np.lexsort((np.arange(x.size), -x.astype(np.int64)))[:k])


def values(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    made = {"any": rng.integers(0, 2**31, n), "many ties": rng.integers(0, 5, n), "zeros": np.zeros(n),
            "largest last": np.arange(n)}[kind].astype(np.int32)  # fmt: skip
    if kind == "any":
        made[:3] = 2**31 - 1
    return made


def floats(bits: np.ndarray) -> np.ndarray:
    """Values whose magnitudes have these bits; every other one is negative."""
    return (bits | np.where(np.arange(bits.size) % 2, -(2**31), 0)).astype(np.int32).view(np.float32)


@pytest.mark.parametrize("kind", some_by_default(["any", "many ties", "zeros", "largest last"], ["many ties"]))
@pytest.mark.parametrize(("sizes", "counts"), [
    ([200_000], [200]),  # by rows
    ([128 * 500, 128 * 300, 12_345, 128 * 400], [60, 40, 20, 30]),  # of whole rows, and not
    ([5000, 300, 7], [5, 300, 0]),  # all of one range, none of the last
    ([130_000, 1000, 20_000], [2000, 10, 1]),  # all values
    ([20_000, 129], [1, 1]),
    ([70_000, 65_536, 1], [70, 65, 1]),
    ([60_000], [60_000]),  # more rows than are looked at together
    ([1], [1]),
])  # fmt: skip
def test_positions_are_those_of_a_sort(sizes, counts, kind):
    parts = [values(kind, n, np.random.default_rng(n)) for n in sizes]
    starts = np.cumsum(sizes) - sizes
    ranges = [Range(*one) for one in zip(starts.tolist(), sizes, counts, strict=True)]
    x = jnp.asarray(floats(np.concatenate(parts)))
    found = jax.jit(lambda x: largest_on_tpu(x, ranges))(x)
    wanted = [start + expected(part, k) for start, part, k in zip(starts, parts, counts, strict=True)]
    assert np.array_equal(found, np.concatenate(wanted)) and found.dtype == jnp.int32


@pytest.mark.slow
def test_ranges_of_a_vector_on_tpu_and_cpu_agree(monkeypatch):
    rng = np.random.default_rng(0)
    x = jnp.asarray(np.round(rng.standard_normal(50_000), 2), jnp.float32).at[7].set(jnp.nan).at[9].set(-jnp.inf)
    ranges = [Range(0, 30_000, 30), Range(30_000, 20, 20), Range(30_020, 19_980, 0), Range(40_000, 10_000, 900)]
    on_cpu = largest_in_ranges(x, ranges)
    monkeypatch.setattr(top_k, "backend", lambda: "tpu")
    calls = []
    monkeypatch.setattr(top_k, "largest_on_tpu", lambda *args: calls.append(1) or largest_on_tpu(*args))
    assert np.array_equal(largest_in_ranges(x, ranges), on_cpu) and calls
    assert largest_in_ranges(x, []).shape == (0,)


@pytest.mark.slow
def test_emulated_nodes_select_each_its_own():
    parts = np.stack([values("many ties", 40_000, np.random.default_rng(i)) for i in range(3)])
    xs = jnp.asarray(np.stack([floats(part) for part in parts]))
    found = jax.vmap(lambda x: largest_on_tpu(x, [Range(0, 40_000, 40)]))(xs)
    assert all(np.array_equal(places, expected(part, 40)) for places, part in zip(found, parts, strict=True))
