"""Metrics of `make_step` and local steps: gradient norms in every layout, and what they send."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import some_by_default
from jax.sharding import NamedSharding, PartitionSpec as P

import jgc
from jgc.compress import dense, topk
from jgc.lab.shared.hlo import collectives
from jgc.loops.norms import norm_of_aggregate
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import SHARED, placements_of

K, B = 2, 8
SPECS = {"in": P(None, "fsdp"), "bias": P(), "out": P("fsdp", None)}
LAYOUTS = ["1 device", "2 devices", "2x4 whole", "2x4 divided"]
every_layout = pytest.mark.parametrize("layout", some_by_default(LAYOUTS, ["2 devices", "2x4 divided"]))


def _nodes(layout):
    if layout.startswith("2x4"):
        return jgc.from_mesh(jax.make_mesh((2, 4), ("dcn", "fsdp")), slow="dcn", fast="fsdp")
    return jgc.make_nodes(K, devices=jax.devices()[: int(layout[0])])


def _params(layout, nodes):
    random = np.random.default_rng(5)
    shapes = {"in": (12, 16), "bias": (16,), "out": (16, 4)}
    params = {name: jnp.asarray(0.3 * random.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    if layout != "2x4 divided":
        return params
    return {name: jax.device_put(x, NamedSharding(nodes.mesh, SPECS[name])) for name, x in params.items()}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"] + params["bias"]) @ params["out"] - batch["y"]) ** 2)


def _batch(i):
    x = np.random.default_rng(i).normal(size=(K, B, 12)).astype(np.float32)
    return {"x": x, "y": x[..., :4]}


def _norms(params, batch):
    """The norms of the nodes' gradients, and of their mean, by plain JAX."""
    grads = [jax.grad(loss)(params, jax.tree.map(lambda x, i=i: x[i], batch)) for i in range(K)]
    mean = jax.tree.map(lambda *xs: sum(xs) / K, *grads)
    return [float(optax.tree.norm(own)) for own in grads], float(optax.tree.norm(mean))


@every_layout
def test_grad_norm_is_that_of_the_optimisers_gradient(layout):
    nodes = _nodes(layout)
    init, step = jgc.make_step(loss, dense(), optax.sgd(0.1), nodes)
    state = init(jax.random.key(0), _params(layout, nodes))
    for i in range(2):
        want = _norms(jax.device_get(state.params), _batch(i))[1]
        state, metrics = step(state, _batch(i))
        assert metrics.grad_norm.shape == () and metrics.grad_norm.dtype == jnp.float32
        np.testing.assert_allclose(metrics.grad_norm, want, rtol=1e-5)
    bad = _batch(2)
    bad["x"][1, 0, 0] = np.nan
    _, metrics = step(state, bad)
    assert not metrics.info.finite and metrics.grad_norm == 0


def test_grad_norm_of_a_sparse_method_is_that_of_its_aggregate():
    init, step = jgc.make_step(loss, topk(alpha=0.1), optax.sgd(1.0), _nodes("2 devices"))
    state = init(jax.random.key(0), _params("2 devices", None))
    before = jax.device_get(state.params)
    state, metrics = step(state, _batch(0))
    moved = jax.tree.map(lambda a, b: a - b, before, jax.device_get(state.params))
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(moved), rtol=1e-5)
    assert metrics.grad_norm < 0.9 * _norms(before, _batch(0))[1]


@every_layout
def test_local_grad_norms_are_the_nodes_own(layout):
    nodes = _nodes(layout)
    init, step = jgc.local_steps(optax.sgd(0.0), optax.sgd(1.0), dense(), 2, nodes).make_step(loss)
    state = init(jax.random.key(0), _params(layout, nodes))
    want = _norms(jax.device_get(state.params), _batch(0))[0]
    _, metrics = step(state, _batch(0))
    assert metrics.grad_norm.shape == (K,) and metrics.grad_norm.dtype == jnp.float32
    np.testing.assert_allclose(metrics.grad_norm, want, rtol=1e-5)


@pytest.mark.parametrize("layout, count", [("2 devices", 0), ("2x4 whole", 0), ("2x4 divided", 1)])
def test_the_norm_sends_one_value_inside_a_node_at_most(layout, count):
    nodes = _nodes(layout)
    params = _params(layout, nodes)
    norm = on_nodes(partial(norm_of_aggregate, nodes=nodes), nodes, ins=(placements_of(params),), outs=SHARED)
    sent = [c for c in collectives(jax.jit(norm).lower(params).compile()) if c.group_size > 1]
    assert [(c.op, c.payload_bytes, c.group_size) for c in sent] == [("all-reduce", 4, 4)] * count


def test_local_losses_are_float32():
    params, nodes = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params("1 device", None)), _nodes("1 device")
    init, step = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, nodes).make_step(loss)
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), _batch(0))
    _, metrics = step(init(jax.random.key(0), params), batch)
    assert loss(params, jax.tree.map(lambda x: x[0], batch)).dtype == jnp.bfloat16
    assert metrics.loss.dtype == metrics.grad_norm.dtype == jnp.float32
