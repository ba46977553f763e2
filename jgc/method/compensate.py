"""From a tree of gradients to the vector v that a node is to send, through its memory and without copies."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jgc.layout.pack import Packing, pack, pieces
from jgc.memory import Memory
from jgc.types import Array, PyTree


def compensate(
    memory: Memory, local: PyTree, grads: PyTree, packing: Packing, complete: bool, skip: Array | bool = False
) -> tuple[Array, PyTree]:
    """`memory.accumulate` and `memory.compensate` of a tree of gradients: (v f32[n], local).

    Args:
      memory: the node's.
      local: its state.
      grads: the node's gradients.
      packing: their layout.
      complete: whether the phase sends all of v.
      skip: if it is true, v is the residual and `local` does not change. Without a state v is the gradient, as it is.
    """
    # leaf by leaf: the gradients never exist as a vector of their own

    def accumulate(local, g):
        return memory.accumulate(local, g, complete)

    local = _accumulated(accumulate, local, pieces(grads, packing), jnp.asarray(skip)) if packing.size else local
    v, new = memory.compensate(local, pack(grads, packing), complete)
    if not jax.tree.leaves(local):  # nothing is kept that a bad gradient could spoil
        return v, new
    residual = memory.residual(local)
    v = _unless(skip, jnp.zeros_like(v) if residual is None else residual, v)
    return v, jax.tree.map(partial(_unless, skip), local, new)


def _unless(skip: Array | bool, old: Array, new: Array) -> Array:
    return new if new is old else jnp.where(skip, old.astype(new.dtype), new)


def _accumulated(accumulate: Callable, local: PyTree, parts: Sequence[tuple[slice, Array]], skip: Array) -> PyTree:
    """`accumulate(local, g)` for every range of the vectors of local."""

    def of_range(old: PyTree, g: Array, skip: Array) -> PyTree:
        return jax.tree.map(partial(_unless, skip), old, accumulate(old, g))

    if not jax.tree.leaves(local):
        return local
    after = jax.eval_shape(accumulate, jax.tree.map(lambda x: x[parts[0][0]], local), parts[0][1])
    same = all(a.dtype == b.dtype for a, b in zip(jax.tree.leaves(local), jax.tree.leaves(after), strict=True))
    if jax.default_backend() == "cpu" and same:
        # Range after range in place: on CPU new memory in every step costs XLA more than the sums.
        local = lax.optimization_barrier(local)  # a reshape, fused with the first write, would make XLA copy it
        for at, g in parts:
            local = _per_emulated_node(partial(_write_range, of_range, at.start))(local, g, skip)
        return local
    leaves = [of_range(jax.tree.map(lambda x, at=at: x[at], local), g, skip) for at, g in parts]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *leaves)


def _write_range(of_range: Callable, start: int, local: PyTree, g: Array, skip: Array) -> PyTree:
    """local [..., n] with `of_range` of its range [..., m] from `start` on written over that range."""
    at = lax.optimization_barrier(jnp.int32(start))  # for a constant one XLA on CPU goes through all n values
    old = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, g.shape[-1], -1), local)

    def written(x, before, after):
        return x if after is before else lax.dynamic_update_slice_in_dim(x, after, at, -1)

    return jax.tree.map(written, local, old, of_range(old, g, skip[..., None]))


def _per_emulated_node(fn: Callable) -> Callable:
    """`fn`, which works along the last axis, unchanged under `vmap`: vmap would turn the write into a slow scatter."""

    def batched(size, is_batched, *args):
        args = jax.tree.map(lambda x, own: x if own else jnp.broadcast_to(x, (size, *x.shape)), args, tuple(is_batched))
        out = fn(*args)
        return out, jax.tree.map(lambda _: True, out)

    call = custom_vmap(fn)
    call.def_vmap(batched)
    return call
