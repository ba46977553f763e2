"""A whole training step: node-local gradients, the compressor, the optimiser, in one compiled
program for each phase.

    init, step = jgc.make_step(loss, jgc.compress.topk(alpha=0.01), optax.adamw(1e-3), nodes)
    state = init(jax.random.key(0), params)
    for batch in batches:
        state, metrics = step(state, batch)

Its parts are public: `jgc.node_grads`, `Compressor.aggregate` inside `jgc.on_nodes`,
  `jgc.phase_after`, `jgc.place`.
"""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jgc.checks.misuse import (
    check_compressor,
    check_loop,
    check_loss,
    check_nodes,
    check_optimizer,
    check_restored,
    holds_state,
    warn_of_momentum,
)
from jgc.checks.states import check_fits
from jgc.loops.buffers import copied, device_of, donatable, lies_elsewhere, wait_on_cpu
from jgc.loops.loop import Loop, shape_of
from jgc.loops.optimizers import check_supported
from jgc.loops.step_program import (
    Arrays,
    Metrics,
    Settings,
    SplitProgram,
    make_diagnosis,
    make_gradients,
    placements_of_step,
    prepare_program,
    step_program,
)
from jgc.method.phases import phase_after, phase_at
from jgc.method.shards import shards_of
from jgc.method.signature import check_state
from jgc.nodes.placement import ByShards
from jgc.types import Array, Compressor, Key, Nodes, Phase, PyTree, State

if TYPE_CHECKING:
    import optax


class LoopState(NamedTuple):
    """The state that a loop carries from step to step. `step` donates its arrays: use the returned
    state alone.

    Attributes:
      step: steps so far, skipped ones included, on the host.
      phase: the phase of the last step, on the host; before the first step, that of the first.
      params: the parameters, equal on all nodes.
      opt_state: the optimiser's state, equal on all nodes.
      compressor: the compressor's state; its local leaves have a leading axis [K].
      key: the random key of all steps; step s uses `fold_in(key, s)`.
      model_state: each node's own, such as batch statistics, leaves [K, ...]; () if `init` got
        none.
    """

    step: int
    phase: Phase
    params: PyTree
    opt_state: PyTree
    compressor: State
    key: Key
    model_state: PyTree = ()


Init = Callable[..., LoopState]


def make_step(
    loss: Callable[..., Any],
    compressor: Compressor,
    optimizer: "optax.GradientTransformation",
    nodes: Nodes,
    has_aux: bool = False,
    unroll: bool | None = None,
    ahead: bool = False,
    prepare: Callable[[PyTree, PyTree], PyTree] | None = None,
    mean_aux: bool = False,
    split: bool = False,
) -> "tuple[Init, Step]":
    """Make the two functions of a training loop: `init` and `step`.

    `init(key, params)` copies the parameters to the devices and makes the states of optimiser and
    compressor. `init(key, params, model_state)` does so for a model with a state that is no
    parameter (batch statistics): the loss is then `(params, batch, model_state) -> (scalar, new
    model_state)`, and every node keeps its model state. Typed random keys in it differ between
    nodes (`jax.random.fold_in` of the node's index). `step(state, batch)` makes one update, in the
    phase that the step belongs to. It compiles one program for each phase, calls the compressor's
    transition between two phases, and donates the state. If a gradient is not finite on any node,
    or has a norm of 1e15 and more, nothing changes on any node but `state.step`. `step(state,
    batch, frozen)` does so for a loss with parameters that are not trained: the base weights under
    LoRA, a target network, a teacher. The loss gets them as its last argument. They are equal on
    all nodes, divided among the devices of a node as their shardings say, and not donated. New
    values in a later step do not recompile.

    Args:
      loss: `(params, batch) -> scalar`, the mean loss over a node's own examples; with `has_aux`
        `-> (scalar, aux)`. With a model state `(params, batch, model_state) -> (scalar,
        model_state)`, with `has_aux`, too, `-> (scalar, (model_state, aux))`. With `frozen` in
        `step` one more argument at the end.
      compressor: any of `jgc.compress`.
      optimizer: any optax optimiser; it gets the mean over nodes, and must have no momentum if the
        compressor owns it. It also gets `value`, the mean loss over nodes, and `grad`, if it takes
        them (`optax.contrib.momo`).
      nodes: the layout.
      has_aux: as in `jax.value_and_grad`.
      unroll: see `jgc.node_grads`.
      ahead: whether a thread compiles the next phase of the schedule while the steps of a phase
        run, so that no step waits for it. On CPU that takes processor time from those steps.
      prepare: `(grads, params) -> grads`, applied to each node's gradient before compression:
        coupled weight decay, clipping, or an optax transform without state. It runs inside the node
        axis; where the devices of a node divide the parameters, it gets a device's shards.
      mean_aux: whether `metrics.aux` is the mean over nodes, in f32, which travels with the other
        metrics.
      split: whether gradients are a program apart from what follows them, compiled once for all
        phases. A method of several phases then compiles in less time, and a step holds all nodes'
        gradients in memory.

    Returns:
      `init(key, params, model_state=()) -> LoopState` and `step(state, batch, frozen=None) ->
      (LoopState, Metrics)`. `step` also has the methods `upcoming`, `lower`, `program`, `gradients`
      and `diagnose`, see `Step`. The leaves of `batch` have leading axes [K, b]: b examples for
      each of the K nodes. With several processes, `key`, `params`, `batch` and `frozen` are equal
      in all of them, or global arrays (`jgc.place_parts`).

    Raises:
      TypeError: something else in place of the loss, of a compressor, such as settings, of an
        optimiser or of the nodes; in `init`, of a random key, a leaf of the parameters that is not
        an array of floats, or one of the model state that is not an array, or an optimiser that
        wants the loss as a function (a line search, sophia), gradients of examples (dpsgd) or pairs
        of parameters (lookahead); in `step`, a loss that returns another model state than it got.
      ValueError: in `init`, an optimiser that holds `as_optax`, or a leaf that is divided over
        another axis than the fast ones; in `step`, a leaf of the batch whose first axis is not K, a
        loss that nodes have averaged, whole arrays restored for divided ones, an array that the
        batch or `frozen` shares with the state, or one that an earlier step donated.

    Warns:
      jgc.MomentumWarning: in `init`, if both compressor and optimiser have a momentum.
      jgc.SkippedStepsWarning: in `step`, once, after 20 skipped steps in a row.
      jgc.SlowLoopWarning: in `step`, on CPU, if the gradient of a convolution lies in a loop.
      UserWarning: in `init`, of a leaf uint32[2] of the model state, which may be a random key that
        all nodes share.

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
    if prepare is not None and not callable(prepare):
        raise TypeError(
            "prepare must be a function (grads, params) -> grads, got a "
            f"{type(prepare).__name__}; of an optax transform without state: "
            "lambda grads, params: tx.update(grads, tx.init(params), params)[0]"
        )
    if mean_aux and not has_aux:
        raise ValueError(
            "mean_aux=True takes the mean of aux, which a loss returns with has_aux=True"
        )
    settings = Settings(
        loss, compressor, optimizer, nodes, has_aux, unroll, prepare, mean_aux, split
    )
    step = Step(settings, ahead)
    return step.init, step


class Step:
    """The function `step` of `jgc.make_step`, and access to its programs.

    Each method takes the arguments of the coming step, and none but `step` itself changes the
    state.
    """

    def __init__(self, settings: Settings, ahead: bool):
        self._settings = settings
        self._loop = Loop(settings.nodes, self._check_state)
        self._coming: dict[Hashable, Future] = {}  # programs that a thread compiles
        ahead = ahead and settings.compressor.next_phase is None
        self._thread = ThreadPoolExecutor(1) if ahead else None
        self._entered: tuple[Any, ...] = (None, None, None)  # see `upcoming`

    def init(self, key: Key, params: PyTree, model_state: PyTree = ()) -> LoopState:
        """The state before the first step. See `jgc.make_step`."""
        compressor, optimizer, nodes = self._settings[1:4]
        placed_key, model_state = self._loop.begin(key, params, model_state)
        if nodes.mesh is not None:
            shards_of(params, nodes)  # names a leaf that is divided over another axis
        put = self._loop.putter(device_of(params))
        params = put(copied(params))
        opt_state = put(copied(optimizer.init(params)))
        if holds_state(opt_state):
            raise ValueError(
                "the optimiser holds as_optax, and make_step compresses by itself: "
                "give it without as_optax"
            )
        check_supported(opt_state)
        if compressor.owns_momentum:
            warn_of_momentum(opt_state)
        state = put(copied(compressor.init(key, params, nodes)))
        self._loop.remember(params, model_state)
        phase = phase_at(compressor.schedule, 0)
        return LoopState(0, phase, params, opt_state, state, placed_key, model_state)

    def __call__(
        self, state: LoopState, batch: PyTree, frozen: PyTree = None
    ) -> tuple[LoopState, Metrics]:
        """One update. See `jgc.make_step`."""
        call = self._prepared(state, batch, frozen)
        program = self._program(call)
        self._compile_next(state.step, call)
        if call.name in self._coming:
            self._coming.pop(call.name).exception()  # waits; the call raises an error itself
        self._entered = None, None, None
        arrays, metrics = program(*call.args)
        self._loop.warn_of_skips(state.step, metrics.info.finite)
        return LoopState(
            state.step + 1, call.phase, arrays.params, arrays.opt_state, arrays.compressor,
            call.args[1], arrays.model_state,
        ), metrics  # fmt: skip

    def upcoming(self, state: LoopState) -> tuple[Phase, State]:
        """The phase of the coming step, and the compressor's state after the transition to it."""
        if self._entered[0] is not state:  # each transition runs once
            self._entered = state, *self._enter(state)
        return self._entered[1:]

    def lower(self, state: LoopState, batch: PyTree, frozen: PyTree = None) -> jax.stages.Lowered:
        """The program of the coming step: `step.lower(state, batch).compile()` compiles it.

        The step then finds it compiled. Its text, memory and cost are those of `jax.stages`; the
        collectives are in `jgc.Wire.physical` (`compressor.wire`) and in the compiled text. With
        `split` the gradients are compiled, and the program is that of what follows them.
        """
        program, args = self.program(state, batch, frozen)
        return program.lower(*jax.tree.map(shape_of, args))

    def program(
        self, state: LoopState, batch: PyTree, frozen: PyTree = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """The program of the coming step, and its arguments on the devices.

        `program(*args)` returns the arrays of the next state and the metrics, and donates the first
        argument. To call it again and again, without the checks of `step`, as `bench loop` does.
        """
        call = self._prepared(state, batch, frozen)
        return self._program(call), call.args

    def gradients(self, state: LoopState, batch: PyTree, frozen: PyTree = None) -> PyTree:
        """All nodes' gradients of the coming step, [K, ...], after `prepare`."""
        return self._gradients(self._prepared(state, batch, frozen))

    def diagnose(self, state: LoopState, batch: PyTree, frozen: PyTree = None) -> dict[str, Array]:
        """Compare the aggregate of the coming step with the true mean; see `jgc.diagnose`.

        Computes the gradients anew and sends them uncompressed, in two programs apart from the
        step's, so it costs more than a step. Call it now and then.
        """
        call = self._prepared(state, batch, frozen)
        arrays, key, number, *_ = call.args
        grads, nodes = self._gradients(call), self._settings.nodes
        wait_on_cpu(grads, nodes)
        where = placements_of_step(arrays)
        name = ("diagnose", *call.name)
        if name not in self._loop.programs:
            compare = make_diagnosis(
                self._settings.compressor, call.phase.value, nodes, where.params, where.compressor
            )
            self._loop.programs[name] = jax.jit(compare)
        return self._loop.programs[name](key, number, grads, arrays.compressor)

    def _gradients(self, call: "_Call") -> PyTree:
        """All nodes' gradients, as they enter the compressor."""
        arrays, _, _, batch, fixed = call.args
        program, nodes = self._gradients_program(call), self._settings.nodes
        _, grads = program(arrays.params, arrays.model_state, batch, fixed)
        if self._settings.prepare is None:
            return grads
        wait_on_cpu(grads, nodes)
        name = ("prepare", *call.name[1:])
        if name not in self._loop.programs:
            self._loop.programs[name] = prepare_program(self._settings, arrays.params)
        return self._loop.programs[name](grads, arrays.params)

    def _gradients_program(self, call: "_Call") -> Any:
        """The gradients alone: for `diagnose`, and with `split` for the steps of all phases."""
        name = ("gradients", *call.name[1:])
        if name not in self._loop.programs:
            gradients = make_gradients(self._settings, call.args[0], call.frozen)
            self._loop.programs[name] = jax.jit(gradients)
        return self._loop.programs[name]

    def _prepared(self, state: LoopState, batch: PyTree, frozen: PyTree) -> "_Call":
        """The arguments of the coming step, checked and on the devices."""
        loop, nodes = self._loop, self._settings.nodes
        check_loop(state, LoopState, batch, nodes)
        arrays = Arrays(state.params, state.opt_state, state.compressor, state.model_state)
        structure = jax.tree.structure(arrays)  # the same in every phase
        loop.check_fits(state, structure)
        phase, compressor = self.upcoming(state)
        device = device_of(state.params)
        put, key = loop.putter(device), state.key
        arrays = donatable(
            arrays._replace(compressor=compressor), batch=batch, key=key, frozen=frozen
        )
        fixed = loop.put_frozen(frozen, device)
        name = phase.value, structure, fixed.name
        if name not in loop.programs or lies_elsewhere((*arrays, key), nodes):
            if isinstance(arrays.compressor.shared, ByShards):
                check_restored((state.params, state.opt_state))
            # moves only restored arrays
            arrays, key = put(arrays, placements=placements_of_step(arrays)), put(key)
        batch = loop.place_batch(batch, put)
        wait_on_cpu(arrays, nodes)
        args = arrays, key, np.int32(state.step), batch, fixed.arrays
        return _Call(phase, name, fixed.placements, args)

    def _enter(self, state: LoopState) -> tuple[Phase, State]:
        _, compressor, _, nodes, *_ = self._settings
        phase = phase_after(compressor, state.phase, state.step, state.compressor, nodes)
        if phase.value == state.phase.value:
            return phase, state.compressor
        after = compressor.transition(state.phase.value, phase.value, state.compressor, nodes)
        return phase, self._loop.putter(device_of(state.params))(copied(after))

    def _program(self, call: "_Call") -> Any:
        programs = self._loop.programs
        if call.name not in programs:
            settings, phase, arrays = self._settings, call.phase.value, call.args[0]
            if settings.split:
                gradients = self._gradients_program(call)
                programs[call.name] = SplitProgram(settings, phase, arrays, gradients)
            else:
                programs[call.name] = step_program(settings, phase, arrays, call.frozen)
        return programs[call.name]

    def _compile_next(self, step: int, call: "_Call") -> None:
        """Let the thread compile the next phase of the schedule, if there is a thread."""
        if self._thread is None:
            return
        schedule = self._settings.compressor.schedule
        phase = next((phase for phase in schedule if phase.start > step), None)
        if phase is None or (phase.value, *call.name[1:]) in self._loop.programs:
            return
        coming = call._replace(phase=phase, name=(phase.value, *call.name[1:]))
        program, shapes = self._program(coming), jax.tree.map(shape_of, call.args)
        self._coming[coming.name] = self._thread.submit(lambda: program.lower(*shapes).compile())

    def _check_state(self, state: LoopState) -> None:
        _, compressor, optimizer, nodes, *_ = self._settings
        check_state(compressor.init, state.params, state.compressor, nodes, "compressor")
        made = jax.eval_shape(optimizer.init, state.params)
        reason = "of another optimiser, or of other parameters"
        check_fits("opt_state", state.opt_state, made, reason)


class _Call(NamedTuple):
    """A step's arguments on the devices, and the name of its program."""

    phase: Phase
    name: tuple[Hashable, ...]
    frozen: PyTree  # placements
    args: tuple[Any, ...]
