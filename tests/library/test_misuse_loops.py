"""What a newcomer gets wrong in a loop, an optax chain and a method of one's own: each has a message with its cure."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import nodes_of, some_by_default

import jgc
from jgc import comm
from jgc.compress import as_optax, dense, init_optax, topk
from jgc.method.from_step import Step, from_step
from jgc.method.memory import error_feedback
from jgc.method.messages import both_ways
from jgc.method.phases import single

PARAMS = {"w": np.zeros((6, 4), np.float32)}
BATCH = np.ones((8, 2, 6), np.float32)


def loss(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


def _raises(error, message):
    return pytest.raises(error, match=re.escape(message))


def _made(own_loss=loss, compressor=None, optimizer=None, layout="4 devices"):
    return jgc.make_step(own_loss, compressor or topk(alpha=0.5), optimizer or optax.adam(0.1), nodes_of(layout))


def _first(**changes):
    init, step = _made(**changes)
    return init(jax.random.key(0), PARAMS), step


# --- a loop -------------------------------------------------------------------------------------------------------


def test_states_of_something_else_are_named():
    state, step = _first()
    with _raises(TypeError, "step takes the LoopState that init or step returned, got a dict"):
        step({"w": np.zeros(99)}, BATCH)
    with _raises(TypeError, "loss must be a function (params, batch) -> scalar, got a Compressor"):
        jgc.make_step(dense(), loss, optax.sgd(0.1), nodes_of("4 devices"))
    local = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, nodes_of("4 devices"))
    init, local_step = local.make_step(loss)
    own = init(jax.random.key(0), PARAMS)
    with _raises(TypeError, "step takes the LoopState that init or step returned, got a LocalState"):
        step(own, BATCH)
    with _raises(TypeError, "step takes the LocalState that init or step returned, got a LoopState"):
        local_step(state, BATCH)
    with _raises(TypeError, "the state's phase must be a jgc.Phase, got None: restore it by jgc.from_arrays"):
        step(state._replace(phase=None), BATCH)
    with _raises(TypeError, "the state's phase must be a jgc.Phase, got None: restore it by jgc.from_arrays"):
        local_step(own._replace(phases=(None,)), BATCH)
    with _raises(ValueError, "these steps have 1 fragments, the state 2"):
        local_step(own._replace(phases=own.phases * 2), BATCH)
    text = "opt_state is of a different optimiser, or of other parameters: it has the leaf '0/count'"
    with _raises(ValueError, text):
        _first(optimizer=optax.sgd(0.1))[1](state, BATCH)


def test_a_state_that_was_used_up_is_named():
    state, step = _first()
    step(state, BATCH)
    with _raises(ValueError, "an earlier step took this state's arrays (it donates them): give the state that it ret"):
        step(state, BATCH)
    local = jgc.local_steps(optax.adam(0.1), optax.sgd(1.0), dense(), 3, nodes_of("4 devices"))
    init, step = local.make_step(loss)
    state = init(jax.random.key(0), PARAMS)
    step(state, BATCH)  # no exchange yet: the shared parameters are still there
    with _raises(ValueError, "an earlier step took this state's arrays"):
        step(state, BATCH)


@pytest.mark.parametrize("make", ["make_step", "local_steps"])
@pytest.mark.parametrize(
    "own_loss, has_aux, model_state, message",
    [
        (loss, True, (), "the loss must return (scalar, aux), with has_aux=True, got a "),
        (lambda p, x: (loss(p, x), 1, 2), True, (), "(scalar, aux), with has_aux=True, got a tuple of 3"),
        (lambda p, x: (loss(p, x), 1), False, (), "the loss returned a tuple of 2: for (scalar, aux)"),
        (lambda p, x, s: loss(p, x), False, {"n": 1.0}, "(scalar, new model state), got a "),
        (lambda p, x, s: (loss(p, x), s), True, {"n": 1.0}, "(scalar, (new model state, aux)), got a dict"),
        (lambda p, x, s: (loss(p, x), s), False, (), "called with (params, batch), and does not fit: missing"),
        (loss, False, {"n": 1.0}, "is called with (params, batch, model_state), because init got a model state"),
        (lambda p, x: (loss(p, x), {"name": "mean"}), True, (), "the leaf 'name' is not an array but the str 'mean'"),
        (lambda p, x: None, False, (), "the loss returned None instead of a scalar: is a `return` missing?"),
        (lambda p, x: (None, loss(p, x)), True, (), "the loss returned None instead of a scalar"),
    ],
    ids=["no aux", "three", "aux", "no state", "state without aux", "no model state", "model state", "text", "none",
         "none with aux"],
)
def test_a_loss_of_another_form_is_named(make, own_loss, has_aux, model_state, message):
    nodes, model_state = nodes_of("1 device"), jax.tree.map(np.float32, model_state)
    if make == "make_step":
        init, step = jgc.make_step(own_loss, dense(), optax.sgd(0.1), nodes, has_aux=has_aux)
    else:
        local = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, nodes)
        init, step = local.make_step(own_loss, has_aux=has_aux)
    with _raises(TypeError, message):
        step(init(jax.random.key(0), PARAMS, model_state), BATCH)


def test_step_inside_a_program_is_an_error():
    state, step = _first()
    outside = "step compiles itself, a program for each phase: call it outside of jit, scan and vmap"
    with _raises(TypeError, outside):
        jax.jit(lambda batch: step(state, batch)[0].params)(BATCH)
    with _raises(TypeError, outside):
        jax.lax.scan(lambda p, x: (step(state._replace(params=p), x)[0].params, 0.0), state.params, BATCH[None])


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"own_loss": lambda p, x: (loss(p, x), {"n": 1})}, TypeError,
         "the loss returned a tuple of 2: for (scalar, aux) give has_aux=True"),
        ({"own_loss": lambda p, x: jax.lax.pmean(loss(p, x), "batch")}, Exception, "leave it out"),
        ({"own_loss": lambda p, x: jax.lax.pmean(loss(p, x), "b"), "layout": "1 device"}, ValueError, "leave it out"),
    ],
    ids=["aux", "pmean", "pmean on one device"],
)  # fmt: skip
def test_what_a_step_cannot_do_is_named(changes, error, message):
    state, step = _first(**changes)
    with _raises(error, message):
        step(state, BATCH)


def test_a_batch_without_examples_is_named():
    nodes = nodes_of("4 devices")
    for init, step in (
        _made(),
        jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, nodes).make_step(loss),
    ):
        with _raises(ValueError, "the batch has no examples, an array of shape (8, 0, 6): give every node one"):
            step(init(jax.random.key(0), PARAMS), BATCH[:, :0])
    with _raises(ValueError, "argument 1 has no examples, an array of shape (8, 0, 6)"):
        jgc.node_grads(loss, nodes)(PARAMS, BATCH[:, :0])
    without = {"x": BATCH, "mask": BATCH[:, :0, 0]}  # one array of several may be empty
    values, _ = jgc.node_grads(lambda p, batch: loss(p, batch["x"]), nodes)(PARAMS, without)
    np.testing.assert_allclose(values, 1.0)


def test_a_state_of_other_nodes_is_named():
    state, _ = _first()
    _, step = jgc.make_step(loss, topk(alpha=0.5), optax.adam(0.1), jgc.make_nodes(4))
    with _raises(ValueError, "this state is of 8 nodes (field 'compressor'), and step is of 4: give step jgc."):
        step(state, BATCH[:4])
    own = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, nodes_of("4 devices")).make_step(loss)[0]
    fewer = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 2, jgc.make_nodes(4)).make_step(loss)[1]
    with _raises(ValueError, "this state is of 8 nodes (field 'own'), and step is of 4"):
        fewer(own(jax.random.key(0), PARAMS), BATCH[:4])


def test_parameters_put_elsewhere_during_a_run_are_moved():
    state, step = _first(compressor=dense())
    state, _ = step(state, BATCH)
    elsewhere = state._replace(params=jax.device_put(jax.device_get(state.params), jax.devices()[0]))
    after, _ = step(elsewhere, BATCH)
    assert after.params["w"].sharding.device_set == set(nodes_of("4 devices").mesh.devices.flat)


def test_the_mesh_in_force_is_that_of_the_nodes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for nodes, what in ((nodes_of("8 devices"), "lie on a different one"), (nodes_of("1 device"), "are emulated")):
            with _raises(ValueError, f"jax.set_mesh has put the mesh {{'data': 8}} in force, and the nodes {what}"):
                jgc.make_step(loss, dense(), optax.sgd(0.1), nodes)
        init, step = jgc.make_step(loss, dense(), optax.sgd(0.1), jgc.from_mesh(mesh, "data"))
        step(init(jax.random.key(0), PARAMS), BATCH)


def test_an_array_on_explicit_axes_in_the_losss_closure_is_named():
    mesh = jax.make_mesh((4, 2), ("host", "chip"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    base = jax.device_put(jnp.ones((6, 4)), jax.NamedSharding(mesh, jax.P()))
    nodes = jgc.from_mesh(mesh, slow="host", fast="chip")
    init, step = jgc.make_step(lambda p, x: jnp.mean(x @ (base + p["w"])), dense(), optax.sgd(0.1), nodes)
    with _raises(ValueError, "the loss's closure holds an array of a mesh, which JAX does not take on Explicit axes"):
        step(init(jax.random.key(0), PARAMS), BATCH[:4])


@pytest.mark.parametrize("named", [False, True], ids=["context", "mesh"])
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_shard_map_in_a_loss_is_named_where_it_does_not_work(divided, named):
    mesh = jax.make_mesh((2, 4), ("host", "chip"))
    nodes, rows = jgc.from_mesh(mesh, slow="host", fast="chip"), jax.P("chip", None)

    def with_shard_map(p, x):
        given = {"mesh": mesh} if named else {}
        return jnp.mean(jax.shard_map(jnp.tanh, in_specs=rows, out_specs=rows, axis_names={"chip"}, **given)(x @ p))

    params = jax.device_put(jnp.ones((6, 4)), jax.NamedSharding(mesh, jax.P(None, "chip" if divided else None)))
    init, step = jgc.make_step(with_shard_map, dense(), optax.sgd(0.1), nodes)
    state, x = init(jax.random.key(0), params), np.ones((2, 16, 6), np.float32)
    if divided and not named:
        np.testing.assert_allclose(step(state, x)[1].loss, np.tanh(6.0), rtol=1e-5)
        return
    message = re.escape("the loss calls a function of a mesh, such as jax.shard_map. Whole parameters: each device")
    if named and not divided:  # JAX 0.10 has the same error for an array of the mesh in the closure
        message += "|Or the loss calls jax.shard_map with an argument mesh"
    with pytest.raises(ValueError, match=message):
        step(state, x)


def test_parameters_that_are_no_arrays_of_floats_are_named():
    init, _ = _made()
    with _raises(TypeError, "the parameter 'w' is a shape, float32[6, 4], and init takes arrays"):
        init(jax.random.key(0), jax.eval_shape(lambda: PARAMS))
    with _raises(TypeError, "the leaf 'step' is not an array but the int 0: give jnp.asarray(0), or of a train"):
        init(jax.random.key(0), {"step": 0, "params": PARAMS})


def test_an_optimisers_state_may_hold_numbers():
    counts = optax.GradientTransformation(lambda p: {"n": 0}, lambda g, s, p=None: (g, {"n": s["n"] + 1}))
    state, step = _first(optimizer=optax.chain(counts, optax.sgd(0.1)))
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert state.opt_state[0]["n"] == 2


def test_a_method_that_there_is_not_has_a_near_one():
    with _raises(AttributeError, "jgc.compress has no method 'topkk'. Did you mean 'topk'? There are dense, "):
        jgc.compress.topkk()
    assert not hasattr(jgc.compress, "_private") and not hasattr(jgc.compress, "nothing")


def test_a_mesh_without_fast_axes_may_say_none():
    mesh = jax.make_mesh((2,), ("slow",), axis_types=(jax.sharding.AxisType.Auto,))
    assert jgc.from_mesh(mesh, "slow", fast=None) == jgc.from_mesh(mesh, "slow")


# --- an optax chain -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", some_by_default(["8 devices", "4 devices"], ["8 devices"]))
def test_gradients_taken_inside_the_node_axis_are_named(layout):
    """`jax.grad` with respect to parameters that nodes share gives the sum over nodes: on one device it would not."""
    nodes = nodes_of(layout)
    tx = optax.chain(as_optax(topk(alpha=0.5), nodes), optax.sgd(0.1))
    state = init_optax(tx, PARAMS, nodes)
    placements = jgc.placements_of(state)

    def run(differ):
        def inside(state, x):
            grads = jax.grad(loss)(comm.vary(PARAMS, nodes) if differ else PARAMS, x)
            return tx.update(grads, state, PARAMS)

        where = {"ins": (placements, jgc.BATCH), "outs": (jgc.SHARED, placements)}
        return jax.jit(jgc.on_nodes(inside, nodes, **where))(jgc.place(state, placements, nodes), BATCH)[0]

    with _raises(ValueError, "the gradients are equal on all nodes, so nothing is left to compress"):
        run(differ=False)
    by_hand = jgc.node_grads(loss, nodes)(PARAMS, BATCH)[1]["w"].mean(0)
    sent = np.asarray(run(differ=True)["w"])
    np.testing.assert_allclose(sent[sent != 0], (-0.1 * by_hand)[sent != 0], rtol=1e-5)


@pytest.mark.parametrize(
    "chained",
    [
        lambda a, b: optax.chain(a, b, optax.sgd(0.1)),
        lambda a, b: optax.chain(a, optax.chain(b, optax.sgd(0.1))),
        lambda a, b: optax.named_chain(("a", a), ("b", b), ("c", optax.sgd(0.1))),
    ],
    ids=["chain", "nested", "named"],
)
def test_two_compressors_in_one_chain_are_an_error(chained):
    nodes = nodes_of("1 device")
    tx = chained(as_optax(topk(), nodes), as_optax(topk(), nodes))
    with _raises(ValueError, "two as_optax in one chain: the second would compress what is already the mean"):
        init_optax(tx, PARAMS, nodes)


@pytest.mark.parametrize("layout", ["1 device", "4 devices"])
def test_a_compressor_of_other_nodes_is_an_error(layout):
    """A mean without a state of its own would be divided by the wrong number."""
    nodes, devices = nodes_of(layout), 1 if layout == "1 device" else 4
    others = jgc.make_nodes(16, jax.devices()[:devices])
    tx = as_optax(dense(), others)
    state = init_optax(tx, PARAMS, others)
    update = jgc.on_nodes(tx.update, nodes, ins=("local", jgc.placements_of(state)), outs=("shared", "shared"))
    with _raises(ValueError, "made for 16 nodes, "):
        update(jgc.place({"w": np.ones((8, 6, 4), np.float32)}, "local", nodes), state)
    init, step = jgc.make_step(loss, dense(), optax.sgd(0.1), jgc.Nodes(8, 4))
    with _raises(ValueError, "made for 8 nodes, 4 on a device, and called inside the node axis of 4, 4 on a device"):
        step(init(jax.random.key(0), PARAMS), BATCH[:4])


# --- a method of one's own ----------------------------------------------------------------------------------------


def _method(step, **changes):
    messages = changes.pop("messages", lambda phase, layers, nodes: both_ways({"values": 96.0}))
    return from_step(step, **{"memory": error_feedback(), "schedule": single("mine"), "messages": messages} | changes)


def _mean(phase, key, v, state, layers, nodes):
    return comm.pmean(v, nodes, "values")


@pytest.mark.parametrize(
    "step, error, message",
    [
        (lambda p, k, v, s, la, n: (_mean(p, k, v, s, la, n), v), TypeError,
         "the step of a method must return a jgc.method.from_step.Step, got a tuple"),
        (lambda p, k, v, s, la, n: Step(_mean(p, k, v, s, la, n)[:5], v), ValueError,
         "the step's mean must be f32[24], as v is, got the shape [5]"),
        (lambda p, k, v, s, la, n: Step(_mean(p, k, v, s, la, n), v[:3]), ValueError,
         "the step's sent must be f32[24], as v is, got the shape [3]"),
        (lambda p, k, v, s, la, n: Step(_mean(p, k, v, s, la, n), v, shared={"turn": 1}), ValueError,
         "the step's shared must be like that of init"),
    ],
    ids=["tuple", "mean", "sent", "shared"],
)  # fmt: skip
def test_what_a_step_returns_is_checked(step, error, message):
    state, run = _first(compressor=_method(step), optimizer=optax.sgd(0.1))
    with _raises(error, message):
        run(state, BATCH)


def test_what_a_method_is_made_of_is_checked():
    with _raises(TypeError, "memory must be a jgc.method.memory.Memory, e.g. error_feedback(), got <function"):
        _method(_mean, memory=error_feedback)
    with _raises(TypeError, "schedule must be a tuple of jgc.Phase, e.g. phases.single('mine'), got 'mine'"):
        _method(_mean, schedule="mine")
