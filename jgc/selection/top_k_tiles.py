"""`largest_in_ranges` for TPUs: the same positions, found with operations on whole rows of 128 values.

A TPU works on tiles of 8 x 128 values. An axis of 8 or 32 values at the end of a shape is filled up to 128, and a
gather or scatter of single values takes as long as one of whole rows. So blocks are rows of 128 neighbouring values:

1. Keep the k rows with the largest maxima of each range. As in `jgc.selection.top_k`, they hold the k largest values.
2. Keep the k largest values of these rows.

Where k rows would be half of the values or more, the second step takes all values. Both steps are `_largest`: it finds
the k-th largest digit by digit, counts in every row how many values are chosen, and finds the row and the lane of the
i-th chosen one by comparing counts, 128 at once.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.types import Array

LANES = 128
_CHUNK = 256  # rows that share a threshold
_DIGIT = 3  # bits found in a pass: 7 candidates. With 4 bits, 15 candidates, all passes together take 1.3 times as long
_PADDING = -1  # below the bits of every magnitude
_AT_ONCE = 2**14  # rows looked at together, at most


class Range(NamedTuple):
    """A range of a vector and the number k of values to take from it, 0 <= k <= size."""

    start: int
    size: int
    k: int


def largest_in_tiles(values: Array, ranges: Sequence[Range]) -> Array:
    """Positions of the k entries of largest magnitude of each range, i32[mu]; ties go to the lower position.

    They ascend within each range; one range's come after the other's.
    """
    used = [Range(*one) for one in ranges if one[2]]
    if not used:
        return jnp.zeros((0,), jnp.int32)
    if 2 * LANES * sum(one.k for one in used) >= sum(one.size for one in used):
        places = _largest([bits_of(_part(values, one)) for one in used], [one.k for one in used])
        return jnp.asarray(_repeated([one.start for one in used], used)) + places
    return _largest_by_rows(values, used)


def bits_of(values: Array) -> Array:
    """Non-negative integers in the order of the magnitudes, i32 of the same shape."""
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF


def _part(values: Array, of: Range) -> Array:
    return values[of.start : of.start + of.size]


def _repeated(numbers: Sequence[int], ranges: Sequence[Range]) -> np.ndarray:
    """The number of the range that each chosen value belongs to, i32[mu]."""
    return np.repeat(np.array(numbers, np.int32), [one.k for one in ranges])


def _largest_by_rows(values: Array, ranges: Sequence[Range]) -> Array:
    """Both steps: the rows with the largest maxima, then the largest values of these."""
    # Zeros behind a range are never chosen: as many values of the range itself come before them.
    rows = [_padded(_part(values, one), LANES, 0).reshape(-1, LANES) for one in ranges]
    most = [jnp.max(bits_of(x), 1) for x in rows]
    counts = [min(one.k, x.size) for one, x in zip(ranges, most, strict=True)]  # rows kept of each range
    kept = _largest(most, counts)

    size = _chunk_of([LANES * count for count in counts])
    chunks = [-(-count // size) for count in counts]
    earlier = np.cumsum(counts) - counts
    slot = np.concatenate([np.arange(n * size).reshape(n, size) for n in chunks])  # of its range
    used = slot < np.repeat(counts, chunks)[:, None]  # behind a range's rows, its last chunk has padding
    numbers = kept[np.where(used, slot + np.repeat(earlier, chunks)[:, None], 0).T]  # [size, chunks]
    lines = bits_of(_gathered(values, ranges, rows, numbers, chunks))
    place = _chosen(jnp.where(used.T[:, :, None], lines, _PADDING), chunks, [one.k for one in ranges])
    found = kept[_repeated(earlier.tolist(), ranges) + place // LANES]
    return jnp.asarray(_repeated([one.start for one in ranges], ranges)) + found * LANES + place % LANES


def _gathered(
    values: Array, ranges: Sequence[Range], rows: Sequence[Array], numbers: Array, chunks: Sequence[int]
) -> Array:
    """Rows of the ranges by their numbers i32[size, chunks] within their range: f32[size, chunks, 128]."""
    whole = values[: values.size // LANES * LANES].reshape(-1, LANES)
    parts, at = [], 0
    # Neighbouring ranges of whole rows are gathered at once, from the vector itself: no copy, and a short program.
    for key, group in groupby(range(len(ranges)), lambda i: -1 if _is_aligned(ranges[i]) else i):
        own = list(group)
        end = at + sum(chunks[i] for i in own)
        first = np.repeat([ranges[i].start // LANES if key < 0 else 0 for i in own], [chunks[i] for i in own])
        parts.append((whole if key < 0 else rows[key])[numbers[:, at:end] + first.astype(np.int32)])
        at = end
    return jnp.concatenate(parts, 1)


def _is_aligned(of: Range) -> bool:
    return of.start % LANES == of.size % LANES == 0


def _padded(x: Array, unit: int, value: int) -> Array:
    return jnp.pad(x, (0, -x.size % unit), constant_values=value) if x.size % unit else x


def _largest(parts: Sequence[Array], counts: Sequence[int]) -> Array:
    """Places of the k largest values of each part i32[n], ascending, part after part, i32[mu]; k > 0."""
    size = _chunk_of([x.size for x in parts])
    chunks = [-(-x.size // (size * LANES)) for x in parts]
    rows = jnp.concatenate([_padded(x, size * LANES, _PADDING) for x in parts]).reshape(-1, size, LANES)
    return _chosen(jnp.swapaxes(rows, 0, 1), chunks, counts)


def _chosen(lines: Array, chunks: Sequence[int], counts: Sequence[int]) -> Array:
    """Places of the k largest values of each part, ascending, part after part, i32[mu].

    Args:
      lines: i32[size, chunks, 128]. A chunk is `size` rows of one part; chunks lie side by side, so that counts of 8
        chunks fill a register, and add up row by row.
      chunks: of each part.
      counts: k of each part.
    """
    size = lines.shape[0]
    owner = np.repeat(np.arange(len(chunks)), chunks)
    mine = owner[None, :] == np.arange(len(chunks))[:, None]  # [parts, chunks]

    def of_chunks(x: Array) -> Array:  # [parts] -> [chunks]
        return jnp.sum(jnp.where(mine, x[:, None], 0), 0)

    def of_rows(x: Array) -> Array:  # [parts] -> [rows]
        return jnp.broadcast_to(of_chunks(x)[:, None], (owner.size, size)).reshape(-1)

    threshold = _kth_largest(lines, mine, np.array(counts, np.int32))
    least = of_chunks(threshold)[None, :, None]
    # how many values of each row are above the threshold, and how many equal it, by one sum over lanes
    both = jnp.sum((lines > least).astype(jnp.int32) + 256 * (lines == least).astype(jnp.int32), 2).T.reshape(-1)
    above, equal = both & 255, both >> 8
    first = ((np.cumsum(chunks) - chunks) * size).astype(np.int32)  # row of each part
    earlier = (jnp.cumsum(equal) - equal, jnp.cumsum(above) - above)
    ties = earlier[0] - of_rows(earlier[0][first])  # of the row's part, before the row
    ends = jnp.append(earlier[1][first[1:]], earlier[1][-1] + above[-1])
    missing = jnp.asarray(counts, jnp.int32) - (ends - earlier[1][first])  # of those equal to it, the first so many
    chosen = above + jnp.clip(of_rows(missing) - ties, 0, equal)
    rows, lanes = _places(lines, jnp.cumsum(chosen), threshold, counts)
    return (rows - np.repeat(first, counts)) * LANES + lanes


def _chunk_of(sizes: Sequence[int]) -> int:
    """Rows of a chunk: the largest power of two, at most `_CHUNK`, with which padding adds at most a sixteenth.

    Example:
      >>> _chunk_of([2**20, 2**20]), _chunk_of([2**20, 10]), _chunk_of([10, 10])
      (256, 256, 8)
    """
    chunk = _CHUNK
    while chunk > 8 and sum(-size % (chunk * LANES) for size in sizes) > sum(sizes) // 16:
        chunk //= 2
    return chunk


def _kth_largest(lines: Array, mine: np.ndarray, counts: np.ndarray) -> Array:
    """For each part the largest t >= 0 that at least k of its values reach, i32[parts]; highest digit first."""
    passes = -(-31 // _DIGIT)
    digits = range(1, 2**_DIGIT)

    def refine(i, t):
        shift = _DIGIT * (passes - 1 - i)
        base = lax.optimization_barrier(jnp.sum(jnp.where(mine, t[:, None], 0), 0))[None, :, None]  # of chunks

        # [chunks, 128] for each digit; lanes are added up later
        counted = [jnp.sum((lines >= base + (digit << shift)).astype(jnp.int32), 0) for digit in digits]
        words = _sums(lax.optimization_barrier(counted))  # [chunks] each
        reach = _sums([jnp.where(mine, x, 0) for x in words])  # [parts] each
        # a digit that does not fit has wrapped around to other numbers
        found = [(x >= counts) & (digit <= (2**31 - 1 >> shift)) for digit, x in zip(digits, reach, strict=True)]
        return t + (sum(x.astype(jnp.int32) for x in found) << shift)

    return lax.fori_loop(0, passes, refine, jnp.zeros_like(lines, shape=counts.size))


def _sums(xs: Sequence[Array]) -> Sequence[Array]:
    """Sums over the second axis of arrays of equal shape, in one operation: on TPU each has a fixed cost."""

    def add(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
        return [x + y for x, y in zip(a, b, strict=True)]

    return lax.reduce(list(xs), [jnp.int32(0)] * len(xs), add, (1,))


def _places(lines: Array, upto: Array, threshold: Array, counts: Sequence[int]) -> tuple[Array, Array]:
    """Row and lane of every chosen value: i32[mu] each. `upto` i32[rows]: chosen values up to the end of each row."""
    total, (size, chunks, _) = sum(counts), lines.shape
    flat = lines.reshape(-1, LANES)
    least = jnp.concatenate([jnp.broadcast_to(threshold[i], (k,)) for i, k in enumerate(counts)])

    def look(i: Array, least: Array) -> tuple[Array, Array]:
        row, before, after = _row_of(upto, i)
        x = flat[row % size * chunks + row // size]  # [m, 128]
        above, equal, whole = _running(x, least[:, None])
        ties = (after - before)[:, None] - whole  # of the row, its first so many are chosen
        upto_lane = above + jnp.minimum(equal, ties)
        return row, jnp.sum((upto_lane <= (i - before)[:, None]).astype(jnp.int32), 1)

    i = jnp.arange(total, dtype=jnp.int32)
    if total <= _AT_ONCE:
        return look(i, least)
    turns = -(-total // _AT_ONCE)
    at_once = -(-total // (turns * LANES)) * LANES
    i, least = (jnp.pad(x, (0, turns * at_once - total), mode="edge").reshape(turns, at_once) for x in (i, least))
    row, lane = lax.map(lambda one: look(*one), (i, least))
    return row.reshape(-1)[:total], lane.reshape(-1)[:total]


def _row_of(upto: Array, i: Array) -> tuple[Array, Array, Array]:
    """The first row with upto > i for each i32[m]; the count before it, and the one at its end. All i32[m]."""
    blocks = jnp.pad(upto, (0, -upto.size % LANES), mode="edge").reshape(-1, LANES)
    if blocks.shape[0] == 1:
        inside, block, start = jnp.broadcast_to(blocks, (i.size, LANES)), jnp.zeros_like(i), jnp.zeros_like(i)
    else:
        block, start, _ = _row_of(blocks[:, -1], i)
        inside = blocks[block]
    done = inside <= i[:, None]
    before = jnp.maximum(start, jnp.max(jnp.where(done, inside, 0), 1))
    after = jnp.min(jnp.where(done, jnp.int32(2**31 - 1), inside), 1)
    return block * LANES + jnp.sum(done.astype(jnp.int32), 1), before, after


def _running(x: Array, least: Array) -> tuple[Array, Array, Array]:
    """How many values of the rows i32[m, 128] are above `least`, and equal it, up to each lane; how many above in all.

    All i32[m, 128]. One product with a triangle and with ones beside it, which leaves the counts where lanes are:
    exact, for no partial sum has more than 16 bits.
    """
    marks = jnp.where(x > least, 1, jnp.where(x == least, 256, 0)).astype(jnp.bfloat16)
    ones = jnp.ones((LANES, LANES), jnp.bfloat16)
    sums = jnp.dot(marks, jnp.concatenate([jnp.triu(ones), ones], 1), preferred_element_type=jnp.float32)
    sums = sums.astype(jnp.int32)
    upto, whole = sums[:, :LANES], sums[:, LANES:]
    return upto & 255, upto >> 8, whole & 255
