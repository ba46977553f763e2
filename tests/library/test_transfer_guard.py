"""Loops under `jax.transfer_guard("disallow")`: jgc moves nothing that the user does not ask it to move."""

import jax
import numpy as np
import optax
import pytest
from contract import every_layout, nodes_of, settings_of, some_by_default

import jgc
from jgc.compress import METHODS, build

PARAMS = {"w": np.ones((24, 16), np.float32), "b": np.ones(16, np.float32)}


def _loss(params, x, shift):
    return ((x @ params["w"] + params["b"] - shift) ** 2).mean()


@every_layout
@pytest.mark.parametrize("loop", ["make_step", "local_steps"])
@pytest.mark.parametrize("name", some_by_default(METHODS, ["qsgd", "random_k"]))
def test_steps_run_where_transfers_must_be_explicit(name, loop, layout):
    nodes, method = nodes_of(layout), build(settings_of(name))
    if method.owns_momentum and loop == "local_steps":
        pytest.skip("the method has the momentum, and the outer optimiser must have it")
    if loop == "make_step":
        init, step = jgc.make_step(_loss, method, optax.sgd(0.01), nodes)
    else:
        init, step = jgc.local_steps(optax.sgd(0.01), optax.sgd(1.0), method, 1, nodes).make_step(_loss)
    x = np.random.default_rng(0).normal(size=(nodes.count, 4, 24)).astype(np.float32)
    batch, shift = jgc.place(x, "batch", nodes), jgc.place(np.ones(16, np.float32), "shared", nodes)
    state, _ = step(init(jax.random.key(0), PARAMS), batch, shift)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            if loop == "make_step":
                step.diagnose(state, batch, shift)
            state, _ = step(state, x, shift)  # a batch of the host, which step puts on the devices explicitly
    assert state.step == 3
