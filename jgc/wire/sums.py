"""Sums and maxima of ranges of a vector, each split into parts: equal bits in every run.

A GPU adds up the values of a scatter by atomics, in any order: the sums differ by rounding from run
to run and from device to device. So there the values of a range are laid out in rows, and the rows
are reduced in one order.

A vector of 7 values, ranges of 3 and 4 values, two parts:

    x       [1  2  3] [4  5  6  7]
    part     0  1  0   1  1  0  0
    sums    [4, 2, 13, 9]             part by part of each range
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jgc.backend import backend, plain
from jgc.types import Array

AT_MOST = 2**16  # values that are added in sequence, about


def group_ids(counts: Sequence[int], part: Array | None = None, parts: int = 1) -> Array:
    """Number of the sum that each value belongs to: `parts` times its range, plus its part; i32[n].

    `counts` are the values of each range, static; `part` is i32[n], in [0, parts).

    Example:
      >>> group_ids((1, 2), jnp.array([1, 0, 1]), 2)
      Array([1, 2, 3], dtype=int32)
    """
    ids = jnp.asarray(np.repeat(np.arange(0, parts * len(counts), parts, dtype=np.int32), counts))
    return ids if part is None else ids + part


def range_sums(x: Array, counts: Sequence[int], part: Array | None = None, parts: int = 1) -> Array:
    """The sum of each part of each range, f32[parts * ranges]; 0 for one without values.

    x is f32[n]; for the others see `group_ids`.

    Example:
      >>> range_sums(jnp.array([1.0, 2.0, 4.0]), (2, 0, 1))
      Array([3., 0., 4.], dtype=float32)
    """
    group, groups = group_ids(counts, part, parts), parts * len(counts)
    if plain():
        return jnp.zeros((groups,), x.dtype).at[group].add(x)
    if backend() == "gpu":
        return _in_rows(jnp.sum, 0.0, x, counts, part, parts)
    # XLA adds the values of a scatter one by one on CPU: in f32, 1 added to 2^24 is lost. So
    # a long vector adds into several sums for each group in turn, which are added in the end.
    rows = -(-x.size // AT_MOST) or 1
    if rows > 1:
        group = group * rows + jnp.arange(x.size, dtype=jnp.int32) % rows
    return jnp.sum(jax.ops.segment_sum(x, group, groups * rows).reshape(groups, rows), axis=1)


def range_maxima(
    x: Array, counts: Sequence[int], part: Array | None = None, parts: int = 1
) -> Array:
    """The maximum of each part of each range, f32[parts * ranges]; -inf without values.

    Example:
      >>> range_maxima(jnp.array([1.0, 2.0, 4.0]), (3,), jnp.array([0, 0, 1]), 2)
      Array([2., 4.], dtype=float32)
    """
    group, groups = group_ids(counts, part, parts), parts * len(counts)
    if plain():
        return jnp.full((groups,), -jnp.inf, x.dtype).at[group].max(x)
    if backend() == "gpu":
        return _in_rows(jnp.max, -np.inf, x, counts, part, parts)
    return jax.ops.segment_max(x, group, groups, indices_are_sorted=part is None)


def _in_rows(
    reduce: Callable[[Array, int], Array], nothing: float,
    x: Array, counts: Sequence[int], part: Array | None, parts: int,
) -> Array:  # fmt: skip
    """Cut each range into blocks, reduce these as rows, and then the blocks of each range.

    Blocks have about as many values as the longest range has blocks, so both steps add few values.
    """
    sizes = np.array(counts, np.int32)
    if not sizes.sum():
        return jnp.full((parts * sizes.size,), nothing, x.dtype)
    if part is not None:
        x = jnp.where(part == np.arange(parts, dtype=np.int32)[:, None], x, nothing)  # [parts, n]
    width = 1 << (int(sizes.max() - 1).bit_length() + 1) // 2
    blocks = -(-sizes // width)
    first = np.cumsum(blocks) - blocks  # the first block of each range
    # values of its range before each block, and from its start on
    before = width * (np.arange(blocks.sum()) - np.repeat(first, blocks))
    left = np.repeat(sizes, blocks) - before
    starts = np.repeat(np.cumsum(sizes) - sizes, blocks) + before
    of_blocks = reduce(_rows(x, starts, left, width, nothing), -1)
    return reduce(_rows(of_blocks, first, blocks, blocks.max(), nothing), -1).T.reshape(-1)


def _rows(x: Array, starts: np.ndarray, sizes: np.ndarray, width: int, nothing: float) -> Array:
    """Ranges of the last axis as rows [..., ranges, width], shorter ones filled with `nothing`."""
    column = jnp.arange(width, dtype=jnp.int32)
    at = jnp.minimum(starts.astype(np.int32)[:, None] + column, x.shape[-1] - 1)
    values = x.at[..., at].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.where(column < sizes.astype(np.int32)[:, None], values, nothing)
