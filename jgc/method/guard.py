"""The guard around every method: no NaN, Inf or absurdly large gradient enters a memory; all nodes decide alike."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.backend import traced_for
from jgc.checks.misuse import check_compressor, check_nodes
from jgc.comm.jaxprs import all_sent
from jgc.layout.launches import readable
from jgc.layout.pack import leaf_paths
from jgc.layout.squares import squared_norm
from jgc.method import shards
from jgc.method.memory import clip_local
from jgc.method.messages import added, scaled
from jgc.method.shards import first_state, join, joined, key_of, placed, shards_of, split, states_of, sum_of
from jgc.method.signature import check_state
from jgc.method.whole_step import checked_shards, step_of_shapes
from jgc.nodes.placement import ByShards
from jgc.types import (
    Array,
    Compressor,
    Info,
    Init,
    Key,
    Message,
    NextPhase,
    Nodes,
    Phase,
    PyTree,
    State,
    Transition,
    Wire,
)

# Methods square gradients, add them up over nodes and steps, and some square those sums: all of it must fit into f32.
LARGEST_NORM = 1e15


def _not_divided(*args: Any) -> Any:
    raise TypeError("per_layer combines whole methods: its core has no `begin` and `finish`")


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
      check: raises ValueError if the method does not fit the parameters; None for a method that fits all.
      has_residual: whether a node keeps what it has not sent; a function, since asking makes an array.
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
    begin: Callable[..., Any] = _not_divided
    finish: Callable[..., tuple[PyTree, State, Info]] = _not_divided
    stages: dict[Hashable, Any] | None = None
    clip_norm: float = 0.0
    check: Callable[[PyTree], None] | None = None
    has_residual: Callable[[], bool] = lambda: False


def guarded(core: Core) -> Compressor:
    """The compressor of a core. If any node's gradient is not usable, all nodes skip the step.

    Not usable are NaN, Inf, and a norm of `LARGEST_NORM` and more.

    A skipped step returns an aggregate of zeros, the unchanged state and an `Info` of zeros. The flag costs one i32
    all-reduce, field "flag". Where devices of a node hold whole gradients, these are averaged first; where they divide
    the gradients, each compresses its own shards (`jgc.method.shards`).
    """

    def init(key, params, nodes):
        check_nodes(nodes)
        divided = checked_shards(core, params, nodes)
        if divided is None:
            return core.init(key, params, nodes)
        return placed(partial(first_state, core.init, key, divided, nodes), nodes)

    def aggregate(phase, key, grads, state, nodes):
        check_phase(core, phase)
        _check_own(grads, nodes)
        if isinstance(state.shared, ByShards):
            return _by_shards(core, phase, key, grads, state, nodes)
        grads = comm.exact_mean(grads, nodes)
        skip = _unusable_anywhere(grads, nodes)
        return _checked(core, phase, key, _clipped(core, grads, nodes), state, nodes, skip)

    def transition(old, new, state, nodes):
        check_phase(core, old)
        check_phase(core, new)
        if not isinstance(state.shared, ByShards):
            return core.transition(old, new, state, nodes)
        after = [core.transition(old, new, one, nodes) for one in states_of(state)]
        return joined(after, state.shared.axes, state.shared.group_of)

    def wire(phase, shapes, nodes):
        check_phase(core, phase)
        step, arguments = step_of_shapes(compressor, phase, shapes, nodes)
        with comm.ledger() as sent:  # from the collectives that tracing a step calls
            traced = jax.make_jaxpr(step)(*arguments)
        return logical(compressor, phase, shapes, nodes)._replace(physical=all_sent(sent, traced, nodes))

    compressor = Compressor(init, aggregate, transition, wire, core.schedule, core.owns_momentum, core.next_phase, core)
    return compressor


def check_phase(core: Core, phase: Any) -> None:
    """Raise TypeError for a `Phase` in place of its value, ValueError for one that is not of the schedule."""
    if isinstance(phase, Phase):
        raise TypeError(f"phase must be the value of a phase, got a Phase: give phase.value, {phase.value!r}")
    values = [own.value for own in core.schedule]
    if core.next_phase is None and phase not in values:
        raise ValueError(f"phase must be one of {', '.join(map(repr, values))}, got {phase!r}")


def _check_own(grads: PyTree, nodes: Nodes) -> None:
    """Raise ValueError for gradients that are equal on all nodes. With nodes that share a device nothing shows it."""
    floats = [x for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if floats and nodes.slow and not any(set(nodes.slow) & set(jax.typeof(x).mat.varying) for x in floats):
        comm.node_index(nodes)  # raises outside the node axis
        raise ValueError(
            "the gradients are equal on all nodes, so nothing is left to compress. Are they a mean that a compressor "
            "made? Or of jax.grad inside jgc.on_nodes, which for parameters that nodes share gives the sum over nodes: "
            "take them by jgc.node_grads, or with respect to jgc.comm.vary(params, nodes)"
        )


def _unusable_anywhere(grads: PyTree, nodes: Nodes) -> Array:
    """Whether any node's gradient is unusable, bool[], equal on all nodes. One all-reduce of an i32."""
    floats = [x for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    return readable(comm.any_true(unusable(floats), nodes))


def _checked(
    core: Core, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes, skip: Array
) -> tuple[PyTree, State, Info]:
    """`core.aggregate`, with results of the shapes and dtypes that went in, and an `Info` of zeros if `skip`."""
    import chex  # here: `import jgc` must not wait for it

    check_state(core.init, grads, state, nodes)
    aggregated, new, info = core.aggregate(phase, key, grads, state, nodes, skip)
    chex.assert_trees_all_equal_shapes_and_dtypes(aggregated, grads)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    info = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), info)
    return aggregated, new, info._replace(finite=~skip)


def _by_shards(
    core: Core, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes
) -> tuple[PyTree, State, Info]:
    """A step on one device's shards, group by group. All devices of all nodes take the same decision to skip it."""
    axes, group_of = state.shared.axes, state.shared.group_of
    if len(group_of) != len(jax.tree.leaves(grads)):
        found = ", ".join(leaf_paths(grads))
        raise ValueError(
            f"the gradients have {len(jax.tree.leaves(grads))} leaves ({found}), and the parameters had "
            f"{len(group_of)} at init"
        )
    groups = split(leaf_paths(grads), jax.tree.leaves(grads), group_of, len(axes))
    groups = _means_inside(groups, axes, nodes)
    skip = _unusable_anywhere(groups, nodes)
    groups = _clipped(core, groups, nodes)
    results = [
        _checked(core, phase, key_of(key, i, axes[i]), group, one, nodes, skip)
        for i, (group, one) in enumerate(zip(groups, states_of(state), strict=True))
    ]
    aggregated, states, infos = zip(*results, strict=True)
    return join(aggregated, grads), joined(states, axes, group_of), sum_of(infos, axes, nodes)


def _means_inside(groups: Sequence[PyTree], axes: Sequence[tuple[str, ...]], nodes: Nodes) -> list[PyTree]:
    """Each group's means over the fast axes of a node that do not divide its leaves."""
    others = [nodes._replace(fast=tuple(axis for axis in nodes.fast if axis not in own)) for own in axes]
    return [comm.exact_mean(group, along) for group, along in zip(groups, others, strict=True)]


def diagnose(
    compressor: Compressor, phase: Hashable, key: Array, grads: PyTree, state: State, nodes: Nodes
) -> dict[str, Array]:
    """Compare the aggregate of a step with the true mean over the nodes.

    Call it inside the node axis. It runs a step of its own and sends whole gradients, so `aggregate` never calls it.

    Args:
      compressor: any of `jgc.compress`.
      phase, key, grads, state, nodes: see `Aggregate`.

    Returns:
      f32[] each: `reconstruction_cosine` and `relative_error` against the mean over nodes of v, gradient plus residual;
      `true_cosine` against the mean of the gradients. Also the method's own diagnostics, of sparse methods `positions`,
      i32[mu]. Where devices of a node divide the gradients: the mean over these devices, for their shards in the
      largest group of leaves.

    Raises:
      TypeError: something else in place of a compressor, or a `Phase` in place of its value.
      ValueError: a phase that the method does not have.
    """
    check_compressor(compressor)
    core: Core = compressor.core
    check_phase(core, phase)
    if not isinstance(state.shared, ByShards):
        grads = comm.exact_mean(grads, nodes)  # as `aggregate` does where devices of a node hold whole gradients
        return core.diagnose(phase, key, _clipped(core, grads, nodes), state, nodes)
    axes = state.shared.axes
    groups = split(leaf_paths(grads), jax.tree.leaves(grads), state.shared.group_of, len(axes))
    groups = _means_inside(groups, axes, nodes)
    i = max(range(len(axes)), key=lambda i: sum(x.size for x in groups[i].values()))
    own = _clipped(core, groups, nodes)[i]
    found = core.diagnose(phase, key_of(key, i, axes[i]), own, states_of(state)[i], nodes)
    scalars = {name: x for name, x in found.items() if x.ndim == 0}
    size = nodes.size(axes[i])
    return {name: comm.sum_inside(x, axes[i], nodes, "diagnose") / size for name, x in scalars.items()}


def residual(compressor: Compressor, local: PyTree, shapes: PyTree) -> dict[str, Array]:
    """A node's residual by parameter.

    Args:
      compressor: any of `jgc.compress`.
      local: `state.local` of one node, without the node axis.
      shapes: a tree like the parameters; the parameters themselves where devices of a node divide them.

    Returns:
      The residual by parameter path, with the parameter's shape and dtype. Parameters without one are left out.

    Raises:
      TypeError: something else in place of a compressor.
      ValueError: `state.local` of all nodes, with their axis.
    """
    check_compressor(compressor)
    core: Core = compressor.core

    def of_one(local, shapes, devices=0):  # `devices`: further axes in front, of devices that each have their own
        own = jax.eval_shape(lambda: core.init(jax.random.key(0), shapes, Nodes(1, 1)).local)  # with a node axis
        pairs = zip(jax.tree.leaves(local), jax.tree.leaves(own), strict=False)
        if any(x.ndim - devices >= one.ndim for x, one in pairs):
            raise ValueError("local has the node axis: give one node's, jax.tree.map(lambda x: x[i], state.local)")
        return partial(core.residual, shapes=shapes)

    if not isinstance(local, ByShards):
        return of_one(local, shapes)(local)
    return shards.residual(of_one, local, shapes)


def logical(compressor: Compressor, phase: Hashable, shapes: PyTree, nodes: Nodes) -> Wire:
    """`compressor.wire` without the physical bytes, which would need a trace of the whole step."""
    divided = shards_of(shapes, nodes)
    with traced_for(nodes):  # codes fill their last word as the kind of device needs it
        groups = [shapes] if divided is None else divided.groups
        each = [compressor.core.messages(phase, group, nodes) for group in groups]
    if divided is None:
        return Wire(each[0][0], (), each[0][1], nodes.size(nodes.fast))
    sizes = [nodes.size(axes) for axes in divided.axes]  # messages of a node, from all of its devices
    step, once = (added([scaled(m, n) for m, n in zip(ms, sizes, strict=True)]) for ms in zip(*each, strict=True))
    return Wire(step, (), once, nodes.size(nodes.fast))


def unusable(arrays: Sequence[Array]) -> Array:
    """Whether the arrays hold NaN or Inf, or have a norm of `LARGEST_NORM` and more together, bool[].

    Example:
      >>> [bool(unusable([jnp.array([1.0, last])])) for last in (-1e14, 2e15, 3e38, jnp.nan, -jnp.inf)]
      [False, True, True, True, True]
    """
    # One pass, as long as that of a plain sum. A square that overflows is Inf, and NaN goes through the sum.
    squares = squared_norm([x.astype(comm.at_least_f32(x.dtype)) for x in arrays])
    return ~(squares < LARGEST_NORM**2)  # not `>=`, which is false for NaN


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
    return clip_local(grads, core.clip_norm, nodes) if core.clip_norm else grads
