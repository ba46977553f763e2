"""Run a tree of gradients through a node's memory to get v, the vector to send, without extra copies."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jgc.backend import backend
from jgc.layout.opaque import dynamic_part, hidden, sealed, with_part
from jgc.layout.pack import Packing, joined, pieces
from jgc.layout.tiles import cut
from jgc.method.memory import Memory
from jgc.types import Array, PyTree


class Begun(NamedTuple):
    """A node's step before anything is sent.

    Attributes:
      filled: v, and the zeros behind it that the memory's vectors have (`jgc.layout.tiles`).
      memory: the memory's state, in vectors of that length.
      packing: the layout of the gradients.
    """

    filled: Array
    memory: PyTree
    packing: Packing

    @property
    def v(self) -> Array:
        """v f32[n]."""
        return cut(self.filled, self.packing.size)


def compensate(
    memory: Memory, local: PyTree, grads: PyTree, packing: Packing, complete: bool, skip: Array | bool = False
) -> tuple[Array, PyTree]:
    """Run `memory.accumulate`, `advance` and `compensate` on a tree of gradients; return v f32[n] and the new state.

    Args:
      memory: the node's memory.
      local: its state, of vectors [n], or longer ones that end in zeros; v is then as long.
      grads: the node's gradients.
      packing: their layout.
      complete: whether the phase sends all of v.
      skip: if true, v is the residual (zeros without one) and `local` does not change.
    """
    vectors = jax.tree.leaves(local)
    behind = vectors[0].size - packing.size if vectors else 0
    zeros = [(slice(packing.size, packing.size + behind), jnp.zeros((behind,), jnp.float32))] if behind else []

    def parts() -> list[tuple[slice, Array]]:
        return pieces(grads, packing) + zeros

    # Leaf by leaf, so that no vector of all gradients is allocated.
    for add in memory.accumulate if packing.size else ():
        local = _added(lambda local, g, add=add: add(local, g, complete), local, parts(), jnp.asarray(skip))
    if memory.advance is not None and packing.size:
        local = sealed(unless(skip, local, memory.advance(local)), jnp.asarray(skip))
    v, new = memory.compensate(local, joined(parts()), complete)
    residual, vectors = memory.residual(local), jax.tree.leaves(local)
    if residual is None and vectors and packing.size and all(v is not x for x in vectors):
        v = _new_vector(memory, local, parts(), complete, jnp.asarray(skip))
    else:
        v = unless(skip, jnp.zeros_like(v) if residual is None else residual, v)
    return v, unless(skip, local, new)


def unless(skip: Array | bool, old: PyTree, new: PyTree) -> PyTree:
    """The tree `new`, but `old` if `skip`. Leaves that are the same in both are not selected."""
    with jax.numpy_dtype_promotion("standard"):  # a residual kept in bf16 is f32 in a step
        return jax.tree.map(lambda a, b: b if b is a else jnp.where(skip, a, b), old, new)


def _new_vector(
    memory: Memory, local: PyTree, parts: Sequence[tuple[slice, Array]], complete: bool, skip: Array
) -> Array:
    """v f32[n] of a memory that has no vector to hold it, written range by range; zeros if `skip`."""

    def write(both, g):
        local, _ = both
        return local, memory.compensate(local, g, complete)[0]

    return _added(write, (local, jnp.zeros_like(parts[0][1], shape=parts[-1][0].stop)), parts, skip)[1]


def _added(add: Callable, local: PyTree, parts: Sequence[tuple[slice, Array]], skip: Array) -> PyTree:
    """`add(local, g)` on every range of the state's vectors; each range keeps its old values if `skip`."""

    def of_range(old: PyTree, g: Array, skip: Array) -> PyTree:
        return unless(skip, old, add(old, g))

    after = jax.eval_shape(add, jax.tree.map(lambda x: x[parts[0][0]], local), parts[0][1])
    same = all(a.dtype == b.dtype for a, b in zip(jax.tree.leaves(local), jax.tree.leaves(after), strict=True))
    if backend() == "cpu" and same:
        # In place, range by range: on CPU, allocating the state anew in every step costs more than the additions.
        local = lax.optimization_barrier(local)  # without it XLA fuses a reshape with the first write and copies local
        # with starts that XLA knows, it goes through all n values, and compiles every range by itself
        for start, (_, g) in zip(hidden([at.start for at, _ in parts], skip), parts, strict=True):
            local = _per_emulated_node(partial(_write_range, of_range))(local, g, skip, start)
        return sealed(local, skip)
    # Elsewhere XLA joins the gradients while it adds them. Cutting the state into ranges costs a TPU two more passes.
    return of_range(local, joined(parts), skip)


def _write_range(of_range: Callable, local: PyTree, g: Array, skip: Array, at: Array) -> PyTree:
    """local [..., n] with its range [..., m] from `at` on replaced by `of_range` of that range."""
    old = jax.tree.map(lambda x: dynamic_part(x, at, g.shape[-1]), local)

    def written(x, before, after):
        return x if after is before else with_part(x, after, at)

    return jax.tree.map(written, local, old, of_range(old, g, skip[..., None]))


def _per_emulated_node(fn: Callable) -> Callable:
    """Keep `fn(local, g, skip, at)`, which works on the last axis, unbatched under `vmap`.

    A batched write would be a slow scatter. `at` is the same on all nodes.
    """

    def batched(size, is_batched, *args):
        *own, at = args
        own = jax.tree.map(lambda x, is_own: x if is_own else jnp.broadcast_to(x, (size, *x.shape)), tuple(own),
                           tuple(is_batched[:-1]))  # fmt: skip
        assert not is_batched[-1], "a range starts at the same place on all nodes"
        out = fn(*own, at)
        return out, jax.tree.map(lambda _: True, out)

    call = custom_vmap(fn)
    call.def_vmap(batched)
    return call
