"""The k largest values of each part of a vector, found by their threshold, without sorting.

Non-negative floats have the order of their bits, so `_kth_largest` finds the k-th largest bit by bit: it counts how
many values reach each candidate. `largest_of_parts` then marks all values above it, and the first of those that equal
it, in a bitmap; the positions of its ones are the result, in order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.types import Array
from jgc.wire.elias_fano import ones_of, running_sum

LANES = 8
GROUP = 32 * LANES  # values counted together; 32 is the longest axis that XLA unrolls on CPU
PADDING = -1  # below the bits of every magnitude


class Parts(NamedTuple):
    """Parts of a vector, one after the other, each of whole groups.

    Attributes:
      owner: the part of each group, i32[groups]; the last one's for padding behind it.
      starts: the first value of each part, i32[parts].
    """

    owner: Array
    starts: Array


def parts_of(sizes: Sequence[int] | np.ndarray, total: int | None = None) -> Parts:
    """The parts of these sizes, in a vector of `total` values, whole groups."""
    groups = np.array(sizes) // GROUP
    owner = np.repeat(np.arange(len(sizes), dtype=np.int32), groups)
    behind = 0 if total is None else total // GROUP - owner.size
    starts = (np.cumsum(sizes) - sizes).astype(np.int32)
    return Parts(jnp.asarray(np.pad(owner, (0, behind), mode="edge")), jnp.asarray(starts))


def whole_groups(size: int) -> int:
    return -(-size // GROUP) * GROUP


def largest_of_parts(bits: Array, parts: Parts, counts: Sequence[int]) -> Array:
    """Positions in `bits` of the k largest values of each part, ascending, ties to the first: i32[m] -> i32[mu].

    At least k values of a part must not be padding.
    """
    threshold = _kth_largest(bits, parts.owner, counts)
    rows = bits.reshape(-1, LANES, 32)
    least = _of_groups(threshold[:, None], parts.owner)[:, :, None]
    above, equal = bitmap(rows > least), bitmap(rows == least)
    ones = jnp.stack([_ones_in(above), _ones_in(equal)])  # in every word
    upto = running_sum(ones)
    before = (upto - ones)[:, parts.starts // 32]  # in all parts before each part
    total = jnp.diff(before[0], append=upto[0, -1])
    # of the values equal to the threshold, the first so many, counted from the first part on
    ties = _of_words(before[1] + np.array(counts, np.int32) - total, parts.owner)
    words = above | first_ones(equal, jnp.clip(ties - (upto[1] - ones[1]), 0, ones[1]))
    earlier = np.cumsum([0, *counts])[:-1].astype(np.int32)  # chosen in all parts before
    chosen = _of_words(-before[0] - before[1] + earlier, parts.owner) + upto[0] + jnp.minimum(upto[1], ties)
    return ones_of(words, chosen.astype(jnp.uint32), sum(counts)).astype(jnp.int32)


def entries_at(x: Array, i: Array) -> Array:
    """x[i] for i that lie in its bounds: nothing is compiled to count others from its end."""
    return x.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _of_groups(x: Array, owner: Array) -> Array:
    """Each group's entry of x [parts, ...]. Behind a barrier, so that it compiles once for all of its uses."""
    return lax.optimization_barrier(entries_at(x, owner))


def _of_words(x: Array, owner: Array) -> Array:
    """The same for each word of 32 values."""
    return jnp.repeat(_of_groups(x, owner), LANES)


def _kth_largest(bits: Array, owner: Array, counts: Sequence[int]) -> Array:
    """For each part the largest t >= 0 that at least k of its values reach, i32[parts]; highest digit first.

    Args:
      bits: i32[m].
      owner: the part of each group, i32[groups].
      counts: k of each part.
    """
    groups, wanted = bits.reshape(-1, 1, 32, LANES), np.array(counts, np.int32)[:, None]

    def refine(i, t):
        shift = 31 - i  # a digit of one bit: least work on CPU
        candidates = t[:, None] + (1 << shift)
        reach = groups >= _of_groups(candidates, owner)[:, :, None, None]
        lanes = lax.optimization_barrier(jnp.sum(reach, 2, dtype=jnp.int32))  # two stages, as in top_k.py
        reached = _sums(jnp.sum(lanes, 2), owner, len(counts)) >= wanted
        return t + (jnp.sum(reached, 1, dtype=jnp.int32) << shift)

    return lax.fori_loop(1, 32, refine, jnp.zeros_like(bits, shape=len(counts)))


def _sums(values: Array, owner: Array, parts: int) -> Array:
    """Sums over the groups of each part: i32[groups, ...] -> i32[parts, ...]."""
    if parts == 1:
        return jnp.sum(values, 0, keepdims=True, dtype=jnp.int32)
    return jax.ops.segment_sum(values, owner, parts, indices_are_sorted=True)


def _ones_in(words: Array) -> Array:
    return lax.population_count(words).astype(jnp.int32)


def bitmap(mask: Array) -> Array:
    """bool[..., 32] as words, u32[m]."""
    bits = mask.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.sum(bits, -1, dtype=jnp.uint32).reshape(-1)


def first_ones(words: Array, wanted: Array) -> Array:
    """Words u32[m] with only their lowest ones, `wanted` i32[m] of each, found by bisection."""
    left, end = wanted.astype(jnp.uint32), jnp.zeros_like(words)
    for width in (16, 8, 4, 2, 1):
        below = lax.population_count(words >> end & jnp.uint32(2**width - 1))
        upper = left > below
        end, left = jnp.where(upper, end + width, end), jnp.where(upper, left - below, left)
    mask = (jnp.uint32(2) << end) - 1  # bits 0 to `end`, the last one wanted; 2 << 31 is 0, so all 32 for end = 31
    return jnp.where(wanted > 0, words & mask, 0)
