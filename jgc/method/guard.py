"""The guard around every method: no NaN or Inf enters a memory, and all nodes take the same decision."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jgc import comm
from jgc.memory import clip_local
from jgc.nodes import on_nodes
from jgc.placement import LOCAL, SHARED
from jgc.types import (
    Array,
    Compressor,
    Info,
    Init,
    Message,
    NextPhase,
    Nodes,
    Phase,
    PyTree,
    State,
    Transition,
    Wire,
)


def _no_halves(*args: Any) -> Any:
    raise TypeError("a combination of methods has no step of its own to divide")


class Core(NamedTuple):
    """A method on some leaves without the guard: what `from_step` makes and `per_layer` combines. Private to jgc.

    Attributes:
      init, transition, schedule, owns_momentum, next_phase: as of `Compressor`.
      aggregate: `(phase, key, grads, state, nodes, skip) -> (aggregated, State, Info)`. If `skip`, a bool[] equal on
        all nodes, the aggregate is zeros and the state stays as it was.
      messages: `(phase, shapes, nodes) -> (messages of a step, messages on entering the phase)`.
      diagnose: see `jgc.diagnose`.
      residual: see `jgc.residual`.
      begin, finish: the two halves of `aggregate` around the step, which a combination does not have.
      stages: of what `compose` made, the codec and the exchange of every phase; `per_layer` shares exchanges.
      clip_norm: clip each node's whole gradient first; 0 for no clipping.
    """

    init: Init
    aggregate: Callable[..., tuple[PyTree, State, Info]]
    transition: Transition
    messages: Callable[[Any, PyTree, Nodes], tuple[tuple[Message, ...], tuple[Message, ...]]]
    schedule: tuple[Phase, ...]
    owns_momentum: bool
    next_phase: NextPhase | None
    diagnose: Callable[..., dict[str, Array]]
    residual: Callable[[PyTree, PyTree], dict[str, Array]]
    begin: Callable[..., Any] = _no_halves
    finish: Callable[..., tuple[PyTree, State, Info]] = _no_halves
    stages: dict[Hashable, Any] | None = None
    clip_norm: float = 0.0


def guarded(core: Core) -> Compressor:
    """The compressor of a core: it skips a step on all nodes if any node's gradient is not finite.

    A skipped step aggregates to zeros, leaves the state as it was and has an `Info` of zeros. The flag is one i32
    all-reduce, field "flag". Where a node has several devices, their plain mean comes first.
    """

    def aggregate(phase, key, grads, state, nodes):
        grads = comm.exact_mean(grads, nodes)
        floats = [x for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
        bad = jnp.any(jnp.stack([not_finite(x) for x in floats])) if floats else jnp.bool_(False)
        skip = comm.any_true(bad, nodes)
        aggregated, new, info = core.aggregate(phase, key, _clipped(core, grads, nodes), state, nodes, skip)
        chex.assert_trees_all_equal_shapes_and_dtypes(aggregated, grads)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        info = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), info)
        return aggregated, new, info._replace(finite=~skip)

    def wire(phase, shapes, nodes):
        key = jax.random.key(0)
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((nodes.count, *x.shape), x.dtype), shapes)
        state = jax.eval_shape(partial(core.init, nodes=nodes), key, params)
        with comm.ledger() as sent:  # from the collectives that tracing a step calls
            jax.eval_shape(step_on_nodes(aggregate, phase, nodes), key, grads, state)
        return logical(compressor, phase, shapes, nodes)._replace(physical=tuple(sent))

    compressor = Compressor(
        core.init, aggregate, core.transition, wire, core.schedule, core.owns_momentum, core.next_phase, core
    )
    return compressor


def diagnose(
    compressor: Compressor, phase: Hashable, key: Array, grads: PyTree, state: State, nodes: Nodes
) -> dict[str, Array]:
    """How good the aggregate of a step is, against the true mean over the nodes.

    A step of its own, inside the node axis, which moves whole gradients: never a part of `aggregate`.

    Args:
      compressor: any of `jgc.compress`.
      phase, key, grads, state, nodes: as of `Compressor.aggregate`.

    Returns:
      `reconstruction_cosine` and `relative_error`, against the mean of what the nodes were to send, and `true_cosine`,
      against the mean of their gradients, all f32[]; and figures of the method's own.
    """
    core: Core = compressor.core
    return core.diagnose(phase, key, _clipped(core, grads, nodes), state, nodes)


def residual(compressor: Compressor, local: PyTree, shapes: PyTree) -> dict[str, Array]:
    """A node's residual by parameter.

    Args:
      compressor: any of `jgc.compress`.
      local: `state.local` of one node, without the node axis.
      shapes: a tree like the parameters.

    Returns:
      For each parameter's path its residual, with the parameter's shape and dtype; nothing of those without one.
    """
    return compressor.core.residual(local, shapes)


def logical(compressor: Compressor, phase: Hashable, shapes: PyTree, nodes: Nodes) -> Wire:
    """`compressor.wire` without the physical bytes, for which a whole step has to be traced."""
    step, once = compressor.core.messages(phase, shapes, nodes)
    return Wire(step, (), once)


def step_on_nodes(aggregate: Callable, phase: Hashable, nodes: Nodes) -> Callable:
    """`aggregate` of whole arrays: (key, grads [K, ...], state) -> (aggregated, state, info [K])."""

    def one(key, grads, state):
        return aggregate(phase, key, grads, state, nodes)

    placement = State(SHARED, LOCAL)
    return on_nodes(one, nodes, ins=(SHARED, LOCAL, placement), outs=(SHARED, placement, LOCAL))


def not_finite(x: Array) -> Array:
    """Whether NaN or Inf is among some floats, bool[].

    Example:
      >>> [bool(not_finite(jnp.array([1.0, last]))) for last in (3e38, jnp.nan, -jnp.inf)]
      [False, True, True]
    """
    # A sum propagates NaN on every backend; XLA's maximum on CPU drops it where it compares 4,096 values or more as
    # vectors. It takes the time of one read; all(isfinite) takes half as much again on CPU.
    return ~jnp.isfinite(jnp.sum(0 * x))


def _clipped(core: Core, grads: PyTree, nodes: Nodes) -> PyTree:
    return clip_local(grads, core.clip_norm, nodes.count) if core.clip_norm else grads
