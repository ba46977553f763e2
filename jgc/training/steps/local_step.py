"""The programs of a run with local steps: an inner step of every node, a fragment's exchange, and its outer step.

The first sends nothing. Metrics of a step are each node's own, [K]: a mean over nodes would be a message in every step.
"""

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc.loops.outer import Arrays, difference
from jgc.nodes.axis import on_nodes
from jgc.training.processes.distributed import ALONE, Team
from jgc.training.steps.costs import PhaseCost
from jgc.training.steps.program import Program, compile_program
from jgc.training.steps.step import Gradients, OfNodes, Parts, TrainState, placements_of_state
from jgc.types import Array, PyTree

Outputs = dict[str, Array]


class Programs(NamedTuple):
    """The compiled programs of a run. All donate the state's buffers.

    Attributes:
      inner: `(state, gradients, step) -> (state, outputs)`.
      exchanges: `(state, step) -> (state, outputs)` and its cost, by fragment and phase; grows.
      applies: with an overlap, `(state) -> (state, {})` by fragment.
    """

    inner: Program
    exchanges: dict[tuple[int, Hashable], tuple[Program, PhaseCost]]
    applies: list[Program]


def arrays_of(state: TrainState) -> Arrays:
    """A train state, or its placements, as the library names its parts."""
    own = state.local
    return Arrays(state.params, state.opt_state, own.waiting, state.compressor, own.params, own.inner)


def with_arrays(state: TrainState, arrays: Arrays) -> TrainState:
    """The state with these arrays."""
    own = OfNodes(arrays.own, arrays.inner, arrays.waiting)
    return state._replace(params=arrays.params, opt_state=arrays.outer, compressor=arrays.compressor, local=own)


def compile_programs(parts: Parts, state: TrainState, gradients: Gradients, team: Team = ALONE) -> Programs:
    """The programs that serve all phases."""
    update = make_inner_update(parts, placements_of_state(state))
    inner = compile_program(update, (state, gradients, np.int32(0)), state, team, "inner step")
    applies = []
    if parts.local is not None and parts.local.overlap:
        for i in range(parts.local.fragments):
            apply = make_apply(parts, placements_of_state(state), state, i)
            applies.append(compile_program(apply, (state,), state, team, "outer step"))
    return Programs(inner, {}, applies)


def compile_exchange(parts: Parts, fragment: int, phase: Hashable, state: TrainState, team: Team = ALONE) -> Program:
    """The exchange of a fragment in a phase."""
    exchange = make_exchange(parts, placements_of_state(state), state, fragment, phase)
    return compile_program(exchange, (state, np.int32(0)), state, team, "exchange")


def make_inner_update(
    parts: Parts, placements: TrainState
) -> Callable[[TrainState, Gradients, Array], tuple[TrainState, Outputs]]:
    """`(state, gradients, step) -> (state, outputs)`, without communication between nodes.

    A node whose gradient is not finite, or has a norm of 1e15 and more, leaves this step out.
    """
    assert parts.local is not None
    inner_step = parts.local.make_inner(arrays_of(placements))

    def update(state, gradients, number):
        arrays = arrays_of(state)
        own, inner, fine, _ = inner_step(arrays.own, arrays.inner, gradients.grads, gradients.loss)  # fine: bool[K]

        def kept(new, old):
            return jnp.where(fine.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        stats = jax.tree.map(kept, gradients.own, state.own)
        state = with_arrays(state, arrays._replace(own=own, inner=inner))._replace(**stats)
        rate = jnp.asarray(parts.schedule(number), jnp.float32)
        outputs = {"loss": gradients.loss, "train_accuracy": gradients.accuracy, "finite": fine}
        return state, {**outputs, "learning_rate": rate}

    return update


def make_exchange(
    parts: Parts, placements: TrainState, state: TrainState, fragment: int, phase: Hashable
) -> Callable[[TrainState, Array], tuple[TrainState, Outputs]]:
    """`(state, step) -> (state, outputs [K])`: a fragment's exchange, and without overlap its outer step."""
    assert parts.local is not None
    leaves = parts.local.leaves(state.params)[fragment]
    exchange = parts.local.make_exchange(arrays_of(placements), leaves, fragment, phase)

    def on_state(state, number):
        arrays, info, _ = exchange(jax.random.fold_in(parts.key, number), arrays_of(state))
        return with_arrays(state, arrays), info._asdict()

    return on_state


def make_apply(
    parts: Parts, placements: TrainState, state: TrainState, fragment: int
) -> Callable[[TrainState], tuple[TrainState, Outputs]]:
    """`(state) -> (state, {})`: with an overlap, the outer step of a fragment that was exchanged before."""
    assert parts.local is not None
    apply = parts.local.make_apply(arrays_of(placements), parts.local.leaves(state.params)[fragment], fragment)

    def on_state(state):
        arrays = arrays_of(state)
        return with_arrays(state, apply(arrays, arrays.waiting[fragment])), {}

    return on_state


# --- what methods see: for diagnose steps, recordings and byte counts -------------------------------------------------


def exchange_parts(parts: Parts) -> Parts:
    """The parts as exchanges use them, which neither decay nor clip; the same without local steps."""
    if parts.local is None:
        return parts
    config = dataclasses.replace(parts.config, weight_decay=0.0, clip_norm=0.0)
    return parts._replace(config=config, compressor=parts.local.method())


def as_exchanged(state: TrainState) -> TrainState:
    """The state as a method sees it that is exchanged in one fragment. The same without local steps."""
    return state._replace(compressor=state.compressor[0], opt_state=(), local=()) if state.local else state


def make_pseudo_gradients(parts: Parts, state: TrainState) -> Callable[[TrainState], Gradients]:
    """`state -> the pseudo-gradients of the coming exchange`, [K, ...], without loss and accuracy."""
    where = placements_of_state(state)
    on_all = jax.jit(on_nodes(difference, parts.nodes, (where.params, where.trained), where.trained))
    return lambda state: _of_grads(on_all(state.params, state.trained))


_of_grads: Callable[[PyTree], Any] = partial(Gradients, None, None, None)  # type: ignore[arg-type]
