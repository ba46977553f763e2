"""A whole training step: node-local gradients, the compressor, the optimiser, in one compiled program for each phase.

    init, step = jgc.make_step(loss, jgc.compress.topk(alpha=0.01), optax.adamw(1e-3), nodes)
    state = init(jax.random.key(0), params)
    for batch in batches:
        state, metrics = step(state, batch)

Its parts are public: `jgc.node_grads`, `Compressor.aggregate` inside `jgc.on_nodes`, `jgc.phase_after`, `jgc.place`.
"""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.backend import backend_of
from jgc.buffers import check_params, copied, device_of, donatable, lies_elsewhere, put_arrays
from jgc.fits import check_fits, check_remembered, remember
from jgc.frozen import Frozen, frozen_for
from jgc.gradients import node_grads
from jgc.losses import in_one_form
from jgc.method.norms import norm_of_aggregate
from jgc.method.phases import phase_after, phase_at
from jgc.method.shards import info_of_node, shards_of
from jgc.method.signature import check_state
from jgc.misuse import (
    check_arrays,
    check_compressor,
    check_key,
    check_loop,
    check_loss,
    check_nodes,
    check_optimizer,
    check_restored,
    holds_state,
    warn_of_momentum,
)
from jgc.model_state import of_all_nodes
from jgc.node_axis import on_nodes
from jgc.optimizers import check_supported, updated
from jgc.placement import BATCH, LOCAL, SHARED, ByShards, check_node_axes, locally, placements_of
from jgc.skipped import make_skip_warning
from jgc.types import Array, Compressor, Info, Key, Nodes, Phase, PyTree, State

if TYPE_CHECKING:
    import optax


class LoopState(NamedTuple):
    """The state that a loop carries from step to step. `step` donates its arrays: use the returned state alone.

    Attributes:
      step: steps so far, skipped ones included, on the host.
      phase: the phase of the last step, on the host; before the first step, that of the first.
      params: the parameters, equal on all nodes.
      opt_state: the optimiser's state, equal on all nodes.
      compressor: the compressor's state; its local leaves have a leading axis [K].
      key: the random key of all steps; step s uses `fold_in(key, s)`.
      model_state: each node's own, such as batch statistics, leaves [K, ...]; () if `init` got none.
    """

    step: int
    phase: Phase
    params: PyTree
    opt_state: PyTree
    compressor: State
    key: Key
    model_state: PyTree = ()


class Metrics(NamedTuple):
    """What a step reports, on the devices: reading a value waits for the step.

    Attributes:
      loss: f32[], the mean over nodes, before the update. A loss that is NaN while all gradients are finite (behind
        `stop_gradient`, say) skips nothing.
      info: `Info` with means over nodes, f32[]; `finite` is a bool[]. If it is false, a gradient could not be used, and
        the step was skipped.
      aux: with `has_aux` the second output of the loss, leaves [K, ...], one entry a node; else None. Where the devices
        of a node hold whole parameters, the loss runs on each device's share of the examples, and an entry is the mean
        over them; where they divide the parameters, the loss runs on all of the node's examples. Return means, equal in
        both cases, not counts or values of examples.
      grad_norm: f32[], the norm of the aggregate, which is the optimiser's gradient. With `dense` it is the norm of the
        mean gradient; a method that sends a part of its values in a step gives the norm of these. 0 if the step was
        skipped.
    """

    loss: Array
    info: Info
    aux: PyTree = None
    grad_norm: Any = None


class Arrays(NamedTuple):
    """The part of `LoopState` that a program takes and returns."""

    params: PyTree
    opt_state: PyTree
    compressor: State
    model_state: PyTree


Init = Callable[..., LoopState]
Step = Callable[..., tuple[LoopState, Metrics]]


def make_step(
    loss: Callable[..., Any],
    compressor: Compressor,
    optimizer: "optax.GradientTransformation",
    nodes: Nodes,
    has_aux: bool = False,
    unroll: bool = True,
    ahead: bool = False,
) -> tuple[Init, Step]:
    """Make the two functions of a training loop: `init` and `step`.

    `init(key, params)` copies the parameters to the devices and makes the states of optimiser and compressor.
    `init(key, params, model_state)` does so for a model with a state that is no parameter (batch statistics): the loss
    is then `(params, batch, model_state) -> (scalar, new model_state)`, and every node keeps a state of its own, in
    which every typed random key is another one (`jax.random.fold_in` of the node's index).
    `step(state, batch)` makes one update, in the phase that the step belongs to. It compiles one program for each
    phase, calls the compressor's transition between two phases, and donates the state. If a gradient is not finite on
    any node, or has a norm of 1e15 and more, nothing changes on any node but `state.step`.
    `step(state, batch, frozen)` does so for a loss with parameters that are not trained: the base weights under LoRA, a
    target network, a teacher. The loss gets them as its last argument. They are equal on all nodes, divided among the
    devices of a node as their shardings say, and not donated; other values in the next step compile nothing.

    Args:
      loss: `(params, batch) -> scalar`, the mean loss over a node's own examples; with `has_aux` `-> (scalar, aux)`.
        With a model state `(params, batch, model_state) -> (scalar, model_state)`, with `has_aux`, too,
        `-> (scalar, (model_state, aux))`. With `frozen` in `step` one more argument at the end.
      compressor: any of `jgc.compress`.
      optimizer: any optax optimiser; it gets the mean over nodes, and must have no momentum if the compressor owns it.
        It also gets `value`, the mean loss over nodes, and `grad`, if it takes them (`optax.contrib.momo`).
      nodes: the layout.
      has_aux: as in `jax.value_and_grad`.
      unroll: see `jgc.on_nodes`; True is much faster for convolutions on CPU.
      ahead: whether a thread compiles the next phase of the schedule while the steps of a phase run, so that no step
        waits for it. On CPU that takes processor time from those steps.

    Returns:
      `init(key, params, model_state=()) -> LoopState` and `step(state, batch, frozen=None) -> (LoopState, Metrics)`.
      The leaves of `batch` have leading axes [K, b]: b examples for each of the K nodes. With several processes, `key`,
      `params`, `batch` and `frozen` are equal in all of them, or global arrays (`jgc.place_parts`).

    Raises:
      TypeError: something else in place of the loss, of a compressor, such as settings, of an optimiser or of the
        nodes; in `init`, of a random key, a leaf of the parameters that is not an array of floats, or one of the model
        state that is not an array, or an optimiser that wants the loss as a function (a line search, sophia), gradients
        of examples (dpsgd) or pairs of parameters (lookahead); in `step`, a loss that returns another model state than
        it got.
      ValueError: in `init`, an optimiser that holds `as_optax`, or a leaf that is divided over another axis than the
        fast ones; in `step`, a leaf of the batch whose first axis is not K, a loss that nodes have averaged, whole
        arrays restored for divided ones, or an array of the state, or of one that an earlier step took, that the batch
        or `frozen` has, too.

    Warns:
      jgc.MomentumWarning: in `init`, if both compressor and optimiser have a momentum.
      jgc.SkippedStepsWarning: in `step`, once, after 20 skipped steps in a row.
      jgc.SlowLoopWarning: in `step`, on CPU, if the gradient of a convolution lies in a loop.
      UserWarning: in `init`, of a leaf uint32[2] of the model state, which may be a random key that all nodes share.

    Example:
      >>> import jgc, optax
      >>> nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
      >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
      >>> init, step = jgc.make_step(loss, jgc.compress.dense(), optax.sgd(0.25), nodes)
      >>> state, metrics = step(init(jax.random.key(0), jnp.zeros(1)), jnp.array([[1.0], [3.0]]))
      >>> float(metrics.loss), state.params, state.step
      (5.0, Array([1.], dtype=float32), 1)
    """
    check_loss(loss)
    check_compressor(compressor)
    check_optimizer(optimizer)
    check_nodes(nodes)
    programs: dict[tuple[Hashable, ...], Any] = {}  # compiled at the first call, `(arrays, key, step, batch, frozen)`
    coming: dict[tuple[Hashable, ...], Future] = {}  # those that a thread compiles
    put_frozen = frozen_for(nodes)
    warn_of_skips = make_skip_warning()
    fitting: set[Any] = set()  # structures of states that fit
    first: dict[Any, PyTree] = {}  # see `remember`
    thread = ThreadPoolExecutor(1) if ahead and compressor.next_phase is None else None

    def program(phase: Hashable, arrays: Arrays, frozen: Frozen) -> Callable[..., tuple[Arrays, Metrics]]:
        return _program(loss, compressor, phase, optimizer, nodes, has_aux, unroll, arrays, frozen.placements)

    def compile_next(step: int, rest: tuple, args: tuple, frozen: Frozen) -> None:
        phase = next((phase for phase in compressor.schedule if phase.start > step), None)
        if thread is not None and phase is not None and (phase.value, *rest) not in programs:
            name = phase.value, *rest
            programs[name] = program(phase.value, args[0], frozen)
            shapes = jax.tree.map(_shape, args)
            coming[name] = thread.submit(lambda: programs[name].lower(*shapes).compile())

    def init(key: Key, params: PyTree, model_state: PyTree = ()) -> LoopState:
        check_key(key)
        check_params(params)
        if nodes.mesh is not None:
            shards_of(params, nodes)  # names a leaf that is divided over another axis
        put = partial(put_arrays, nodes=nodes, device=device_of(params))
        params = put(copied(params))
        opt_state = put(copied(optimizer.init(params)))
        if holds_state(opt_state):
            raise ValueError(
                "the optimiser holds as_optax, and make_step compresses by itself: give it without as_optax"
            )
        check_supported(opt_state)
        if compressor.owns_momentum:
            warn_of_momentum(opt_state)
        inner = put(copied(compressor.init(key, params, nodes)))
        own = put(of_all_nodes(model_state, nodes), placements=LOCAL)
        remember(first, params, own)
        return LoopState(0, phase_at(compressor.schedule, 0), params, opt_state, inner, put(key), own)

    def step(state: LoopState, batch: PyTree, frozen: PyTree = None) -> tuple[LoopState, Metrics]:
        check_loop(state, LoopState, batch, nodes)
        put = partial(put_arrays, nodes=nodes, device=device_of(state.params))
        structure = jax.tree.structure((state.params, state.opt_state, state.compressor, state.model_state))
        if structure not in fitting:
            check_remembered(first, state.params, state.model_state)
            check_state(compressor.init, state.params, state.compressor, nodes, "compressor")
            made = jax.eval_shape(optimizer.init, state.params)
            check_fits("opt_state", state.opt_state, made, "of another optimiser, or of other parameters")
            fitting.add(structure)
        phase, inner = phase_after(compressor, state.phase, state.step, state.compressor, nodes), state.compressor
        if phase.value != state.phase.value:
            inner = put(copied(compressor.transition(state.phase.value, phase.value, inner, nodes)))
        arrays, key = Arrays(state.params, state.opt_state, inner, state.model_state), state.key
        arrays = donatable(arrays, batch=batch, key=key, frozen=frozen)
        fixed = put_frozen(frozen, device_of(state.params))
        name = phase.value, jax.tree.structure(arrays), fixed.name
        if name not in programs or lies_elsewhere((*arrays, key), nodes):
            if isinstance(inner.shared, ByShards):
                check_restored((state.params, state.opt_state))
            arrays, key = put(arrays, placements=_placements(arrays)), put(key)  # moves only what was restored
        if name not in programs:
            programs[name] = program(phase.value, arrays, fixed)
        check_arrays(batch, or_numbers=True)
        check_node_axes(BATCH, batch, nodes, "the batch")
        # Devices of a CPU are threads of one processor: collectives of several steps at once can wait forever.
        if nodes.mesh is not None and nodes.mesh.size > 1 and backend_of(nodes) == "cpu":
            jax.block_until_ready(arrays)
        args = arrays, key, np.int32(state.step), put(batch, placements=BATCH), fixed.arrays
        compile_next(state.step, name[1:], args, fixed)
        if name in coming:
            coming.pop(name).exception()  # waits; the call raises an error of its own
        arrays, metrics = programs[name](*args)
        warn_of_skips(state.step, metrics.info.finite)
        params, opt_state, inner, own = arrays
        return LoopState(state.step + 1, phase, params, opt_state, inner, key, own), metrics

    return init, step


def _shape(x: Any) -> Any:
    """What a program is compiled for. Arrays that JAX may move have no sharding."""
    if not isinstance(x, Array):
        return x
    weak, sharding = getattr(x, "weak_type", False), x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak, sharding=sharding)


def _placements(arrays: Arrays) -> Arrays:
    """Where the arrays lie; a restored model state does not say that it is each node's own."""
    return placements_of(arrays)._replace(model_state=LOCAL)


def _program(
    loss: Callable[..., Any],
    compressor: Compressor,
    phase: Hashable,
    optimizer: "optax.GradientTransformation",
    nodes: Nodes,
    has_aux: bool,
    unroll: bool,
    arrays: Arrays,
    frozen: PyTree,
) -> Callable[..., tuple[Arrays, Metrics]]:
    """`(arrays, key, step, batch, frozen) -> (arrays, metrics)` for one phase, compiled at the first call.

    Args:
      frozen: placements of the parameters that are not trained; None if there are none.
    """
    import optax  # here: `import jgc` must not wait for it

    placements, has_state = _placements(arrays), bool(jax.tree.leaves(arrays.model_state))
    gradients = node_grads(
        in_one_form(loss, has_aux, has_state, frozen is not None), nodes, has_aux=True, unroll=unroll, local=True,
        placements=placements.params, frozen=frozen,
    )  # fmt: skip
    exchange = on_nodes(
        partial(_exchange, compressor, phase, nodes),
        nodes,
        ins=(SHARED, locally(placements.params), placements.compressor, LOCAL),
        outs=(placements.params, placements.compressor, SHARED),
    )

    def update(arrays, key, step, batch, fixed):
        args = arrays.params, batch, arrays.model_state, *([] if frozen is None else [fixed])
        (losses, (own, aux)), grads = gradients(*args)  # all with an axis [K]
        key = jax.random.fold_in(key, step)
        mean, inner, (value, info, norm) = exchange(key, grads, arrays.compressor, losses)
        updates, opt_state = updated(optimizer, mean, arrays.opt_state, arrays.params, value=value, grad=mean)
        new = optax.apply_updates(arrays.params, updates), opt_state, own
        old = arrays.params, arrays.opt_state, arrays.model_state
        # the compressor restores its own state; `where` also keeps weak types out, which would compile anew
        kept = jax.tree.map(lambda a, b: jnp.where(info.finite, a, b), new, old)
        params, opt_state, own = kept
        return Arrays(params, opt_state, inner, own), Metrics(value, info, aux, norm)

    # outputs lie exactly where inputs do: left to XLA, the second step would be another program
    shardings = jax.tree.map(lambda x: x.sharding, arrays)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def _exchange(
    compressor: Compressor, phase: Hashable, nodes: Nodes, key: Key, grads: PyTree, state: State, loss: Array
) -> tuple[PyTree, State, tuple[Array, Info, Array]]:
    """One node's aggregate and state; means over nodes of loss and `Info`, by one collective; the aggregate's norm."""
    mean, state, info = compressor.aggregate(phase, key, grads, state, nodes)
    info = info_of_node(info, nodes)
    own = (loss, info.residual_norm, info.elements_sent, info.overflow)  # all nodes agree on `finite`
    loss, norm, elements, overflow = comm.pmean(jnp.stack([x.astype(jnp.float32) for x in own]), nodes, "metrics")
    return mean, state, (loss, Info(norm, elements, overflow, info.finite), norm_of_aggregate(mean, nodes))
