"""Gradients that the devices of a node divide: 2 nodes of 4 devices; leaves divided over any dimension, or none."""

import contextlib
import functools
from typing import NamedTuple

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import some_by_default
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jgc
from jgc.compress import METHODS, dense, per_layer, stacked, step_on_nodes, topk
from jgc.lab.shared.hlo import collectives
from jgc.method.shards import whole
from jgc.nodes.placement import Sharded, Stacked, placements_of, spec
from jgc.types import PyTree, State

K, F = 2, 4
SPECS = {"a": P("fsdp"), "b": P(None, "fsdp"), "c": P(), "d": P(None, None, "fsdp")}
SHAPES = {"a": (32, 24), "b": (10, 40), "c": (7,), "d": (3, 3, 16)}
SHARDS = {"a": (8, 24), "b": (10, 10), "d": (3, 3, 4)}  # of the group that is divided; "c" is the other
REFUSED = ("gradiveq",)
SUM_DIFFERS = {  # matrix products of other batches
    "klt": 1e-6, "powersgd": 1e-6, "powersgd/alternate": 1e-6, "lgc_ps": 1e-5, "lgc_ring": 1e-5
}  # fmt: skip
TURNS = ("qsgd/two-shot feedback", "powersgd/alternate")  # variants with other collectives
NAMES = [*(name for name in METHODS if name not in REFUSED), *TURNS]
SETTINGS = {  # so that small shards send something, and gradients are conserved
    "dgc": {"momentum": 0.0, "factor_masking": False, "alpha": 0.05},
    "qsgd": {"error_feedback": True},
    "topk": {"alpha": 0.05},
    "scalecom": {"alpha": 0.05, "selection": "chunks", "chunk": 32},
}

SOME = ("dgc", "powersgd")  # vectors, factors of each layer
some_methods = pytest.mark.parametrize("name", some_by_default(NAMES, SOME))


def mesh_nodes(order=("dcn", "fsdp")):
    sizes = {"dcn": K, "fsdp": F}
    return jgc.from_mesh(jax.make_mesh(tuple(sizes[x] for x in order), order), slow="dcn", fast="fsdp")


def put(tree: PyTree, nodes: jgc.Nodes, local: bool = False) -> PyTree:
    """Arrays divided as `SPECS` says; with `local`, they have a leading axis [K]."""

    def one(name, x):
        return jax.device_put(x, NamedSharding(nodes.mesh, P("dcn", *SPECS[name]) if local else SPECS[name]))

    return {name: one(name, x) for name, x in tree.items()}


def gradients(seed: int) -> PyTree:
    """Multiples of 2^-10, so that sums are exact: [K, ...]."""
    rng = np.random.default_rng(seed)
    return {name: (rng.integers(-63, 64, (K, *shape)) / 1024).astype(np.float32) for name, shape in SHAPES.items()}


def compressor_of(name: str) -> jgc.Compressor:
    if name in TURNS:
        return contract.compressor_of(name)
    method = METHODS[name]
    return method.factory(method.settings(**SETTINGS.get(name, {})))


class Run(NamedTuple):
    nodes: jgc.Nodes
    params: PyTree
    first: State
    step: object


@functools.cache
def run_of(name: str, phase: int = -1) -> Run:
    nodes, compressor = mesh_nodes(), compressor_of(name)
    params = put({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, nodes)
    first = compressor.init(jax.random.key(0), params, nodes)
    placements = placements_of(params), placements_of(first)
    step = step_on_nodes(compressor.aggregate, compressor.schedule[phase].value, nodes, *placements)
    args = jax.random.key(0), put(gradients(0), nodes, local=True), first
    shardings = jax.tree.map(lambda x: NamedSharding(nodes.mesh, spec(x, nodes)), placements)
    info = NamedSharding(nodes.mesh, spec(Stacked("local", ("fsdp",)), nodes))
    return Run(nodes, params, first, jax.jit(step, out_shardings=(*shardings, info)).lower(*args).compile())


def shard_of(x: np.ndarray, name: str, f: int) -> np.ndarray:
    """Device f's part of a leaf [K, ...]."""
    dim = next(i for i, axis in enumerate(SPECS[name]) if axis) + 1
    return np.split(np.asarray(x), F, dim)[f]


@some_methods
def test_step_equals_the_one_on_each_devices_shards(name):
    run, compressor = run_of(name), compressor_of(name)
    phase, alone = compressor.schedule[-1].value, jgc.make_nodes(K, devices=jax.devices()[:K])
    key, state = jax.random.key(5), run.first
    by_hand = [_state_of(state, 0, f) for f in range(F)] + [_state_of(state, 1, None)]
    step = jax.jit(step_on_nodes(compressor.aggregate, phase, alone))
    for seed in range(3):
        grads = gradients(seed)
        aggregated, state, _ = run.step(key, put(grads, run.nodes, local=True), state)
        found = {}
        for f in range(F):
            own = {name: shard_of(grads[name], name, f) for name in SHARDS}
            own_key = jax.random.fold_in(jax.random.fold_in(key, 0), f)
            found[f], by_hand[f], _ = step(own_key, own, by_hand[f])
        pooled, by_hand[F], _ = step(jax.random.fold_in(key, 1), {"c": grads["c"]}, by_hand[F])
        for leaf in SHARDS:
            dim = next(i for i, axis in enumerate(SPECS[leaf]) if axis)
            expected = np.concatenate([found[f][leaf] for f in range(F)], dim)
            np.testing.assert_allclose(aggregated[leaf], expected, rtol=0, atol=SUM_DIFFERS.get(name, 0))
        np.testing.assert_allclose(aggregated["c"], pooled["c"], rtol=0, atol=SUM_DIFFERS.get(name, 0))


def _state_of(state: State, group: int, f: int | None) -> State:
    """The state of a group on device f of every node, as a state of its own; f None: of a group that is not divided."""
    shared, local = jax.tree.map(np.asarray, (state.shared.parts[group], state.local.parts[group]))
    if f is None:
        return State(shared, local)
    return State(jax.tree.map(lambda x: x[f], shared), jax.tree.map(lambda x: x[:, f], local))


CONSERVING = [x for x in NAMES if x in (*TURNS, "qsgd") or "conservation" not in METHODS[x].exempt]


@pytest.mark.parametrize("name", some_by_default(CONSERVING, SOME))
def test_shards_conserve_gradients(name):
    """Residuals and aggregates of 30 steps add up to the gradients."""
    run, compressor = run_of(name), compressor_of(name)
    if compressor.owns_momentum and name != "dgc":
        pytest.skip("the velocity takes the gradient's place: tests/laws.py has that law")
    state, came, sent = run.first, 0.0, 0.0
    for seed in range(30):
        grads = gradients(seed)
        aggregated, state, _ = run.step(jax.random.key(seed), put(grads, run.nodes, local=True), state)
        came = jax.tree.map(lambda total, g: total + g.mean(0), _zeros_if(came), grads)
        sent = jax.tree.map(lambda total, x: total + np.asarray(x), _zeros_if(sent), dict(aggregated))
    kept = [
        jgc.residual(compressor, jax.tree.map(lambda x, k=k: np.asarray(x)[k], state.local), run.params)
        for k in range(K)
    ]
    for leaf in SHAPES:
        mean = np.mean([np.asarray(one[leaf]) for one in kept], 0) if leaf in kept[0] else 0.0
        np.testing.assert_allclose(mean + sent[leaf], came[leaf], rtol=0, atol=2e-5)


def _zeros_if(total: PyTree | float) -> PyTree:
    return {name: np.zeros(shape) for name, shape in SHAPES.items()} if isinstance(total, float) else total


@some_methods
def test_state_is_divided_like_the_parameters(name):
    run = run_of(name)
    divided = run.first.local.parts[0]
    for x in jax.tree.leaves(divided):
        assert x.shape[:2] == (K, F) and (not x.size or x.addressable_shards[0].data.nbytes * K * F == x.nbytes)
    arguments = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(run.first))
    memory = run.step.memory_analysis()
    mine = sum(np.prod(shape) // (F if leaf in SHARDS else 1) for leaf, shape in SHAPES.items()) * 4
    # buffers of the step: the state, a gradient shard and the key, no more than alignment on top
    assert arguments + mine <= memory.argument_size_in_bytes <= arguments + mine + 4096


@pytest.mark.parametrize("name", some_by_default(["topk", "dgc", "scalecom", "ef21", "powersgd"], SOME))
def test_residual_of_a_device_is_that_of_its_shards(name):
    run = run_of(name)
    of_device = [x.addressable_shards[0].data.size for x in jax.tree.leaves(run.first.local.parts[0])]
    values = sum(np.prod(shape) for leaf, shape in SHAPES.items() if leaf in SHARDS)
    # powersgd has a residual for each layer; the others have vectors, and dgc a velocity beside it
    assert (sum if name == "powersgd" else max)(of_device) == values / F


@some_methods
@pytest.mark.parametrize("phase", some_by_default([0, -1], [-1]), ids=["first phase", "last phase"])
def test_collectives_meet_other_nodes_alone_and_equal_wire(name, phase):
    run, compressor = run_of(name, phase), compressor_of(name)
    found = [c for c in collectives(run.step) if c.group_size > 1]
    (flag,) = [c for c in found if c.op == "all-reduce" and c.group_size == K * F]
    assert flag.payload_bytes == 4
    # none over the F devices of a node; a permute counts the devices of all its pairs
    assert all(c.group_size == K for c in found if c is not flag and c.op != "collective-permute")
    wire = compressor.wire(compressor.schedule[phase].value, run.params, run.nodes)
    assert sum(c.sent_bytes for c in found) == sum(sent.bytes for sent in wire.physical)


def test_bytes_of_a_node_are_those_of_its_devices():
    run, compressor = run_of("topk"), compressor_of("topk")
    wire = compressor.wire(compressor.schedule[-1].value, run.params, run.nodes)
    shards = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHARDS.items()}
    rest = {"c": jax.ShapeDtypeStruct((7,), np.float32)}
    alone = jgc.make_nodes(K, devices=jax.devices()[:1])
    device, whole_leaves = (compressor.wire(compressor.schedule[-1].value, x, alone) for x in (shards, rest))

    def up(wire):
        return sum(m.bytes for m in wire.logical if m.direction == "up")

    assert up(wire) == F * up(device) + up(whole_leaves)
    assert wire.devices == F


@pytest.mark.parametrize("bad", some_by_default([np.nan, np.inf], [np.inf]))
@pytest.mark.parametrize("leaf", SHAPES)
@pytest.mark.parametrize("name", some_by_default(["topk", "dense", "powersgd"], ["powersgd"]))
def test_bad_value_on_one_device_makes_all_devices_skip(name, leaf, bad):
    run = run_of(name)
    _, state, _ = run.step(jax.random.key(0), put(gradients(0), run.nodes, local=True), run.first)
    grads = gradients(1)
    grads[leaf][1, ..., -1] = bad
    aggregated, after, info = run.step(jax.random.key(1), put(grads, run.nodes, local=True), state)
    assert not np.asarray(info.finite).any() and info.finite.shape == (K, F)
    assert all(not np.asarray(x).any() for x in aggregated.values())
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_local_clipping_takes_the_norm_of_the_whole_gradient():
    nodes, params = run_of("topk").nodes, run_of("topk").params
    compressor = jgc.compress.dgc(alpha=1.0, momentum=0.0, factor_masking=False, clip_norm=0.5)
    state = compressor.init(jax.random.key(0), params, nodes)
    placements = placements_of(params), placements_of(state)
    step = jax.jit(step_on_nodes(compressor.aggregate, "top-k", nodes, *placements))
    grads = gradients(0)
    aggregated, _, _ = step(jax.random.key(0), put(grads, nodes, local=True), state)
    norms = [np.sqrt(sum((g[k] ** 2).sum() for g in grads.values())) for k in range(K)]
    for leaf in SHAPES:
        expected = np.mean([grads[leaf][k] * min(1, 0.5 / np.sqrt(K) / norms[k]) for k in range(K)], 0)
        np.testing.assert_allclose(aggregated[leaf], expected, rtol=1e-5, atol=1e-7)


def test_diagnosis_of_everything_is_exact():
    nodes, params = run_of("topk").nodes, run_of("topk").params
    compressor = jgc.compress.topk(alpha=1.0)
    state = compressor.init(jax.random.key(0), params, nodes)

    def one(key, grads, state):
        return jgc.diagnose(compressor, "top-k", key, grads, state, nodes)

    ins = ("shared", {name: Sharded("local", x) for name, x in SPECS.items()}, placements_of(state))
    found = jax.jit(jgc.on_nodes(one, nodes, ins, "shared"))(jax.random.key(0), put(gradients(0), nodes, True), state)
    assert found["reconstruction_cosine"] == pytest.approx(1) and found["true_cosine"] == pytest.approx(1)


def test_per_layer_sees_the_paths_of_whole_trees():
    nodes, params = run_of("topk").nodes, run_of("topk").params
    compressor = jgc.compress.per_layer([("^c", jgc.compress.dense())], default=jgc.compress.topk(alpha=0.05))
    state = compressor.init(jax.random.key(0), params, nodes)
    value = compressor.schedule[-1].value
    step = jax.jit(step_on_nodes(compressor.aggregate, value, nodes, placements_of(params), placements_of(state)))
    grads = gradients(0)
    aggregated, _, _ = step(jax.random.key(0), put(grads, nodes, local=True), state)
    np.testing.assert_array_equal(aggregated["c"], grads["c"].mean(0))
    assert np.count_nonzero(aggregated["a"]) < grads["a"][0].size / 4
    with pytest.raises(ValueError, match="'nothing' matches no parameter"):
        jgc.compress.per_layer([("nothing", jgc.compress.dense())], jgc.compress.topk()).init(
            jax.random.key(0), params, nodes
        )


def test_axes_divide_leaves_together_or_apart():
    """fsdp and tensor: a leaf over both, one over both in one dimension, one over tensor alone, in any order."""
    nodes = jgc.from_mesh(jax.make_mesh((2, 2, 2), ("dcn", "fsdp", "tensor")), "dcn", ("fsdp", "tensor"))
    specs = {"both": P("tensor", "fsdp"), "one": P(("fsdp", "tensor")), "tensor": P(None, "tensor"), "none": P()}
    shapes = {"both": (8, 6), "one": (12, 2), "tensor": (3, 4), "none": (5,)}
    params = {name: jax.device_put(jnp.zeros(shapes[name]), NamedSharding(nodes.mesh, x)) for name, x in specs.items()}
    compressor = jgc.compress.topk(alpha=0.5)
    state = compressor.init(jax.random.key(0), params, nodes)
    assert set(state.shared.axes) == {
        ("fsdp", "tensor"), (), ("tensor",)}  # fmt: skip
    step = jax.jit(step_on_nodes(compressor.aggregate, "top-k", nodes, placements_of(params), placements_of(state)))
    rng = np.random.default_rng(0)
    grads = {name: (rng.integers(-63, 64, (2, *shape)) / 1024).astype(np.float32) for name, shape in shapes.items()}
    placed = {name: jax.device_put(x, NamedSharding(nodes.mesh, P("dcn", *specs[name]))) for name, x in grads.items()}
    aggregated, after, _ = step(jax.random.key(0), placed, state)
    kept = [
        jgc.residual(compressor, jax.tree.map(lambda x, k=k: np.asarray(x)[k], after.local), params) for k in range(2)
    ]
    for name in shapes:
        mean = np.mean([np.asarray(one[name]) for one in kept], 0)
        np.testing.assert_array_equal(mean + np.asarray(aggregated[name]), grads[name].mean(0))
        assert np.any(mean) and np.any(np.asarray(aggregated[name]))


def test_whole_puts_shards_where_jax_has_them():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    x = jnp.arange(8 * 16.0).reshape(8, 16)
    for one in (P("x", "y"), P("y", "x"), P(None, ("x", "y")), P(("y", "x")), P("y")):
        axes = tuple(axis for axis in ("x", "y") if axis in str(one))
        array = jax.device_put(x, NamedSharding(mesh, one))
        parts = {}
        for shard in array.addressable_shards:
            at = np.argwhere(mesh.device_ids == shard.device.id)[0]
            parts[tuple(at[i] for i, axis in enumerate(("x", "y")) if axis in axes)] = np.asarray(shard.data)
        stacked = jnp.stack([parts[at] for at in sorted(parts)])
        np.testing.assert_array_equal(whole(stacked, one, axes, dict(mesh.shape)), x)


def test_methods_that_cannot_refuse():
    run = run_of("topk")
    for name in REFUSED:
        with pytest.raises(ValueError, match="cannot compress shards"):
            compressor_of(name).init(jax.random.key(0), run.params, run.nodes)


def test_parameters_divided_between_nodes_are_refused():
    nodes = mesh_nodes()
    params = {"w": jax.device_put(jnp.zeros((8, 8)), NamedSharding(nodes.mesh, P("dcn")))}
    with pytest.raises(ValueError, match="'w' is sharded over the mesh axis 'dcn', which is not one of the fast axes"):
        compressor_of("topk").init(jax.random.key(0), params, nodes)


@pytest.mark.parametrize("order", ["dcn fsdp", pytest.param("fsdp dcn", marks=pytest.mark.exhaustive)])
def test_node_grads_keep_the_parameters_sharding(order):
    nodes, rng = mesh_nodes(order.split()), np.random.default_rng(0)
    params = {"a": rng.standard_normal((8, 4)).astype(np.float32), "b": rng.standard_normal((4, 8)).astype(np.float32),
              "c": rng.standard_normal(4).astype(np.float32)}  # fmt: skip
    placed = put(params, nodes)
    batch = rng.standard_normal((K, 12, 8)).astype(np.float32)

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"] + params["c"]) @ params["b"]) ** 2)

    grads = jax.jit(jgc.node_grads(loss, nodes, placements=placements_of(placed)))
    value, found = grads(placed, jgc.place(batch, "batch", nodes))
    for k in range(K):
        expected = jax.value_and_grad(loss)(params, batch[k])
        np.testing.assert_allclose(np.asarray(value)[k], expected[0], rtol=1e-5)
        jax.tree.map(
            lambda a, b, k=k: np.testing.assert_allclose(np.asarray(a)[k], b, rtol=1e-4, atol=1e-6), found, expected[1]
        )
    for name, x in found.items():
        assert x.sharding.is_equivalent_to(NamedSharding(nodes.mesh, P("dcn", *SPECS[name])), x.ndim)


@pytest.mark.parametrize("context", some_by_default([False, True], [True]), ids=["", "set_mesh"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_any_mesh(kind, context):
    """Auto and Explicit axes, an axis that jgc does not use, a name in place of a tuple."""
    mesh = jax.make_mesh((2, 2, 2), ("dcn", "fsdp", "spare"), axis_types=(kind,) * 3)
    nodes, rng = jgc.from_mesh(mesh, slow="dcn", fast="fsdp"), np.random.default_rng(0)
    params = {"w": rng.standard_normal((8, 4)).astype(np.float32), "b": rng.standard_normal(4).astype(np.float32)}
    divided = {"w": P("fsdp", None), "b": P(None)}
    placed = {name: jax.device_put(x, NamedSharding(mesh, divided[name])) for name, x in params.items()}
    batch = rng.standard_normal((2, 6, 8)).astype(np.float32)

    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)  # Explicit axes alone would refuse this product

    compressor = jgc.compress.dense()
    state, placements = compressor.init(jax.random.key(0), placed, nodes), placements_of(placed)
    gradients = jgc.node_grads(loss, nodes, placements=placements)
    aggregate = step_on_nodes(compressor.aggregate, "dense", nodes, placements, placements_of(state))

    @jax.jit
    def step(params, state, batch):
        mean, state, _ = aggregate(jax.random.key(0), gradients(params, batch)[1], state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, mean), state

    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        after, _ = step(placed, state, jax.device_put(batch, NamedSharding(mesh, P("dcn", "fsdp"))))
    expected = jax.grad(lambda params: (loss(params, batch[0]) + loss(params, batch[1])) / 2)(params)
    for name in params:
        np.testing.assert_allclose(after[name], params[name] - 0.1 * expected[name], rtol=1e-5)
    assert after["w"].sharding.spec[0] == "fsdp"


@pytest.mark.parametrize(
    ("slow", "fast", "message"),
    [
        ("dcm", (), "mesh axis 'dcm' is not one of ('dcn', 'fsdp')"),
        ("dcn", "dcn", "mesh axis 'dcn' is named twice"),
        ((), "fsdp", "slow must name at least one axis of the mesh, of ('dcn', 'fsdp')"),
    ],
)
def test_wrong_axes_are_named(slow, fast, message):
    with pytest.raises(ValueError) as error:
        jgc.from_mesh(jax.make_mesh((2, 4), ("dcn", "fsdp")), slow, fast)
    assert message in str(error.value)


def test_residual_of_all_nodes_is_refused():
    run = run_of("topk")
    with pytest.raises(ValueError, match=r"local has the node axis: give one node's"):
        jgc.residual(compressor_of("topk"), run.first.local, run.params)


def test_diagnosis_averages_over_axes_that_do_not_divide():
    mesh = jax.make_mesh((2, 2, 2), ("s", "a", "b"), axis_types=(AxisType.Auto,) * 3)
    nodes = jgc.from_mesh(mesh, slow="s", fast=("a", "b"))
    params = {"w": jax.device_put(np.zeros((4, 6), np.float32), NamedSharding(mesh, P("a")))}
    compressor = jgc.compress.dense()
    state = compressor.init(jax.random.key(0), params, nodes)

    def one(grads, state):
        grads = jax.tree.map(lambda g: jgc.comm.vary_over(g, ("b",)) * (1.0 + jax.lax.axis_index("b")), grads)
        return jgc.diagnose(compressor, "dense", jax.random.key(0), grads, state, nodes)["reconstruction_cosine"]

    grads = {"w": jax.device_put(np.ones((2, 4, 6), np.float32), NamedSharding(mesh, P("s", "a")))}
    placements = placements_of(state)
    ins = ({"w": Sharded("local", P("a"))}, placements)
    assert jax.jit(jgc.on_nodes(one, nodes, ins=ins, outs=jgc.SHARED))(grads, state) == pytest.approx(1)


# --- what sharded parameters need more ------------------------------------------------------------------------------


def _fsdp(shapes):
    """Nodes of four devices, and ones of these shapes by name, divided as given."""
    nodes = jgc.from_mesh(jax.make_mesh((2, 4), ("dcn", "fsdp")), slow="dcn", fast="fsdp")
    return nodes, {
        name: jax.device_put(np.ones(shape, np.float32), NamedSharding(nodes.mesh, P(*spec)))
        for name, (shape, spec) in shapes.items()
    }


@pytest.mark.slow
def test_klt_learns_bases_of_divided_biases_and_long_modes():
    nodes, params = _fsdp({"w": ((8, 6), ("fsdp",)), "b": ((8,), ("fsdp",))})
    for settings in ({}, {"max_mode": 4}):
        method = jgc.compress.klt(share=0.5, alpha=0.1, warmup_steps=1, momentum_correction=False, **settings)
        init, step = jgc.make_step(
            lambda p, x: jnp.mean((x @ p["w"] + p["b"].sum()) ** 2), method, optax.sgd(0.01), nodes
        )
        state = init(jax.random.key(0), params)
        for i in range(3):
            state, metrics = step(state, np.random.default_rng(i).normal(size=(2, 4, 8)).astype(np.float32))
        assert state.phase.name != "dense" and metrics.info.finite


def test_rules_of_stacked_layers_see_shards_and_refuse_divided_layers():
    nodes, params = _fsdp({"layers": ((4, 6, 8), ("fsdp",)), "wide": ((3, 32, 6), (None, "fsdp"))})
    of_numbers = per_layer([("layers/0$", dense())], default=topk(alpha=0.1))
    with pytest.raises(ValueError, match="'layers' is sharded over its layers, dimension 0"):
        stacked("layers", of_numbers).init(jax.random.key(0), params, nodes)
    of_shapes = per_layer([(lambda path, x: x.shape[0] >= 16, dense())], default=topk(alpha=0.1))
    with pytest.raises(ValueError, match="a rule says True of wide/0"):
        stacked("wide", of_shapes).init(jax.random.key(0), {"wide": params["wide"]}, nodes)
    assert stacked("layers", topk(alpha=0.1)).init(jax.random.key(0), params, nodes)


def test_a_state_made_inside_jit_is_named():
    nodes, params = _fsdp({"w": ((8, 6), ("fsdp",))})
    compressor = topk(alpha=0.1)
    state = jax.jit(lambda params: compressor.init(jax.random.key(0), params, nodes))(params)
    step = step_on_nodes(compressor.aggregate, "top-k", nodes, jgc.placements_of(params), jgc.placements_of(state))
    grads = {"w": jax.ShapeDtypeStruct((2, 8, 6), jnp.float32)}
    with pytest.raises(ValueError, match=r"'w' is float32\[2, 6\], .* float32\[8, 6\]: .* call init .* outside jit"):
        jax.eval_shape(step, jax.random.key(0), grads, state)


def test_residual_of_shards_wants_the_parameters():
    nodes, params = _fsdp({"w": ((8, 6), ("fsdp",))})
    compressor = topk(alpha=0.1)
    local = jax.tree.map(lambda x: np.asarray(x)[0], compressor.init(jax.random.key(0), params, nodes).local)
    with pytest.raises(ValueError, match="the state is of shards: give the parameters themselves"):
        jgc.residual(compressor, local, jax.tree.map(np.asarray, params))
    assert jgc.residual(compressor, local, params)["w"].shape == (8, 6)
