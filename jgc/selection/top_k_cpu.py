"""The search for CPUs: the two steps of `jgc.selection.top_k`, each by a threshold.

Non-negative floats have the order of their bits, so `_kth_largest` finds the k-th largest bit by
bit: it counts how many values reach each candidate. `_largest_of_parts` then marks all values above
it, and the first of those that equal it, in a bitmap; the positions of its ones are the result.

Parts of a vector lie one after the other in whole groups of `GROUP` values, padded behind.
Constants have one entry a group, not a value: XLA takes a second for each of millions of entries.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.selection.entries import entries_at
from jgc.selection.ranges import PADDING, Range, bits_of
from jgc.types import Array
from jgc.wire.elias_fano import bitmap, first_ones, ones_of, running_sum

LANES = 8
GROUP = 32 * LANES  # values counted together; 32 is the longest axis that XLA unrolls on CPU


def block_of(ranges: Sequence[Range]) -> int:
    """b, the largest power of two, at most 256, with b <= sqrt(2 n/k) in every range.

    Then the blocks are about as many as the values in the kept blocks. Returns 1 (no blocks) rather
    than 2: a search of all values takes no longer, and often half as long (measured for n from 1e4
    to 1e7).

    Example:
      >>> sizes = [(25_600_000, 25_600), (10**6, 250_000), (10**9, 1)]
      >>> [block_of([Range(0, n, k)]) for n, k in sizes]
      [32, 1, 256]
    """
    b = 256
    while b > 1 and any(b * b * k > 2 * size for _, size, k in ranges):
        b //= 2
    return b if b > 2 else 1


def largest_by_blocks(values: Array, ranges: Sequence[Range], b: int | None = None) -> Array:
    """Both steps, or only the second if b is 1; k > 0 in every range. Default: `block_of`."""
    b = b or block_of(ranges)
    counts = [x.k for x in ranges]
    all_blocks = np.array([_whole_groups(-(-x.size // b)) for x in ranges])
    shifts = [x.start for x in ranges] - b * _before(all_blocks)
    maxima = _block_maxima(values, ranges, b)
    if b == 1:
        chosen = _largest_of_parts(maxima, _owners(all_blocks), _starts(all_blocks), counts)
        return chosen + np.repeat(shifts, counts).astype(np.int32)
    shift = _of_groups(shifts, all_blocks)
    # The kept blocks of each range, filled up to whole groups of values with blocks of padding.
    kept_values = np.array([_whole_groups(k * b) for k in counts])
    slots, kept_before = _before(kept_values) // b, _before(counts)
    source = _of_groups(kept_before - slots, kept_values)[:, None]  # a block's number less its slot
    used = _of_groups(slots + counts, kept_values)[:, None]  # up to this slot
    end = _of_groups([x.start + x.size for x in ranges], kept_values)[:, None]
    size = int(max(sum(all_blocks), sum(kept_values)))

    def starts_of(blocks: Array) -> Array:
        return blocks * b + entries_at(shift, blocks // GROUP)

    def values_of(blocks: Array) -> Array:
        slot = jnp.arange(sum(kept_values) // b, dtype=jnp.int32).reshape(-1, GROUP // b)
        first = starts_of(blocks).at[slot + source].get(mode="clip", wrap_negative_indices=False)
        at = first[..., None] + jnp.arange(b, dtype=jnp.int32).reshape(1, 1, -1)
        bits = bits_of(values.at[at].get(mode="clip", wrap_negative_indices=False))
        limit = jnp.where(slot < used, end, 0)[..., None]  # a last block may end beyond its range
        return _filled(jnp.where(at < limit, bits, PADDING).reshape(-1), size)

    # Both steps are turns of one loop, so that XLA compiles them once.
    owners = jnp.stack([_owners(all_blocks, size), _owners(kept_values, size)])
    starts = jnp.stack([_starts(all_blocks), _starts(kept_values)])

    def step(i, chosen):
        bits = lax.cond(i == 0, lambda blocks: _filled(maxima, size), values_of, chosen[1])
        return chosen[1], _largest_of_parts(bits, owners[i], starts[i], counts)

    nothing = jnp.zeros_like(maxima, shape=sum(counts))
    blocks, kept = lax.fori_loop(0, 2, step, (nothing, nothing))
    block = kept // b + entries_at(source[:, 0], kept // GROUP)
    return entries_at(starts_of(blocks), block) + kept % b


def _whole_groups(size: int) -> int:
    return -(-size // GROUP) * GROUP


def _before(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """The sum of all earlier sizes."""
    return np.cumsum(sizes) - sizes


def _starts(sizes: np.ndarray) -> Array:
    """The first value of each part, i32[parts]."""
    return jnp.asarray(_before(sizes).astype(np.int32))


def _of_groups(numbers: Sequence[int] | np.ndarray, sizes: np.ndarray) -> Array:
    """The number of the part that each group belongs to, i32[groups]; sizes are whole groups."""
    return jnp.asarray(np.repeat(np.asarray(numbers), sizes // GROUP).astype(np.int32))


def _owners(sizes: np.ndarray, total: int | None = None) -> Array:
    """The part of each group, i32[groups]; the last part's for padding up to `total` values."""
    owner = np.repeat(np.arange(sizes.size, dtype=np.int32), sizes // GROUP)
    behind = 0 if total is None else total // GROUP - owner.size
    return jnp.asarray(np.pad(owner, (0, behind), mode="edge"))


def _filled(bits: Array, size: int) -> Array:
    """Bits followed by padding, i32[size]."""
    if bits.size == size:
        return bits
    return jnp.pad(bits, (0, size - bits.size), constant_values=PADDING)


def _block_maxima(values: Array, ranges: Sequence[Range], b: int) -> Array:
    """The largest of every b neighbouring magnitudes of each range, as bits, i32[m].

    Each range is padded to whole groups; its last block may be shorter.
    """
    parts = []
    for start, end in _runs(ranges, b * GROUP):
        x = values[start:end]
        whole, lanes = x.size // b * b, min(b, LANES)
        # Two stages, the first over an axis that leaves lanes of 8 neighbours: XLA on CPU
        # vectorises only that, and without the barrier fuses both. It reads the n values as fast as
        # `max(abs)`: 9 ms of processor time, not 27, for 25.6M.
        rows = jnp.max(bits_of(x[:whole]).reshape(-1, b // lanes, lanes), 1) if b > 1 else None
        maxima = bits_of(x) if rows is None else jnp.max(lax.optimization_barrier(rows), 1)
        if whole < x.size:
            maxima = jnp.concatenate([maxima, jnp.max(bits_of(x[whole:]), keepdims=True)])
        parts.append(_filled(maxima, _whole_groups(maxima.size)))
    return jnp.concatenate(parts)


def _runs(ranges: Sequence[Range], unit: int) -> list[tuple[int, int]]:
    """Starts and ends of stretches of adjacent ranges, all but the last of each of whole units.

    Each stretch is one operation, so that the program does not grow with the ranges.

    Example:
      >>> _runs([Range(0, 512, 1), Range(512, 300, 1), Range(812, 256, 1)], 256)
      [(0, 812), (812, 1068)]
    """
    runs: list[tuple[int, int]] = []
    for start, size, _ in ranges:
        if runs and runs[-1][1] == start and (start - runs[-1][0]) % unit == 0:
            runs[-1] = runs[-1][0], start + size
        else:
            runs.append((start, start + size))
    return runs


def _largest_of_parts(bits: Array, owner: Array, starts: Array, counts: Sequence[int]) -> Array:
    """Places of the k largest values of each part, ascending, ties to the first: i32[m] -> i32[mu].

    owner i32[groups]: the part of each group; starts i32[parts]: the first value of each part.
    """

    def of_words(x):  # of each word of 32 values: the entry of its part
        return jnp.repeat(_of_owner(x, owner), LANES)

    threshold = _kth_largest(bits, owner, counts)
    rows = bits.reshape(-1, LANES, 32)
    least = _of_owner(threshold[:, None], owner)[:, :, None]
    above, equal = bitmap(rows > least), bitmap(rows == least)
    ones = jnp.stack([lax.population_count(x).astype(jnp.int32) for x in (above, equal)])
    upto = running_sum(ones)
    before = (upto - ones)[:, starts // 32]  # in all parts before each part
    total = jnp.diff(before[0], append=upto[0, -1])
    # Values equal to the threshold are chosen up to this number, counted from the first part on.
    ties = of_words(before[1] + np.array(counts, np.int32) - total)
    words = above | first_ones(equal, jnp.clip(ties - (upto[1] - ones[1]), 0, ones[1]))
    earlier = _before(counts).astype(np.int32)  # chosen in all parts before
    chosen = of_words(-before[0] - before[1] + earlier) + upto[0] + jnp.minimum(upto[1], ties)
    return ones_of(words, chosen.astype(jnp.uint32), sum(counts)).astype(jnp.int32)


def _of_owner(x: Array, owner: Array) -> Array:
    """Each group's entry of x [parts, ...]. Behind a barrier: it compiles once for all uses."""
    return lax.optimization_barrier(entries_at(x, owner))


def _kth_largest(bits: Array, owner: Array, counts: Sequence[int]) -> Array:
    """For each part the largest t >= 0 that at least k of its values reach, i32[parts]."""
    groups, wanted = bits.reshape(-1, 1, 32, LANES), np.array(counts, np.int32)[:, None]

    def refine(i, t):
        shift = 31 - i  # highest bit first; digits of one bit: least work on CPU
        candidates = t[:, None] + (1 << shift)
        reach = groups >= _of_owner(candidates, owner)[:, :, None, None]
        # Two stages, as in `_block_maxima`.
        lanes = lax.optimization_barrier(jnp.sum(reach, 2, dtype=jnp.int32))
        sums = jnp.sum(lanes, 2)
        if len(counts) == 1:
            reached = jnp.sum(sums, 0, keepdims=True, dtype=jnp.int32) >= wanted
        else:
            in_parts = jax.ops.segment_sum(sums, owner, len(counts), indices_are_sorted=True)
            reached = in_parts >= wanted
        return t + (jnp.sum(reached, 1, dtype=jnp.int32) << shift)

    return lax.fori_loop(1, 32, refine, jnp.zeros_like(bits, shape=len(counts)))
