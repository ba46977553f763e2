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

    A skipped step aggregates to zeros, leaves the state as it was and has `Info.finite` False. The flag is one
    i32 all-reduce, kind "flag". Where a node has several devices, their plain mean comes first.
    """

    def aggregate(phase, key, grads, state, nodes):
        grads = comm.exact_mean(grads, nodes)
        skip = comm.any_true(_has_non_finite(grads), nodes)

        def choose(if_skipped, otherwise):
            return jax.tree.map(lambda a, b: jnp.where(skip, a, b), if_skipped, otherwise)

        zeros = jax.tree.map(jnp.zeros_like, grads)
        aggregated, new, info = core.aggregate(phase, key, choose(zeros, grads), state, nodes)
        chex.assert_trees_all_equal_shapes_and_dtypes(aggregated, grads)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        aggregated = jax.tree.map(lambda x: jnp.where(skip, jnp.zeros_like(x), x), aggregated)
        return aggregated, choose(state, new), info._replace(finite=~skip)

    def wire(phase, shapes, nodes):  # the core says what is sent logically, the traced step what physically
        return core.wire(phase, shapes, nodes)._replace(physical=physical(guarded, phase, shapes, nodes))

    guarded = core._replace(aggregate=aggregate, wire=wire, core=core)
    return guarded
