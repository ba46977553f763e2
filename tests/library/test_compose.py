"""Methods from parts: codec, memory and exchange, and the guard in front of them."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import nodes_of, same_bits

import jgc
from jgc.compress import compose, compose_phases
from jgc.compress.dense import identity
from jgc.compress.sparse.topk import selected
from jgc.method.exchange import all_reduce, gather, nowhere, server
from jgc.method.memory import error_feedback, no_memory
from jgc.method.phases import single
from jgc.selection.selector import make_selector
from jgc.types import State

NODES = "1 device"


def _aggregate(compressor, grads, phase=None, layout=NODES):
    nodes = nodes_of(layout)
    params = jax.tree.map(lambda g: g[0], grads)
    phase = compressor.schedule[-1].value if phase is None else phase
    step = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, phase, nodes))
    return step(jax.random.key(0), grads, compressor.init(jax.random.key(0), params, nodes))


def _gradients(*shape: int):
    return jnp.asarray(np.random.default_rng(0).integers(-64, 65, (8, *shape)) / 64, jnp.float32)


@pytest.mark.parametrize("algorithm", ["psum", "ring"])
def test_all_reduce_of_nonlinear_code_is_an_error_when_built(algorithm):
    message = f"all-reduce by {algorithm} adds payloads up, and the code 'top-k' is not linear"
    with pytest.raises(ValueError, match=message):
        compose(selected(make_selector(0.1)), error_feedback(), all_reduce(algorithm))
    stages = {"dense": (identity(), all_reduce()), "compressed": (selected(make_selector(0.1)), all_reduce(algorithm))}
    with pytest.raises(ValueError, match=message):
        compose_phases(stages, error_feedback(), single("compressed"))


@pytest.mark.parametrize("exchange", [gather(), server()], ids=lambda e: e.name)
def test_any_code_can_be_gathered(exchange):
    grads = _gradients(4, 5)
    aggregated, _, info = _aggregate(compose(selected(make_selector(1.0)), no_memory(), exchange), grads)
    assert np.array_equal(aggregated, grads.mean(0))
    assert np.array_equal(info.elements_sent, [20] * 8)


def test_linear_code_is_decoded_after_sum():
    """A sketch: the sums of neighbouring pairs. Decoding gives each of a pair half of its sum."""

    def encode(key, v, layers):
        return {"pairs": v.reshape(-1, 2).sum(1)}

    def decode(payload, layers):
        return jnp.repeat(payload["pairs"], 2) / 2

    def mean(payloads, layers):
        return decode({"pairs": payloads["pairs"].mean(0)}, layers)

    codec = identity()._replace(name="pairs", encode=encode, decode=decode, mean=mean)
    grads, expected = _gradients(3, 4), _gradients(3, 4).mean(0).reshape(-1, 2).mean(1)
    for exchange in (all_reduce(), all_reduce("ring"), gather()):
        aggregated, state, _ = _aggregate(compose(codec, error_feedback(), exchange), grads)
        assert np.array_equal(aggregated, np.repeat(expected, 2).reshape(3, 4))
        kept = grads.reshape(8, -1) - np.repeat(grads.reshape(8, -1, 2).mean(2), 2, axis=1)
        assert np.array_equal(state.local.memory, kept)


def test_each_node_encodes_with_own_key():
    def encode(key, v, layers):
        return {"dense": v + jax.random.randint(key, (), 0, 2**16)}

    noisy = identity()._replace(encode=encode)
    _, state, _ = _aggregate(compose(noisy, error_feedback(), gather()), _gradients(2, 2))
    assert len(np.unique(state.local.memory[:, 0])) == 8


def test_unsent_gradients_stay_in_residual():
    codec = selected(make_selector(0.5))
    aggregated, state, _ = _aggregate(compose(codec, error_feedback(), nowhere()), _gradients(2, 4))
    assert not np.any(aggregated)
    assert np.count_nonzero(state.local.memory) <= 8 * 4


def test_info_has_residual_norm_and_elements_sent():
    grads = _gradients(4, 5)
    _, state, info = _aggregate(jgc.compress.topk(alpha=0.25), grads)
    np.testing.assert_allclose(info.residual_norm, np.linalg.norm(state.local.memory, axis=1), rtol=1e-6)
    assert np.array_equal(info.elements_sent, [5] * 8)
    assert info.finite.all() and not info.overflow.any()


@pytest.mark.parametrize("method", ["topk", "dgc", "scalecom", "egc", "random_k", "threshold_v"])
def test_accelerators_find_the_norm_of_the_residual_without_reading_it(method, monkeypatch):
    settings = {"topk": {"alpha": 0.02, "value_code": "2bit"}, "egc": {"ratio": 20}, "threshold_v": {"threshold": 2.0}}
    compressor = getattr(jgc.compress, method)(**settings.get(method, {"alpha": 0.02}))
    monkeypatch.setattr(sys.modules["jgc.layout.vector"], "backend", lambda: "gpu")
    nodes, params = nodes_of(NODES), {"w": jnp.zeros((30, 50)), "b": jnp.zeros(9)}
    state = compressor.init(jax.random.key(0), params, nodes)
    step = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
    for i in range(4):
        grads = jax.tree.map(lambda x, i=i: jax.random.normal(jax.random.key(i), (8, *x.shape)), params)
        if i == 2:  # all nodes skip this step
            grads["b"] = grads["b"].at[1, 3].set(jnp.nan)
        _, state, info = step(jax.random.key(i), grads, state)
        kept = [jgc.residual(compressor, jax.tree.map(lambda x, k=k: x[k], state.local), params) for k in range(8)]
        norms = [np.linalg.norm(np.concatenate([x.reshape(-1) for x in of_node.values()])) for of_node in kept]
        np.testing.assert_allclose(info.residual_norm, norms if i != 2 else 0, rtol=1e-5)
        assert min(norms) > 0


def test_messages_of_a_server_and_of_a_gather():
    nodes, params = nodes_of(NODES), {"w": jnp.zeros((20, 30))}
    wire = jgc.compress.topk(alpha=0.1).wire("top-k", params, nodes)  # 60 values, positions in 16 bits
    assert {m[:3]: m.bytes for m in wire.logical} == {
        ("worker", "up", "positions"): 40,
        ("worker", "up", "values"): 240,
        ("worker", "down", "positions"): 7 * 40,
        ("worker", "down", "values"): 7 * 240,
    }
    wire = compose(identity(), no_memory(), server()).wire("dense", params, nodes)
    assert [tuple(m) for m in wire.logical] == [("worker", "up", "dense", 2400), ("worker", "down", "dense", 2400)]


def test_skipped_step_does_not_update_memory():
    """Also where the bad value would have been averaged away or not selected."""
    grads = _gradients(4, 5).at[5, 0, 0].set(jnp.inf)
    compressor = jgc.compress.topk(alpha=0.1)
    aggregated, state, info = _aggregate(compressor, grads)
    assert not np.any(aggregated) and not np.any(state.local.memory) and not info.finite.any()
    params = grads[0]
    assert same_bits(state, compressor.init(jax.random.key(0), params, nodes_of(NODES)))


def test_diagnose_compares_with_true_mean_without_changing_state():
    nodes, grads = nodes_of(NODES), _gradients(4, 5)
    compressor = jgc.compress.topk(alpha=0.25)
    state = compressor.init(jax.random.key(0), grads[0], nodes)

    def one(key, grads, state):
        return jgc.diagnose(compressor, "top-k", key, grads, state, nodes)

    placements = State(jgc.SHARED, jgc.LOCAL)
    figures = jax.jit(jgc.on_nodes(one, nodes, (jgc.SHARED, jgc.LOCAL, placements), jgc.SHARED))(
        jax.random.key(0), grads, state
    )
    got, true = np.asarray(_aggregate(compressor, grads)[0], float), np.asarray(grads.mean(0), float)
    used = np.where(got != 0, true, 0)
    cosine = lambda a, b: np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b)  # noqa: E731
    assert figures["true_cosine"] == pytest.approx(cosine(got, true), rel=1e-5)
    assert figures["reconstruction_cosine"] == pytest.approx(cosine(got, used), rel=1e-5)
    assert figures["relative_error"] == pytest.approx(np.linalg.norm(got - used) / np.linalg.norm(used), rel=1e-5)
    assert set(figures["positions"].tolist()) == set(np.argsort(-np.abs(grads[0].ravel()), kind="stable")[:5].tolist())
    assert figures["positions_n"] == 20


def test_diagnose_bytes_are_not_in_wire():
    nodes, params = nodes_of("8 devices"), {"w": jnp.zeros((4, 5))}
    wire = jgc.compress.topk(alpha=0.25).wire("top-k", params, nodes)
    assert {s.field for s in wire.physical} == {"flag", "positions+values"}
