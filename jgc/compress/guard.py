"""The guard before every method: no NaN or Inf enters a memory, and all nodes take the same decision."""

import chex
import jax
import jax.numpy as jnp

from jgc import comm
from jgc.compress._wire import physical
from jgc.types import Array, Compressor, PyTree


def _has_non_finite(tree: PyTree) -> Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.any(jnp.stack([~jnp.all(jnp.isfinite(x)) for x in leaves])) if leaves else jnp.bool_(False)


def guard(core: Compressor) -> Compressor:
    """The same method, which skips a step on all nodes if any node's gradient is not finite.

    A skipped step aggregates to zeros, leaves the state as it was and has an `Info` of zeros. The flag is one i32
    all-reduce, kind "flag", for which nothing but the end of the step waits: a method may see what is not finite, and
    what it makes of that is thrown away. Where a node has several devices, their plain mean comes first.
    """

    def aggregate(phase, key, grads, state, nodes):
        grads = comm.exact_mean(grads, nodes)
        skip = comm.any_true(_has_non_finite(grads), nodes)
        aggregated, new, info = core.aggregate(phase, key, grads, state, nodes)
        chex.assert_trees_all_equal_shapes_and_dtypes(aggregated, grads)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        aggregated, info = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), (aggregated, info))
        new = jax.tree.map(lambda before, after: jnp.where(skip, before, after), state, new)
        return aggregated, new, info._replace(finite=~skip)

    def wire(phase, shapes, nodes):  # the core says what is sent logically, the traced step what physically
        return core.wire(phase, shapes, nodes)._replace(physical=physical(guarded, phase, shapes, nodes))

    guarded = core._replace(aggregate=aggregate, wire=wire, core=core)
    return guarded
