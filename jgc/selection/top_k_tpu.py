"""`largest_in_ranges` on TPUs: operations on whole rows of 128 values.

A TPU works on tiles of 8 x 128 values. An axis of 8 or 32 values at the end of a shape is filled up
to 128, and a gather or scatter of single values takes as long as one of whole rows. So blocks are
rows of 128 neighbouring values:

1. Keep the k rows with the largest maxima of each range. They hold the k largest values, as in
   `jgc.selection.top_k`.
2. Keep the k largest values of these rows.

Where k rows would be half of the values or more, the second step takes all values. Both steps are
`_largest`: it finds the k-th largest digit by digit, counts in every row how many values are
chosen, and finds the row and the lane of the i-th chosen value by comparing counts, 128 together.
"""

from collections.abc import Sequence
from itertools import groupby

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.selection.ranges import PADDING, Range, bits_of
from jgc.types import Array
from jgc.wire.bits import LANES

_CHUNK = 256  # rows that share a threshold
_DIGIT = 3  # bits found in a pass: 7 candidates. 4 bits, 15 candidates, take 1.3 times as long
_AT_ONCE = 2**14  # rows looked at together, at most


def largest_on_tpu(values: Array, ranges: Sequence[Range]) -> Array:
    """Positions of the k entries of largest magnitude of each range, range after range, i32[mu]."""
    used = [Range(*x) for x in ranges if x.k]
    if not used:
        return jnp.zeros((0,), jnp.int32)
    if 2 * LANES * sum(x.k for x in used) >= sum(x.size for x in used):
        parts = [bits_of(values[x.start : x.start + x.size]) for x in used]
        return jnp.asarray(_repeated([x.start for x in used], used)) + _largest(
            parts, [x.k for x in used]
        )
    return _largest_by_rows(values, used)


def _repeated(numbers: Sequence[int], ranges: Sequence[Range]) -> np.ndarray:
    """The number of the range that each chosen value belongs to, i32[mu]."""
    return np.repeat(np.array(numbers, np.int32), [x.k for x in ranges])


def _largest_by_rows(values: Array, ranges: Sequence[Range]) -> Array:
    """Both steps: the rows with the largest maxima, then the largest values of these."""
    # Zeros behind a range are never chosen: as many values of the range itself come before them.
    rows = [
        _padded(values[x.start : x.start + x.size], LANES, 0).reshape(-1, LANES) for x in ranges
    ]
    maxima = [jnp.max(bits_of(x), 1) for x in rows]
    counts = [min(x.k, m.size) for x, m in zip(ranges, maxima, strict=True)]  # rows kept of each
    kept = _largest(maxima, counts)

    size = _chunk_of([LANES * count for count in counts])
    chunks = [-(-count // size) for count in counts]
    earlier = np.cumsum(counts) - counts
    slot = np.concatenate([np.arange(n * size).reshape(n, size) for n in chunks])  # of its range
    used = slot < np.repeat(counts, chunks)[:, None]  # behind its rows, a last chunk has padding
    source = np.where(used, slot + np.repeat(earlier, chunks)[:, None], 0)
    numbers = kept[source.T]  # [size, chunks]
    lines = bits_of(_gathered(values, ranges, rows, numbers, chunks))
    lines = jnp.where(used.T[:, :, None], lines, PADDING)
    place = _chosen(lines, chunks, [x.k for x in ranges])
    row = kept[_repeated(earlier.tolist(), ranges) + place // LANES]
    return jnp.asarray(_repeated([x.start for x in ranges], ranges)) + row * LANES + place % LANES


def _gathered(
    values: Array,
    ranges: Sequence[Range],
    rows: Sequence[Array],
    numbers: Array,
    chunks: Sequence[int],
) -> Array:
    """Rows of the ranges by their numbers i32[size, chunks] in a range: f32[size, chunks, 128]."""
    whole = values[: values.size // LANES * LANES].reshape(-1, LANES)
    parts, at = [], 0
    # Neighbouring ranges of whole rows are gathered together from the vector: no copy, and a short
    # program.
    for key, group in groupby(range(len(ranges)), lambda i: -1 if _is_aligned(ranges[i]) else i):
        members = list(group)
        end = at + sum(chunks[i] for i in members)
        starts = [ranges[i].start // LANES if key < 0 else 0 for i in members]
        first = np.repeat(starts, [chunks[i] for i in members]).astype(np.int32)
        parts.append((whole if key < 0 else rows[key])[numbers[:, at:end] + first])
        at = end
    return jnp.concatenate(parts, 1)


def _is_aligned(x: Range) -> bool:
    return x.start % LANES == x.size % LANES == 0


def _padded(x: Array, unit: int, value: int) -> Array:
    return jnp.pad(x, (0, -x.size % unit), constant_values=value) if x.size % unit else x


def _largest(parts: Sequence[Array], counts: Sequence[int]) -> Array:
    """Places of the k largest values of each part i32[n], ascending, i32[mu]; k > 0."""
    size = _chunk_of([x.size for x in parts])
    chunks = [-(-x.size // (size * LANES)) for x in parts]
    rows = jnp.concatenate([_padded(x, size * LANES, PADDING) for x in parts])
    return _chosen(jnp.swapaxes(rows.reshape(-1, size, LANES), 0, 1), chunks, counts)


def _chosen(lines: Array, chunks: Sequence[int], counts: Sequence[int]) -> Array:
    """Places of the k largest values of each part, ascending, part after part, i32[mu].

    lines i32[size, chunks, 128]: a chunk is `size` rows of one part; chunks lie side by side, so
    that counts of 8 chunks fill a register, and add up row by row.
    """
    size = lines.shape[0]
    owner = np.repeat(np.arange(len(chunks)), chunks)
    in_part = owner[None, :] == np.arange(len(chunks))[:, None]  # [parts, chunks]

    def of_chunks(x: Array) -> Array:  # [parts] -> [chunks]
        return jnp.sum(jnp.where(in_part, x[:, None], 0), 0)

    def of_rows(x: Array) -> Array:  # [parts] -> [rows]
        return jnp.broadcast_to(of_chunks(x)[:, None], (owner.size, size)).reshape(-1)

    threshold = _kth_largest(lines, in_part, np.array(counts, np.int32))
    least = of_chunks(threshold)[None, :, None]
    # How many values of each row are above the threshold, and how many equal it, by one sum.
    marks = (lines > least).astype(jnp.int32) + 256 * (lines == least).astype(jnp.int32)
    both = jnp.sum(marks, 2).T.reshape(-1)
    above, equal = both & 255, both >> 8
    first = ((np.cumsum(chunks) - chunks) * size).astype(np.int32)  # row of each part
    equal_before, above_before = jnp.cumsum(equal) - equal, jnp.cumsum(above) - above
    ties = equal_before - of_rows(equal_before[first])  # of the row's part, before the row
    ends = jnp.append(above_before[first[1:]], above_before[-1] + above[-1])
    # Of the values equal to the threshold, the first `missing` of each part are chosen.
    missing = jnp.asarray(counts, jnp.int32) - (ends - above_before[first])
    chosen = above + jnp.clip(of_rows(missing) - ties, 0, equal)
    rows, lanes = _places(lines, jnp.cumsum(chosen), threshold, counts)
    return (rows - np.repeat(first, counts)) * LANES + lanes


def _chunk_of(sizes: Sequence[int]) -> int:
    """Rows of a chunk: the largest power of two with which padding adds at most a sixteenth.

    Example:
      >>> _chunk_of([2**20, 2**20]), _chunk_of([2**20, 10]), _chunk_of([10, 10])
      (256, 256, 8)
    """
    chunk = _CHUNK
    while chunk > 8 and sum(-size % (chunk * LANES) for size in sizes) > sum(sizes) // 16:
        chunk //= 2
    return chunk


def _kth_largest(lines: Array, in_part: np.ndarray, counts: np.ndarray) -> Array:
    """For each part the largest t >= 0 that at least k of its values reach, i32[parts]."""
    passes = -(-31 // _DIGIT)
    digits = range(1, 2**_DIGIT)

    def refine(i, t):
        shift = _DIGIT * (passes - 1 - i)  # highest digit first
        # Behind barriers, or XLA fuses the parts' sums into the pass over all values.
        of_chunks = jnp.sum(jnp.where(in_part, t[:, None], 0), 0)
        base = lax.optimization_barrier(of_chunks)[None, :, None]
        # [chunks, 128] for each digit; lanes are added up later
        reached = [
            jnp.sum((lines >= base + (digit << shift)).astype(jnp.int32), 0) for digit in digits
        ]
        in_chunks = _sums(lax.optimization_barrier(reached))  # [chunks] each
        in_parts = _sums([jnp.where(in_part, x, 0) for x in in_chunks])  # [parts] each
        # A digit that does not fit has wrapped around to other numbers.
        fits = [digit <= (2**31 - 1 >> shift) for digit in digits]
        picked = [(x >= counts) & fit for fit, x in zip(fits, in_parts, strict=True)]
        return t + (sum(x.astype(jnp.int32) for x in picked) << shift)

    return lax.fori_loop(0, passes, refine, jnp.zeros_like(lines, shape=counts.size))


def _sums(xs: Sequence[Array]) -> Sequence[Array]:
    """Sums over the second axis of equal shapes, in one operation: each has a fixed cost on TPU."""

    def add(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
        return [x + y for x, y in zip(a, b, strict=True)]

    return lax.reduce(list(xs), [jnp.int32(0)] * len(xs), add, (1,))


def _places(
    lines: Array, upto: Array, threshold: Array, counts: Sequence[int]
) -> tuple[Array, Array]:
    """Row and lane of every chosen value, i32[mu] each; upto: chosen to the end of each row."""
    total, (size, chunks, _) = sum(counts), lines.shape
    flat = lines.reshape(-1, LANES)
    least = jnp.concatenate([jnp.broadcast_to(threshold[i], (k,)) for i, k in enumerate(counts)])

    def look(i: Array, least: Array) -> tuple[Array, Array]:
        row, before, after = _row_of(upto, i)
        x = flat[row % size * chunks + row // size]  # [m, 128]
        above, equal, whole = _running(x, least[:, None])
        ties = (after - before)[:, None] - whole  # the number of the row's ties that are chosen
        upto_lane = above + jnp.minimum(equal, ties)
        return row, jnp.sum((upto_lane <= (i - before)[:, None]).astype(jnp.int32), 1)

    i = jnp.arange(total, dtype=jnp.int32)
    if total <= _AT_ONCE:
        return look(i, least)
    turns = -(-total // _AT_ONCE)
    at_once = -(-total // (turns * LANES)) * LANES
    behind = (0, turns * at_once - total)
    i, least = (jnp.pad(x, behind, mode="edge").reshape(turns, at_once) for x in (i, least))
    row, lane = lax.map(lambda x: look(*x), (i, least))
    return row.reshape(-1)[:total], lane.reshape(-1)[:total]


def _row_of(upto: Array, i: Array) -> tuple[Array, Array, Array]:
    """The first row with upto > i for each i32[m]; the counts before it and at its end. i32[m]."""
    blocks = jnp.pad(upto, (0, -upto.size % LANES), mode="edge").reshape(-1, LANES)
    if blocks.shape[0] == 1:
        inside = jnp.broadcast_to(blocks, (i.size, LANES))
        block, start = jnp.zeros_like(i), jnp.zeros_like(i)
    else:
        block, start, _ = _row_of(blocks[:, -1], i)
        inside = blocks[block]
    done = inside <= i[:, None]
    before = jnp.maximum(start, jnp.max(jnp.where(done, inside, 0), 1))
    after = jnp.min(jnp.where(done, jnp.int32(2**31 - 1), inside), 1)
    return block * LANES + jnp.sum(done.astype(jnp.int32), 1), before, after


def _running(x: Array, least: Array) -> tuple[Array, Array, Array]:
    """How many values of rows i32[m, 128] are above `least`, and equal it, up to each lane.

    Also how many are above in the whole row; all i32[m, 128]. One product with a triangle and ones
    next to it leaves the counts where lanes are; exact, because no sum has more than 16 bits.
    """
    marks = jnp.where(x > least, 1, jnp.where(x == least, 256, 0)).astype(jnp.bfloat16)
    ones = jnp.ones((LANES, LANES), jnp.bfloat16)
    factors = jnp.concatenate([jnp.triu(ones), ones], 1)
    sums = jnp.dot(marks, factors, preferred_element_type=jnp.float32).astype(jnp.int32)
    upto, whole = sums[:, :LANES], sums[:, LANES:]
    return upto & 255, upto >> 8, whole & 255
