"""The step: node-local gradients, order of operations, agreement of the three layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default
from tiny import tiny_model
from training_helpers import tiny_config

from jgc import comm
from jgc.compress import Dense, TopK
from jgc.lab.shared.hlo import collectives
from jgc.lab.shared.programs import make_gradients
from jgc.loops.buffers import copied
from jgc.method.phases import single
from jgc.nodes.layouts import make_nodes
from jgc.training.run import setup as building
from jgc.training.run.periodic import batches
from jgc.training.steps.step import arrays_by_name, init_state, make_steps, with_arrays
from jgc.types import Compressor, Info, State, Wire


def parts_of(config, monkeypatch, devices=1):
    """A run's parts with its nodes on `devices` devices."""
    monkeypatch.setattr(building, "make_model", tiny_model)
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:devices]))
    return building.build(config)


def first_gradients(setup):
    """The nodes' gradients in the first step, and its batch."""
    batch = next(batches(setup))
    return jax.jit(make_gradients(setup.parts))(setup.state.params, setup.state.model_state, batch), batch


def steps(setup, count, batch_of=lambda batch, i: batch):
    """The state and the metrics after `count` steps."""
    state = with_arrays(setup.state, copied(arrays_by_name(setup.state)))
    for i, batch in zip(range(count), batches(setup), strict=False):
        state, metrics = setup.step(state, batch_of(batch, i))
    return arrays_by_name(state), metrics


def spy() -> Compressor:
    """A compressor that records the input of `aggregate` and returns the mean."""

    def init(key, params, nodes):
        return State((), jax.tree.map(lambda x: jnp.zeros((nodes.count, *x.shape)), params))

    def aggregate(phase, key, grads, state, nodes):
        mean = jax.tree.map(lambda g: comm.pmean(g, nodes, "dense"), grads)
        return mean, State((), grads), Info(jnp.float32(0), jnp.float32(0), jnp.int32(0), jnp.bool_(True))

    return Compressor(
        init, aggregate, lambda old, new, state, nodes: state, lambda *a: Wire((), ()), single(), False, None,
        method=None,
    )


@pytest.mark.parametrize("devices", some_by_default([1, 2, 4], [2]))
def test_gradients_are_node_local(monkeypatch, devices):
    config = tiny_config(nodes=4, method=TopK(), weight_decay=0.1, decay_all=True, clip_norm=1e-3, momentum=0.0)
    setup = parts_of(config, monkeypatch, devices)
    gradients, batch = first_gradients(setup)
    parts = setup.parts._replace(compressor=spy())
    stats = jax.tree.map(lambda x: x[0], setup.state.model_state)
    step = make_steps(parts, has_state=True)
    state = init_state(parts, {"params": setup.state.params, **stats}, jax.random.key(0), step)
    new, _ = step(state, batch)
    for entered, raw, param in zip(
        *map(jax.tree.leaves, (new.compressor.local, gradients.grads, setup.state.params)), strict=True
    ):
        assert len({np.asarray(row).tobytes() for row in np.asarray(entered)}) == 4
        # coupled decay, then clipping to clip_norm / sqrt(K): the direction stays, all of it is clipped
        decayed = np.asarray(raw) + 0.1 * np.asarray(param)
        ratio = np.asarray(entered)[np.abs(decayed) > 1e-4] / decayed[np.abs(decayed) > 1e-4]
        assert np.all(ratio > 0) and np.all(ratio < 1)
    entered = np.concatenate([np.asarray(x).reshape(4, -1) for x in jax.tree.leaves(new.compressor.local)], axis=1)
    np.testing.assert_allclose(np.linalg.norm(entered, axis=1), 1e-3 / 2, rtol=1e-5)
    stats = jax.tree.leaves(new.model_state["batch_stats"])[0]
    assert len({np.asarray(row).tobytes() for row in stats}) == 4  # batch statistics are each node's own


@pytest.mark.parametrize("devices", some_by_default([4, 2], [4]))
def test_layouts_agree(monkeypatch, devices):
    config = tiny_config(nodes=4, method=TopK(alpha=0.1), clip_norm=1.0)
    one, several = [jax.device_get(steps(parts_of(config, monkeypatch, d), 3)) for d in (1, devices)]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_sgd_update_by_hand(monkeypatch):
    """p - rate * (mean gradient + decay * p), with decay only for two and more dimensions."""
    config = tiny_config(nodes=2, method=Dense(), weight_decay=0.01)
    setup = parts_of(config, monkeypatch)
    gradients, _ = first_gradients(setup)
    new, _ = steps(setup, 1)
    rate = setup.parts.schedule(0)
    for p, g, got in zip(*map(jax.tree.leaves, (setup.state.params, gradients.grads, new["params"])), strict=True):
        expected = p - rate * (g.mean(axis=0) + (0.01 * p if p.ndim > 1 else 0.0))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_non_finite_gradient_skips_step(monkeypatch):
    setup = parts_of(tiny_config(method=TopK(alpha=0.1)), monkeypatch)

    def poison(batch, i):
        images, labels = batch
        return (images.at[1, 0].set(np.inf), labels) if i == 2 else batch

    before, _ = steps(setup, 2)
    after, metrics = steps(setup, 3, poison)
    assert not metrics.info.finite
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_single_momentum(monkeypatch):
    def opt_arrays(**settings):
        return [x for x in jax.tree.leaves(parts_of(tiny_config(**settings), monkeypatch).state.opt_state) if x.ndim]

    assert opt_arrays(method=TopK(momentum_correction=False))
    assert not opt_arrays(method=TopK(momentum_correction=True))


def test_compiled_bytes_accounted(monkeypatch):
    """The step sends the bytes of the ledger, which are those of `wire` and the metrics."""
    setup = parts_of(tiny_config(nodes=4, method=TopK(alpha=0.1)), monkeypatch, devices=4)
    batch = next(batches(setup))
    with comm.ledger() as sent:
        lowered = setup.step.lower(setup.state, batch)
    compiled = lowered.compile()
    assert sum(c.sent_bytes for c in collectives(compiled)) == sum(s.bytes for s in sent)
    compressor = sum(s.bytes for s in sent if s.field != "metrics")
    assert compressor == sum(s.bytes for s in setup.costs[0].wire.physical) > 0
