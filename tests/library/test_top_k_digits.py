"""Selection as on GPUs gives the positions that a sort gives, NaN first, whatever `lax.top_k` does with NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default
from test_top_k import reference, vectors

from jgc.backend import plain_operations
from jgc.layout.pack import Layer, make_packing, unpack
from jgc.selection.chunks import cut_in_chunks, largest_in_chunks, largest_in_rows
from jgc.selection.ranges import Range
from jgc.selection.top_k import largest_in_ranges
from jgc.selection.top_k_gpu import block_for, largest_on_gpu, rows_of
from jgc.wire import elias_fano

RANGES = [Range(5, 20_000, 20), Range(20_005, 12_345, 200), Range(32_350, 3, 1), Range(39_990, 4, 4),
          Range(100, 10, 0), Range(32_353, 513, 100), Range(0, 9000, 5)]  # fmt: skip
WHOLE = [Range(0, 40_000, 40)]
CHUNKS = [Range(i, min(4096, 40_000 - i), 4) for i in range(0, 40_000, 4096)]  # a row each


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def made(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tiny = rng.choice(np.array([0.0, -0.0, 1e-45, -3e-45, 1e-40], np.float32), n)
    nan = np.where(rng.random(n) < 0.001, np.float32(np.nan), vectors(n)["normal"])
    return vectors(n) | {"denormal": tiny, "nan": nan}


def expected(v: np.ndarray, ranges) -> list[int]:
    return [start + i for start, size, k in ranges for i in reference(v[start : start + size], k)]


CASES = [(RANGES, 8), (RANGES, 1), (WHOLE, 32), (CHUNKS, 16), (CHUNKS, None), (WHOLE, 1)]


@pytest.mark.parametrize(("ranges", "b"), some_by_default(CASES, CASES[:2] + CASES[3:4]))
def test_positions_are_those_of_a_sort(ranges, b):
    select = jax.jit(lambda v: largest_on_gpu(v, ranges, b))
    for name, v in made(40_000).items():
        assert select(v).tolist() == expected(v, ranges), name


def test_emulated_nodes_select_each_its_own():
    rows = np.stack(list(made(3000).values()))
    ranges = [Range(0, 2048, 30), Range(2048, 700, 7)]
    selected = jax.jit(jax.vmap(lambda v: largest_on_gpu(v, ranges, 4)))(rows)
    assert selected.tolist() == [expected(row, ranges) for row in rows]


def test_all_values_and_none():
    assert largest_on_gpu(jnp.zeros(9), [Range(0, 3, 0)]).shape == (0,)
    assert largest_on_gpu(jnp.zeros(9), [Range(7, 2, 2), Range(1, 3, 3)]).tolist() == [7, 8, 1, 2, 3]


@pytest.mark.slow
def test_values_between_ranges_are_not_chosen():
    v = jnp.arange(256.0)
    assert largest_on_gpu(v, [Range(0, 100, 2), Range(128, 100, 2)], 1).tolist() == [98, 99, 226, 227]
    assert largest_on_gpu(v, [Range(0, 100, 2), Range(128, 100, 2)], 4).tolist() == [98, 99, 226, 227]


def test_sizes_of_rows_and_blocks():
    for sizes in ([1], [31, 33], [10**6, 7, 7], [5000] * 9, [3, 10**5] * 50):
        rows, sizes = rows_of(np.array(sizes)), np.array(sizes)
        assert rows.length % 32 == 0 and (np.bincount(rows.owner) * rows.length >= sizes).all()
        assert (np.diff(rows.start) % rows.length == 0).all() and rows.start[0] == 0
    assert block_for(np.array([2 * 10**7]), np.array([5 * 10**6])) == 1  # a quarter of all: no block is left out


def without_nan(top_k):
    """`lax.top_k` of an H100: NaN is left out of floats if k <= 16 and a row has 1,024 or more."""

    def changed(x, k):
        if k <= 16 and x.shape[-1] >= 1024 and jnp.issubdtype(x.dtype, jnp.floating):
            return top_k(jnp.where(jnp.isnan(x), -jnp.inf, x), k)
        return top_k(x, k)

    return changed


@pytest.mark.parametrize("plain", [True, False])
def test_nan_is_largest_though_top_k_leaves_it_out(plain, on_gpu, monkeypatch):
    monkeypatch.setattr(jax.lax, "top_k", without_nan(jax.lax.top_k))
    v = jnp.ones(5000).at[jnp.array([2000, 4000])].set(jnp.nan)
    assert jax.lax.top_k(v, 2)[1].tolist() == [0, 1]  # the stand-in does it
    with plain_operations(plain):
        assert jax.jit(lambda v: largest_in_ranges(v, [Range(0, v.size, 4)]))(v).tolist() == [0, 1, 2000, 4000]
        assert jax.jit(lambda v: largest_in_rows(v, 3))(v[None]).tolist() == [[0, 2000, 4000]]


def test_chunks_and_rows_are_those_of_other_devices(monkeypatch):
    layers = (Layer("a", 0, 9000, (90, 100)), Layer("b", 9000, 20, (20,)), Layer("c", 9020, 4096, (4096,)))
    cut = cut_in_chunks(layers, 0.002, min_values=3)
    v = jnp.asarray(vectors(13_116)["few kinds"])

    def selected(v):
        return largest_in_chunks(v, layers, cut), largest_in_rows(v[:8192].reshape(2, 4096), 16)

    on_cpu = jax.jit(selected)(v)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    on_gpu = jax.jit(lambda v: selected(v))(v)  # a new function: JAX would run the program for CPUs again
    assert all(a.tolist() == b.tolist() for a, b in zip(on_gpu, on_cpu, strict=True))


def test_positions_of_a_code_are_the_same(on_gpu):
    positions = np.sort(np.random.default_rng(0).choice(40_000, 300, replace=False)).astype(np.int32)
    code = elias_fano.encode(jnp.asarray(positions), 40_000)
    decode = jax.jit(jax.vmap(lambda code: elias_fano.decode(code, 40_000, 300)))
    assert decode(jnp.stack([code, code])).tolist() == [positions.tolist()] * 2


@pytest.mark.parametrize("skip", [False, True])
def test_leaves_are_cut_out_or_cleared(skip, on_gpu):
    tree = {"a": jnp.zeros((3, 4)), "b": jnp.zeros((5,)), "c": jnp.zeros((), jnp.float16)}
    flat = jnp.arange(1, 19, dtype=jnp.float32).at[2].set(jnp.nan)
    leaves = jax.jit(lambda flat, skip: unpack(flat, make_packing(tree), skip, clear=True))(flat, skip)
    plain = unpack(flat, make_packing(tree))
    for leaf, other in zip(jax.tree.leaves(leaves), jax.tree.leaves(plain), strict=True):
        assert np.array_equal(leaf, 0 * np.nan_to_num(other) if skip else other, equal_nan=True)
        assert leaf.dtype == other.dtype


def test_default_is_the_gpu_search(on_gpu):
    v = vectors(40_000)["few kinds"]
    text = str(jax.make_jaxpr(lambda v: largest_in_ranges(v, RANGES))(v))
    assert "top_k" not in text and "sort" not in text.replace("indices_are_sorted", "")
