"""How long values have waited, against a count by hand; on any method with a memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default

import jgc
from jgc.compress import egc, gradient_dropping, scalecom, threshold_v, topk
from jgc.nodes.placement import SHARED

K, STEPS = 3, 6
PARAMS = {"a": jnp.zeros((10, 10)), "b": jnp.zeros((5, 4))}
METHODS = {
    "topk": topk(alpha=0.05, track_age=True),
    "corrected": topk(alpha=0.05, momentum_correction=True, track_age=True),
    "egc": egc(ratio=20.0, track_age=True),
    "gradient_dropping": gradient_dropping(alpha=0.05, track_age=True),
    "threshold_v": threshold_v(threshold=2.5, capacity=0.1, track_age=True),
    "scalecom": scalecom(alpha=0.05, beta=0.5, track_age=True),
}


def play(method):
    """State, and what a diagnose step before it says, after every step."""
    nodes, random = jgc.make_nodes(K, jax.devices()[:1]), np.random.default_rng(0)
    phase = method.schedule[-1].value
    step = jax.jit(jgc.compress.step_on_nodes(method.aggregate, phase, nodes))
    ins = (SHARED, jgc.LOCAL, jgc.State(SHARED, jgc.LOCAL))
    look = jax.jit(jgc.on_nodes(
        lambda key, grads, state: jgc.diagnose(method, phase, key, grads, state, nodes), nodes, ins=ins, outs=SHARED,
    ))  # fmt: skip
    state = method.init(jax.random.key(0), PARAMS, nodes)
    for _ in range(STEPS):
        grads = jax.tree.map(lambda x: jnp.float32(random.normal(size=(K, *x.shape))), PARAMS)
        figures = look(jax.random.key(1), grads, state)
        aggregated, state, _ = step(jax.random.key(1), grads, state)
        yield aggregated, state, figures


def age_of(state):
    return np.asarray(state.local.memory.age)


@pytest.mark.parametrize("name", some_by_default(METHODS, ("topk", "scalecom")))
def test_age_counts_steps_since_sent(name):
    """It is 0 on a node that has just sent it, where the aggregate then is not 0, and one more on all others."""
    before = np.zeros((K, 120), int)
    for aggregated, state, figures in play(METHODS[name]):
        age = age_of(state)
        sent = age == 0
        np.testing.assert_array_equal(age, np.where(sent, 0, before + 1))
        moved = np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(aggregated)]) != 0
        np.testing.assert_array_equal(sent.any(axis=0), moved)
        now = before + 1  # while the step is under way
        assert figures["oldest/a"] == now[:, :100].max() and figures["oldest/b"] == now[:, 100:].max()
        found = [figures["mean_age/a"], figures["mean_age/b"]]
        np.testing.assert_allclose(found, [now[:, :100].mean(), now[:, 100:].mean()], rtol=1e-6)
        before = age
    assert before.max() == STEPS  # something has never been sent


def test_ages_are_off_by_default():
    *_, (_, state, figures) = play(topk(alpha=0.05))
    assert isinstance(state.local.memory, jax.Array) and not any("/" in name for name in figures)
