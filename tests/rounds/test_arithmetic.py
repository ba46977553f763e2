"""The shared state: against optax, and bit for bit against recorded digests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgc.rounds.arithmetic import AdamW, Sgd, shared_state, stepped

N, STEPS = 1000, 20
OUTER = {
    "sgd": (Sgd(0.7, 0.0), optax.sgd(0.7)),
    "momentum": (Sgd(0.7, 0.9, nesterov=False), optax.sgd(0.7, momentum=0.9)),
    "nesterov": (Sgd(0.7, 0.9), optax.sgd(0.7, momentum=0.9, nesterov=True)),
    "adamw": (AdamW(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
}
RECORDED = {
    "sgd": "38e71d43b3b937f1",
    "momentum": "270c998727db600d",
    "nesterov": "f347996084f66a50",
    "adamw": "1b4257d96065d3d1",
}


def _vectors(step: int):
    # from integers: the generators of numpy may change their floats
    draw = np.random.Generator(np.random.PCG64(step)).integers(-(2**20), 2**20, (3, N))
    return [(tokens, (x / 2**20).astype(np.float32)) for tokens, x in zip((3, 1, 2), draw, strict=True)]


def _run(outer):
    theta = np.linspace(-1, 1, N, dtype=np.float32)
    shared = shared_state(0, theta, outer.init(N))
    for step in range(STEPS):
        shared = stepped(outer, shared, _vectors(step), most=3)
    return shared


@pytest.mark.parametrize("name", OUTER)
def test_outer_steps_are_those_of_optax(name):
    outer, reference = OUTER[name]
    theta = jnp.linspace(-1, 1, N)
    state = reference.init(theta)
    for step in range(STEPS):
        mean = sum(tokens * x.astype(np.float64) for tokens, x in _vectors(step)) / 6
        updates, state = jax.jit(reference.update)(jnp.asarray(mean, jnp.float32), state, theta)
        theta = optax.apply_updates(theta, updates)
    np.testing.assert_allclose(_run(outer).theta, theta, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", OUTER)
def test_outer_steps_have_the_recorded_bits(name):
    assert _run(OUTER[name][0]).digest[:16] == RECORDED[name]


def test_equal_tokens_give_the_plain_mean():
    vectors = [(7, np.float32([1, 2])), (7, np.float32([3, 5]))]
    shared = shared_state(0, np.zeros(2, np.float32), {})
    assert stepped(Sgd(1.0, 0.0), shared, vectors, most=7).theta.tolist() == [-2.0, -3.5]


@pytest.mark.parametrize("make", [lambda: Sgd(0), lambda: Sgd(1, 1), lambda: AdamW(b2=1.0)])
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()
