"""LGC with a parameter server: what comes out of each phase."""

import functools
import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import same_bits
from lgc_helpers import MU, NO_CODE, PARAMS, SHORT, K, nodes_of

import jgc
from jgc.compress import LgcPs, lgc_ps
from jgc.compress.lgc.normalise import innovations_by_layer, select_layers
from jgc.layout.pack import make_packing
from jgc.selection.selector import Selector
from jgc.types import State
from jgc.wire.values import ValueCode


@functools.cache
def _first_state(**settings):
    init = jax.jit(lambda key: lgc_ps(**{**SHORT, **settings}).init(key, PARAMS, nodes_of()),
                   compiler_options={"xla_backend_optimization_level": 0})  # fmt: skip
    return init(jax.random.key(0))


@functools.cache
def _step(phase: str, **settings):
    return jax.jit(jgc.compress.step_on_nodes(lgc_ps(**{**SHORT, **settings}).aggregate, phase, nodes_of()))


@functools.cache
def _diagnose(**settings):
    compressor, placements = lgc_ps(**{**SHORT, **settings}), State(jgc.SHARED, jgc.LOCAL)

    def one(key, grads, state):
        return jgc.diagnose(compressor, "compressed", key, grads, state, nodes_of())

    return jax.jit(jgc.on_nodes(one, nodes_of(), (jgc.SHARED, jgc.LOCAL, placements), jgc.SHARED))


def _gradients(seed: int = 0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.normal(size=(K, *x.shape)).astype(np.float32), PARAMS)


def _flat(tree) -> np.ndarray:
    """[K, n] or [n] in the order a, b, bias."""
    lead = tree["a"].ndim - 2
    return np.concatenate([np.asarray(tree[k]).reshape(*tree[k].shape[:lead], -1) for k in ("a", "b", "bias")], -1)


def _largest(v: np.ndarray) -> np.ndarray:
    """Positions of the largest tenth of each layer."""
    out, start = [], 0
    for size, count in ((160, 16), (80, 8), (10, 1)):
        out += sorted(start + np.argsort(-np.abs(v[start : start + size]), kind="stable")[:count])
        start += size
    return np.array(out)


@pytest.mark.slow
def test_top_k_phase_aggregates_at_leaders_positions_and_trains():
    grads, state = _gradients(), _first_state()
    aggregated, after, info = _step("top-k")(jax.random.key(0), grads, state)
    v, positions = _flat(grads), _largest(_flat(grads)[0])
    expected = np.zeros(250, np.float32)
    expected[positions] = v[:, positions].mean(0)
    np.testing.assert_allclose(_flat(aggregated), expected, rtol=1e-6)
    assert np.array_equal(np.asarray(info.elements_sent), [MU] * K)
    weights, trained = state.shared.autoencoder.weights, after.shared.autoencoder.weights
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), weights, trained)
    assert any(jax.tree.leaves(changed.encoder)) and any(jax.tree.leaves(changed.decoders))


@pytest.mark.parametrize("phase", ["dense", "compressed"])
def test_other_phases_do_not_train(phase):
    _, after, _ = _step(phase)(jax.random.key(0), _gradients(), _first_state())
    assert same_bits(after.shared.autoencoder, _first_state().shared.autoencoder)
    assert int(after.shared.step) == 1


@pytest.mark.parametrize("phase", ["top-k", "compressed"])
def test_renaming_nodes_moves_the_leader(phase):
    """What it sends is what trains, encodes and serves all nodes: positions, signs, scales and code alike."""
    grads, leader = _gradients(), 1
    renamed = jax.tree.map(lambda g: np.roll(g, -leader, axis=0), grads)
    expected, after, _ = _step(phase)(jax.random.key(0), renamed, _first_state())
    state = _first_state(leader="rotating")
    state = state._replace(shared=state.shared._replace(step=jnp.int32(leader)))
    got, after_got, _ = _step(phase, leader="rotating")(jax.random.key(0), grads, state)
    np.testing.assert_allclose(_flat(got), _flat(expected), rtol=1e-5, atol=1e-6)
    moved = np.roll(after.local.memory, leader, axis=0)
    np.testing.assert_allclose(after_got.local.memory, moved, rtol=1e-5, atol=1e-6)
    moves = [
        jax.tree.map(lambda a, b: a - b, s.shared.autoencoder.weights.encoder, state.shared.autoencoder.weights.encoder)
        for s in (after_got, after)
    ]
    for one, other in zip(*map(jax.tree.leaves, moves), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3 * np.abs(other).max())


def test_values_sent_as_innovations_arrive_exactly():
    """With all values sent so, the compressed phase gives what the top-k phase does."""
    grads, state = _gradients(), _first_state()
    exact, _, _ = _step("compressed", innovation=1.0)(jax.random.key(0), grads, state)
    top_k, _, _ = _step("top-k")(jax.random.key(0), grads, state)
    np.testing.assert_allclose(_flat(exact), _flat(top_k), rtol=1e-6)


def test_code_without_innovations_conserves_gradients():
    grads, state = _gradients(), _first_state()
    aggregated, after, _ = _step("compressed", innovation=0.0)(jax.random.key(0), grads, state)
    got, v, positions = _flat(aggregated), _flat(grads), _largest(_flat(grads)[0])
    assert np.all(np.isfinite(got)) and set(np.flatnonzero(got)) <= set(positions)
    assert np.vdot(got, v.mean(0)) > 0
    np.testing.assert_allclose(np.mean(after.local.memory, 0) + got, v.mean(0), atol=1e-6)


@pytest.mark.parametrize("step", [0, 5])
def test_the_nodes_take_turns_as_leader(step):
    state = _first_state(leader="rotating")
    state = state._replace(shared=state.shared._replace(step=jnp.int32(step)))
    grads = _gradients()
    aggregated, _, _ = _step("compressed", leader="rotating")(jax.random.key(0), grads, state)
    assert set(np.flatnonzero(_flat(aggregated))) == set(_largest(_flat(grads)[step % K]))


@pytest.mark.slow
def test_own_positions_match_top_k():
    grads, settings = _gradients(), {"positions": "own"}
    v, expected = _flat(grads), np.zeros((K, 250))
    for k in range(K):
        expected[k, _largest(v[k])] = v[k, _largest(v[k])]
    for phase, innovation in (("top-k", 0.2), ("compressed", 1.0)):
        step = _step(phase, innovation=innovation, **settings)
        aggregated, after, _ = step(jax.random.key(0), grads, _first_state(**settings))
        np.testing.assert_allclose(_flat(aggregated), expected.mean(0), rtol=1e-5)
        np.testing.assert_allclose(after.local.memory, v - expected, atol=1e-6)


def test_every_node_is_decoded_by_its_own_decoder():
    """A bias added to the last layer of one decoder is added to its node's values, in units of the leader's scales."""
    state, grads, node = _first_state(), _gradients(), 2
    weights = state.shared.autoencoder.weights
    last = weights.decoders["params"]["Conv_0"]
    assert last["bias"].shape == (K, 1)
    decoders = {"params": {**weights.decoders["params"], "Conv_0": {**last, "bias": last["bias"].at[node].add(1.0)}}}
    autoencoder = state.shared.autoencoder._replace(weights=weights._replace(decoders=decoders))
    changed = state._replace(shared=state.shared._replace(autoencoder=autoencoder))
    step = _step("compressed", innovation=0.0)
    (before, kept, _), (after, kept_after, _) = (step(jax.random.key(0), grads, s) for s in (state, changed))
    x, positions = _flat(grads), _largest(_flat(grads)[0])
    scales = np.repeat([np.abs(x[0, positions])[a:b].mean() for a, b in ((0, 16), (16, 24), (24, 25))], [16, 8, 1])
    added = np.where(x[0, positions] < 0, -scales, scales)
    np.testing.assert_allclose((_flat(after) - _flat(before))[positions], added / K, rtol=1e-4)
    for k in range(K):
        expected = -added if k == node else np.zeros(MU)
        change = (kept_after.local.memory - kept.local.memory)[k, positions]
        np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("send_means", [True, False])
def test_layer_of_leaders_zeros_gets_means_of_other_nodes(send_means):
    """Its scale is zero, and the decoders' biases must not come out as values."""
    settings = {"innovation": 0.0, "send_means": send_means}
    grads, state = _gradients(), _first_state()
    weights = jax.tree.map(lambda x: x + 0.1, state.shared.autoencoder.weights)  # as if trained: biases are not zero
    autoencoder = state.shared.autoencoder._replace(weights=weights)
    state = state._replace(shared=state.shared._replace(autoencoder=autoencoder))
    grads["b"][0] = 0
    aggregated, _, _ = _step("compressed", **settings)(jax.random.key(0), grads, state)
    values = _flat(grads)[:, 160 : 160 + 8]  # ties go to the lowest positions
    expected = values.mean(1).mean() if send_means else 0.0
    np.testing.assert_allclose(_flat(aggregated)[160 : 160 + 8], np.repeat(expected, 8), rtol=1e-5)


def test_diagnostics_match_their_definitions():
    grads, state = _gradients(), _first_state()
    figures = _diagnose()(jax.random.key(0), grads, state)
    got = _flat(_step("compressed")(jax.random.key(0), grads, state)[0]).astype(float)
    v = _flat(grads).astype(float)
    positions = _largest(_flat(grads)[0])
    x, true = v[:, positions], v[:, positions].mean(0)
    signs, bounds = np.where(x[0] < 0, -1, 1), [0, 16, 24, 25]
    layers = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    trivial, ceiling = np.zeros((K, MU)), np.zeros((K, MU))
    for k in range(K):
        for layer in layers:
            mean, leaders = (signs * x[k])[layer].mean(), np.abs(x[0])[layer].mean()
            follows = np.clip(mean / leaders, 0, 1)  # the leader, as far as its mean does
            trivial[k, layer] = signs[layer] * mean
            ceiling[k, layer] = signs[layer] * (mean + follows * ((signs * x[0])[layer] - leaders))
    without_code = trivial.copy()
    for k in range(K):  # a fifth of the values of every node arrive exactly: those that signs and means explain worst
        exact = np.argsort(-np.abs(x[k] - trivial[k]), kind="stable")[:5]
        ceiling[k, exact] = without_code[k, exact] = x[k, exact]
    ceiling[0] = x[0]

    def cosine(a, b):
        return np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)

    assert figures["reconstruction_cosine"] == pytest.approx(cosine(got[positions], true), rel=1e-4)
    error = np.linalg.norm(got[positions] - true) / np.linalg.norm(true)
    assert figures["relative_error"] == pytest.approx(error, rel=1e-4)
    assert figures["signs_means_cosine"] == pytest.approx(cosine(trivial.mean(0), true), rel=1e-4)
    assert figures["without_code_cosine"] == pytest.approx(cosine(without_code.mean(0), true), rel=1e-4)
    assert figures["ceiling_cosine"] == pytest.approx(cosine(ceiling.mean(0), true), rel=1e-4)
    assert figures["true_cosine"] == pytest.approx(cosine(got, v.mean(0)), rel=1e-4)
    assert figures["positions"].tolist() == positions.tolist()


def test_without_a_code_values_come_from_signs_means_and_innovations():
    grads, state = _gradients(), _first_state(**NO_CODE)
    aggregated, after, _ = _step("compressed", **NO_CODE)(jax.random.key(0), grads, state)
    figures = _diagnose()(jax.random.key(0), grads, _first_state())
    got, v, positions = _flat(aggregated), _flat(grads), _largest(_flat(grads)[0])
    true = v[:, positions].mean(0)
    cosine = np.vdot(got[positions], true) / np.linalg.norm(got) / np.linalg.norm(true)
    assert cosine == pytest.approx(float(figures["without_code_cosine"]), rel=1e-4)
    np.testing.assert_allclose(np.mean(after.local.memory, 0) + got, v.mean(0), atol=1e-6)


@pytest.mark.parametrize("code_dtype", get_args(ValueCode))
def test_the_code_may_have_every_value_code(code_dtype):
    grads, settings = _gradients(), {"code_dtype": code_dtype}
    mean, after, _ = _step("compressed", **settings)(jax.random.key(0), grads, _first_state())
    np.testing.assert_allclose(np.mean(after.local.memory, 0) + _flat(mean), _flat(grads).mean(0), atol=1e-4)
    code = lgc_ps(**SHORT, **settings).wire("compressed", PARAMS, nodes_of())
    assert any(message.field == "code" for message in code.logical)


def test_a_growing_residual_is_refused():
    with pytest.raises(ValueError, match='fold_signs must be True with feedback "exact" and innovation=0'):
        lgc_ps(fold_signs=False, innovation=0.0)
    lgc_ps(fold_signs=False, innovation=0.0, feedback="paper")


def test_innovations_are_the_share_of_the_selected_values_and_at_least_one():
    """Without one, the residual of `fold_signs=False` grew without bound."""
    layers = make_packing({"w": jnp.zeros(100)}).layers
    selection = select_layers(Selector(1.0), layers)
    assert [innovations_by_layer(LgcPs(innovation=x), selection) for x in (0.29, 0.57, 0.005, 0)] == [
        (29,), (57,), (1,), (0,)]  # fmt: skip


@pytest.mark.parametrize("spread", [1e-25, 1e13])
def test_a_node_far_above_the_leaders_scale_spoils_no_autoencoder(spread):
    """The leader is far smaller in one layer, or a different node larger in all."""
    grads = _gradients()
    for name in ["b"] if spread < 1 else PARAMS:
        grads[name][0 if spread < 1 else 1] *= np.float32(spread)
    _, after, info = _step("top-k")(jax.random.key(0), grads, _first_state())
    assert np.all(info.finite)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after.shared))


@pytest.mark.parametrize("setting", ["fold_signs", "send_means"])
def test_without_a_code_signs_and_means_are_needed(setting):
    with pytest.raises(ValueError, match="code_dtype='none' needs fold_signs and send_means"):
        lgc_ps(code_dtype="none", **{setting: False})
