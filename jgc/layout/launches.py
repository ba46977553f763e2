"""Fewer kernels on a GPU, where a launch takes 2 to 5 microseconds, as long as a read of 2 million values.

On other backends these functions do nothing else than a loop over the arrays would.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jgc.backend import backend
from jgc.layout.batches import in_batches
from jgc.types import Array, PyTree

_MOST_TURNS = 16  # of a loop without a loop: each is compiled by itself


def bucket_bytes() -> int:
    """The bytes from which an array has an all-reduce by itself; smaller ones are joined until they have as many.

    XLA on GPU joins all-reduces up to about 32 MB anyway, but so late that every array then has a kernel of its slice.
    """
    return 2**25 if backend() == "gpu" else 2**20


def readable(flag: Array) -> Array:
    """The flag, bool[]; on GPU read from an array in memory.

    XLA on GPU joins operations on arrays of equal size into one kernel if they read a common array; a scalar does not
    count. So `where(flag, 0, x)` of the 51 leaves of a transformer takes 6 kernels, not 50.
    """
    return lax.optimization_barrier(jnp.broadcast_to(flag, (2,)))[0] if backend() == "gpu" else flag


def stacked(arrays: Sequence[Array]) -> list[Array]:
    """The arrays, on GPU as parts of stacks in memory, one for each shape.

    Operations on parts of one stack become one kernel. And if the stack was computed from donated arrays, results of
    their shapes are written into their memory; a kernel that reads several of them and replaces them needs copies.
    """
    if backend() != "gpu":
        return list(arrays)
    batches = in_batches(arrays)
    in_memory = lax.optimization_barrier(batches.arrays)
    return [in_memory[b][i] for b, i in batches.places]


def each_of(fn: Callable[..., Array], *lists: Sequence[Array]) -> list[Array]:
    """fn of the first arrays of all lists, of the second ones, and so on; on GPU `vmap` over those of equal shapes.

    Example:
      >>> each_of(jnp.dot, [jnp.ones(3), jnp.ones(2)], [jnp.ones(3), jnp.ones(2)])
      [Array(3., dtype=float32), Array(2., dtype=float32)]
    """
    rows = list(zip(*lists, strict=True))
    if backend() != "gpu":
        return [fn(*arrays) for arrays in rows]
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for i, arrays in enumerate(rows):
        alike.setdefault(tuple(x.shape for x in arrays), []).append(i)
    out: dict[int, Array] = {}
    for places in alike.values():
        stacks = [jnp.stack([values[i] for i in places]) for values in lists]
        out |= zip(places, jax.vmap(fn)(*stacks), strict=True)
    return [out[i] for i in range(len(rows))]


def turns(first: int, end: int, turn: Callable[[Any, PyTree], PyTree], x: PyTree) -> PyTree:
    """`lax.fori_loop`; on GPU few turns are written out, for XLA then fuses them and the host decides nothing."""
    if backend() != "gpu" or end - first > _MOST_TURNS:
        return lax.fori_loop(first, end, turn, x)
    for i in range(first, end):
        x = turn(i, x)
    return x
