"""Every tuned operation equals its plain reference, on each backend's code run on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgc.backend import plain_operations
from jgc.layout.pack import Layer
from jgc.selection.entries import Sparse, SparseSum, Unordered, cleared, scatter_layers
from jgc.selection.ranges import Range
from jgc.selection.selector import make_selector
from jgc.selection.top_k import largest_in_ranges
from jgc.wire import elias_fano
from jgc.wire.bits import ones_at, pack_bits, unpack_bits
from jgc.wire.sums import range_maxima, range_sums

BACKENDS = ["cpu", "gpu", "tpu"]
seeds = st.integers(0, 2**32 - 1)
LAYERS = (Layer("a", 0, 300, (30, 10)), Layer("b", 300, 7, (7,)), Layer("c", 307, 100, (100,)))


@pytest.fixture(params=BACKENDS)
def on(request, monkeypatch):
    """The code for a backend, run on CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    return request.param


def same(operation, *args):
    """Whether the operation and its plain reference give equal bits."""
    tuned = jax.jit(lambda *args: operation(*args))(*args)
    with plain_operations():
        plain = jax.jit(lambda *args: operation(*args))(*args)
    for a, b in zip(jax.tree.leaves(tuned), jax.tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def some_values(seed, n):
    """Multiples of 1/8, whose sums are exact in any order, with many ties."""
    return jnp.asarray(np.random.default_rng(seed).integers(-40, 41, n) / 8, jnp.float32)


@pytest.mark.parametrize("ranges", [
    [Range(0, 300, 3), Range(300, 50, 50), Range(350, 50, 0)],
    [Range(5, 20_000, 20), Range(20_005, 12_345, 200), Range(32_350, 3, 1), Range(32_353, 513, 100)],
], ids=["small", "large"])  # fmt: skip
def test_largest_in_ranges(ranges, on):
    same(lambda v: largest_in_ranges(v, ranges), some_values(0, 40_000).at[jnp.array([7, 99])].set(jnp.nan))


@pytest.mark.parametrize("chunk", [16, 256])
def test_chunks_and_the_code_of_their_positions(chunk, on):
    selector = make_selector(1 / 16, selection="chunks", chunk=chunk)

    def positions(v):
        chosen = selector.positions(v, LAYERS)
        packed = selector.pack(chosen, LAYERS)
        return chosen, packed, selector.unpack(packed, LAYERS)

    same(positions, some_values(1, 407))


@pytest.mark.parametrize("n, k", [(1, 1), (97, 97), (1000, 300), (100_000, 40), (2**31 - 1, 3)])
def test_elias_fano(n, k, on):
    chosen = np.sort(np.random.default_rng(k).choice(n, k, replace=False) if n < 2**20 else [0, 2**30, n - 1])
    code = lambda p: (elias_fano.encode(p, n), elias_fano.decode(elias_fano.encode(p, n), n, k))  # noqa: E731
    same(code, jnp.asarray(chosen, jnp.int32))


@pytest.mark.parametrize("bits", [1, 3, 9, 32])
@pytest.mark.parametrize("n", [0, 5, 33_000])
def test_words_of_codes(n, bits, on):
    codes = jnp.asarray(np.random.default_rng(n).integers(0, 2**bits, n, dtype=np.uint32))
    same(lambda codes: (words := pack_bits(codes, bits), unpack_bits(words, bits, n)), codes)


def test_ones_of_messages(on):
    words = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (9, 4), dtype=np.uint32))
    same(lambda words: ones_at(words, 100), words)


@pytest.mark.parametrize("counts", [(3, 4), (0, 500, 0, 1), (700, 1, 33, 64, 2)])
@pytest.mark.parametrize("parts", [1, 3])
def test_sums_and_maxima_of_ranges(counts, parts, on):
    x = some_values(0, sum(counts))
    part = jnp.arange(x.size, dtype=jnp.int32) * 7 % parts if parts > 1 else None
    same(lambda x: (range_sums(x, counts, part, parts), range_maxima(x, counts, part, parts)), x)


@pytest.mark.parametrize("kind", [Sparse, Unordered])
def test_entries_added_layer_by_layer(kind, on):
    random = np.random.default_rng(0)
    counts, nodes = (20, 7, 9), 3
    at = [[layer.start + np.sort(random.choice(layer.size, k, False)) for layer, k in zip(LAYERS, counts, strict=True)]
          for _ in range(nodes)]  # fmt: skip
    positions = jnp.asarray(np.stack([np.concatenate(of_node) for of_node in at]), jnp.int32)
    values = some_values(0, positions.size).reshape(positions.shape)
    same(lambda p, x: scatter_layers(SparseSum(kind(p, x), counts), LAYERS), positions, values)
    same(lambda p, x: cleared(jnp.ones(407), kind(p[0].at[3].set(500), x[0])), positions, values)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 700), st.floats(0.01, 1))
def test_any_range(seed, n, share):
    ranges = [Range(0, n, max(1, round(share * n)))]
    v = some_values(seed, n)
    with plain_operations():
        plain = largest_in_ranges(v, ranges)
    assert largest_in_ranges(v, ranges).tolist() == plain.tolist()
