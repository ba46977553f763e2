"""The loop of `make_step`: its state, and `init` and `step` with their compiled programs."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc.checks.misuse import check_loop, check_restored
from jgc.checks.optax_states import holds_state, warn_of_momentum
from jgc.checks.states import check_fits
from jgc.loops.buffers import (
    as_made,
    copied,
    device_of,
    donatable,
    lies_elsewhere,
    wait_on_cpu,
)  # fmt: skip
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
)  # fmt: skip
from jgc.method.phases import phase_at
from jgc.method.shards import shards_of
from jgc.method.signature import check_state
from jgc.nodes.placement import ByShards
from jgc.types import Array, Key, Phase, PyTree, State


class LoopState(NamedTuple):
    """The state that a loop carries from step to step. `step` donates it: use the returned one.

    Attributes:
      step: steps so far, skipped ones included, on the host.
      phase: the phase of the last step, on the host; initially the first phase.
      params: the parameters, equal on all nodes.
      opt_state: the optimiser's state, equal on all nodes.
      compressor: the compressor's state; its local leaves have a leading axis [K].
      key: the random key of all steps; step s uses `fold_in(key, s)`.
      model_state: of each node, such as batch statistics, leaves [K, ...]; () without one.
    """

    step: int
    phase: Phase
    params: PyTree
    opt_state: PyTree
    compressor: State
    key: Key
    model_state: PyTree = ()


Init = Callable[..., LoopState]


class Step:
    """The function `step` of `jgc.make_step`, and access to its programs.

    Each method takes the arguments of the coming step; only `step` changes the state.
    """

    def __init__(self, settings: Settings, ahead: bool):
        self._settings = settings
        self._loop = Loop(settings.nodes, self._check_state)
        self._coming: dict[Hashable, Future] = {}  # programs that a thread compiles
        ahead = ahead and settings.compressor.next_phase is None
        self._thread = ThreadPoolExecutor(1) if ahead else None

    def init(self, key: Key, params: PyTree, model_state: PyTree = ()) -> LoopState:
        """The state before the first step. See `jgc.make_step`."""
        compressor, optimizer, nodes = self._settings[1:4]
        placed_key, model_state = self._loop.begin(key, params, model_state)
        if nodes.mesh is not None:
            shards_of(params, nodes)  # names a leaf that is sharded over a different axis
        put = self._loop.putter(device_of(params))
        params = put(copied(params))
        opt_state = put(copied(optimizer.init(params)))
        if holds_state(opt_state):
            raise ValueError("the optimiser holds as_optax, but make_step compresses: leave it out")
        check_supported(opt_state)
        if compressor.owns_momentum:
            warn_of_momentum(opt_state)
        state = put(copied(compressor.init(key, params, nodes)))
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
        self._loop.leave()
        with jax.transfer_guard_host_to_device("allow"):  # the step's number
            arrays, metrics = program(*call.args)
        self._loop.warn_of_skips(state.step, metrics.info.finite)
        after = LoopState(state.step + 1, call.phase, **arrays._asdict(), key=call.args[1])
        return after, metrics

    def upcoming(self, state: LoopState) -> tuple[Phase, State]:
        """The phase of the coming step, and the compressor's state after the transition to it."""
        compressor = self._settings.compressor
        return self._loop.enter(state, compressor, state.phase, state.step, state.compressor)

    def lower(self, state: LoopState, batch: PyTree, frozen: PyTree = None) -> jax.stages.Lowered:
        """The program of the coming step: `step.lower(state, batch).compile()` compiles it.

        The step then finds it compiled. Text, memory and cost are as in `jax.stages`. With `split`
        this compiles the gradients and returns the program that follows them.
        """
        program, args = self.program(state, batch, frozen)
        return program.lower(*jax.tree.map(shape_of, args))

    def program(
        self, state: LoopState, batch: PyTree, frozen: PyTree = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """The program of the coming step, and its arguments on the devices, to skip the checks.

        `program(*args)` returns the next state's arrays and the metrics, and donates the first.
        """
        call = self._prepared(state, batch, frozen)
        return self._program(call), call.args

    def gradients(self, state: LoopState, batch: PyTree, frozen: PyTree = None) -> PyTree:
        """All nodes' gradients of the coming step, [K, ...], after `prepare`."""
        return self._gradients(self._prepared(state, batch, frozen))

    def diagnose(self, state: LoopState, batch: PyTree, frozen: PyTree = None) -> dict[str, Array]:
        """Compare the aggregate of the coming step with the true mean; see `jgc.diagnose`.

        Computes the gradients again and sends them uncompressed: it costs more than a step.
        """
        call = self._prepared(state, batch, frozen)
        arrays, key, number, *_ = call.args
        grads, nodes = self._gradients(call), self._settings.nodes
        wait_on_cpu(grads, nodes)
        where, compressor = placements_of_step(arrays), self._settings.compressor

        def make():
            phase = call.phase.value
            return jax.jit(make_diagnosis(compressor, phase, nodes, where.params, where.compressor))

        program = self._loop.program(("diagnose", *call.name), make)
        with jax.transfer_guard_host_to_device("allow"):
            return program(key, number, grads, arrays.compressor)

    def _gradients(self, call: "_Call") -> PyTree:
        """All nodes' gradients, as they enter the compressor."""
        arrays, _, _, batch, fixed = call.args
        program, nodes = self._gradients_program(call), self._settings.nodes
        _, grads = program(arrays.params, arrays.model_state, batch, fixed)
        if self._settings.prepare is None:
            return grads
        wait_on_cpu(grads, nodes)
        make = partial(prepare_program, self._settings, arrays.params)
        return self._loop.program(("prepare", *call.name[1:]), make)(grads, arrays.params)

    def _gradients_program(self, call: "_Call") -> Any:
        """The gradients: for `diagnose`, and with `split` for the steps of all phases."""
        return self._loop.program(
            ("gradients", *call.name[1:]),
            lambda: jax.jit(make_gradients(self._settings, call.args[0], call.frozen)),
        )

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
        arrays = arrays._replace(compressor=compressor)
        arrays = donatable(arrays, batch=batch, key=key, frozen=frozen)
        fixed = loop.put_frozen(frozen, device)
        name = phase.value, structure, fixed.name
        numbers = loop.numbers(arrays.opt_state)
        if name not in loop.programs or lies_elsewhere((*arrays, key), nodes, numbers):
            if isinstance(arrays.compressor.shared, ByShards):
                check_restored((state.params, state.opt_state))
            # moves only arrays that a user has restored or set
            made = jax.eval_shape(self._settings.optimizer.init, state.params)
            arrays = arrays._replace(opt_state=as_made(arrays.opt_state, made))
            arrays, key = put(arrays, placements=placements_of_step(arrays)), put(key)
        batch = loop.place_batch(batch, put)
        wait_on_cpu(arrays, nodes)
        args = arrays, key, np.int32(state.step), batch, fixed.arrays
        return _Call(phase, name, fixed.placements, args)

    def _program(self, call: "_Call") -> Any:
        def make():
            settings, phase, arrays = self._settings, call.phase.value, call.args[0]
            if settings.split:
                return SplitProgram(settings, phase, arrays, self._gradients_program(call))
            return step_program(settings, phase, arrays, call.frozen)

        return self._loop.program(call.name, make)

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
        reason = "of a different optimiser, or of other parameters"
        check_fits("opt_state", state.opt_state, made, reason)


class _Call(NamedTuple):
    """A step's arguments on the devices, and the name of its program."""

    phase: Phase
    name: tuple[Hashable, ...]
    frozen: PyTree  # placements
    args: tuple[Any, ...]
