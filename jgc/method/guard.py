"""The guard before every method: no NaN or Inf enters a memory, and all nodes take the same decision."""

from collections.abc import Hashable

import chex
import jax
import jax.numpy as jnp

from jgc import comm
from jgc.method.physical import physical
from jgc.types import Array, Compressor, Info, Key, Nodes, PyTree, State

Result = tuple[PyTree, State, Info]  # of a step: the aggregate, the state after it, its figures


def _has_non_finite(tree: PyTree) -> Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    return jnp.any(jnp.stack([not_finite(x) for x in leaves])) if leaves else jnp.bool_(False)


def not_finite(x: Array) -> Array:
    """Whether NaN or Inf is among some floats, bool[].

    A sum, for NaN goes through it on every device; XLA's maximum on CPU loses NaN where 4,096 values or more are
    compared as vectors. It takes the time of one read, `all(isfinite)` half as much again on CPU.

    Example:
      >>> [bool(not_finite(jnp.array([1.0, last]))) for last in (3e38, jnp.nan, -jnp.inf)]
      [False, True, True]
    """
    return ~jnp.isfinite(jnp.sum(0 * x))


def guard(core: Compressor) -> Compressor:
    """The same method, which skips a step on all nodes if any node's gradient is not finite.

    A skipped step aggregates to zeros, leaves the state as it was and has an `Info` of zeros. The flag is one i32
    all-reduce, kind "flag". Where a node has several devices, their plain mean comes first.

    Args:
      core: the method. Unless it `skips`, nothing but the end of the step waits for the flag: the method may see what
        is not finite, and what it makes of that is thrown away.
    """

    def aggregate(phase, key, grads, state, nodes):
        grads = comm.exact_mean(grads, nodes)
        skip = comm.any_true(_has_non_finite(grads), nodes)
        aggregated, new, info = aggregate_unless(skip, core, phase, key, grads, state, nodes)
        chex.assert_trees_all_equal_shapes_and_dtypes(aggregated, grads)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        info = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), info)
        return aggregated, new, info._replace(finite=~skip)

    def wire(phase, shapes, nodes):  # the core says what is sent logically, the traced step what physically
        return core.wire(phase, shapes, nodes)._replace(physical=physical(guarded, phase, shapes, nodes))

    guarded = core._replace(aggregate=aggregate, wire=wire, core=core, skips=False)
    return guarded


def aggregate_unless(
    skip: Array | bool, core: Compressor, phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes
) -> Result:
    """A core's step, or zeros and the state before it."""
    if core.skips:
        return core.aggregate(phase, key, grads, state, nodes, skip)
    aggregated, after, info = core.aggregate(phase, key, grads, state, nodes)
    aggregated = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), aggregated)
    return aggregated, jax.tree.map(lambda a, b: jnp.where(skip, a, b), state, after), info
