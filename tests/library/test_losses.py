"""Losses with loops, branches and foreign layers: in every layout what they are on one device."""

import functools

import equinox as eqx
import equinox.internal
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import some_by_default
from flax import nnx
from jax.experimental.ode import odeint
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgc
from jgc.comm import varying_axes

T, D = 3, 4  # length and width of an example


def _scan(p, b, key):
    x = jnp.swapaxes(b["x"], 0, 1)
    return jax.lax.scan(lambda s, m: (s + jnp.mean((m @ p["w"] - 1) ** 2), None), jnp.float32(0), x)[0]


def _fori(p, b, key):
    return jax.lax.fori_loop(0, T, lambda i, s: s + jnp.mean((b["x"][:, i] @ p["w"]) ** 2), 0.0)


def _while(p, b, key):
    turns = jax.lax.while_loop(lambda s: s < 3, lambda s: s + 1 + 0 * jnp.sum(p["w"]), 0.0)
    return jax.lax.stop_gradient(turns) * jnp.mean((b["x"] @ p["w"]) ** 2)


def _cond(p, b, key):
    return jax.lax.cond(b["flag"][0] > 0, lambda: jnp.mean((b["x"] @ p["w"]) ** 2), lambda: 0.0)


@jax.custom_vjp
def _constant_slope(x):
    return x**2


_constant_slope.defvjp(lambda x: (x**2, None), lambda _, g: (jnp.float32(1),))


def _custom_vjp(p, b, key):
    return _constant_slope(jnp.mean(b["x"] @ p["w"]))


def _ctc(p, b, key):
    logits, labels = b["x"] @ p["w"], jnp.tile(jnp.array([1]), (len(b["x"]), 1))
    return jnp.mean(optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape)))


def _gamma(p, b, key):
    shape = jax.nn.softplus(jnp.mean(b["x"], 1) @ p["w"]) + 1
    return jnp.mean(jax.vmap(jax.random.gamma)(key, shape))


def _poisson(p, b, key):
    rate = jnp.exp(jnp.mean(b["x"], 1) @ p["w"])
    drawn = jax.vmap(jax.random.poisson)(key, jax.lax.stop_gradient(rate))
    return jnp.mean(rate - drawn * jnp.log(rate))


def _odeint(p, b, key):
    def end(y):
        return odeint(lambda y, t, w: jnp.tanh(w @ y), y, jnp.array([0.0, 1.0]), p["w"], rtol=1e-7, atol=1e-7)[-1]

    return jnp.mean(jax.vmap(end)(b["x"][:, 0]) ** 2)


_LINEN = nn.RNN(nn.LSTMCell(D))
_NNX_GRAPH, _NNX_PARAMS, _NNX_REST = nnx.split(nnx.RNN(nnx.LSTMCell(D, D, rngs=nnx.Rngs(0))), nnx.Param, ...)
_GRU_PARAMS, _GRU_REST = eqx.partition(eqx.nn.GRUCell(D, D, key=jax.random.key(0)), eqx.is_inexact_array)
_NORM, _NORM_STATE = eqx.nn.make_with_state(eqx.nn.BatchNorm)(D, axis_name="batch", mode="batch")
_NORM_PARAMS, _NORM_REST = eqx.partition(_NORM, eqx.is_inexact_array)


def _linen_lstm(p, b, key):
    return jnp.mean(_LINEN.apply({"params": p}, b["x"]) ** 2)


def _nnx_lstm(p, b, key):
    return jnp.mean(nnx.merge(_NNX_GRAPH, p, _NNX_REST, copy=True)(b["x"]) ** 2)


def _equinox_gru(p, b, key):
    cell = eqx.combine(p, _GRU_REST)

    def last(x):
        return jax.lax.scan(lambda h, xi: (cell(xi, h), None), jnp.zeros(D), x)[0]

    return jnp.mean(jax.vmap(last)(b["x"]) ** 2)


def _equinox_norm(p, b, state):
    layer = eqx.combine(p, _NORM_REST)
    y, state = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(b["x"][:, 0], state)
    return jnp.mean(jnp.tanh(y - 0.3) ** 2), state


_W = {"w": np.random.default_rng(0).normal(size=(D, D)).astype(np.float32)}
KINDS = {
    "linen LSTM": (_linen_lstm, _LINEN.init(jax.random.key(0), jnp.zeros((1, T, D)))["params"]),
    "NNX LSTM": (_nnx_lstm, _NNX_PARAMS),
    "Equinox GRU": (_equinox_gru, _GRU_PARAMS),
    **{name: (loss, _W) for name, loss in {
        "CTC": _ctc, "scan": _scan, "fori": _fori, "while": _while, "cond": _cond, "custom_vjp": _custom_vjp,
        "gamma": _gamma, "poisson": _poisson, "odeint": _odeint,
    }.items()},
}  # fmt: skip
NORM = "Equinox BatchNorm"
LAYOUTS = ["8 nodes on 1", "8 nodes on 4", "8 nodes on 8", "2 x 4 whole", "2 x 4 divided"]


def loss_of_all(params, batch, state):
    """The sum of all kinds, with each one's loss: one program for all of them."""
    keys = jax.vmap(lambda key: jax.random.split(key, len(KINDS)))(batch["key"])
    losses = {name: loss(params[name], batch, keys[:, i]) for i, (name, (loss, _)) in enumerate(KINDS.items())}
    losses[NORM], state = _equinox_norm(params[NORM], batch, state)
    return sum(losses.values()), (state, losses)


def batch_of(step: int, count: int) -> dict[str, np.ndarray]:
    """Two examples for each node, four times: the four devices of a node then have equal batch statistics."""
    random = np.random.default_rng(step)
    x = np.tile(random.normal(size=(count, 2, T, D)).astype(np.float32), (1, 4, 1, 1))
    return {"x": x, "flag": np.tile(np.arange(count)[:, None] % 2, (1, 8)),
            "key": jax.random.split(jax.random.key(step), (count, 8))}  # fmt: skip


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("host", "chip"), axis_types=(AxisType.Auto,) * 2)


def _nodes(layout: str) -> jgc.Nodes:
    if layout.startswith("2 x 4"):
        return jgc.from_mesh(_mesh(), slow="host", fast="chip")
    count, _, _, devices = layout.split()
    return jgc.make_nodes(int(count), devices=jax.devices()[: int(devices)])


def _divided(params):
    """Every leaf over the devices of a node, along its last axis."""

    def divide(x):
        axes = [None] * (x.ndim - 1) + ["chip"] if x.ndim and x.shape[-1] % 4 == 0 else []
        return jax.device_put(x, NamedSharding(_mesh(), P(*axes)))

    return jax.tree.map(divide, params)


@functools.cache
def _trained(loop: str, layout: str) -> tuple[dict, dict]:
    """The parameters and the losses of every kind after three steps."""
    nodes = _nodes(layout)
    params = {name: own for name, (_, own) in KINDS.items()} | {NORM: _NORM_PARAMS}
    params = _divided(params) if "divided" in layout else params
    if loop == "make_step":
        options = {"has_aux": True, "unroll": False}
        init, step = jgc.make_step(loss_of_all, jgc.compress.dense(), optax.sgd(0.05), nodes, **options)
    else:
        local = jgc.local_steps(optax.sgd(0.05), optax.sgd(1.0), jgc.compress.dense(), 3, nodes)
        init, step = local.make_step(loss_of_all, has_aux=True, unroll=False)
    state = init(jax.random.key(0), params, _NORM_STATE)
    for i in range(3):
        state, metrics = step(state, batch_of(i, nodes.count))
    return jax.tree.map(np.asarray, state.params), {name: np.mean(x) for name, x in metrics.aux.items()}


CASES = [(loop, layout) for loop in ("make_step", "local_steps") for layout in LAYOUTS[1:]]
CHOSEN = [("make_step", "2 x 4 divided")]


@pytest.mark.parametrize("kind", [*KINDS, NORM])
@pytest.mark.parametrize("loop, layout", some_by_default(CASES, CHOSEN))
def test_every_layout_trains_as_one_device(loop, layout, kind):
    params, losses = _trained(loop, layout)
    expected_params, expected_losses = _trained(loop, f"{_nodes(layout).count} nodes on 1")
    np.testing.assert_allclose(losses[kind], expected_losses[kind], rtol=1e-6, atol=1e-6)
    for x, expected in zip(*map(jax.tree.leaves, (params[kind], expected_params[kind])), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_move(kind):
    before, after = KINDS[kind][1], _trained("make_step", "2 nodes on 1")[0][kind]  # what a default case needs, too
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), before, after)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("layout", some_by_default(LAYOUTS, ["8 nodes on 4"]))
@pytest.mark.parametrize("loop", ["make_step", "local_steps", "node_grads"])
def test_a_loss_that_nodes_average_is_an_error(loop, layout):
    nodes = _nodes(layout)
    axis = nodes.slow[0] if nodes.slow else "jgc_node"
    params = _divided(_W) if "divided" in layout else _W

    def averaged(p, batch):
        return jax.lax.pmean(_scan(p, batch, None), axis)

    batch = {"x": batch_of(0, nodes.count)["x"]}
    if loop == "node_grads":
        run = jgc.node_grads(averaged, nodes, placements=jgc.placements_of(params))
        with pytest.raises(ValueError, match="leave"):
            run(params, batch)
        return
    init, step = jgc.make_step(averaged, jgc.compress.dense(), optax.sgd(0.1), nodes)
    if loop == "local_steps":
        local = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), jgc.compress.dense(), 2, nodes)
        init, step = local.make_step(averaged)
    with pytest.raises(ValueError, match="leave"):
        step(init(jax.random.key(0), params), batch)


@pytest.mark.parametrize("unroll", some_by_default([True, False], [True]))
def test_node_grads_are_each_nodes(unroll):
    """JAX puts no all-reduce into them (fact 1 of the design)."""
    nodes, batch = _nodes("8 nodes on 4"), {"x": batch_of(0, 8)["x"]}
    _, grads = jgc.node_grads(lambda p, b: _scan(p, b, None), nodes, unroll=unroll)(_W, batch)
    for i in range(8):
        expected = jax.grad(lambda p, i=i: _scan(p, {"x": batch["x"][i]}, None))(_W)["w"]
        np.testing.assert_allclose(grads["w"][i], expected, rtol=1e-5, atol=1e-6)
    assert np.std(grads["w"], axis=0).min() > 1e-3


def test_statistics_over_the_devices_of_a_node_are_those_of_all_its_examples():
    """Averages inside a loss are right along the fast axes, as long as the loss is not one of them."""
    nodes, x = _nodes("2 x 4 whole"), np.random.default_rng(0).normal(size=(2, 8, D)).astype(np.float32)

    def loss(p, x, mean):
        y = x @ p["w"]
        return jnp.mean((y - mean(y)) ** 2)

    of_devices = jgc.node_grads(lambda p, x: loss(p, x, lambda y: jax.lax.pmean(jnp.mean(y, 0), "chip")), nodes)
    of_node = jgc.node_grads(lambda p, x: loss(p, x, lambda y: jnp.mean(y, 0)), _nodes("2 nodes on 1"))
    for found, expected in zip(*(jax.tree.leaves(run(_W, x)) for run in (of_devices, of_node)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_optimiser_may_loop_from_a_constant_in_local_steps():
    def turns(g):
        return jax.lax.fori_loop(0, 2, lambda _, s: s - 0.05 * g, jnp.zeros_like(g))

    inner = optax.GradientTransformation(lambda params: (), lambda grads, state, _: (jax.tree.map(turns, grads), state))
    ends = []
    for layout in ("8 nodes on 1", "8 nodes on 4", "8 nodes on 8"):
        local = jgc.local_steps(inner, optax.sgd(1.0), jgc.compress.dense(), 2, _nodes(layout))
        init, step = local.make_step(lambda p, b: _scan(p, b, None))
        state = init(jax.random.key(0), _W)
        for i in range(2):
            state, _ = step(state, {"x": batch_of(i, 8)["x"]})
        ends.append(np.asarray(state.params["w"]))
    np.testing.assert_allclose(ends[1:], [ends[0]] * 2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", some_by_default(["8 nodes on 4", "8 nodes on 8", "2 x 4 whole"], ["2 x 4 whole"]))
def test_gradients_of_equinoxs_loops(layout):
    """Its checkpointed loops (diffrax has them) compare shardings, and fail in a plain shard_map."""

    def loss(p, b):
        def turn(y):
            return jnp.tanh(y @ p["w"])

        loop = eqx.internal.while_loop
        return jnp.mean(loop(lambda y: jnp.sum(y) < 99, turn, b["x"][:, 0], max_steps=4, kind="checkpointed") ** 2)

    nodes = _nodes(layout)
    batch = {"x": batch_of(0, nodes.count)["x"]}
    value, grads = jax.jit(jgc.node_grads(loss, nodes))(_W, batch)
    expected = [jax.value_and_grad(loss)(_W, {"x": x}) for x in batch["x"]]
    np.testing.assert_allclose(value, [x for x, _ in expected], rtol=1e-5)
    np.testing.assert_allclose(grads["w"], np.stack([g["w"] for _, g in expected]), rtol=1e-5, atol=1e-6)


# --- the walk over a loss's jaxpr -----------------------------------------------------------------------------------

NONE, BOTH = frozenset(), frozenset({"a", "b"})


def _swap(carry, _):
    (_, y), z = carry
    return ((y, z), z), None


WALKS = {  # x differs along a, y along none
    "arithmetic": (lambda x, y: (x + y, y * 2, jnp.float32(1)), ["a", "", ""]),
    "sums": (lambda x, y: (jax.lax.psum(x, "a"), jax.lax.pmax(x, "a")), ["", ""]),
    "sums over several axes": (lambda x, y: (jax.lax.psum(x, "b"), jax.lax.pmax(x, ("a", "b"))), ["a", ""]),
    "groups": (lambda x, y: jax.lax.psum(x, "a", axis_index_groups=[[0], [1]]), ["a"]),
    "gathers": (lambda x, y: (jax.lax.all_gather(x, "a"), jax.lax.ppermute(x, "a", [(0, 1)])), ["", "a"]),
    "index": (lambda x, y: (jax.lax.axis_index("b") + y, jax.lax.axis_index("a")), ["b", "a"]),
    "jit": (jax.jit(lambda x, y: (jax.lax.pmean(x, "a"), x)), ["", "a"]),
    "checkpoint": (jax.checkpoint(lambda x, y: (jnp.sin(y), x)), ["", "a"]),
    "scan": (lambda x, y: jax.lax.scan(_swap, ((y, y), x), None, length=1)[0], ["a", "a", "a"]),
    "scan of what is equal": (lambda x, y: jax.lax.scan(_swap, ((y, y), y), x[None])[0], ["", "", ""]),
    "while": (lambda x, y: jax.lax.while_loop(lambda s: s[0] < x, lambda s: (s[0] + 1, 2 * s[1]), (y, y)), ["a", "a"]),
    "while of what is equal": (lambda x, y: jax.lax.while_loop(lambda s: s < y, lambda s: s + 1, y), [""]),
    "cond": (lambda x, y: jax.lax.cond(x > 0, lambda: (y + 1, x), lambda: (y, y)), ["a", "a"]),
    "cond of what is equal": (lambda x, y: jax.lax.cond(y > 0, lambda: (y, x), lambda: (y, y)), ["", "a"]),
    "custom": (lambda x, y: (jax.nn.relu(y), _constant_slope(x)), ["", "a"]),
    "derivative": (lambda x, y: jax.grad(lambda x, y: x * _constant_slope(y), (0, 1))(x, y), ["", ""]),
}  # fmt: skip


@pytest.mark.parametrize("name", WALKS)
def test_walk_finds_the_axes_along_which_outputs_differ(name):
    function, expected = WALKS[name]
    traced = jax.make_jaxpr(function, axis_env=[("a", 2), ("b", 3)])(jnp.float32(1), jnp.float32(2))
    assert varying_axes(traced, [frozenset("a"), NONE]) == [frozenset(x) for x in expected]


@pytest.mark.parametrize("name", ["arithmetic", "sums", "index", "jit", "checkpoint", "scan of what is equal",
                                  "custom"])  # fmt: skip
def test_walk_agrees_with_the_check_of_jax(name):
    """JAX's check finds the same axes in every function that it accepts."""
    function, found = WALKS[name][0], []
    mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])

    def one(x, y):
        out = function(x[0], y)
        found[:] = [frozenset(jax.typeof(x).mat.varying) for x in jax.tree.leaves(out)]
        return x

    jax.eval_shape(jax.shard_map(one, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")), jnp.ones(2), jnp.float32(2))
    traced = jax.make_jaxpr(function, axis_env=[("a", 2), ("b", 3)])(jnp.float32(1), jnp.float32(2))
    assert varying_axes(traced, [frozenset("a"), NONE]) == found
