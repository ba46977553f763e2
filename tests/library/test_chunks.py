"""The largest values of every chunk against numpy, the code of their positions, and which methods take chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default
from hypothesis import given, strategies as st

import jgc
from jgc.compress import METHODS
from jgc.layout.pack import Layer
from jgc.selection import chunks as chunked
from jgc.selection.chunks import cut_in_chunks, largest_of_rows
from jgc.selection.selector import make_selector
from jgc.training.steps.positions import entropy_bound_bits

TAKING = ("topk", "dgc", "scalecom", "egc", "ef21", "threshold_v", "klt", "lgc_ps", "lgc_ring")


def layers_of(*sizes):
    starts = np.cumsum((0, *sizes))[:-1]
    return tuple(Layer(str(i), int(at), size, (size,)) for i, (at, size) in enumerate(zip(starts, sizes, strict=True)))


def expected(v, layers, alpha, least, chunk):
    """Positions and counts of each layer, chunk by chunk, by sorting."""
    positions, counts = [], []
    for layer in layers:
        own = []
        for start in range(layer.start, layer.start + layer.size, chunk):
            x = np.abs(v[start : min(start + chunk, layer.start + layer.size)])
            k = min(x.size, max(1, round(alpha * x.size), int(np.ceil(least * x.size / layer.size))))
            own += (start + np.sort(np.argsort(-x, kind="stable")[:k])).tolist()
        positions += own
        counts.append(len(own))
    return positions, tuple(counts)


SHAPES = [
    ((9000, 20, 5000), 0.001, 1, 4096),  # shorter last chunks, and a layer smaller than a chunk
    ((8192, 4096, 4096), 1 / 64, 1, 4096),  # whole chunks alone
    ((16, 40, 16, 16, 7, 64), 1 / 8, 1, 16),  # a shorter chunk between whole ones
    ((1000, 8, 300), 0.02, 500, 128),  # min_values asks for more than alpha, of all values of two layers
    ((3,), 0.001, 1, 4096),
    ((5000, 10), 0.25, 1, 4096),
    ((50, 60), 1.0, 1, 16),  # everything
    ((), 0.5, 1, 16),
]


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("sizes, alpha, least, chunk", SHAPES)
@pytest.mark.parametrize("ties", some_by_default([True, False], [True]))
def test_every_chunks_largest_as_numpy_has_them(sizes, alpha, least, chunk, ties, backend, monkeypatch):
    monkeypatch.setattr(chunked, "backend", lambda: backend)  # both ways of searching
    rng, layers = np.random.default_rng(0), layers_of(*sizes)
    v = (rng.integers(-4, 5, sum(sizes)) if ties else rng.standard_normal(sum(sizes))).astype(np.float32)
    positions, counts = expected(v, layers, alpha, least, chunk)
    selector = make_selector(alpha, least, "chunks", chunk)
    found = jax.jit(lambda v: selector.positions(v, layers))(v)
    assert found.tolist() == positions
    assert selector.counts(layers) == counts
    packed = jax.jit(lambda p: selector.pack(p, layers))(found)
    assert packed.dtype == jnp.uint32
    assert selector.unpack(packed, layers).tolist() == positions


@pytest.mark.slow
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4, 9, 64]), st.integers(1, 3))
def test_both_searches_of_rows_agree_ties_included(seed, k, largest):
    rows = np.random.default_rng(seed).integers(0, largest + 1, (2, 4096)).astype(np.float32)
    rows[1, 100:] = -1  # a shorter chunk
    two_steps = np.sort(np.asarray(largest_of_rows(jnp.asarray(rows), k)), axis=1)
    assert two_steps.tolist() == np.sort(jax.lax.top_k(rows, k)[1], axis=1).tolist()


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=4), st.floats(1 / 4096, 1.0), st.integers(1, 50))
def test_every_layer_sends_its_share_and_at_least_the_minimum(sizes, alpha, least):
    chunks = cut_in_chunks(layers_of(*sizes), alpha, least)
    assert (chunks.counts <= chunks.sizes).all() and sum(chunks.of_layers) == chunks.counts.sum()
    for count, size in zip(chunks.of_layers, sizes, strict=True):
        assert min(least, size) <= count <= size
        pieces = -(-size // 4096)
        assert count <= max(alpha * size, least) + pieces  # rounded up in every chunk at most


@pytest.mark.parametrize("k, bits", [(4, 12.0), (16, 10.0), (64, 8.0)])
def test_bits_of_a_position(k, bits):
    layers = layers_of(2**20)
    entropy = entropy_bound_bits(4096, k) / k
    selector = make_selector(k / 4096, selection="chunks")
    positions = jax.ShapeDtypeStruct((256 * k,), jnp.int32)
    sent = 32 * jax.eval_shape(lambda p: selector.pack(p, layers), positions).size / (256 * k)
    assert sent == pytest.approx(bits, abs=0.01)
    assert entropy < sent < entropy + 1.2


def test_wire_and_memory_of_chunks():
    """2-bit values of 64 of every 4,096, as SparseLoCo sends them, and what is not sent stays."""
    params, nodes = {"w": jnp.zeros((128, 96)), "b": jnp.zeros(100)}, jgc.make_nodes(2, jax.devices()[:1])
    method = jgc.compress.topk(alpha=64 / 4096, selection="chunks", value_code="2bit")
    (up, *_) = [m for m in method.wire("top-k", params, nodes).logical if (m.direction, m.field) == ("up", "positions")]
    mu = 3 * 64 + 2
    assert mu <= 8 * up.bytes / 8 <= mu + 12  # 8 bits each
    random = np.random.default_rng(0)
    grads = {k: random.integers(-64, 65, (2, *x.shape)).astype(np.float32) for k, x in params.items()}
    state = method.init(jax.random.key(0), params, nodes)
    step = jax.jit(jgc.compress.step_on_nodes(method.aggregate, "top-k", nodes))
    aggregated, state, info = step(jax.random.key(0), grads, state)
    assert info.elements_sent.tolist() == [mu, mu]
    left = np.asarray(state.local.memory, float).mean(0)
    came = np.concatenate([grads[k].mean(0).ravel() for k in ("w", "b")])
    got = np.concatenate([np.asarray(aggregated[k], float).ravel() for k in ("w", "b")])
    np.testing.assert_allclose(got + left, came, atol=1e-4)
    assert 0 < np.count_nonzero(got) <= 2 * mu


@pytest.mark.parametrize("name", TAKING)
def test_methods_select_in_chunks(name):
    method = METHODS[name].factory(METHODS[name].settings(selection="chunks"))
    params, nodes = {"w": jnp.zeros((512, 512))}, jgc.make_nodes(2)
    exact = METHODS[name].factory(METHODS[name].settings())
    last = method.schedule[-1].value
    sent, of_exact = (
        sum(m.bytes for m in x.wire(last, params, nodes).logical if m.direction == "up") for x in (method, exact)
    )
    # 4 of 4,096 are 256 of 262,144 values, and 0.1 % are 262; LGC sends whole groups of 16
    assert sent == pytest.approx(of_exact, rel=0.05)


def test_every_method_with_a_selection_takes_chunks():
    assert {name for name, method in METHODS.items() if hasattr(method.settings(), "selection")} == {*TAKING}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"selection": "chunks", "chunk": 100}, "chunk must be a power of two from 16 to 65536, got 100"),
        ({"selection": "chunks", "chunk": 8}, "got 8"),
        ({"selection": "chunks", "alpha": 1e-4}, "at least 1/4096, got 0.0001"),
        ({"chunk": 64}, "chunk=64 does nothing without selection='chunks'"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        jgc.compress.topk(**settings)
