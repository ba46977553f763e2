"""Random keys in a model's state: every node draws others; keys as plain numbers, which all nodes share, are named."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import every_layout, nodes_of, same_bits
from flax import nnx
from make_step_process import PARAMS, batch_of, loss

import jgc
from jgc.compress import dense

LOOPS = ["make_step", "local_steps"]


def _made(loop, own_loss, nodes):
    if loop == "make_step":
        return jgc.make_step(own_loss, dense(), optax.sgd(0.1), nodes, has_aux=True)
    return jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, nodes).make_step(own_loss, has_aux=True)


def _drawn(params, batch, state):
    """A loss whose aux is what dropout would draw; the next state has the next key, as Equinox and NNX have it."""
    key, after = jax.random.split(state["key"])
    each = jax.vmap(jax.random.normal)(state["several"])
    return loss(params, batch), ({**state, "key": after}, jnp.append(each, jax.random.normal(key)))


@every_layout
@pytest.mark.parametrize("loop", LOOPS)
def test_nodes_draw_different_numbers(layout, loop):
    nodes, key = nodes_of(layout), jax.random.key(7)
    init, step = _made(loop, _drawn, nodes)
    several = jax.random.split(jax.random.key(9), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = init(jax.random.key(0), PARAMS, {"key": key, "several": several, "mean": jnp.zeros(3)})
    assert state.model_state["several"].shape == (8, 2) and state.model_state["mean"].shape == (8, 3)
    want = [jax.random.fold_in(key, k) for k in range(8)]
    for i in range(2):
        state, metrics = step(state, batch_of(i))
        pairs = [jax.random.split(x) for x in want]
        np.testing.assert_allclose(metrics.aux[:, 2], [jax.random.normal(pair[0]) for pair in pairs], rtol=1e-6)
        assert all(len(set(column.tolist())) == 8 for column in metrics.aux.T)
        want = [pair[1] for pair in pairs]
    kept = jax.device_get(jax.random.key_data(state.model_state["key"]))
    bad = batch_of(3)
    bad["x"][:, 0, 0] = np.nan
    state, _ = step(state, bad)  # which no node takes
    assert same_bits(kept, jax.device_get(jax.random.key_data(state.model_state["key"])))


@pytest.mark.parametrize("empty", [{}, {"batch_stats": {}}, (nnx.State({}), nnx.State({}))], ids=["{}", "linen", "nnx"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_model_state_without_arrays_is_given_to_the_loss(loop, empty):
    def of_a_model(params, batch, state):
        assert jax.tree.structure(state) == jax.tree.structure(empty)
        return loss(params, batch), (state, {})

    init, step = _made(loop, of_a_model, nodes_of("4 devices"))
    state, _ = step(init(jax.random.key(0), PARAMS, empty), batch_of(0))
    again, _ = step(jgc.from_arrays(jgc.as_arrays(state)), batch_of(1))
    assert jax.tree.structure(again.model_state) == jax.tree.structure(empty)


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_keys_where_nodes_have_several_devices(divided):
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"))
    nodes = jgc.from_mesh(mesh, slow="dcn", fast="fsdp")
    params = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(4)}
    if divided:
        params["w"] = jax.device_put(params["w"], jax.NamedSharding(mesh, jax.P(None, "fsdp")))
    init, step = _made("make_step", _drawn, nodes)
    state = init(jax.random.key(0), params, {"key": jax.random.key(7), "several": jax.random.split(jax.random.key(9))})
    state, metrics = step(state, jax.tree.map(lambda x: x.reshape(2, 20, -1), batch_of(0)))
    want = [jax.random.normal(jax.random.split(jax.random.fold_in(jax.random.key(7), k))[0]) for k in range(2)]
    np.testing.assert_allclose(metrics.aux[:, 2], want, rtol=1e-6)


def test_dropout_of_nnx_masks_other_values_on_each_node():
    model = nnx.Sequential(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def of_model(params, batch, rest):
        model = nnx.merge(graph, params, rest, copy=True)
        out = model(jnp.ones((16, 6)))
        return jnp.mean(out**2), (nnx.state(model, nnx.Not(nnx.Param)), out == 0)

    init, step = _made("make_step", of_model, nodes_of("4 devices"))
    state = init(jax.random.key(0), params, rest)
    masks = []
    for i in range(2):
        state, metrics = step(state, batch_of(i))
        masks += [mask.tobytes() for mask in np.asarray(metrics.aux)]
    assert len(set(masks)) == 16


@pytest.mark.parametrize("loop", LOOPS)
def test_a_key_as_plain_numbers_is_named(loop):
    init, _ = _made(loop, _drawn, nodes_of("1 device"))
    with pytest.warns(UserWarning, match=r"the leaf '1' of the model state is uint32\[2\], as the data of random"):
        state = init(jax.random.key(0), PARAMS, [jnp.zeros(3), np.uint32([3, 0])])
    assert state.model_state[1].tolist() == [[3, 0]] * 8  # left as it is: it may be something else
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(jax.random.key(0), PARAMS, {"count": jnp.uint32(0), "three": jnp.zeros(3, jnp.uint32)})


@pytest.mark.parametrize("data", [jnp.zeros(4, jnp.uint32), jnp.zeros((3, 2), jnp.uint32)], ids=["rbg", "several"])
def test_data_of_any_keys_is_named(data):
    init, _ = _made("make_step", _drawn, nodes_of("1 device"))
    with pytest.warns(UserWarning, match=r"'key' of the model state is uint32\[(4|3, 2)\], as the data of random keys"):
        init(jax.random.key(0), PARAMS, {"key": data})
