"""The loop of training with local steps: state, metrics, `init` and `step`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from jgc.checks.misuse import check_loop, check_restored
from jgc.loops.buffers import as_made, device_of, donatable, lies_elsewhere, wait_on_cpu
from jgc.loops.fragments import take
from jgc.loops.local_programs import apply_program, exchange_program, inner_program
from jgc.loops.loop import Loop, shape_of
from jgc.loops.mixed import check_own, check_replaced, note, note_returned
from jgc.loops.outer import (
    Arrays,
    Parts,
    check_local,
    difference,
    first_optimisers,
    replaced,
)  # fmt: skip
from jgc.loops.step_program import make_diagnosis
from jgc.method.phases import phase_at
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import LOCAL, ByShards, placements_of
from jgc.types import Array, Info, Key, Phase, PyTree, State


class LocalState(NamedTuple):
    """The state that a loop carries from step to step. `step` donates it: use the returned one.

    Attributes:
      step: inner steps so far, on the host.
      phases: the compressor's phase of each fragment's last exchange, on the host.
      params: the shared parameters after the last outer steps: evaluate and keep these.
      outer: the outer optimiser's states, one for each fragment, equal on all nodes.
      waiting: with an overlap, the aggregates that wait to be applied.
      compressor: the compressor's states, one for each fragment; local leaves are [K, ...].
      own: each node's parameters, leaves [K, ...].
      inner: each node's state of the inner optimiser, leaves [K, ...].
      largest_norm: f32[K], the largest gradient norm that each node has used, fading by a tenth in
        each step whose gradient is used; 0 before the first.
      key: the random key of all exchanges; the exchange after step s uses `fold_in(key, s)`.
      model_state: of each node, such as batch statistics, leaves [K, ...]; () without one.
    """

    step: int
    phases: tuple[Phase, ...]
    params: PyTree
    outer: tuple[PyTree, ...]
    waiting: tuple[PyTree, ...]
    compressor: tuple[State, ...]
    own: PyTree
    inner: PyTree
    largest_norm: Array
    key: Key
    model_state: PyTree = ()


class LocalMetrics(NamedTuple):
    """A step's metrics on the devices, not averaged: reading a value waits for the step.

    Attributes:
      loss: f32[K], of each node, before its update.
      finite: bool[K], whether a node used its gradient. If not, it left out this step: the gradient
        was not finite, had a norm of 1e15 or more, or was a million times as large as the largest
        that the node has used lately.
      exchanged: the fragment that was exchanged after the step; None without an exchange.
      info: the exchange's `Info`, leaves [K]. If `info.finite` is false, it changed nothing.
      aux: with `has_aux` the second output of the loss, leaves [K, ...]; else None.
      grad_norm: f32[K], the norm of each node's gradient, NaN or infinite where the gradient is.
      reset: bool[K], the nodes that restarted from the shared parameters, with a fresh inner state,
        because their difference was not finite or had a norm of 1e15 or more.
    """

    loss: Array
    finite: Array
    exchanged: int | None
    info: Info | None
    aux: PyTree = None
    grad_norm: Any = None
    reset: Array | None = None


Init = Callable[..., LocalState]


class LocalStep:
    """The function `step` of `jgc.local_steps`, and its two halves, `inner` and `exchange`.

    `step(state, batch)` is `step.exchange(*step.inner(state, batch))`. Call the halves to time or
    record an exchange, or to compare it with the true mean (`diagnose`).
    """

    def __init__(self, parts: Parts, loss: Callable[..., Any], has_aux: bool, unroll: bool | None):
        self._parts, self._loss = parts, (loss, has_aux, unroll)
        check = partial(check_local, parts)
        self._loop = Loop(parts.nodes, check, "steps of one node")
        self._made = WeakValueDictionary[int, Any]()  # see `check_own`
        self._returned = WeakValueDictionary[int, Any]()  # see `check_replaced`

    def init(self, key: Key, params: PyTree, model_state: PyTree = ()) -> LocalState:
        """The state before the first step. See `jgc.LocalSteps.make_step`."""
        placed_key, model_state = self._loop.begin(key, params, model_state)
        arrays = self._parts.first(key, params)
        phases = (phase_at(self._parts.compressor.schedule, 0),) * self._parts.fragments
        note(self._made, arrays)
        return LocalState(0, phases, *arrays, placed_key, model_state)

    def __call__(
        self, state: LocalState, batch: PyTree, frozen: PyTree = None
    ) -> tuple[LocalState, LocalMetrics]:
        """An inner step of every node, and the exchange and outer step that are due after it."""
        state, metrics = self.inner(state, batch, frozen)
        return self._exchange(state, metrics, Arrays(*state[2:-2]))

    def inner(
        self, state: LocalState, batch: PyTree, frozen: PyTree = None
    ) -> tuple[LocalState, LocalMetrics]:
        """An inner step of every node, which sends nothing."""
        program, args, arrays, key = self._inner(state, batch, frozen)
        wait_on_cpu(arrays, self._parts.nodes)
        (own, inner, model_state, largest_norm), of_step = program(*args)
        losses, finite, aux, norms = of_step
        self._loop.warn_of_skips(state.step, finite)
        arrays = arrays._replace(own=own, inner=inner, largest_norm=largest_norm)
        note_returned(self._returned, arrays)
        metrics = LocalMetrics(losses, finite, None, None, aux, norms)
        return LocalState(state.step + 1, state.phases, *arrays, key, model_state), metrics

    def exchange(self, state: LocalState, metrics: LocalMetrics) -> tuple[LocalState, LocalMetrics]:
        """The exchange and the outer step that are due after `inner`; nothing if none is."""
        state = self._placed(state)
        return self._exchange(state, metrics, Arrays(*state[2:-2]))

    def upcoming(self, state: LocalState) -> tuple[Phase, State]:
        """The phase of the exchange due after `state.step` steps, and its compressor's state."""
        return self._enter(state, self._due(state))

    def lower(self, state: LocalState, batch: PyTree, frozen: PyTree = None) -> jax.stages.Lowered:
        """The program of the coming inner step; see `jgc.make_step`."""
        program, args, *_ = self._inner(state, batch, frozen)
        return program.lower(*jax.tree.map(shape_of, args))

    def lower_exchange(self, state: LocalState) -> jax.stages.Lowered:
        """The program of the exchange that is due after `state.step` steps."""
        fragment, state = self._due(state), self._placed(state)
        program, arrays, _ = self._exchange_program(state, Arrays(*state[2:-2]), fragment)
        number = np.int32(state.step - 1)
        return program.lower(*jax.tree.map(shape_of, (arrays, state.key, number)))

    def pseudo_gradients(self, state: LocalState) -> PyTree:
        """theta - theta_k of all nodes, [K, ...], which the compressor aggregates."""
        arrays = self._checked(state)

        def make():
            where = self._parts.placements(arrays)
            ins = where.params, where.own
            return jax.jit(on_nodes(difference, self._parts.nodes, ins, where.own))

        program = self._loop.program(("difference", jax.tree.structure(arrays)), make)
        return program(arrays.params, arrays.own)

    def diagnose(self, state: LocalState) -> dict[str, Array]:
        """Compare the aggregate of the exchange that is due with the true mean; `jgc.diagnose`.

        Sends whole pseudo-gradients, in a separate program.
        """
        parts, fragment = self._parts, self._due(state)
        leaves = parts.leaves(state.params)[fragment]
        grads = take(self.pseudo_gradients(state), leaves)
        phase, compressor = self._enter(state, fragment)
        wait_on_cpu(grads, parts.nodes)

        def make():
            where = placements_of((take(state.params, leaves), compressor))
            return jax.jit(make_diagnosis(parts.method(), phase.value, parts.nodes, *where))

        name = "diagnose", fragment, phase.value, jax.tree.structure(compressor)
        program = self._loop.program(name, make)
        with jax.transfer_guard_host_to_device("allow"):  # the step's number
            return program(state.key, np.int32(state.step - 1), grads, compressor)

    def _due(self, state: LocalState) -> int:
        """The fragment whose exchange is due. Raise ValueError if none is."""
        fragment = self._parts.due(state.step).exchange
        if fragment is None:
            raise ValueError(f"no exchange is due after {state.step} steps: see LocalSteps.due")
        return fragment

    def _checked(self, state: LocalState, batch: PyTree = None) -> Arrays:
        """The arrays of a state, after the checks."""
        check_loop(state, LocalState, batch, self._parts.nodes)
        count, have = len(state.phases), self._parts.fragments
        if count != have:
            raise ValueError(f"these steps have {have} fragments, the state {count}")
        return Arrays(*state[2:-2])

    def _lies_elsewhere(self, state: LocalState) -> bool:
        """Whether arrays are not on the devices. ValueError for whole ones that `init` shards."""
        numbers = self._loop.numbers((state.outer, state.inner))
        of_all = any(jnp.ndim(x) == 0 for x in self._loop.numbers(state.inner))
        if not (of_all or lies_elsewhere(state[2:], self._parts.nodes, numbers)):
            return False
        parts = jax.tree.leaves(state.compressor, is_leaf=lambda x: isinstance(x, ByShards))
        if any(isinstance(x, ByShards) for x in parts):
            check_restored({"params": state.params, "own": state.own})
        return True

    def _as_made(self, arrays: Arrays) -> Arrays:
        """The arrays, with numbers that a user has set, e.g. learning rates, as `init` has them."""
        outer, inner = first_optimisers(self._parts, arrays.params)
        return arrays._replace(
            outer=as_made(arrays.outer, outer), inner=as_made(arrays.inner, inner))

    def _placed(self, state: LocalState) -> LocalState:
        """The state with its arrays on the devices, after the checks."""
        arrays = self._checked(state)
        if not self._lies_elsewhere(state):
            return state
        arrays = self._as_made(arrays)
        put = self._loop.putter(device_of(state.params))
        arrays = put(arrays, placements=self._parts.placements(arrays))
        return state._replace(**arrays._asdict(), key=put(state.key))

    def _inner(
        self, state: LocalState, batch: PyTree, frozen: PyTree
    ) -> tuple[Any, tuple[Any, ...], Arrays, Key]:
        """The program of an inner step, its arguments, all arrays of the state and its key."""
        loop, parts = self._loop, self._parts
        arrays = self._checked(state, batch)
        first, elsewhere = not loop.programs, self._lies_elsewhere(state)
        if elsewhere:
            arrays = self._as_made(arrays)
            state = state._replace(**arrays._asdict())
        donated = arrays._asdict() | {"model_state": state.model_state}
        structure = jax.tree.structure(donated)
        check_replaced(self._returned, arrays)
        loop.check_fits(state, structure)
        device = device_of(state.params)
        put = loop.putter(device)
        donated = donatable(donated, batch=batch, key=state.key, frozen=frozen)
        key, model_state, arrays = state.key, donated.pop("model_state"), Arrays(**donated)
        before = arrays
        if first or elsewhere:  # restored or moved
            arrays, key = put(arrays, placements=parts.placements(arrays)), put(key)
            model_state = put(model_state, placements=LOCAL)
        check_own(self._made, before, arrays, parts, state.step, first)
        batch, fixed = loop.place_batch(batch, put), loop.put_frozen(frozen, device)
        program = loop.program(
            ("inner", structure, fixed.name),
            lambda: inner_program(parts, arrays, model_state, fixed.placements, *self._loss),
        )
        args = arrays.own, arrays.inner, model_state, batch, arrays.largest_norm, fixed.arrays
        return program, args, arrays, key

    def _exchange(
        self, state: LocalState, metrics: LocalMetrics, arrays: Arrays
    ) -> tuple[LocalState, LocalMetrics]:
        parts = self._parts
        exchanged, applied = parts.due(state.step)
        if not parts.overlap:
            applied = None  # the exchange applies its aggregate itself
        if exchanged is None and applied is None:
            return state, metrics
        if exchanged is not None:
            program, arrays, phase = self._exchange_program(state, arrays, exchanged)
            wait_on_cpu(arrays, parts.nodes)
            with jax.transfer_guard_host_to_device("allow"):
                arrays, info, reset = program(arrays, state.key, np.int32(state.step - 1))
            state = state._replace(phases=replaced(state.phases, exchanged, phase))
            metrics = metrics._replace(exchanged=exchanged, info=info, reset=reset)
        if applied is not None:
            name = "apply", applied, jax.tree.structure(arrays)
            make = partial(apply_program, parts, arrays, applied)
            wait_on_cpu(arrays, parts.nodes)
            arrays = self._loop.program(name, make)(arrays)
        note_returned(self._returned, arrays)
        self._loop.leave()
        return state._replace(**arrays._asdict()), metrics

    def _exchange_program(
        self, state: LocalState, arrays: Arrays, fragment: int
    ) -> tuple[Any, Arrays, Phase]:
        """A fragment's exchange, the arrays in its phase, and that phase."""
        phase, compressor = self._enter(state, fragment)
        arrays = arrays._replace(compressor=replaced(arrays.compressor, fragment, compressor))
        name = fragment, phase.value, jax.tree.structure(arrays)
        make = partial(exchange_program, self._parts, arrays, fragment, phase.value)
        return self._loop.program(name, make), arrays, phase

    def _enter(self, state: LocalState, fragment: int) -> tuple[Phase, State]:
        """The phase of a fragment's exchange, and the compressor's state after the transition."""
        before, memory = state.phases[fragment], state.compressor[fragment]
        number = self._parts.round_of(fragment, state.step)
        return self._loop.enter(state, self._parts.method(), before, number, memory)
