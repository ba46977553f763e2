"""`jgc.mean_gradients`: a trainer that applies the gradients itself gets the parameters of `jgc.make_step`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jgc

TX = optax.adam(0.1)


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


def batch_of(i, nodes):
    x = np.random.default_rng(i).normal(size=(nodes.count, 8, 16)).astype(np.float32)
    return jgc.place({"x": x, "y": x.sum(-1)}, "batch", nodes)


def start():
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(16, 8)) / 4, jnp.float32), "v": jnp.ones(8)}


def trained_by_hand(compressor, params, nodes, steps=6, **options):
    state, gradients = jgc.mean_gradients(loss, compressor, params, nodes, **options)
    inner, values = TX.init(params), []
    for i in range(steps):
        value, grads, state = gradients(params, state, batch_of(i, nodes))
        jax.block_until_ready(grads)
        updates, inner = TX.update(grads, inner, params)
        params = optax.apply_updates(params, updates)
        values.append(float(value))
    return params, values


def trained(compressor, params, nodes, steps=6):
    init, step = jgc.make_step(loss, compressor, TX, nodes)
    state, values = init(jax.random.key(0), params), []
    for i in range(steps):
        state, metrics = step(state, batch_of(i, nodes))
        values.append(float(metrics.loss))
    return state.params, values


@pytest.mark.parametrize("compressor", [
    jgc.compress.topk(alpha=0.25),
    jgc.compress.topk(alpha=0.25, warmup_steps=3),  # two phases, by the number of calls
    jgc.compress.scalecom(alpha=0.25),
    jgc.compress.powersgd(rank=1),
], ids=["topk", "phases", "scalecom", "powersgd"])  # fmt: skip
@pytest.mark.parametrize("layout", ["8 devices", "4 nodes on 1"])
def test_same_parameters_as_make_step(compressor, layout):
    nodes = jgc.make_nodes(8) if layout == "8 devices" else jgc.make_nodes(4, devices=jax.devices()[:1])
    params = jgc.place(start(), "shared", nodes)
    mine, values = trained_by_hand(compressor, params, nodes)
    others, losses = trained(compressor, start(), nodes)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), mine, others)
    np.testing.assert_allclose(values, losses, rtol=2e-5)


def test_shards_of_a_node_stay_where_they_are():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("node", "fsdp"))
    nodes = jgc.from_mesh(mesh, ("node",), fast=("fsdp",))
    places = {"w": NamedSharding(mesh, P(None, "fsdp")), "v": NamedSharding(mesh, P("fsdp"))}
    params = jax.tree.map(jax.device_put, start(), places)
    compressor = jgc.compress.topk(alpha=0.25)
    mine, _ = trained_by_hand(compressor, params, nodes)
    others, _ = trained(compressor, params, nodes)
    assert mine["w"].sharding.is_equivalent_to(places["w"], 2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), mine, others)


def test_aux_has_a_row_for_each_node():
    nodes = jgc.make_nodes(8)
    params = jgc.place(start(), "shared", nodes)

    def with_aux(params, batch):
        return loss(params, batch), {"largest": jnp.max(batch["y"])}

    state, gradients = jgc.mean_gradients(with_aux, jgc.compress.dense(), params, nodes, has_aux=True)
    batch = batch_of(0, nodes)
    (value, aux), grads, _ = gradients(params, state, batch)
    np.testing.assert_array_equal(aux["largest"], np.max(batch["y"], axis=1))
    whole = jax.tree.map(lambda x: np.reshape(x, (64, *x.shape[2:])), batch)
    expected, mean = jax.value_and_grad(loss)(start(), whole)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), grads, mean)


def test_a_frozen_argument_gets_no_gradient():
    nodes = jgc.make_nodes(8)
    whole = jgc.place(start(), "shared", nodes)
    params, base = {"v": whole["v"]}, {"w": whole["w"]}
    compressor = jgc.compress.dense()
    state, gradients = jgc.mean_gradients(
        lambda params, batch, base: loss(params | base, batch), compressor, params, nodes, frozen=jgc.SHARED
    )
    _, grads, _ = gradients(params, state, batch_of(0, nodes), base)
    state, gradients = jgc.mean_gradients(loss, compressor, whole, nodes)
    expected = gradients(whole, state, batch_of(0, nodes))[1]
    assert grads.keys() == {"v"}
    np.testing.assert_allclose(grads["v"], expected["v"], rtol=1e-5)


def test_a_step_that_is_skipped_gives_zeros_or_nan():
    nodes = jgc.make_nodes(8)
    params = jgc.place(start(), "shared", nodes)
    batch = batch_of(0, nodes)
    batch["y"] = batch["y"].at[3, 0].set(jnp.inf)
    for nan_if_skipped, fits in ((False, lambda x: bool((x == 0).all())), (True, lambda x: bool(jnp.isnan(x).all()))):
        state, gradients = jgc.mean_gradients(
            loss, jgc.compress.topk(alpha=0.25), params, nodes, nan_if_skipped=nan_if_skipped
        )
        assert all(map(fits, jax.tree.leaves(gradients(params, state, batch)[1])))


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"compressor": jgc.compress.TopK()}, TypeError, "TopK"),
    ({"nodes": 8}, TypeError, "nodes"),
    ({"loss": 3}, TypeError, "loss"),
    ({"params": {"w": "none"}}, TypeError, "w"),
    ({"compressor": jgc.compress.gradiveq()}, ValueError, "finds its phases during the run"),
    ({"phase": "none"}, ValueError, "phase must be one of"),
    ({"compressor": jgc.compress.powersgd(alternate=True)}, ValueError, "use jgc.make_step"),
    ({"compressor": jgc.compress.powersgd(alternate=True), "phase": "none"}, ValueError, "phase must be one of"),
    ({"compressor": jgc.compress.powersgd(alternate=True), "phase": 3}, ValueError, "phase must be one of"),
])  # fmt: skip
def test_mistakes_are_said_at_once(change, error, message):
    nodes = jgc.make_nodes(8)
    args = {"loss": loss, "compressor": jgc.compress.topk(alpha=0.25), "params": start(), "nodes": nodes} | change
    with pytest.raises(error, match=message):
        jgc.mean_gradients(**args)


def test_a_method_with_momentum_warns_of_a_second():
    nodes = jgc.make_nodes(8)
    params = jgc.place(start(), "shared", nodes)
    with pytest.warns(jgc.MomentumWarning, match="an optimiser without one"):
        jgc.mean_gradients(loss, jgc.compress.dgc(momentum=0.9), params, nodes)
