"""What a user can get wrong: each mistake has a message that names what is wrong and what would be right."""

import dataclasses
import re
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import every_layout, nodes_of, same_bits, some_by_default
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from make_step_process import compilations

import jgc
from jgc.compress import TopK, as_optax, dense, dgc, init_optax, per_layer, step_on_nodes, topk
from jgc.lab.shared.hlo import collectives
from jgc.nodes.placement import check_placements, locally

PARAMS = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(3)}
EMULATED = "1 device"


def _grads(params=PARAMS, count=8, value=1.0):
    return jax.tree.map(lambda x: jnp.full((count, *x.shape), value, x.dtype), params)


def _loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2) + jnp.sum(params["b"])


def _raises(error, message):
    return pytest.raises(error, match=re.escape(message))


# --- gradients that the state was not made for --------------------------------------------------------------------


def _step(compressor, grads, layout=EMULATED, params=PARAMS):
    nodes = nodes_of(layout)
    state = compressor.init(jax.random.key(0), params, nodes)
    step = step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes)
    return jax.eval_shape(step, jax.random.key(0), grads, state)


THREE, TWO = [dense(), topk(), jgc.compress.powersgd()], [dense(), topk(alpha=0.2)]


@every_layout
@pytest.mark.parametrize("compressor", some_by_default(THREE, THREE[1:2]), ids=["dense", "topk", "powersgd"])
@pytest.mark.parametrize(
    "other, message",
    [
        ({"w": jnp.zeros((6, 4))}, "the gradients lack the leaf 'b' that the parameters had at init: they have w"),
        ({**PARAMS, "c": jnp.zeros(2)}, "the gradients have the leaf 'c' that the parameters did not have at init: "),
        ({**PARAMS, "w": jnp.zeros((4, 6))}, "the gradient of 'w' is float32[4, 6], and the parameter at init was "
         "float32[6, 4]: give init what the gradients are taken with respect to"),
        ({**PARAMS, "b": jnp.zeros(3, jnp.bfloat16)}, "the gradient of 'b' is bfloat16[3], and the parameter at init "
         "was float32[3]"),
        ({**PARAMS, "b": jnp.zeros(3, jnp.int32)}, "the gradient of 'b' is no float[3]"),
        ({**PARAMS, "b": jnp.zeros((8, 3))}, "the gradient of 'b' is float32[8, 3], and the parameter at init was "
         "float32[3]: its first axis seems to be the nodes'"),
    ],
    ids=["path lacks", "path new", "shape", "dtype", "integer", "node axis"],
)  # fmt: skip
def test_gradients_of_another_tree_are_named(compressor, other, message, layout):
    with _raises(ValueError, message):
        _step(compressor, _grads(other), layout)


def test_gradients_of_another_tree_are_named_in_groups_of_layers():
    compressor = per_layer([("^w", dense())], default=topk())
    with _raises(ValueError, "the gradient of 'w' is float32[6, 5], and the parameter at init was float32[6, 4]"):
        _step(compressor, _grads({**PARAMS, "w": jnp.zeros((6, 5))}))
    with _raises(ValueError, "the gradients have the leaf 'c' that the parameters did not have at init: they have b"):
        _step(compressor, _grads({**PARAMS, "c": jnp.zeros(5)}))


@every_layout
@pytest.mark.parametrize(
    "made, taken, message",
    [
        (dense(), topk(), "it lacks the leaf 'local/memory'"),
        (topk(), dense(), "it has the leaf 'local/memory'"),
        (topk(), dgc(), "it lacks the leaf 'local/memory/velocity'"),
        (dgc(), topk(), "it lacks the leaf 'local/memory'"),
        (topk(), jgc.compress.powersgd(), "it lacks the leaf 'shared/0'"),
        (per_layer([("^w", dense())], default=topk()), topk(), "it lacks the leaf 'local/memory'"),
        (topk(), per_layer([("^w", dense())], default=topk()), "it lacks the leaf 'local/1/memory'"),
    ],
    ids=["dense topk", "topk dense", "topk dgc", "dgc topk", "topk powersgd", "per_layer topk", "topk per_layer"],
)
def test_state_of_another_compressor_is_named(made, taken, message, layout):
    nodes = nodes_of(layout)
    other = made.init(jax.random.key(0), PARAMS, nodes)
    step = step_on_nodes(taken.aggregate, taken.schedule[-1].value, nodes)
    text = f"this state was made by a different compressor, or with other settings: {message}. Make it"
    with _raises(ValueError, text):
        jax.eval_shape(step, jax.random.key(0), _grads(), other)
    (init, _), (_, step) = (jgc.make_step(_loss, one, optax.sgd(0.1), nodes) for one in (made, taken))
    with _raises(ValueError, message):
        step(init(jax.random.key(0), PARAMS), {"x": np.ones((8, 5, 6), np.float32)})


def test_state_of_another_compressor_is_named_where_devices_of_a_node_divide_it():
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    nodes = jgc.from_mesh(mesh, "dcn", "fsdp")
    params = {"w": jax.device_put(jnp.ones((6, 4)), NamedSharding(mesh, P(None, "fsdp"))), "b": jnp.zeros(3)}
    (init, _), (_, step) = (jgc.make_step(_loss, one, optax.sgd(0.1), nodes) for one in (topk(), dgc()))
    with _raises(ValueError, "it lacks the leaf 'local/parts/0/memory/velocity'"):
        step(init(jax.random.key(0), params), {"x": np.ones((2, 8, 6), np.float32)})


def test_leaves_in_another_order_are_an_error():
    class Tree(NamedTuple):
        w: jax.Array
        b: jax.Array

    with _raises(ValueError, "the leaves of the gradients come in a different order"):
        _step(topk(), _grads(Tree(PARAMS["w"], PARAMS["b"])))


def test_signature_has_no_arrays_and_belongs_to_the_structure():
    state = topk().init(jax.random.key(0), PARAMS, nodes_of(EMULATED))
    assert len(jax.tree.leaves(state)) == 1  # the residual
    again = jax.tree.map(lambda x: x + 1, state)
    assert again.local.signature == state.local.signature == hash_twin(state)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def hash_twin(state):
    """An equal signature that was made apart."""
    twin = topk().init(jax.random.key(1), PARAMS, nodes_of(EMULATED)).local.signature
    assert hash(twin) == hash(state.local.signature) and twin is not state.local.signature
    return twin


# --- placements, batches and the number of nodes ------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["kind", "Local", jax.sharding.PartitionSpec(), 3], ids=str)
def test_unknown_placement_is_named(bad):
    message = f"a placement must be jgc.SHARED ('shared'), jgc.LOCAL ('local') or jgc.BATCH ('batch'), got {bad!r}"
    nodes = nodes_of(EMULATED)
    for call in (
        lambda: jgc.on_nodes(lambda x: x, nodes, ins=({"a": bad},), outs="local"),
        lambda: jgc.on_nodes(lambda x: x, nodes, ins=("local",), outs=("shared", bad)),
        lambda: jgc.place(PARAMS, bad, nodes),
        lambda: jgc.place(PARAMS, bad, nodes_of("8 devices")),
        lambda: check_placements({"a": "local", "b": [bad]}),
    ):
        with _raises(ValueError, message):
            call()


@every_layout
def test_batch_that_is_not_split_by_nodes_is_named(layout):
    nodes = nodes_of(layout)
    batch = {"x": np.ones((40, 6), np.float32)}
    shape = "has shape (40, 6), and its first axis must be the K = 8 nodes; a batch has leading axes [K, b]: "
    cure = "split it by nodes, x.reshape(8, -1, *x.shape[1:])"
    with _raises(ValueError, f"the leaf 'x' of argument 1 {shape}{cure}"):
        jax.jit(jgc.node_grads(_loss, nodes))(PARAMS, batch)
    with _raises(ValueError, f"the leaf 'x' of the tree {shape}{cure}"):
        jgc.place(batch, jgc.BATCH, nodes)
    init, step = jgc.make_step(_loss, topk(), optax.sgd(0.1), nodes)
    with _raises(ValueError, f"the leaf 'x' of the batch {shape}{cure}"):
        step(init(jax.random.key(0), PARAMS), batch)


@every_layout
def test_batch_of_a_number_or_a_string_is_named(layout):
    nodes = nodes_of(layout)
    init, step = jgc.make_step(_loss, topk(), optax.sgd(0.1), nodes)
    x = np.ones((8, 5, 6), np.float32)
    for batch, error, message in (
        ({"x": x, "rate": 0.5}, ValueError, "a batch has leading axes [K, b]: repeat a number for each example, "
         "jnp.full((8, b), x)"),
        ({"x": x, "rate": np.float32(1)}, ValueError, "repeat a number for each example, jnp.full((8, b), x)"),
        ({"x": x, "split": "train"}, TypeError, "'split' is not an array but the str 'train': give only the arrays"),
    ):  # fmt: skip
        for call in (
            lambda batch: step(init(jax.random.key(0), PARAMS), batch),
            lambda batch: jgc.node_grads(_loss, nodes)(PARAMS, batch),
            lambda batch: jgc.place(batch, jgc.BATCH, nodes),
        ):
            with pytest.raises(error, match=f"{re.escape(message)}$"):
                call(batch)


def test_batch_that_a_nodes_devices_cannot_share_is_named():
    nodes = jgc.make_nodes(2, devices_per_node=4)
    message = "the leaf 'x' of the tree has shape (2, 6, 6), and its second axis, a node's examples, must be divisible"
    with _raises(ValueError, message):
        jgc.place({"x": np.ones((2, 6, 6))}, jgc.BATCH, nodes)


@every_layout
def test_another_number_of_nodes_is_named(layout):
    nodes, compressor = nodes_of(layout), topk()
    state = compressor.init(jax.random.key(0), PARAMS, jgc.make_nodes(4, jax.devices()[:1]))
    step = jax.jit(step_on_nodes(compressor.aggregate, "top-k", nodes))
    with _raises(
        ValueError, "the leaf 'local/memory' of argument 2 has shape (4, 27), and its first axis must be the K = 8"
    ):
        step(jax.random.key(0), _grads(), state)
    with _raises(ValueError, "the leaf 'b' of argument 1 has shape (4, 3), and its first axis must be the K = 8 nodes; "
                 "jgc.node_grads, compressor.init and"):  # fmt: skip
        step(jax.random.key(0), _grads(count=4), compressor.init(jax.random.key(0), PARAMS, nodes))


@every_layout
def test_output_that_differs_between_nodes_is_named(layout):
    run = jgc.on_nodes(lambda x: {"fine": 0 * x.sum() < 1, "a": [x]}, nodes_of(layout), ("local",), {"fine": "local",
                       "a": "shared"})  # fmt: skip
    with _raises(
        ValueError, "the output's leaf 'a/0' is declared SHARED, but differs between nodes (or their devices)"
    ):
        jax.jit(run)(jnp.ones((8, 3)))


def test_sharded_gradients_of_another_tree_and_outputs_that_differ_inside_a_node_are_named():
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    nodes, compressor = jgc.from_mesh(mesh, "dcn", "fsdp"), topk(alpha=0.5)
    params = {"w": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("fsdp"))), "b": jnp.zeros(4)}
    state, where = compressor.init(jax.random.key(0), params, nodes), jgc.placements_of(params)
    other = {**params, "w": jax.device_put(jnp.ones((8, 5)), NamedSharding(mesh, P("fsdp")))}
    for tree, message in (
        (other, "the gradient of 'w' is float32[2, 5], and the parameter at init was float32[2, 4]"),
        ({"w": params["w"]}, "the gradients have 1 leaves (w), and the parameters had 2 at init"),
    ):
        step = step_on_nodes(
            compressor.aggregate, "top-k", nodes, {k: where[k] for k in tree}, jgc.placements_of(state)
        )
        with _raises(ValueError, message):
            jax.eval_shape(step, jax.random.key(0), _grads(tree, count=2), state)
    tx = optax.chain(as_optax(compressor, nodes), optax.clip_by_global_norm(1.0))  # of a device's shards alone
    state = init_optax(tx, params, nodes)
    of_state = jgc.placements_of(state)
    update = jgc.on_nodes(tx.update, nodes, ins=(locally(where), of_state), outs=(where, of_state))
    with _raises(
        ValueError, "the output's leaf '0/b' is declared SHARED, but differs between nodes (or their devices)"
    ):
        jax.eval_shape(update, _grads(params, count=2), state)


def test_missing_argument_is_counted():
    run = jgc.on_nodes(lambda x, y: x, nodes_of(EMULATED), ("local", "local"), "local")
    with _raises(ValueError, "ins has 2 placements, and the call 1 arguments"):
        run(jnp.ones(8))


# --- what is not a compressor, what is not an array -----------------------------------------------------------------


@pytest.mark.parametrize(
    "other, message",
    [
        (TopK(alpha=0.5), "expected a compressor, got the settings TopK: call jgc.compress.build(TopK(momentum_corr"),
        (TopK, "expected a compressor, got the settings TopK: call jgc.compress.build(TopK(...))"),
        (topk, "expected a compressor, got the function topk: call it, e.g. jgc.compress.topk()"),
        (jgc.compress.METHODS["topk"], "got the registered method 'topk': call jgc.compress.topk()"),
        ("topk", "expected a compressor, e.g. jgc.compress.topk(), got 'topk'"),
    ],
    ids=["settings", "settings class", "factory", "registered", "name"],
)
def test_what_is_not_a_compressor_is_named(other, message):
    nodes = nodes_of(EMULATED)
    for call in (
        lambda: jgc.make_step(_loss, other, optax.sgd(0.1), nodes),
        lambda: as_optax(other, nodes),
        lambda: per_layer([("w", other)], default=dense()),
        lambda: per_layer([("w", dense())], default=other),
        lambda: jgc.compress.stacked("w", other),
        lambda: jgc.bytes_per_step(other, PARAMS, nodes),
        lambda: jgc.phase_after(other, dense().schedule[0], 1, None, nodes),
        lambda: jgc.residual(other, (), PARAMS),
        lambda: jgc.diagnose(other, "top-k", jax.random.key(0), PARAMS, None, nodes),
    ):
        with _raises(TypeError, message):
            call()


def test_what_is_no_layout_no_optimiser_and_no_pair_is_named():
    nodes, sgd = nodes_of("8 devices"), optax.sgd(0.1)
    for call in (
        lambda x: jgc.make_step(_loss, topk(), sgd, x),
        lambda x: as_optax(topk(), x),
        lambda x: jgc.bytes_per_step(topk(), PARAMS, x),
        lambda x: jgc.local_steps(sgd, sgd, topk(), every=2, nodes=x),
    ):
        with _raises(TypeError, "expected the layout of the nodes, got 8: make it by jgc.make_nodes(K), or"):
            call(8)
        with pytest.raises(TypeError, match=r"got a Mesh: make it by jgc.from_mesh\(mesh, slow=...\)"):
            call(nodes.mesh)
    with _raises(TypeError, "optimizer must be an optax optimiser, e.g. optax.sgd(0.7), got <function adam"):
        jgc.make_step(_loss, topk(), optax.adam, nodes)
    for rules in ({"w": dense()}, ("w", dense()), [dense()]):
        with _raises(TypeError, "rules must be pairs, e.g. [('^head/', jgc.compress.dense())], got a "):
            per_layer(rules, default=topk())


@pytest.mark.parametrize("layout", some_by_default([EMULATED, "8 devices"], ["8 devices"]))
def test_leaf_that_is_not_an_array_is_named(layout):
    nodes = nodes_of(layout)
    module = {"layer": {"weight": jnp.ones((2, 2)), "activation": jax.nn.relu}}
    message = "the leaf 'layer/activation' is not an array but the "
    cure = "give only the arrays. For an Equinox module: params, static = eqx.partition(model, eqx.is_inexact_array)"
    init, _ = jgc.make_step(_loss, topk(), optax.sgd(0.1), nodes)
    for call in (
        lambda: init(jax.random.key(0), module),
        lambda: topk().init(jax.random.key(0), module, nodes),
        lambda: as_optax(topk(), nodes).init(module),
        lambda: init_optax(as_optax(topk(), nodes), module, nodes),
        lambda: jgc.place(module, jgc.SHARED, nodes),
        lambda: jgc.node_grads(_loss, nodes)(module, {"x": jnp.ones((8, 2))}),
        lambda: jgc.bytes_per_step(topk(), module, nodes),
    ):
        with pytest.raises(TypeError, match=re.escape(message) + ".*" + re.escape(cure)):
            call()


def test_integer_parameter_of_make_step_is_named():
    init, _ = jgc.make_step(_loss, topk(), optax.sgd(0.1), nodes_of(EMULATED))
    with _raises(
        TypeError, "the parameter 'steps' is int32, and optimisers take floats: keep it out of the parameters"
    ):
        init(jax.random.key(0), {**PARAMS, "steps": jnp.int32(0)})


def test_optimiser_that_compresses_in_make_step_is_refused():
    nodes = nodes_of(EMULATED)
    init, _ = jgc.make_step(_loss, topk(), optax.chain(as_optax(topk(), nodes), optax.sgd(0.1)), nodes)
    with _raises(
        ValueError, "the optimiser holds as_optax, but make_step compresses: leave it out"
    ):
        init(jax.random.key(0), PARAMS)


# --- losses and parameters on a mesh ------------------------------------------------------------------------------


def _hosts_of_chips():
    mesh = jax.make_mesh((2, 4), ("host", "chip"))
    nodes = jgc.from_mesh(mesh, slow="host", fast="chip")
    divided = {"w": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("chip"))), "b": jnp.zeros(3)}
    return nodes, divided, {"x": np.ones((2, 4, 8), np.float32)}


@pytest.mark.parametrize("axis", ["host", "chip"])
def test_loss_that_was_averaged_over_devices_is_named(axis):
    nodes, params, batch = _hosts_of_chips()
    whole = jax.tree.map(np.asarray, params)
    with _raises(ValueError, f"the loss is the same on all devices along the mesh axis {axis!r}: "):
        jgc.node_grads(lambda p, b: jax.lax.pmean(_loss(p, b), axis), nodes)(whole, batch)
    assert jgc.node_grads(_loss, nodes)(whole, batch)[0].shape == (2,)  # NumPy's arrays, Explicit axes


def test_aux_that_differs_inside_a_node_is_named():
    nodes, params, batch = _hosts_of_chips()
    whole = jax.tree.map(np.asarray, params)
    with _raises(ValueError, "the output's leaf '0/1/count' differs between the devices of a node, which share its "):
        jgc.node_grads(lambda p, b: (_loss(p, b), {"count": jnp.sum(b["x"] > 0)}), nodes, has_aux=True)(whole, batch)


def test_parameters_divided_on_another_mesh_are_named():
    _, params, _ = _hosts_of_chips()
    init, _ = jgc.make_step(_loss, topk(), optax.sgd(0.1), jgc.make_nodes(2, devices_per_node=4))
    with _raises(ValueError, "'w' is sharded over the mesh axis 'chip', which is not one of the fast axes ('jgc_f"):
        init(jax.random.key(0), params)


@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_whole_arrays_restored_in_place_of_divided_ones_are_named(part):
    nodes, params, batch = _hosts_of_chips()
    init, step = jgc.make_step(_loss, topk(), optax.adam(0.1), nodes)
    state = init(jax.random.key(0), params)
    restored = state._replace(**{part: jax.tree.map(np.asarray, getattr(state, part))})
    name = {"params": "0/b", "opt_state": "1/0/mu/b"}[part]
    with _raises(ValueError, f"this state is sharded within a node, and the leaf {name!r} is a whole array: "):
        step(restored, batch)
    step(state, batch)


def test_whole_arrays_restored_in_local_steps_are_named():
    nodes, params, batch = _hosts_of_chips()
    local = jgc.local_steps(optax.adam(0.1), optax.sgd(0.7, momentum=0.9), topk(), 2, nodes)
    (init, used), (_, unused) = local.make_step(_loss), local.make_step(_loss)
    state, metrics = used(init(jax.random.key(0), params), batch)
    arrays = jgc.as_arrays(state)
    of_one_device = jax.tree.map(lambda x: jax.device_put(np.array(x), jax.devices()[0]), arrays)
    for saved in (jax.tree.map(np.array, arrays), of_one_device):
        restored = jgc.from_arrays(saved)
        for call in (lambda x: used(x, batch), lambda x: unused(x, batch), lambda x: unused.exchange(x, metrics)):
            with _raises(ValueError, "this state is sharded within a node, and the leaf 'own/b' is a whole array: "):
                call(restored)
    used(state, batch)


# --- momentum twice -----------------------------------------------------------------------------------------------

OWNING = topk(momentum_correction=True)
WITH_MOMENTUM = {
    "sgd": (optax.sgd(0.1, momentum=0.9), "0/trace"),
    "adamw": (optax.adamw(0.1), "0/mu"),
    "lion": (optax.lion(0.1), "0/mu"),
    "ema": (optax.chain(optax.ema(0.9), optax.sgd(0.1)), "0/ema"),
    "adan": (optax.adan(0.1), "0/m"),
    "prodigy": (optax.contrib.prodigy(0.1), "exp_avg"),
    "ademamix": (optax.contrib.ademamix(0.1), "0/m1"),
}


@pytest.mark.parametrize("name", WITH_MOMENTUM)
@pytest.mark.parametrize("compressor", [OWNING, dgc()], ids=["topk", "dgc"])
def test_momentum_of_method_and_optimiser_is_a_warning(compressor, name):
    nodes, (optimizer, where) = nodes_of(EMULATED), WITH_MOMENTUM[name]
    init, _ = jgc.make_step(_loss, compressor, optimizer, nodes)
    message = re.escape(
        f"the method's memory holds the momentum, and the optimiser has one, too (its state '{where}'"
    )
    with pytest.warns(jgc.MomentumWarning, match=message):
        init(jax.random.key(0), PARAMS)
    tx = optax.chain(as_optax(compressor, nodes, phase=compressor.schedule[-1].value), optimizer)
    with pytest.warns(jgc.MomentumWarning, match="optax.sgd.*momentum_correction=False"):
        init_optax(tx, PARAMS, nodes)
    with pytest.warns(jgc.MomentumWarning):
        jgc.placements_of(tx.init(PARAMS))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Variational:
    mu: np.ndarray
    log: np.ndarray


def test_momentum_warning_can_be_turned_off_and_is_silent_where_all_is_well():
    nodes = nodes_of(EMULATED)
    fine = [
        (OWNING, optax.sgd(0.1)),
        (OWNING, optax.rmsprop(0.1)),
        (OWNING, optax.rmsprop(0.1, centered=True)),
        (topk(), optax.adamw(0.1)),
        (dense(), optax.lion(0.1)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for compressor, optimizer in fine:
            jgc.make_step(_loss, compressor, optimizer, nodes)[0](jax.random.key(0), PARAMS)
            init_optax(optax.chain(as_optax(compressor, nodes), optimizer), PARAMS, nodes)
        named = Variational(np.ones(3, np.float32), np.ones(3, np.float32))  # an attribute of the model's called mu
        for optimizer in (optax.rmsprop(0.1), optax.chain(optax.clip(1.0), optax.adagrad(0.1))):
            jgc.make_step(_loss, OWNING, optimizer, nodes)[0](jax.random.key(0), named)
        warnings.filterwarnings("ignore", category=jgc.MomentumWarning)
        jgc.make_step(_loss, OWNING, optax.adamw(0.1), nodes)[0](jax.random.key(0), PARAMS)


# --- optax wrappers around as_optax -------------------------------------------------------------------------------


def _on_axis(tx, state, nodes):
    where = jgc.placements_of(state)
    return jax.jit(jgc.on_nodes(tx.update, nodes, ins=("local", where, "shared"), outs=("shared", where)))


def _own(step, nodes):
    """Gradients that differ between nodes, multiples of 1/64."""
    random = np.random.default_rng(step)
    whole = jax.tree.map(lambda x: (random.integers(-64, 65, (8, *x.shape)) / 64).astype(np.float32), PARAMS)
    return jgc.place(whole, jgc.LOCAL, nodes)


@every_layout
@pytest.mark.parametrize("compressor", some_by_default(TWO, TWO[1:]), ids=["dense", "topk"])
def test_multi_steps_aggregates_the_mean_of_each_nodes_mini_steps(layout, compressor):
    nodes = nodes_of(layout)
    tx = optax.MultiSteps(optax.chain(as_optax(compressor, nodes), optax.trace(0.5)), 2)
    state = init_optax(tx, PARAMS, nodes)
    where = jgc.placements_of(state)
    assert set(jax.tree.leaves(where.acc_grads)) == {jgc.LOCAL} and where.mini_step == jgc.SHARED
    alone = optax.chain(as_optax(compressor, nodes), optax.trace(0.5))
    alone_state = init_optax(alone, PARAMS, nodes)
    update, update_alone = _on_axis(tx, state, nodes), _on_axis(alone, alone_state, nodes)
    with compilations("checked") as compiled:
        for i in range(4):
            updates, state = update(_own(i, nodes), state, PARAMS)
            if i % 2 == 0:
                assert not any(np.any(x) for x in jax.tree.leaves(updates))
                continue
            both = jax.tree.map(lambda a, b: (a + b) / 2, _own(i - 1, nodes), _own(i, nodes))
            expected, alone_state = update_alone(both, alone_state, PARAMS)
            assert same_bits(updates, expected)
    assert len(compiled) == 2  # once each
    assert same_bits(state.inner_opt_state[0].compressor, alone_state[0].compressor)


def test_multi_steps_without_init_optax_names_the_cure():
    nodes = nodes_of("8 devices")
    tx = optax.MultiSteps(as_optax(topk(), nodes), 2)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"the leaf 'acc_grads/b' of argument 1 has shape \(3,\).*jgc.init_optax"):
        _on_axis(tx, state, nodes)(_own(0, nodes), state, PARAMS)


def test_multi_steps_that_skips_by_itself_is_refused():
    nodes = nodes_of(EMULATED)
    tx = optax.MultiSteps(as_optax(topk(), nodes), 2, should_skip_update_fn=optax.skip_not_finite)
    with _raises(
        ValueError, "optax.MultiSteps with should_skip_update_fn around as_optax: each node would decide by its"
    ):
        init_optax(tx, PARAMS, nodes)


@every_layout
def test_apply_if_finite_is_refused_around_as_optax_and_works_behind_it(layout):
    nodes = nodes_of(layout)
    around = optax.apply_if_finite(optax.chain(as_optax(topk(), nodes), optax.sgd(0.1)), 3)
    for call in (lambda: init_optax(around, PARAMS, nodes), lambda: jgc.placements_of(around.init(PARAMS))):
        with pytest.raises(ValueError, match=r"optax.apply_if_finite around as_optax: .*optax.chain\(as_optax"):
            call()
    behind = optax.chain(as_optax(dense(), nodes), optax.apply_if_finite(optax.sgd(1.0), 3))
    state = init_optax(behind, PARAMS, nodes)
    updates, _ = _on_axis(behind, state, nodes)(_own(0, nodes), state, PARAMS)
    np.testing.assert_allclose(updates["w"], -np.mean(_own(0, nodes)["w"], 0), rtol=1e-6)


@every_layout
def test_masked_names_the_leaf_that_it_leaves_out_and_works_in_pairs(layout):
    nodes, mask = nodes_of(layout), {"w": True, "b": False}
    tx = optax.chain(optax.masked(as_optax(topk(), nodes), mask), optax.sgd(0.1))
    state = init_optax(tx, PARAMS, nodes)
    with _raises(ValueError, "the output's leaf '0/b' is declared SHARED, but differs between nodes"):
        _on_axis(tx, state, nodes)(_own(0, nodes), state, PARAMS)
    others = jax.tree.map(lambda x: not x, mask)
    both = optax.chain(
        optax.masked(as_optax(topk(alpha=1.0), nodes), mask), optax.masked(as_optax(dense(), nodes), others)
    )
    parts = {"large": as_optax(topk(alpha=1.0), nodes), "small": as_optax(dense(), nodes)}
    for tx in (both, optax.multi_transform(parts, {"w": "large", "b": "small"})):
        state = init_optax(tx, PARAMS, nodes)
        updates, _ = _on_axis(tx, state, nodes)(_own(0, nodes), state, PARAMS)
        for name, x in updates.items():
            np.testing.assert_allclose(x, np.mean(_own(0, nodes)[name], 0), rtol=1e-6, atol=1e-7)


def test_frozen_leaves_of_a_partition_are_named_and_a_dense_mean_of_them_is_not_sent():
    nodes, labels = nodes_of("8 devices"), {"w": "trained", "b": "frozen"}
    trained = as_optax(topk(), nodes)
    tx = optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, labels)
    state = init_optax(tx, PARAMS, nodes)
    with _raises(ValueError, "frozen leaves do not belong to the parameters: pass them to node_grads as frozen"):
        _on_axis(tx, state, nodes)(_own(0, nodes), state, PARAMS)
    zero = optax.chain(as_optax(dense(), nodes), optax.set_to_zero())
    tx = optax.partition({"trained": trained, "frozen": zero}, labels)
    state = init_optax(tx, PARAMS, nodes)
    program = _on_axis(tx, state, nodes).lower(_own(0, nodes), state, PARAMS).compile()
    assert all("f32" not in x.dtype for x in collectives(program))


@every_layout
def test_momentum_in_front_of_as_optax_is_named(layout):
    nodes = nodes_of(layout)
    tx = optax.chain(optax.trace(0.9), as_optax(topk(), nodes))
    state = init_optax(tx, PARAMS, nodes)
    with _raises(ValueError, "the output's leaf '1/0/trace/b' is declared SHARED, but differs between nodes"):
        _on_axis(tx, state, nodes)(_own(0, nodes), state, PARAMS)


# --- phases that a method finds -----------------------------------------------------------------------------------


def test_as_optax_takes_phases_that_a_method_finds():
    nodes = nodes_of("4 devices")
    compressor = jgc.compress.gradiveq(warmup_steps=1, sampling_steps=3, compressed_steps=2, loss=0.3)
    params = {"conv": jnp.zeros((3, 3, 2, 4)), "b": jnp.zeros(4)}
    random = np.random.default_rng(0)
    phase, names, sizes = compressor.schedule[0], [], []
    state = init_optax(as_optax(compressor, nodes, phase=phase), params, nodes)
    placement = jgc.State(jgc.SHARED, jgc.LOCAL)
    for i in range(7):
        before, phase = phase, jgc.phase_after(compressor, phase, i, state.compressor, nodes)
        if phase.value != before.value:
            inner = compressor.transition(before.value, phase.value, state.compressor, nodes)
            state = state._replace(compressor=jgc.place(inner, placement, nodes))
        tx = as_optax(compressor, nodes, phase=phase)
        grads = jax.tree.map(lambda x: random.normal(size=(8, *x.shape)).astype(np.float32), params)
        updates, state = _on_axis(tx, state, nodes)(jgc.place(grads, jgc.LOCAL, nodes), state, params)
        names.append(phase.name)
        sizes.append(phase.value)
        if phase.name == "dense":
            np.testing.assert_allclose(updates["conv"], grads["conv"].mean(0), rtol=1e-5, atol=1e-6)
    assert names == ["dense"] + ["sampling"] * 3 + ["compressed"] * 2 + ["sampling"]
    assert sizes[4] not in [p.value for p in compressor.schedule]  # found during the run
    with _raises(ValueError, "the method finds its phases during the run: give phase=, not switched=True"):
        as_optax(compressor, nodes, switched=True)


# --- something else in place of an argument -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"min_values": float("nan")}, "min_values must be a whole number, got nan"),
        ({"min_values": 2.5}, "min_values must be a whole number, got 2.5"),
        ({"alpha": "0.1"}, "alpha must be a number, got '0.1'"),
        ({"alpha": True}, "alpha must be a number, got True"),
        ({"momentum_correction": "False"}, "momentum_correction must be True or False, got 'False'"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"selection": "chunks", "alpha": 0.00024}, "must be at least 1/4096, got 0.00024"),
    ],
)
def test_a_setting_of_another_type_is_named(settings, message):
    with _raises(ValueError, message):
        topk(**settings)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("topk", {"momentum": 0.5}, "momentum=0.5 does nothing without momentum_correction=True"),
        ("dense", {"momentum": 0.5}, "momentum=0.5 does nothing without momentum_correction=True"),
        ("topk", {"momentum_correction": True, "momentum_at_once": True, "factor_masking": True},
         "factor_masking=True does nothing with momentum_at_once=True"),
        ("gradiveq", {"warmup_steps": 0, "sampling_steps": 1, "samples": 4}, "the first bases need two samples"),
        ("signsgd", {"combine": "feedback", "magnitude": 1.0}, "magnitude=1.0 does nothing with combine='feedback'"),
        ("demo", {"sign": False, "magnitude": 1.0}, "magnitude=1.0 does nothing with sign=False"),
        ("lgc_ps", {"code_dtype": "none", "overwrite": False}, "overwrite=False does nothing with code_dtype='none'"),
        ("lgc_ps", {"code_dtype": "none", "autoencoder_loss": "sum"}, "autoencoder_loss='sum' does nothing with code"),
        ("lgc_ps", {"autoencoder_steps": 0, "lambda_similarity": 2.0}, "lambda_similarity=2.0 does nothing with"),
        ("lgc_ring", {"autoencoder_steps": 0, "autoencoder_loss": "sum"}, "autoencoder_loss='sum' does nothing with "),
        ("lgc_ps", {"innovation": 0.0, "innovation_by": "layer"}, "innovation_by='layer' does nothing with"),
        ("lgc_ps", {"code_dtype": "none", "leader": "rotating"}, "leader='rotating' does nothing with code_dtype="),
        ("silent", {"factor_masking": True}, "factor_masking=True does nothing where no single values are sent"),
        ("qsgd", {"bits": 2, "exchange": "ring", "error_feedback": True}, "needs bits of at least 3, got 2"),
        ("terngrad", {"scaler_sharing": False, "exchange": "ring", "error_feedback": True}, "must be False with"),
        ("lgc_ring", {"fold_signs": False}, 'fold_signs and send_means must be True with feedback "exact"'),
        ("gradiveq", {"rank": 4, "loss": 0.5}, "loss=0.5 does nothing with rank=4"),
        ("dgc", {"alpha": 0.3, "warmup_steps": 9}, "strategy='exponential' goes from 25% down to alpha, and alpha"),
        ("lgc_ps", {"autoencoder_learning_rate": float("inf")}, "autoencoder_learning_rate must be finite and pos"),
        ("lgc_ps", {"lambda_similarity": float("inf")}, "lambda_similarity must be finite, 0 or positive, got inf"),
        ("klt", {"track_age": True}, "track_age must be False, got True"),
        ("egc", {"selection": "chunks", "ratio": 8192}, "must be at least 1/4096, got 0.000122"),
        ("topk", {"residual_dtype": "float16"}, "residual_dtype must be one of float32, bfloat16, got 'float16'"),
    ],
)  # fmt: skip
def test_a_setting_that_does_nothing_is_named(name, settings, message):
    with _raises(ValueError, message):
        jgc.compress.METHODS[name].factory(**settings)


def test_defaults_that_do_nothing_pass():
    assert jgc.compress.dgc(momentum_at_once=True).owns_momentum  # its default masking is not the user's
    assert not jgc.compress.dgc(momentum_correction=False).owns_momentum


def test_vectors_of_more_values_than_positions_have_bits_for():
    shapes = {f"w{i}": jax.ShapeDtypeStruct((2**15, 2**14), jnp.float32) for i in range(4)}
    for name in ("qsgd", "topk", "random_k", "onebit"):
        with _raises(ValueError, "2,147,483,648 values, and a vector of all holds up to 2,147,483,647"):
            jgc.bytes_per_step(jgc.compress.METHODS[name].factory(), shapes, jgc.make_nodes(2))
    halves = per_layer([("w[01]", jgc.compress.qsgd())], default=jgc.compress.qsgd())
    assert jgc.bytes_per_step(halves, shapes, jgc.make_nodes(2))
    assert jgc.bytes_per_step(dense(), shapes, jgc.make_nodes(2))["dense"].node == 4 * 2**31  # has no such vector


def test_ring_of_int16_codes_has_no_room_for_many_nodes():
    params, nodes = {"w": jnp.zeros((40, 30))}, jgc.make_nodes(64, jax.devices()[:1])
    ring = jgc.compress.lgc_ring(alpha=0.2, code_dtype="int16")
    with _raises(ValueError, "code_dtype='int16' leaves each of 64 nodes codes up to 1.996 times a layer's scale"):
        jgc.bytes_per_step(ring, params, nodes)
    with _raises(ValueError, "code_dtype='int16' leaves each of 64 nodes"):  # not only after the warm-up
        ring.init(jax.random.key(0), params, nodes)


def test_numbers_of_numpy_are_numbers():
    assert len(topk(alpha=np.float32(0.5), warmup_steps=np.int64(2)).schedule) == 2


def test_a_setting_that_there_is_not_is_named():
    for make in (topk, lambda **own: jgc.compress.build(TopK(), **own)):
        with _raises(TypeError, "TopK has no setting 'alfa'; there are momentum_correction, "):
            make(alfa=0.1)
    with _raises(ValueError, "expected settings, got the class TopK: call it, TopK()"):
        jgc.compress.build(TopK)


def test_rules_may_come_from_a_zip():
    compressor = per_layer(zip(["^b"], [dense()], strict=True), default=topk(alpha=0.5))
    state = compressor.init(jax.random.key(0), PARAMS, nodes_of(EMULATED))
    assert len(state.shared) == 2
    with _raises(TypeError, "rules must be pairs"):
        per_layer(None, default=topk())
    with _raises(TypeError, "a rule must be a pattern or a function (path, leaf) -> bool, got None"):
        per_layer([(None, dense())], default=topk())


@pytest.mark.parametrize("make", [jgc.compress.powersgd, jgc.compress.ef21, jgc.compress.threshold_v, topk])
def test_a_phase_that_the_method_does_not_have_is_an_error(make):
    compressor, nodes, grads = make(warmup_steps=5), nodes_of(EMULATED), _grads()
    state = compressor.init(jax.random.key(0), PARAMS, nodes)
    for phase, error, message in (("dnse", ValueError, "phase must be one of 'dense', "),
                                  (compressor.schedule[0], TypeError, "give phase.value, 'dense'")):  # fmt: skip
        with _raises(error, message):
            jax.eval_shape(step_on_nodes(compressor.aggregate, phase, nodes), jax.random.key(0), grads, state)
        with _raises(error, message):
            compressor.wire(phase, PARAMS, nodes)


def test_a_residual_is_of_one_node():
    for compressor in (topk(alpha=0.5), jgc.compress.powersgd()):
        local = compressor.init(jax.random.key(0), PARAMS, nodes_of(EMULATED)).local
        with _raises(ValueError, "local has the node axis: give one node's"):
            jgc.residual(compressor, local, PARAMS)
        own = jgc.residual(compressor, jax.tree.map(lambda x: x[1], local), PARAMS)
        assert own["w"].shape == (6, 4)


def test_leaves_without_a_residual_are_left_out_of_it():
    params = {**PARAMS, "steps": jnp.int32(0)}
    local = topk(alpha=0.5).init(jax.random.key(0), params, nodes_of(EMULATED)).local
    assert set(jgc.residual(topk(alpha=0.5), jax.tree.map(lambda x: x[0], local), params)) == {"w", "b"}


@pytest.mark.parametrize(
    "made, taking, message",
    [
        (jgc.compress.powersgd(rank=1), jgc.compress.powersgd(rank=2), "its shared leaf "),
        (topk(residual_dtype="bfloat16"), topk(), "is bfloat16, and this one's is float32"),
    ],
)
def test_a_state_made_with_other_settings_is_an_error(made, taking, message):
    nodes = nodes_of(EMULATED)
    state = made.init(jax.random.key(0), PARAMS, nodes)
    step = step_on_nodes(taking.aggregate, taking.schedule[-1].value, nodes)
    with _raises(ValueError, message):
        jax.eval_shape(step, jax.random.key(0), _grads(), state)


def test_a_method_for_convolutions_says_that_there_are_none():
    with pytest.warns(UserWarning, match="gradiveq compresses kernels of convolutions"):
        jgc.compress.gradiveq().init(jax.random.key(0), PARAMS, nodes_of(EMULATED))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda n: jgc.make_step(None, topk(), optax.sgd(0.1), n), TypeError, "loss must be a function"),
        (lambda n: jgc.make_step(_loss, topk(), optax.sgd(0.1), n)[0](0, PARAMS), TypeError,
         "key must be one random key, e.g. jax.random.key(0), got 0"),
        (lambda n: jgc.node_grads(None, n), TypeError, "loss must be a function"),
        (lambda n: jgc.node_grads(_loss, 8), TypeError, "expected the layout of the nodes, got 8"),
        (lambda n: jgc.on_nodes(_loss, n, ins=(jgc.LOCAL), outs=jgc.LOCAL), TypeError, "ins must be a tuple"),
        (lambda n: jgc.place(PARAMS, jgc.SHARED, 8), TypeError, "expected the layout of the nodes, got 8"),
        (lambda n: topk().init(jax.random.key(0), PARAMS, 8), TypeError, "expected the layout of the nodes, got 8"),
        (lambda n: jgc.phase_at(topk(), 0), TypeError, "phase_at takes a schedule: give compressor.schedule"),
        (lambda n: jgc.make_nodes(2, devices=[]), ValueError, "devices is empty"),
        (lambda n: jgc.make_nodes(2, devices=jax.devices()[0]), TypeError, "devices must be a sequence"),
        (lambda n: jgc.from_mesh([], "node"), TypeError, "mesh must be a jax.sharding.Mesh, got []"),
        (lambda n: jgc.from_mesh(jax.make_mesh((1,), ("node",)), "node", per_device=0), ValueError,
         "per_device must be at least 1, got 0"),
        (lambda n: jgc.to_host({"a": jnp.zeros(2)}), TypeError, "to_host takes one array, got a dict"),
    ],
)  # fmt: skip
def test_something_else_in_place_of_an_argument_is_named(call, error, message):
    with _raises(error, message):
        call(nodes_of(EMULATED))


def test_a_loss_that_emulated_nodes_average_is_an_error():
    nodes = nodes_of(EMULATED)
    grads = jgc.node_grads(lambda params, batch: jgc.comm.pmean(_loss(params, batch), nodes, "loss"), nodes)
    with _raises(ValueError, "the function communicates"):
        grads(PARAMS, {"x": jnp.ones((8, 2, 6))})


def test_a_legacy_key_is_a_key():
    init, _ = jgc.make_step(_loss, topk(), optax.sgd(0.1), nodes_of(EMULATED))
    assert init(jax.random.PRNGKey(0), PARAMS).step == 0


def test_parts_may_be_local():
    nodes = jgc.from_mesh(jax.make_mesh((4, 2), ("node", "inside")), "node", fast="inside")
    assert jgc.place_parts(lambda of: np.arange(4)[of], nodes).tolist() == list(range(4))


def test_phases_of_one_name_are_told_apart():
    compressor = per_layer([("^w", topk(warmup_steps=1))], default=topk(warmup_steps=2))
    found = jgc.bytes_per_step(compressor, PARAMS, nodes_of(EMULATED))
    assert [phase.name for phase in compressor.schedule] == list(found)
    assert len(found) == 3
    assert {name: sent.node for name, sent in found.items()}["dense, from step 0"] == 4 * 27
