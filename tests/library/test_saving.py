"""States of loops as arrays alone: every field comes back, and training goes on bit for bit."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import nodes_of, same_bits, some_by_default

import jgc
from jgc.compress import dense, gradiveq, per_layer, topk

PARAMS = {"conv": np.ones((3, 3, 2, 4), np.float32), "head": np.ones((4, 2), np.float32)}

KEYS = {
    "key": lambda: jax.random.key(7),
    "raw": lambda: jax.random.PRNGKey(7),
    "rbg": lambda: jax.random.key(7, impl="rbg"),
}


def loss(params, batch):
    return sum(jnp.mean((p * batch) ** 2) for p in jax.tree.leaves(params))


def batch_of(step):
    return np.random.default_rng(step).normal(size=(8, 1)).astype(np.float32)


@functools.cache
def loop(name):
    nodes = nodes_of("4 devices")
    if name == "local steps":
        method = topk(alpha=0.2, warmup_steps=2)
        return jgc.local_steps(optax.adam(0.1), optax.sgd(1.0), method, 3, nodes, fragments=2).make_step(loss)
    method = {
        "phases": topk(alpha=0.2, warmup_steps=4),
        "phases that are found": gradiveq(warmup_steps=2, sampling_steps=2, compressed_steps=3, loss=0.3),
        "groups": per_layer([("head", dense())], default=topk(alpha=0.2, warmup_steps=4)),
    }[name]
    return jgc.make_step(loss, method, optax.adam(0.1), nodes)


@pytest.mark.parametrize(
    "name, kind",
    some_by_default(
        itertools.product(["phases", "phases that are found", "groups", "local steps"], KEYS),
        [("phases", "raw"), ("phases that are found", "key"), ("groups", "rbg"), ("local steps", "key")],
    ),
)
def test_training_goes_on_from_arrays_bit_for_bit(name, kind):
    key = KEYS[kind]()
    init, step = loop(name)
    state = init(key, PARAMS)
    for i in range(6):
        state, _ = step(state, batch_of(i))
    arrays = jgc.as_arrays(state)
    assert all(isinstance(x, np.ndarray | jax.Array) for x in jax.tree.leaves(arrays))
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(arrays))
    fresh = jgc.as_arrays(init(key, PARAMS))
    assert jax.tree.map(np.shape, arrays) == jax.tree.map(np.shape, fresh)  # what a checkpoint library compares
    again = jgc.from_arrays(jax.tree.map(jnp.copy, arrays))
    assert jax.tree.structure(again) == jax.tree.structure(state) and again.step == 6
    for i in range(6, 9):
        (state, _), (again, _) = step(state, batch_of(i)), step(again, batch_of(i))
        assert same_bits(state.params, again.params)


@pytest.mark.parametrize("make", ["make_step", "local_steps"])
def test_keys_of_a_model_state_come_back(make):
    """Each node's dropout key, say, beside the loop's own of another kind."""

    def with_key(params, batch, model):
        key, own = jax.random.split(model["key"])
        return loss(params, batch) * (1 + jax.random.uniform(own)), {"key": key}

    nodes = nodes_of("4 devices")
    if make == "make_step":
        init, step = jgc.make_step(with_key, topk(alpha=0.2), optax.adam(0.1), nodes)
    else:
        init, step = jgc.local_steps(optax.adam(0.1), optax.sgd(1.0), topk(alpha=0.2), 2, nodes).make_step(with_key)
    first = {"key": jax.random.key(3, impl="rbg")}
    state, _ = step(init(jax.random.key(7), PARAMS, first), batch_of(0))
    arrays = jax.tree.map(np.asarray, jgc.as_arrays(state))
    again = jgc.from_arrays(arrays)
    assert again.model_state["key"].dtype == state.model_state["key"].dtype != again.key.dtype
    (state, metrics), (again, found) = step(state, batch_of(1)), step(again, batch_of(1))
    assert same_bits(metrics.loss, found.loss) and same_bits(jgc.as_arrays(state), jgc.as_arrays(again))


def test_what_is_no_state_is_named():
    state = loop("phases")[0](jax.random.key(0), PARAMS)
    with pytest.raises(TypeError, match=r"expected the state of jgc.make_step or jgc.local_steps, got a dict"):
        jgc.as_arrays({"step": 1})
    with pytest.raises(TypeError, match="from_arrays takes what as_arrays returned"):
        jgc.from_arrays(state)
    with pytest.raises(ValueError, match=r"the phases' description takes 9,0.. bytes"):
        jgc.as_arrays(state._replace(phase=jgc.Phase("x" * 9000, 0, "x")))
