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
import numpy as np

from jgc.checks.misuse import (
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
from jgc.checks.states import check_fits, check_remembered, remember
from jgc.loops.buffers import check_params, copied, device_of, donatable, lies_elsewhere, put_arrays, wait_on_cpu
from jgc.loops.frozen import Frozen, frozen_for
from jgc.loops.model_state import of_all_nodes
from jgc.loops.optimizers import check_supported
from jgc.loops.skipped import make_skip_warning
from jgc.loops.step_program import Arrays, Metrics, placements_of_step, step_program
from jgc.method.phases import phase_after, phase_at
from jgc.method.shards import shards_of
from jgc.method.signature import check_state
from jgc.nodes.placement import BATCH, LOCAL, ByShards, check_node_axes
from jgc.types import Array, Compressor, Key, Nodes, Phase, PyTree, State

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


Init = Callable[..., LoopState]
Step = Callable[..., tuple[LoopState, Metrics]]


def make_step(
    loss: Callable[..., Any],
    compressor: Compressor,
    optimizer: "optax.GradientTransformation",
    nodes: Nodes,
    has_aux: bool = False,
    unroll: bool | None = None,
    ahead: bool = False,
) -> tuple[Init, Step]:
    """Make the two functions of a training loop: `init` and `step`.

    `init(key, params)` copies the parameters to the devices and makes the states of optimiser and compressor.
    `init(key, params, model_state)` does so for a model with a state that is no parameter (batch statistics): the loss
    is then `(params, batch, model_state) -> (scalar, new model_state)`, and every node keeps its model state. Typed
    random keys in it differ between nodes (`jax.random.fold_in` of the node's index).
    `step(state, batch)` makes one update, in the phase that the step belongs to. It compiles one program for each
    phase, calls the compressor's transition between two phases, and donates the state. If a gradient is not finite on
    any node, or has a norm of 1e15 and more, nothing changes on any node but `state.step`.
    `step(state, batch, frozen)` does so for a loss with parameters that are not trained: the base weights under LoRA, a
    target network, a teacher. The loss gets them as its last argument. They are equal on all nodes, divided among the
    devices of a node as their shardings say, and not donated. New values in a later step do not recompile.

    Args:
      loss: `(params, batch) -> scalar`, the mean loss over a node's own examples; with `has_aux` `-> (scalar, aux)`.
        With a model state `(params, batch, model_state) -> (scalar, model_state)`, with `has_aux`, too,
        `-> (scalar, (model_state, aux))`. With `frozen` in `step` one more argument at the end.
      compressor: any of `jgc.compress`.
      optimizer: any optax optimiser; it gets the mean over nodes, and must have no momentum if the compressor owns it.
        It also gets `value`, the mean loss over nodes, and `grad`, if it takes them (`optax.contrib.momo`).
      nodes: the layout.
      has_aux: as in `jax.value_and_grad`.
      unroll: see `jgc.node_grads`.
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
        arrays restored for divided ones, an array that the batch or `frozen` shares with the state, or one that an
        earlier step donated.

    Warns:
      jgc.MomentumWarning: in `init`, if both compressor and optimiser have a momentum.
      jgc.SkippedStepsWarning: in `step`, once, after 20 skipped steps in a row.
      jgc.SlowLoopWarning: in `step`, on CPU, if the gradient of a convolution lies in a loop.
      UserWarning: in `init`, of a leaf uint32[2] of the model state, which may be a random key that all nodes share.

    Example:
      >>> import jax.numpy as jnp, jgc, optax
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
        return step_program(loss, compressor, phase, optimizer, nodes, has_aux, unroll, arrays, frozen.placements)

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
        compressor_state = put(copied(compressor.init(key, params, nodes)))
        model_state = put(of_all_nodes(model_state, nodes), placements=LOCAL)
        remember(first, params, model_state)
        phase = phase_at(compressor.schedule, 0)
        return LoopState(0, phase, params, opt_state, compressor_state, put(key), model_state)

    def step(state: LoopState, batch: PyTree, frozen: PyTree = None) -> tuple[LoopState, Metrics]:
        check_loop(state, LoopState, batch, nodes)
        device = device_of(state.params)
        put = partial(put_arrays, nodes=nodes, device=device)
        arrays, key = Arrays(state.params, state.opt_state, state.compressor, state.model_state), state.key
        structure = jax.tree.structure(arrays)  # the same in every phase
        if structure not in fitting:
            check_remembered(first, state.params, state.model_state)
            check_state(compressor.init, state.params, state.compressor, nodes, "compressor")
            made = jax.eval_shape(optimizer.init, state.params)
            check_fits("opt_state", state.opt_state, made, "of another optimiser, or of other parameters")
            fitting.add(structure)
        phase = phase_after(compressor, state.phase, state.step, state.compressor, nodes)
        if phase.value != state.phase.value:
            after = compressor.transition(state.phase.value, phase.value, state.compressor, nodes)
            arrays = arrays._replace(compressor=put(copied(after)))
        arrays = donatable(arrays, batch=batch, key=key, frozen=frozen)
        fixed = put_frozen(frozen, device)
        name = phase.value, structure, fixed.name
        if name not in programs or lies_elsewhere((*arrays, key), nodes):
            if isinstance(arrays.compressor.shared, ByShards):
                check_restored((state.params, state.opt_state))
            arrays, key = put(arrays, placements=placements_of_step(arrays)), put(key)  # moves only restored arrays
        if name not in programs:
            programs[name] = program(phase.value, arrays, fixed)
        check_arrays(batch, or_numbers=True)
        check_node_axes(BATCH, batch, nodes, "the batch")
        wait_on_cpu(arrays, nodes)
        args = arrays, key, np.int32(state.step), put(batch, placements=BATCH), fixed.arrays
        compile_next(state.step, name[1:], args, fixed)
        if name in coming:
            coming.pop(name).exception()  # waits; the call raises an error of its own
        arrays, metrics = programs[name](*args)
        warn_of_skips(state.step, metrics.info.finite)
        params, opt_state, compressor_state, model_state = arrays
        return LoopState(state.step + 1, phase, params, opt_state, compressor_state, key, model_state), metrics

    return init, step


def _shape(x: Any) -> Any:
    """What a program is compiled for. Arrays that JAX may move have no sharding."""
    if not isinstance(x, Array):
        return x
    weak, sharding = getattr(x, "weak_type", False), x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak, sharding=sharding)
