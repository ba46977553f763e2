"""States that a checkpoint library, or a hand, put together wrongly: `step` names the field, the leaf and the cure."""

import re
from importlib import import_module

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import nodes_of

import jgc
from jgc.compress import dense, powersgd, topk
from jgc.loops.buffers import donatable

PARAMS = {"w": np.zeros((6, 4), np.float32), "b": np.zeros(4, np.float32)}
BATCH = np.ones((8, 2, 6), np.float32)
RESTORE = "restore the checkpoint into jgc.as_arrays(init(...)) (docs/your_loop.md, Checkpoints)"


def loss(params, x, model_state):
    return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2), model_state


def made(kind="make_step", method=None, optimizer=None, outer=None):
    """A first state and its step."""
    method, optimizer = method or topk(alpha=0.5), optimizer or optax.adam(0.1)
    if kind == "make_step":
        init, step = jgc.make_step(loss, method, optimizer, nodes_of("4 devices"))
    else:
        outer = outer or optax.sgd(0.7, momentum=0.9)
        init, step = jgc.local_steps(optimizer, outer, method, 2, nodes_of("4 devices"), 2, 1).make_step(loss)
    return init(jax.random.key(0), PARAMS, {"mean": np.zeros(3, np.float32)}), step


def as_orbax_restores(tree):
    """A tree as Orbax gives it without a target: dicts for named tuples, lists for tuples, None for what is empty."""
    if hasattr(tree, "_fields"):
        return {name: as_orbax_restores(x) for name, x in tree._asdict().items()} or None
    if isinstance(tree, tuple):
        return [as_orbax_restores(x) for x in tree]
    return {name: as_orbax_restores(x) for name, x in tree.items()} if isinstance(tree, dict) else tree


def with_leaf(tree, *axes):
    return {**tree, "c": jnp.zeros((*axes, 3))}


CONTAINERS = [
    ("make_step", "opt_state", as_orbax_restores, "opt_state is a list, and init makes a tuple"),
    ("make_step", "opt_state", lambda x: tuple(as_orbax_restores(x)),
     "opt_state/0 is a dict, and init makes a ScaleByAdamState"),
    ("make_step", "compressor", as_orbax_restores, "compressor is a dict, and init makes a State"),
    ("make_step", "compressor", lambda x: x._replace(local=x.local._asdict()), "compressor/local is a dict, and"),
    ("make_step", "params", flax.core.freeze, "params is a FrozenDict, and init makes a dict"),
    ("make_step", "model_state", flax.core.freeze, "model_state is a FrozenDict, and init makes a dict"),
    ("local_steps", "inner", lambda x: tuple(as_orbax_restores(x)), "inner/0 is a dict, and init makes a ScaleByAdam"),
    ("local_steps", "outer", as_orbax_restores, "outer is a list, and init makes a tuple"),
    ("local_steps", "waiting", lambda x: tuple(as_orbax_restores(x)), "waiting/0 is a dict, and init makes a Waiting"),
    ("local_steps", "own", flax.core.freeze, "own is a FrozenDict, and init makes a dict"),
    ("local_steps", "params", flax.core.freeze, "params is a FrozenDict, and init makes a dict"),
    ("local_steps", "model_state", flax.core.freeze, "model_state is a FrozenDict, and init makes a dict"),
    ("local_steps", "compressor", list, "compressor must be a tuple of 2 states, one a fragment, and is a list of 2"),
    ("local_steps", "compressor", lambda x: x[:1], "a tuple of 2 states, one a fragment, and is a tuple of 1"),
    ("local_steps", "compressor", lambda x: tuple(as_orbax_restores(x)), "compressor/0 is a dict, and init makes"),
]  # fmt: skip


@pytest.mark.parametrize("kind, field, change, message", CONTAINERS)
def test_containers_of_a_checkpoint_without_target_are_named(kind, field, change, message):
    state, step = made(kind)
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*: {re.escape(RESTORE)}"):
        step(state._replace(**{field: change(getattr(state, field))}), BATCH)


def of(kind, field, **changes):
    """A field of the state of a different loop."""
    return lambda _: getattr(made(kind, **changes)[0], field)


OTHERS = [
    ("make_step", "params", with_leaf, "opt_state is of a different optimiser, or of other parameters: it lacks the "
     "leaf '0/mu/c'. init(key, params) makes one that fits"),
    ("make_step", "params", lambda x: {**x, "w": jnp.zeros((6, 5))}, "opt_state is of a different optimiser, or of "
     "other parameters: its leaf '0/mu/w' is float32[6, 4], and should be float32[6, 5]. init(key, params) makes one"),
    ("make_step", "opt_state", lambda x: jax.tree.map(lambda a: a.astype(jnp.int32), x), "opt_state is of a different "
     "optimiser, or of other parameters: its leaf '0/mu/b' is int32[4], and should be float32[4]"),
    ("make_step", "compressor", of("make_step", "compressor", method=powersgd()), "compressor was made by a different "
     "compressor, or with other settings: it lacks the leaf 'local/memory'. Make it by the init of the compressor"),
    ("local_steps", "params", with_leaf, "own is of other parameters than params: it lacks the leaf 'c'. init(key"),
    ("local_steps", "own", lambda x: with_leaf(x, 8), "own is of other parameters than params: it has the leaf 'c'"),
    ("local_steps", "own", lambda x: {**x, "w": x["w"].astype(jnp.bfloat16)}, "own is of other parameters than params: "
     "its leaf 'w' is bfloat16[8, 6, 4], and should be float32[8, 6, 4]"),
    ("local_steps", "inner", of("local_steps", "inner", optimizer=optax.sgd(0.1, momentum=0.9)), "inner is of a "
     "different inner optimiser, or of other parameters: it lacks the leaf '0/count'"),
    ("local_steps", "inner", lambda x: jax.tree.map(lambda a: a[0], x), "inner is of a different inner optimiser, or "
     "of other parameters: its leaf '0/mu/b' is float32[4], and should be float32[8, 4]"),
    ("local_steps", "outer", of("local_steps", "outer", outer=optax.adam(0.1)), "outer is of a different outer "
     "optimiser, or of other parameters: it lacks the leaf '0/0/trace/b'"),
    ("local_steps", "waiting", lambda x: (), "waiting is of local steps with a different overlap, or of other "
     "parameters: it lacks the leaf '0/mean/b'"),
    ("local_steps", "compressor", of("local_steps", "compressor", method=powersgd()), "compressor/0 was made by "
     "a different compressor, or with other settings: it lacks the leaf 'local/memory'"),
]  # fmt: skip


@pytest.mark.parametrize("kind, field, change, message", OTHERS)
def test_parts_of_another_loop_are_named(kind, field, change, message):
    state, step = made(kind)
    with pytest.raises(ValueError, match=re.escape(message)):
        step(state._replace(**{field: change(getattr(state, field))}), BATCH)


def test_keys_and_numbers_in_an_optimisers_state_fit():
    """A user may set a rate, in a different dtype too."""
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.inject_hyperparams(optax.sgd)(0.1))
    for kind, field in (("make_step", "opt_state"), ("local_steps", "inner")):
        state, step = made(kind, method=dense(), optimizer=noisy)
        getattr(state, field)[1].hyperparams["learning_rate"] = np.full(8 if field == "inner" else (), 0.5)
        step(state, BATCH)


# --- buffers that a step donates --------------------------------------------------------------------------------------


def test_an_array_that_comes_twice_is_copied():
    w, host = jnp.arange(3.0), np.arange(3.0)
    tree = {"params": {"a": w, "b": jnp.ones(2)}, "opt_state": (w, [w], host, host, 1, 1)}
    safe = donatable(tree, batch=host)
    arrays = [x for x in jax.tree.leaves(safe) if isinstance(x, jax.Array)]
    assert len(set(map(id, arrays))) == len(arrays) == 4
    assert jax.tree.all(jax.tree.map(np.array_equal, safe, tree))
    once = {"a": w, "b": jnp.ones(2)}
    assert donatable(once, batch=host, key=jax.random.key(0)) is once


def test_copies_lie_where_the_array_does():
    nodes = nodes_of("4 devices")
    w = jgc.place(np.zeros((8, 3), np.float32), jgc.LOCAL, nodes)
    _, copy = donatable((w, w))
    assert copy is not w and copy.sharding == w.sharding


def test_an_array_of_the_state_in_another_argument_is_named():
    key = jax.random.key(0)
    state = {"params": {"w": jnp.ones(3)}, "model_state": key}
    cure = "of the state, which step donates: give a copy of {}, jax.tree.map(jnp.copy, {})"
    message = "the array 'target/w' of frozen is 'params/w' " + cure.format("frozen", "frozen")
    with pytest.raises(ValueError, match=re.escape(message)):
        donatable(state, batch=np.ones(3), frozen={"target": state["params"]})
    with pytest.raises(ValueError, match=re.escape("the key is 'model_state' " + cure.format("the key", "key"))):
        donatable(state, key=key)


LOOPS = [("jgc.loops.step_loop", "make_step"), ("jgc.loops.local_loop", "local_steps")]


@pytest.mark.parametrize("module, kind", LOOPS)
def test_steps_look_before_they_donate(module, kind, monkeypatch):
    seen = {}

    def watched(donated, **others):
        seen.update(donated=set(map(id, jax.tree.leaves(donated))), **others)
        return donatable(donated, **others)

    monkeypatch.setattr(import_module(module), "donatable", watched)
    state, step = made(kind, method=dense(), optimizer=optax.sgd(0.1))
    step(state, BATCH)
    arrays = {id(x) for x in jax.tree.leaves(state) if isinstance(x, jax.Array)} - {id(state.key)}
    assert seen["donated"] == arrays and seen["batch"] is BATCH and seen["key"] is state.key
