"""The largest entries of every layer, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgc.layout.pack import Layer, whole
from jgc.selection import entries
from jgc.selection.entries import Sparse, Unordered, cleared, scatter
from jgc.selection.selector import Selector, check_alpha

LAYERS = (Layer("a", 0, 5, (5,)), Layer("b", 5, 1, (1,)), Layer("c", 6, 12, (12,)))
vectors = st.lists(st.integers(-3, 3), min_size=18, max_size=18)  # small integers: many ties


@given(vectors, st.sampled_from([0.01, 0.2, 0.5, 1.0]))
def test_top_positions_match_numpy_with_ties_to_lower_position(values, alpha):
    v, selector = np.array(values, np.float32), Selector(alpha)
    expected = []
    for layer, count in zip(LAYERS, selector.counts(LAYERS), strict=True):
        order = np.argsort(-np.abs(v[layer.start : layer.start + layer.size]), kind="stable")
        expected += (layer.start + np.sort(order[:count])).tolist()
    assert jax.jit(lambda v: selector.positions(v, LAYERS))(v).tolist() == expected


def test_nothing_is_selected_of_no_layers():
    assert Selector(0.1).positions(jnp.zeros(0), ()).shape == (0,)


@given(st.lists(st.integers(1, 10**7), max_size=5), st.floats(1e-6, 1.0), st.integers(1, 50))
def test_every_layer_sends_its_share_and_at_least_the_minimum(sizes, alpha, least):
    layers = tuple(whole(size, str(i)) for i, size in enumerate(sizes))
    for count, size in zip(Selector(alpha, least).counts(layers), sizes, strict=True):
        assert min(least, size) <= count <= size
        assert count in (least, size) or abs(count - alpha * size) <= 0.5


@pytest.mark.parametrize("size", [1, 256, 65537])
def test_positions_roundtrip(size):
    layers = (Layer("a", 0, size, (size,)), Layer("b", size, 100, (100,)))
    selector = Selector(2 / (size + 100), min_values=2)  # of a layer of one value, that one
    positions = jnp.unique(jnp.array([0, size - 1, size, size + 99], jnp.int32))
    assert sum(selector.counts(layers)) == positions.size
    packed = selector.pack(positions, layers)
    assert packed.dtype == jnp.uint32
    assert selector.unpack(packed, layers).tolist() == positions.tolist()
    assert selector.unpack(packed, layers).dtype == jnp.int32


def test_scatter_adds_values_at_equal_positions():
    sparse = Sparse(jnp.array([[0, 2], [2, 3]]), jnp.array([[1.0, 2.0], [4.0, 8.0]]))
    assert scatter(sparse, 5).tolist() == [1, 0, 6, 8, 0]


@pytest.mark.parametrize("shape", [(5, 40), (2, 3, 40), (1, 7)])
def test_sequential_scatter_equals_one_scatter_bit_for_bit(shape, monkeypatch):
    """On CPU, which adds in order; a GPU does not, and takes the nodes in turn."""
    random = np.random.default_rng(0)
    positions = np.sort(random.permuted(np.broadcast_to(np.arange(60, dtype=np.int32), (*shape[:-1], 60)), axis=-1))
    positions = np.minimum(positions[..., : shape[-1]] * 60 // shape[-1], 53)  # 50 and more are nowhere, 53 repeats
    sparse = Sparse(jnp.asarray(positions), jnp.asarray(random.standard_normal(shape), jnp.float32))
    one = scatter(sparse, 50)
    monkeypatch.setattr(entries, "backend", lambda: "gpu")
    other = scatter(sparse, 50)
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes() and np.any(np.asarray(one))


def test_positions_of_a_gpu_are_distinct(monkeypatch):
    """What is dropped lies past the end, at distinct positions: a scatter may rely on it that none is there twice."""
    monkeypatch.setattr(entries, "backend", lambda: "gpu")
    monkeypatch.delenv("JGC_PLAIN", raising=False)  # plain references promise nothing
    sparse = Unordered(jnp.array([4, 9, 2, 9, 5, 7]), jnp.arange(1.0, 7.0))
    at, unique, ascend = entries._promises(sparse, 5)
    assert unique and not ascend
    assert len(set(at.tolist())) == 6 and [p for p in at.tolist() if p < 5] == [4, 2]
    assert scatter(sparse, 5).tolist() == [0, 0, 3, 0, 1]
    assert cleared(jnp.ones(5), sparse).tolist() == [1, 1, 0, 1, 0]
    assert {"scatter", "scatter-add"} == {
        eqn.primitive.name
        for f in (scatter, lambda sparse, n: cleared(jnp.ones(n), sparse))
        for eqn in jax.make_jaxpr(f, static_argnums=1)(sparse, 5).eqns
        if eqn.params.get("unique_indices")
    }


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.0001, float("nan")])
def test_bad_alpha_is_named(alpha):
    with pytest.raises(ValueError, match=rf"alpha must be in \(0, 1\].*got {alpha}"):
        check_alpha(alpha)
