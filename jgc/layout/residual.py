"""The contract of a node's memory: functions of vectors that turn residual and gradient into v.

`jgc.method.memory` has the memories; `jgc.layout.vector` and `jgc.layout.by_layer` run them on a
tree of gradients. Every step calls these functions in this order, and none communicates:

    local = accumulated(memory, local, g, ...)     add the gradient g f32[n] to the state
    v, local = compensate(local, g, complete)      v f32[n]: gradient plus residual
    local = update(local, v, sent, complete)       the residual becomes v - sent
    local = stored(key, local, before)             in the dtypes in which the state is kept

`complete` is True in a phase that sends all of v (an uncompressed warm-up).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc.selection.entries import Sparse, added
from jgc.types import Array, Key, PyTree
from jgc.wire.noise import to_bfloat16


class Memory(NamedTuple):
    """A node's memory.

    Attributes:
      init: `n -> local`, zeros.
      accumulate: functions `(local, g, complete) -> local`, elementwise; each runs on all values
        before the next. g is f32[n] or a range of it; local is then the same range of the state.
        A function changes one vector of the state.
      compensate: `(local, g, complete) -> (v, local)`, elementwise; takes the state after the last
        of `accumulate`.
      update: `(local, v, sent, complete) -> local`, in f32; takes the state that `compensate`
        returned. `sent`, f32[n] or Sparse, is the part of v that counts as sent.
      residual: `local -> [n] or None`, the residual in its own dtype.
      owns_momentum: whether this memory holds the momentum; the optimiser must then have none.
      conserves: whether mean over nodes of (residual after + sent) = mean of (residual before +
        gradient). With momentum correction, the velocity replaces the gradient.
      advance: `local -> local`, elementwise, after the last of `accumulate`, without the gradient;
        None for nothing.
    """

    init: Callable[[int], PyTree]
    accumulate: tuple[Callable[[PyTree, Array, bool], PyTree], ...]
    compensate: Callable[[PyTree, Array, bool], tuple[Array, PyTree]]
    update: Callable[[PyTree, Array, Array | Sparse, bool], PyTree]
    residual: Callable[[PyTree], Array | None]
    owns_momentum: bool
    conserves: bool
    advance: Callable[[PyTree], PyTree] | None = None


def accumulated(memory: Memory, local: PyTree, g: Array, complete: bool) -> PyTree:
    """The state after all functions of `memory.accumulate`, and `memory.advance`."""
    for add in memory.accumulate:
        local = add(local, g, complete)
    return local if memory.advance is None else memory.advance(local)


def has_residual(memory: Memory) -> bool:
    """Whether a memory has a residual. Makes a state of one value."""
    return memory.residual(memory.init(1)) is not None


def subtract(v: Array, sent: Array | Sparse) -> Array:
    """v - sent, f32[n]."""
    if isinstance(sent, Sparse):
        return added(v, sent._replace(values=-sent.values))
    return v - sent


def unless(skip: Array | bool, old: PyTree, new: PyTree) -> PyTree:
    """The tree `new`, but `old` if `skip`. Leaves that are the same in both are not selected."""
    with jax.numpy_dtype_promotion("standard"):  # a residual stored in bf16 is f32 in a step
        return jax.tree.map(lambda a, b: b if b is a else jnp.where(skip, a, b), old, new)


def stored(key: Key, new: PyTree, before: PyTree) -> PyTree:
    """A state that `update` returned, in the dtypes of the state before. To bfloat16 it is rounded
    up or down at random, so that the mean over draws is the exact value.

    To the nearest, each gradient below 1/512 of its residual would be lost: at 0.1 %, up to half
    of a steady one.

    Args:
      key: this node's and this step's.
      new: the state, vectors in f32.
      before: a state of the same structure.
    """
    leaves, treedef = jax.tree.flatten(new)
    dtypes = [x.dtype for x in jax.tree.leaves(before)]
    rounds = [
        x.dtype == jnp.float32 and dtype == jnp.bfloat16
        for x, dtype in zip(leaves, dtypes, strict=True)
    ]
    if not any(rounds):
        return new
    keys = jax.random.split(key, len(leaves))
    out = [to_bfloat16(keys[i], x) if rounds[i] else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, out)
