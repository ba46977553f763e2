"""Arrays stacked by shape: a program grows with the shapes, not with the layers.

On a GPU a launch takes 2 to 5 microseconds, as long as a read of 2 million values: there operations
on arrays of one shape become one kernel.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jgc.backend import backend
from jgc.layout.pack import Layer, Layers
from jgc.types import Array, PyTree


class Batches(NamedTuple):
    """Arrays stacked by shape."""

    arrays: list[Array]  # [b, ...], one for each shape
    places: list[tuple[int, int]]  # each array's batch and its place there, in order. Static

    def each(self, numbers: Sequence[Array]) -> list[Array]:
        """The arrays in their order, cut out by `numbers` 0, 1, ..., see `hidden`."""

        def entry(batch, i):
            return lax.dynamic_slice_in_dim(batch, i, 1, allow_negative_indices=False)[0]

        return [entry(self.arrays[b], numbers[i]) for b, i in self.places]


def in_batches(arrays: Sequence[Array]) -> Batches:
    """Arrays of equal shape stacked, the shapes in order of their first array."""
    members: dict[tuple[int, ...], list[Array]] = {}
    places = []
    for x in arrays:
        batch = members.setdefault(x.shape, [])
        places.append((list(members).index(x.shape), len(batch)))
        batch.append(x)
    return Batches([jnp.stack(batch) for batch in members.values()], places)


def in_fewer(batches: Batches) -> Batches:
    """Arrays [b, rows, r] in fewer shapes, padded by up to a quarter of all rows; on GPU twice.

    Example:
      >>> batches = Batches([jnp.ones((1, 2, 3)), jnp.ones((9, 4, 3)), jnp.ones((9, 8, 3))], [(1,
      ...     0), (0, 0), (2, 0)])
      >>> fewer = in_fewer(batches)
      >>> [x.shape for x in fewer.arrays], fewer.places
      ([(9, 8, 3), (10, 4, 3)], [(1, 0), (1, 9), (0, 0)])
    """
    sizes = [x.shape[:2] for x in batches.arrays]
    total = sum(count * rows for count, rows in sizes)
    # a kernel's launch costs more than 100,000 zeros
    spare = 2 * total if backend() == "gpu" else total // 4
    joined: list[list[int]] = []  # batches of one height, that of the first, the tallest
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i][1]):
        count, rows = sizes[i]
        more = count * (sizes[joined[-1][0]][1] - rows) if joined else 0
        if joined and more <= spare:
            joined[-1].append(i)
            spare -= more
        else:
            joined.append([i])
    arrays: list[Array] = []
    moved: dict[int, tuple[int, int]] = {}  # each batch's new one and its place there
    for members in joined:
        height, start = sizes[members[0]][1], 0
        for i in members:
            moved[i] = len(arrays), start
            start += sizes[i][0]
        taller = [
            jnp.pad(batches.arrays[i], ((0, 0), (0, height - sizes[i][1]), (0, 0))) for i in members
        ]
        arrays.append(jnp.concatenate(taller))
    return Batches(arrays, [(moved[b][0], moved[b][1] + i) for b, i in batches.places])


def searched_together(layers: Layers, shape: Callable[[Layer], Hashable]) -> list[Layers]:
    """Layers of equal shape in one batch; on CPU a batch for each layer, which runs faster.

    Example:
      >>> layers = (Layer("a", 0, 4, (4,)), Layer("b", 4, 4, (4,)))
      >>> len(searched_together(layers, lambda layer: layer.shape))
      2
    """
    if backend() == "cpu":
        return [(layer,) for layer in layers]
    batches: dict[Hashable, list[Layer]] = {}
    for layer in layers:  # XLA for TPU takes two seconds to compile a search
        batches.setdefault(shape(layer), []).append(layer)
    return [tuple(batch) for batch in batches.values()]


_MOST_TURNS = 16  # of a loop without a loop: each is compiled by itself


def stacked(arrays: Sequence[Array]) -> list[Array]:
    """The arrays, on GPU as parts of stacks in memory, one for each shape.

    Operations on parts of one stack become one kernel. If the stack was computed from donated
    arrays, results of their shapes are written into their memory, without copies.
    """
    if backend() != "gpu":
        return list(arrays)
    batches = in_batches(arrays)
    in_memory = lax.optimization_barrier(batches.arrays)
    return [in_memory[b][i] for b, i in batches.places]


def each_of(fn: Callable[..., Array], *lists: Sequence[Array]) -> list[Array]:
    """fn of the first arrays of all lists, of the second ones, and so on; on GPU `vmap` by shape.

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
    """`lax.fori_loop`; on GPU few turns are unrolled, because XLA then fuses them."""
    if backend() != "gpu" or end - first > _MOST_TURNS:
        return lax.fori_loop(first, end, turn, x)
    for i in range(first, end):
        x = turn(i, x)
    return x
