"""The guard around every method: no NaN or Inf enters a memory, and all nodes take the same decision."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

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
    """A method without the guard: `from_step` makes one, `per_layer` combines several. Private to jgc.

    Attributes:
      init, transition, schedule, owns_momentum, next_phase: see `Compressor`.
      aggregate: `(phase, key, grads, state, nodes, skip) -> (aggregated, State, Info)`. If `skip`, a bool[] equal on
        all nodes, the aggregate is zeros and the state does not change.
      messages: `(phase, shapes, nodes) -> (messages of a step, messages on entering the phase)`.
      diagnose: see `jgc.diagnose`.
      residual: see `jgc.residual`.
      begin, finish: the parts of `aggregate` before and after the step; a combination has none.
      stages: codec and exchange of every phase, if `compose` made the method; lets `per_layer` share collectives.
      clip_norm: each node first clips its whole gradient to the norm clip_norm / sqrt(K); 0 for no clipping.
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
    """The compressor of a core. If any node's gradient is not finite, all nodes skip the step.

    A skipped step returns an aggregate of zeros, the unchanged state and an `Info` of zeros. The flag costs one i32
    all-reduce, field "flag". If a node has several devices, it first averages their gradients.
    """

    def aggregate(phase, key, grads, state, nodes):
        grads = comm.exact_mean(grads, nodes)
        floats = [x for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
        bad = any_not_finite(floats) if floats else jnp.bool_(False)
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
    """Compare the aggregate of a step with the true mean over the nodes.

    Call it inside the node axis. It runs a step of its own and sends whole gradients, so `aggregate` never calls it.

    Args:
      compressor: any of `jgc.compress`.
      phase, key, grads, state, nodes: see `Aggregate`.

    Returns:
      All f32[]: `reconstruction_cosine` and `relative_error` against the mean over nodes of v, gradient plus residual;
      `true_cosine` against the mean of the gradients. Also the method's own diagnostics.
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
      The residual by parameter path, with the parameter's shape and dtype. Parameters without one are left out.
    """
    return compressor.core.residual(local, shapes)


def logical(compressor: Compressor, phase: Hashable, shapes: PyTree, nodes: Nodes) -> Wire:
    """`compressor.wire` without the physical bytes, which would need a trace of the whole step."""
    step, once = compressor.core.messages(phase, shapes, nodes)
    return Wire(step, (), once)


def step_on_nodes(aggregate: Callable, phase: Hashable, nodes: Nodes) -> Callable:
    """`aggregate` on whole arrays: (key, grads [K, ...], state) -> (aggregated, state, info [K])."""

    def one(key, grads, state):
        return aggregate(phase, key, grads, state, nodes)

    placement = State(SHARED, LOCAL)
    return on_nodes(one, nodes, ins=(SHARED, LOCAL, placement), outs=(SHARED, placement, LOCAL))


def any_not_finite(arrays: Sequence[Array]) -> Array:
    """Whether any of the arrays holds NaN or Inf, bool[]. Emulated nodes get one answer for all of their device."""

    def any_bad(arrays):
        # Plain sums take a third of the time of `not_finite`. They can overflow, so a bad one is looked at again.
        wide = [jnp.promote_types(x.dtype, jnp.float32) for x in arrays]
        sums = jnp.stack([jnp.sum(x, dtype=of).astype(jnp.float32) for x, of in zip(arrays, wide, strict=True)])

        def look_again(arrays):
            return jnp.any(jnp.stack([not_finite(x) for x in arrays]))

        good = jnp.all(jnp.isfinite(sums))
        return lax.cond(good, lambda arrays: jnp.isnan(sums[0]), look_again, arrays)

    on_device = custom_vmap(any_bad)  # under a plain `vmap`, `cond` would always take both branches

    @on_device.def_vmap
    def _(size, batched, arrays):
        return any_bad(arrays), False

    return on_device(list(arrays))


def not_finite(x: Array) -> Array:
    """Whether x holds NaN or Inf, bool[].

    Example:
      >>> [bool(not_finite(jnp.array([1.0, last]))) for last in (3e38, jnp.nan, -jnp.inf)]
      [False, True, True]
    """
    # A sum propagates NaN on every backend; XLA's maximum on CPU drops it where it compares 4,096 values or more as
    # vectors. The sum takes as long as one read of x; all(isfinite) takes 1.5 times as long on CPU.
    return ~jnp.isfinite(jnp.sum(0 * x))


def _clipped(core: Core, grads: PyTree, nodes: Nodes) -> PyTree:
    return clip_local(grads, core.clip_norm, nodes.count) if core.clip_norm else grads
