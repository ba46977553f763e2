"""The node axis: layouts, node-local gradients, and what may be called shared."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import LAYOUTS, every_layout, nodes_of
from hypothesis import given, strategies as st
from jax.sharding import AxisType

import jgc
from jgc import comm
from jgc.nodes.axis import on_nodes
from jgc.nodes.layouts import FAST, from_mesh, make_nodes
from jgc.nodes.placement import BATCH, LOCAL, SHARED
from jgc.nodes.placing import place
from jgc.types import State

NOT_SHARED = r"is declared SHARED, but differs between nodes \(or their devices\)|unroll=True"


# --- layouts ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 8))
def test_uneven_nodes_per_device_is_an_error_with_valid_counts(count, devices):
    try:
        nodes = make_nodes(count, jax.devices()[:devices])
    except ValueError as error:
        assert str(error).startswith(f"{count} nodes do not divide among {min(count, devices)} devices")
        for fits in re.search(r"use ([\d or]+) nodes", str(error))[1].split(" or "):
            assert make_nodes(int(fits), jax.devices()[:devices]).count == int(fits)
        return
    assert nodes.count == count
    assert nodes.per_device * (1 if nodes.mesh is None else nodes.mesh.size) == count
    assert (nodes.mesh is None) == (devices == 1 and count > 1)


def test_layout_follows_from_devices():
    layouts = [nodes_of(layout).layout for layout in LAYOUTS]
    assert layouts == ["one per device", "emulated", "several per device"]
    assert make_nodes(2, devices_per_node=4).mesh.shape[FAST] == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"count": 8.0}, "the number of nodes must be a whole number, got 8.0"),
        ({"count": True}, "the number of nodes must be a whole number, got True"),
        ({"count": 2, "devices_per_node": 2.0}, "devices_per_node must be a whole number, got 2.0"),
        ({"count": 0}, "the number of nodes must be at least 1, got 0"),
        ({"count": -2}, "the number of nodes must be at least 1, got -2"),
        ({"count": 2, "devices_per_node": 0}, "devices_per_node must be at least 1, got 0"),
        ({"count": 4, "devices_per_node": 4}, "4 nodes of 4 devices need 16 devices, got 8"),
        ({"count": 12}, "12 nodes do not divide among 8 devices; use 8 or 16 nodes, or fewer devices"),
    ],
    ids=str,
)
def test_bad_node_counts_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        make_nodes(**arguments)


def test_nodes_on_own_mesh():
    mesh = jax.make_mesh((2, 4), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2)
    assert from_mesh(mesh, slow=("pod",), fast=("chip",)).count == 2
    assert from_mesh(mesh, slow=("pod", "chip"), per_device=3).count == 24
    with pytest.raises(ValueError, match=r"mesh axis 'node' is not one of \('pod', 'chip'\)"):
        from_mesh(mesh, slow=("node",))
    mixed = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"must be all Auto or all Explicit, got \{'a': 'Auto', 'b': 'Explicit'\}"):
        from_mesh(mixed, slow="a")


def test_nodes_are_hashable_and_equal_by_value():
    assert hash(make_nodes(8)) == hash(make_nodes(8)) and make_nodes(8) == make_nodes(8)


# --- what is shared -----------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("unroll", [False, True])
def test_differing_shared_output_is_an_error_when_traced(layout, unroll):
    nodes = nodes_of(layout)
    with pytest.raises(ValueError, match=NOT_SHARED):
        jax.eval_shape(on_nodes(lambda x: 2 * x, nodes, (LOCAL,), SHARED, unroll=unroll), jnp.arange(8.0))


@every_layout
def test_equal_output_can_be_shared(layout):
    nodes = nodes_of(layout)

    def three(x, w):
        return comm.psum(x, nodes, "x"), 2 * w, x + w

    fn = on_nodes(three, nodes, ins=(LOCAL, SHARED), outs=(SHARED, SHARED, LOCAL))
    total, shared, local = jax.jit(fn)(jnp.arange(8.0), jnp.float32(3))
    assert (float(total), float(shared)) == (28, 6)
    assert local.tolist() == list(range(3, 11))


@every_layout
def test_missing_collective_is_an_error_when_traced(layout):
    nodes = nodes_of(layout)
    step = jgc.compress.step_on_nodes(lambda phase, key, grads, state, nodes: (grads, state, 0 * grads), None, nodes)
    with pytest.raises(ValueError, match=NOT_SHARED):
        jax.eval_shape(step, jax.random.key(0), jnp.zeros((8, 3)), State((), ()))


@every_layout
def test_placed_arrays_do_not_recompile(layout):
    nodes = nodes_of(layout)
    placements = {"a": SHARED, "b": LOCAL}
    step = jax.jit(on_nodes(lambda t: jax.tree.map(lambda x: x + 1, t), nodes, (placements,), placements))
    whole = {"a": np.arange(3, dtype=np.float32), "b": np.arange(16, dtype=np.float32).reshape(8, 2)}
    tree = place(whole, placements, nodes)
    for _ in range(3):
        tree = step(tree)
    assert step._cache_size() == 1
    assert all(np.array_equal(tree[name], x + 3) for name, x in whole.items())


# --- node-local gradients -----------------------------------------------------------------------------------------


def _loss(params, batch):
    return jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2)


def _problem(count: int):
    random = np.random.default_rng(0)
    batch = random.normal(size=(count, 6, 3)).astype(np.float32), random.normal(size=(count, 6)).astype(np.float32)
    return {"w": jnp.array([1.0, -2.0, 0.5])}, batch


def _by_hand(params, batch):
    x, y = (np.asarray(b, float) for b in batch)
    w = np.asarray(params["w"], float)
    return np.stack([2 * x[k].T @ (x[k] @ w - y[k]) / len(y[k]) for k in range(len(x))])


@every_layout
@pytest.mark.parametrize("unroll", [False, True])
def test_node_gradients_are_each_nodes_own(layout, unroll):
    nodes = nodes_of(layout)
    params, batch = _problem(8)
    loss, grads = jax.jit(jgc.node_grads(_loss, nodes, unroll=unroll))(params, place(batch, BATCH, nodes))
    expected = _by_hand(params, batch)
    assert all(np.abs(expected[i] - expected[j]).max() > 0.1 for i in range(8) for j in range(i))
    np.testing.assert_allclose(grads["w"], expected, rtol=1e-5)
    np.testing.assert_allclose(loss[3], _loss(params, (batch[0][3], batch[1][3])), rtol=1e-6)


@pytest.mark.parametrize("backend, times", [("cpu", 8), ("gpu", 1), ("tpu", 1)])
def test_nodes_of_a_device_are_computed_as_suits_it(backend, times, monkeypatch):
    """One by one on a CPU, together under `vmap` elsewhere: in `node_grads`, `make_step` and `local_steps`."""
    nodes, (params, batch), sgd, dense = nodes_of("1 device"), _problem(8), optax.sgd(0.1), jgc.compress.dense()
    monkeypatch.setattr("jgc.nodes.gradients.backend_of", lambda nodes: backend)
    traced = str(jax.make_jaxpr(jgc.node_grads(_loss, nodes))(params, batch))
    assert traced.count("dot_general[") == 2 * times  # the loss and its gradient
    unrolled, map_nodes = [], jgc.nodes.gradients.on_nodes
    monkeypatch.setattr(
        jgc.nodes.gradients,
        "on_nodes",
        lambda *args, **more: unrolled.append(more["unroll"]) or map_nodes(*args, **more),
    )
    loops = jgc.make_step(_loss, dense, sgd, nodes), jgc.local_steps(sgd, sgd, dense, 2, nodes).make_step(_loss)
    for init, step in loops:
        step(init(jax.random.key(0), params), batch)
    assert unrolled == [times > 1] * 2


@pytest.mark.parametrize("unroll", ["no", "auto", 2, []])
def test_unroll_is_true_false_or_none(unroll):
    nodes, (params, batch) = nodes_of("1 device"), _problem(8)
    with pytest.raises(TypeError, match=r"unroll must be True, False or None .* got"):
        jgc.node_grads(_loss, nodes, unroll=unroll)(params, batch)


@every_layout
def test_gradients_entering_aggregate_differ_between_nodes(layout):
    """`jax.grad` under shard_map would put the sum over nodes into every one of them."""
    nodes = nodes_of(layout)
    params, batch = _problem(8)

    def one(params, batch):
        return jax.grad(_loss)(comm.vary(params, nodes), batch)["w"]

    seen = jax.jit(on_nodes(one, nodes, (SHARED, BATCH), LOCAL))(params, place(batch, BATCH, nodes))
    np.testing.assert_allclose(seen, _by_hand(params, batch), rtol=1e-5)


@every_layout
def test_node_grads_pass_local_state_and_aux(layout):
    nodes = nodes_of(layout)
    params, batch = _problem(8)
    own = {"offset": np.arange(8, dtype=np.float32)}

    def loss(params, batch, own):
        return _loss(params, batch) + own["offset"] * params["w"][0], {"next": own["offset"] + 1}

    gradients = jgc.node_grads(loss, nodes, has_aux=True, local=True)
    (_, aux), grads = gradients(params, place(batch, BATCH, nodes), place(own, LOCAL, nodes))
    expected = _by_hand(params, batch) + np.arange(8)[:, None] * [1, 0, 0]
    np.testing.assert_allclose(grads["w"], expected, rtol=1e-5)
    assert aux["next"].tolist() == list(range(1, 9))


@every_layout
def test_integer_parameters_have_no_gradient_and_pass_through_a_method(layout):
    nodes = nodes_of(layout)
    params, batch = _problem(8)
    params["steps"] = jnp.int32(3)
    _, grads = jgc.node_grads(_loss, nodes)(params, place(batch, BATCH, nodes))
    compressor = jgc.compress.dense()
    step = jgc.compress.step_on_nodes(compressor.aggregate, "dense", nodes)
    aggregated, _, _ = jax.jit(step)(jax.random.key(0), grads, compressor.init(jax.random.key(0), params, nodes))
    assert aggregated["steps"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(aggregated["w"], _by_hand(_problem(8)[0], batch).mean(0), rtol=1e-5)


def test_devices_of_a_node_average_before_compression():
    nodes, seen = make_nodes(4, devices_per_node=2), []
    params, batch = _problem(4)

    def loss(params, batch):
        seen.append(batch[0].shape)
        return _loss(params, batch)

    _, grads = jax.jit(jgc.node_grads(loss, nodes))(params, place(batch, BATCH, nodes))
    np.testing.assert_allclose(grads["w"], _by_hand(params, batch), rtol=1e-5)
    assert set(seen) == {(3, 3)}  # half of a node's six examples on each of its devices


@pytest.mark.parametrize("averaged", [True, False], ids=["by node_grads", "by the method"])
@pytest.mark.parametrize("name", ["dense", "topk"])
def test_fast_axes_give_the_plain_mean(name, averaged):
    nodes = make_nodes(4, devices_per_node=2)
    params, batch = _problem(4)
    method = jgc.compress.METHODS[name]
    compressor = jgc.compress.build(method.settings(), **method.lossless)

    def one(params, batch, state):
        grads = jax.grad(_loss)(comm.vary(params, nodes), batch)  # differs between the devices of a node
        if averaged:
            grads = comm.exact_mean(grads, nodes)
        return compressor.aggregate(compressor.schedule[0].value, jax.random.key(0), grads, state, nodes)[:2]

    placements = State(SHARED, LOCAL)
    step = jax.jit(on_nodes(one, nodes, (SHARED, BATCH, placements), (SHARED, placements)))
    state = place(compressor.init(jax.random.key(0), params, nodes), placements, nodes)
    aggregated, _ = step(params, place(batch, BATCH, nodes), state)
    np.testing.assert_allclose(aggregated["w"], _by_hand(params, batch).mean(0), rtol=1e-5, atol=1e-6)


def test_nodes_of_one_device_run_on_that_device():
    nodes = make_nodes(4, devices=jax.devices()[3:4])
    assert (nodes.count, nodes.per_device, nodes.mesh.devices.tolist()) == (4, 4, [jax.devices()[3]])
    x = place(np.arange(4.0), LOCAL, nodes)
    mean = jax.jit(on_nodes(lambda x: comm.pmean(x, nodes, "x"), nodes, ins=(LOCAL,), outs=SHARED))(x)
    assert mean == 1.5 and mean.devices() == {jax.devices()[3]}
    assert make_nodes(4, devices=jax.devices()[:1]).mesh is None


@every_layout
def test_function_that_communicates_is_refused_one_by_one(layout):
    nodes = nodes_of(layout)
    run = on_nodes(lambda x: comm.pmean(x, nodes, "x"), nodes, ins=(LOCAL,), outs=LOCAL, unroll=True)
    with pytest.raises(ValueError, match="the function communicates"):
        run(np.zeros((nodes.count, 2), np.float32))
