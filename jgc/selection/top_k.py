"""Positions of the k largest magnitudes of ranges of a vector: exact, ties to the lower position.

`lax.top_k` runs all n values through a heap on CPU, and sorts them all on a GPU. The searches for
each device take two steps instead, each without sorting, in little more than one read:

1. Divide the range into blocks of b neighbouring values and keep the k blocks with the largest
   maxima. Ties between maxima go to the lower block. This is the only pass over all n values.
2. Keep the k largest of the k b values in these blocks. Ties go to the lower position.

The result is exact, ties included. Take a value x at position p in a block that was dropped. The
maximum of every kept block either exceeds x, or equals both x and the maximum of p's block. In the
second case the kept block is the lower one, so its maximum lies at a position below p. Hence k
values come before x, and x is not among the first k.

On CPUs short ranges are sorted, and long ones searched by `jgc.selection.top_k_cpu`.
"""

from collections.abc import Sequence
from itertools import groupby

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend, plain
from jgc.selection.ranges import Range, bits_of
from jgc.selection.top_k_cpu import block_of, largest_by_blocks
from jgc.selection.top_k_gpu import largest_on_gpu
from jgc.selection.top_k_tpu import largest_on_tpu
from jgc.types import Array

SHORT = 10_000  # values that `lax.top_k` sorts faster, by `python -m experiments select`


def largest_in_ranges(values: Array, ranges: Sequence[Range], blocks: bool = False) -> Array:
    """Positions of the k entries of largest magnitude of each range of a vector f32[n].

    They ascend in each range, range after range, i32[mu]; ties go to the lower position. NaN counts
    as larger than infinity; 0.0 and -0.0 are equal. Many ranges compile as fast as one. With
    `blocks`, short ranges are not sorted on CPU either: faster where k is a large part of them.

    Raises:
      ValueError: a k is not between 0 and its range's size, or a range is not within the values.

    Example:
      >>> v = jnp.array([1.0, -3.0, 0.0, 3.0, 3.0, 4.0])
      >>> largest_in_ranges(v, [Range(0, 4, 1), Range(4, 2, 1)])
      Array([1, 5], dtype=int32)
    """
    for start, size, k in ranges:
        if not 0 <= k <= size:
            raise ValueError(f"k must be between 0 and {size}, the number of values, got {k}")
        if start < 0 or start + size > values.size:
            raise ValueError(
                f"a range must lie within the {values.size} values, "
                f"got start {start} and size {size}")
    if plain():
        return largest_plain(values, ranges)
    if backend() == "gpu":
        return largest_on_gpu(values, ranges)
    if backend() == "tpu":
        # The barrier keeps XLA from computing the values twice, in two layouts.
        return largest_on_tpu(lax.optimization_barrier(values), ranges)
    return largest_on_cpu(values, ranges, blocks)


def largest_plain(values: Array, ranges: Sequence[Range]) -> Array:
    """The plain reference of `largest_in_ranges`."""
    parts = [jnp.zeros((0,), jnp.int32)]
    for start, size, k in ranges:
        # Integers: of floats XLA for GPU leaves NaN out if k <= 16.
        largest = lax.top_k(bits_of(values[start : start + size]), k)[1]
        parts.append(start + jnp.sort(largest))
    return jnp.concatenate(parts)


# --- on CPUs --------------------------------------------------------------------------------------


def largest_on_cpu(values: Array, ranges: Sequence[Range], blocks: bool) -> Array:
    """Positions of the k entries of largest magnitude of each range, range after range, i32[mu]."""
    ways = [
        "all" if k in (0, size) else "blocks" if blocks or size >= SHORT else "sort"
        for _, size, k in ranges
    ]
    long = [x for x, way in zip(ranges, ways, strict=True) if way == "blocks"]
    if long and not blocks:
        # A short range joins the long ones, unless their blocks would become smaller: that compiles
        # less.
        b = block_of(long)
        for i, x in enumerate(ranges):
            if ways[i] == "sort" and block_of([x]) >= b:
                ways[i] = "blocks"
    positions = {}
    for way in dict.fromkeys(ways):
        members = [x for x, other in zip(ranges, ways, strict=True) if other == way]
        positions[way] = _SEARCHES[way](values, members)
    # Back in the order of the ranges; neighbours that were searched together are cut as one.
    parts, at = [jnp.zeros((0,), jnp.int32)], dict.fromkeys(positions, 0)
    for way, group in groupby(zip(ranges, ways, strict=True), key=lambda pair: pair[1]):
        end = at[way] + sum(x.k for x, _ in group)
        parts.append(positions[way][at[way] : end])
        at[way] = end
    return jnp.concatenate(parts)


def all_of_ranges(values: Array, ranges: Sequence[Range]) -> Array:
    """Positions in ranges of which all values are taken, or none."""
    return jnp.concatenate([start + jnp.arange(k, dtype=jnp.int32) for start, _, k in ranges])


def largest_by_sorting(values: Array, ranges: Sequence[Range]) -> Array:
    """By `lax.top_k`, ranges of equal size in one batch."""
    positions: dict[int, Array] = {}
    for size, k in dict.fromkeys((x.size, x.k) for x in ranges):
        alike = [i for i, x in enumerate(ranges) if x[1:] == (size, k)]
        rows = jnp.stack([values[ranges[i].start : ranges[i].start + size] for i in alike])
        starts = np.array([[ranges[i].start] for i in alike], np.int32)
        largest = starts + jnp.sort(lax.top_k(jnp.abs(rows), k)[1], axis=1)
        positions |= dict(zip(alike, largest, strict=True))
    return jnp.concatenate([positions[i] for i in range(len(ranges))])


_SEARCHES = {"all": all_of_ranges, "sort": largest_by_sorting, "blocks": largest_by_blocks}
