"""The loop of training with local steps: its state, its metrics, and `init` and `step` with their compiled programs."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from jgc.checks.misuse import check_arrays, check_key, check_loop
from jgc.checks.states import check_remembered, remember
from jgc.loops.buffers import copied, device_of, donatable, lies_elsewhere, put_arrays, wait_on_cpu
from jgc.loops.frozen import frozen_for
from jgc.loops.local_states import check_local
from jgc.loops.losses import in_one_form
from jgc.loops.mixed import check_own, check_replaced, note, note_returned
from jgc.loops.model_state import of_all_nodes
from jgc.loops.outer import Arrays, Parts, replaced
from jgc.loops.skipped import make_skip_warning
from jgc.loops.spikes import largest_after, limits_of
from jgc.method.phases import phase_after, phase_at
from jgc.nodes.gradients import node_grads
from jgc.nodes.placement import BATCH, LOCAL, check_node_axes
from jgc.types import Array, Info, Key, Phase, PyTree, State


class LocalState(NamedTuple):
    """The state that a loop carries from step to step. `step` donates its arrays: use the returned state alone.

    Attributes:
      step: inner steps so far, on the host.
      phases: the compressor's phase of each fragment's last exchange, on the host.
      params: the parameters that all nodes share, as the last outer steps left them: what to evaluate and to keep.
      outer: the outer optimiser's states, one for each fragment, equal on all nodes.
      waiting: with an overlap, the aggregates that wait to be applied.
      compressor: the compressor's states, one for each fragment; local leaves have a leading axis [K].
      own: each node's own parameters, leaves [K, ...].
      inner: each node's own state of the inner optimiser, leaves [K, ...].
      largest_norm: f32[K], the largest norm of a gradient that each node has used, fading by a tenth in each step; 0
        before the first; see `step`.
      key: the random key of all exchanges; that after step s uses `fold_in(key, s)`.
      model_state: each node's own, such as batch statistics, leaves [K, ...]; () if `init` got none.
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
    """What a step reports, on the devices: reading a value waits for the step. Between exchanges nothing is averaged.

    Attributes:
      loss: f32[K], each node's own, before its update.
      finite: bool[K], whether a node could use its gradient; where it could not, the node left out this step, and its
        model state stayed as it was. A gradient cannot be used if it is not finite, has a norm of 1e15 and more, or is
        a million times as large as the largest that the node has used lately.
      exchanged: the fragment that was exchanged after the step; None if none was.
      info: its `Info`, leaves [K]; None without an exchange. If `info.finite` is false, the exchange changed nothing.
      aux: with `has_aux` the second output of the loss, leaves [K, ...]; else None.
      grad_norm: f32[K], the norm of each node's gradient, NaN or infinite where the gradient is.
      reset: bool[K], the nodes that began anew from the shared parameters, with a fresh state of the inner optimiser,
        after a refused exchange: their difference from the shared parameters was not finite, or had a norm of 1e15 and
        more. None without an exchange.
    """

    loss: Array
    finite: Array
    exchanged: int | None
    info: Info | None
    aux: PyTree = None
    grad_norm: Any = None
    reset: Array | None = None


Init = Callable[..., LocalState]
Step = Callable[..., tuple[LocalState, LocalMetrics]]


def make_loop(parts: Parts, loss: Callable[..., Any], has_aux: bool, unroll: bool | None) -> tuple[Init, Step]:
    """Make `init` and `step`. See `jgc.LocalSteps.make_step`."""
    nodes = parts.nodes
    programs: dict[Hashable, Callable[..., Any]] = {}  # compiled at the first call
    put_frozen = frozen_for(nodes)
    warn_of_skips = make_skip_warning("steps of one node")
    fitting: set[Any] = set()  # structures of states that fit
    first: dict[Any, PyTree] = {}  # see `remember`
    made = WeakValueDictionary[int, Any]()  # see `check_own`
    returned = WeakValueDictionary[int, Any]()  # see `check_replaced`

    def program(name: Hashable, make: Callable[..., Any], arrays: Arrays, *args: Any) -> Callable[..., Any]:
        wait_on_cpu(arrays, nodes)
        if name not in programs:
            programs[name] = make(parts, arrays, *args)
        return programs[name]

    def init(key: Key, params: PyTree, model_state: PyTree = ()) -> LocalState:
        check_key(key)
        arrays, put = parts.first(key, params), partial(put_arrays, nodes=nodes, device=device_of(params))
        phases = (phase_at(parts.compressor.schedule, 0),) * parts.fragments
        model_state = put(of_all_nodes(model_state, nodes), placements=LOCAL)
        remember(first, arrays.params, model_state)
        note(made, arrays)
        return LocalState(0, phases, *arrays, put(key), model_state)

    def step(state: LocalState, batch: PyTree, frozen: PyTree = None) -> tuple[LocalState, LocalMetrics]:
        check_loop(state, LocalState, batch, nodes)
        if len(state.phases) != parts.fragments:
            raise ValueError(f"these steps have {parts.fragments} fragments, and the state {len(state.phases)}")
        arrays = Arrays(*state[2:-2])
        donated = arrays._asdict() | {"model_state": state.model_state}
        structure = jax.tree.structure(donated)
        check_replaced(returned, arrays)
        if structure not in fitting:
            check_remembered(first, state.params, state.model_state)
            check_local(parts, arrays)
            fitting.add(structure)
        device = device_of(state.params)
        put = partial(put_arrays, nodes=nodes, device=device)
        donated = donatable(donated, batch=batch, key=state.key, frozen=frozen)
        key, model_state, arrays = state.key, donated.pop("model_state"), Arrays(**donated)
        before = arrays
        if not programs or lies_elsewhere((*arrays, model_state, key), nodes):  # the state was restored or moved
            arrays, key = put(arrays, placements=parts.placements(arrays)), put(key)
            model_state = put(model_state, placements=LOCAL)
        check_own(made, before, arrays, parts, state.step, first=not programs)
        check_arrays(batch, or_numbers=True)
        check_node_axes(BATCH, batch, nodes, "the batch")
        fixed = put_frozen(frozen, device)
        settings = model_state, fixed.placements, loss, has_aux, unroll
        inner_step = program(("inner", structure, fixed.name), inner_program, arrays, *settings)
        new, of_step = inner_step(
            arrays.own, arrays.inner, model_state, put(batch, placements=BATCH), arrays.largest_norm, fixed.arrays
        )
        own, inner, model_state, largest_norm = new
        losses, finite, aux, norms = of_step
        warn_of_skips(state.step, finite)
        arrays = arrays._replace(own=own, inner=inner, largest_norm=largest_norm)
        phases, done, info, reset = state.phases, state.step + 1, None, None
        due = parts.due(done)
        if due.exchange is not None:
            arrays, phase = _enter(parts, arrays, due.exchange, phases[due.exchange], done)
            phases = replaced(phases, due.exchange, phase)
            exchange = program(
                (due.exchange, phase.value, structure), exchange_program, arrays, due.exchange, phase.value
            )
            arrays, info, reset = exchange(arrays, key, np.int32(state.step))
        if parts.overlap and due.apply is not None:
            arrays = program(("apply", due.apply, structure), apply_program, arrays, due.apply)(arrays)
        note_returned(returned, arrays)
        metrics = LocalMetrics(losses, finite, due.exchange, info, aux, norms, reset)
        return LocalState(done, phases, *arrays, key, model_state), metrics

    return init, step


def _enter(parts: Parts, arrays: Arrays, fragment: int, before: Phase, done: int) -> tuple[Arrays, Phase]:
    """The phase of a fragment's exchange, and the arrays after the compressor's transition to it."""
    method, state = parts.method(), arrays.compressor[fragment]
    phase = phase_after(method, before, parts.round_of(fragment, done), state, parts.nodes)
    if phase.value == before.value:
        return arrays, phase
    after = method.transition(before.value, phase.value, state, parts.nodes)
    after = put_arrays(copied(after), parts.nodes, device_of(arrays.params))
    return arrays._replace(compressor=replaced(arrays.compressor, fragment, after)), phase


def inner_program(
    parts: Parts, arrays: Arrays, model_state: PyTree, frozen: PyTree, loss: Callable[..., Any], has_aux: bool,
    unroll: bool | None,
) -> Callable[..., tuple[tuple, tuple]]:  # fmt: skip
    """A step of every node, `(own, inner, model_state, batch, largest_norm, frozen) -> (new, of_step)`.

    `new` is `(own, inner, model_state, largest_norm)`, `of_step` is `(loss, finite, aux, norms)`. Compiled at the first
    call; donates what `new` replaces.

    Args:
      parts: the settings.
      arrays: of the state, as all steps get them.
      model_state: leaves [K, ...].
      frozen: placements of the parameters that are not trained; None if there are none.
      loss: as in `jgc.LocalSteps.make_step`, with its options.
      has_aux: one of these.
      unroll: one of these.
    """
    placements, has_frozen = parts.placements(arrays), frozen is not None
    gradients = node_grads(
        in_one_form(loss, has_aux, bool(jax.tree.leaves(model_state)), has_frozen), parts.nodes, has_aux=True,
        unroll=unroll, local=True, placements=placements.own, frozen=frozen,
    )  # fmt: skip
    inner_step = parts.make_inner(placements)

    def inner_update(own, inner, model_state, batch, largest_norm, fixed):
        args = own, batch, model_state, *([fixed] if has_frozen else [])
        (losses, (after, aux)), grads = gradients(*args)  # all with an axis [K]
        own, inner, finite, norms = inner_step(own, inner, grads, losses, limits_of(largest_norm))
        largest_norm = largest_after(largest_norm, norms, finite)
        model_state = jax.tree.map(
            lambda a, b: jnp.where(finite.reshape(-1, *[1] * (a.ndim - 1)), a, b), after, model_state
        )
        return (own, inner, model_state, largest_norm), (losses, finite, aux, norms)

    shardings = _shardings((arrays.own, arrays.inner, model_state, arrays.largest_norm))
    return jax.jit(inner_update, donate_argnums=(0, 1, 2, 4), out_shardings=(shardings, None))


def exchange_program(parts: Parts, arrays: Arrays, fragment: int, phase: Hashable) -> Callable[..., Any]:
    """A fragment's exchange, `(arrays, key, step) -> (arrays, info, reset)`. Compiled at the first call."""
    leaves = parts.leaves(arrays.params)[fragment]
    exchange = parts.make_exchange(parts.placements(arrays), leaves, fragment, phase)

    def exchange_update(arrays, key, step):
        return exchange(jax.random.fold_in(key, step), arrays)

    return jax.jit(exchange_update, donate_argnums=0, out_shardings=(_shardings(arrays), None, None))


def apply_program(parts: Parts, arrays: Arrays, fragment: int) -> Callable[[Arrays], Arrays]:
    """A fragment's outer step with the aggregate that waits, `arrays -> arrays`. Compiled at the first call."""
    apply = parts.make_apply(parts.placements(arrays), parts.leaves(arrays.params)[fragment], fragment)

    def outer_update(arrays):
        return apply(arrays, arrays.waiting[fragment])

    return jax.jit(outer_update, donate_argnums=0, out_shardings=_shardings(arrays))


def _shardings(arrays: PyTree) -> PyTree:
    # outputs lie exactly where inputs do: left to XLA, the second step would be another program
    return jax.tree.map(lambda x: x.sharding, arrays)
