"""`largest_in_ranges` on GPUs: a few short kernels that the host never waits for.

Parts of a vector lie one after the other in rows of equal length. The k-th largest value of each
part is found digit by digit: a pass reads every value once, counts the 16 values of the next digit
in each row, adds the counts of each part's rows, and picks the digit. XLA knows the number of
passes, so that the host reads no condition back.

Of many values, `jgc.selection.top_k`'s two steps: search the maxima of blocks of b neighbours, then
the values of the kept blocks. Of few values, or where nearly all blocks would be kept, one search
of all values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.selection.entries import entries_at
from jgc.selection.ranges import PADDING, Range, bits_of
from jgc.types import Array
from jgc.wire.elias_fano import bitmap, first_ones, ones_of, running_sum

_DIGIT = 4  # bits found in a pass
_PASSES = 8
_STEP = 2**25  # values that a GPU reads while it runs the kernels of one more search, about
_LONGEST = 4096  # values of a row; counts of two digits share a word, so less than 2^16
_WORD = 32


class Rows(NamedTuple):
    """Parts laid out in whole rows, one after the other. Static."""

    length: int  # values of a row, a multiple of 32
    owner: np.ndarray  # the part of each row, i32[rows]; the last one's for padding behind it
    first: np.ndarray  # the first row of each part, i32[parts]

    @property
    def start(self) -> np.ndarray:
        """The place of each part's first value."""
        return self.first * self.length

    def of(self, x: Sequence[int] | np.ndarray) -> Array:
        """The number of each row's part, i32[rows, 1]."""
        return jnp.asarray(np.asarray(x)[self.owner, None].astype(np.int32))


def rows_of(sizes: np.ndarray) -> Rows:
    """The longest rows, powers of two, that padding fills to at most a fifth.

    One row a part where that suffices.

    Example:
      >>> rows_of(np.array([2**20, 100])).length, rows_of(np.array([500, 512, 300])).length
      (4096, 512)
    """
    longest = max(_WORD, 1 << int(sizes.max() - 1).bit_length())
    length = min(longest, _LONGEST)
    if longest > _LONGEST or longest * sizes.size > 2 * sizes.sum() + _STEP // _PASSES:
        while length > _WORD and (-sizes % length).sum() > sizes.sum() // 4:
            length //= 2
    return _rows(sizes, length)


def _rows(sizes: np.ndarray, length: int) -> Rows:
    rows = -(-sizes // length)
    owner = np.repeat(np.arange(sizes.size, dtype=np.int32), rows)
    return Rows(length, owner, np.cumsum(rows) - rows)


def alike(a: Rows, sizes: np.ndarray) -> tuple[Rows, Rows]:
    """`a` and rows for these sizes, of equal shape if neither needs twice the other's values."""
    b = _rows(sizes, a.length)
    few, many = sorted([a.owner.size, b.owner.size])
    if many > 2 * few:
        return a, rows_of(sizes)
    a, b = (
        x._replace(owner=np.pad(x.owner, (0, many - x.owner.size), mode="edge")) for x in (a, b)
    )
    return a, b


def block_for(sizes: np.ndarray, counts: np.ndarray) -> int:
    """b, or 1 for one search of all values: whichever reads least.

    Example:
      >>> cases = [(25_600_000, 25_600), (10**6, 10**3), (10**8, 10**8)]
      >>> [block_for(np.array([n]), np.array([k])) for n, k in cases]
      [32, 1, 1]
    """

    def read(b: int) -> int:
        if b == 1:
            return int(_PASSES * sizes.sum())
        blocks = -(-sizes // b)
        searched = (blocks + b * np.minimum(counts, blocks)).sum()
        return int(sizes.sum() + _PASSES * searched + _STEP)

    return min((1, 4, 8, 16, 32, 64, 128, 256), key=read)


def largest_on_gpu(values: Array, ranges: Sequence[Range], b: int | None = None) -> Array:
    """Positions of the k entries of largest magnitude of each range, range after range, i32[mu].

    b is the length of a block, 1 for a single search; by default that of `block_for`.
    """
    used = [x for x in ranges if x.k]
    if not used:
        return jnp.zeros((0,), jnp.int32)
    starts, sizes, counts = (np.array(x) for x in zip(*used, strict=True))
    if (counts == sizes).all():
        return jnp.concatenate([x.start + jnp.arange(x.k, dtype=jnp.int32) for x in used])
    b = b or block_for(sizes, counts)
    blocks_of = -(-sizes // b)
    kept_counts = np.minimum(counts, blocks_of)
    rows = rows_of(blocks_of)
    if b > 1:
        rows, kept = alike(rows, b * kept_counts)
    # Of place i, the values start at shift + b i.
    shift, end = starts - b * rows.start, starts + sizes
    bits = _bits_at(values, rows, starts, end, b)
    if b == 1:
        places = _chosen(bits, rows, counts)
        return places + entries_at(rows.of(shift)[:, 0], places // rows.length)
    blocks = _chosen(jnp.max(bits, 2), rows, kept_counts)
    before = np.cumsum(kept_counts) - kept_counts
    slots = kept.length // b
    slot = jnp.arange(kept.owner.size * slots, dtype=jnp.int32).reshape(-1, slots)
    number = slot + kept.of(before - kept.start // b)  # of a kept block; any behind a part's last
    first = b * entries_at(blocks, jnp.minimum(number, blocks.size - 1)) + kept.of(shift)
    is_used = number < kept.of(before + kept_counts)
    inside = _values_at(values, first, jnp.where(is_used, kept.of(end), 0), b)
    places = _chosen(inside.reshape(-1, kept.length), kept, counts)
    return entries_at(first.reshape(-1), places // b) + places % b


def _bits_at(values: Array, rows: Rows, starts: np.ndarray, end: np.ndarray, b: int) -> Array:
    """Magnitudes of the values that each place stands for, i32[rows, length(, b)].

    With padding behind each part.
    """
    shape = (rows.owner.size, rows.length, *([b] if b > 1 else []))
    shift = starts - b * rows.start
    if (shift == shift[0]).all() and (starts[1:] == end[:-1]).all():
        # Adjacent parts, of whole rows but the last: no copy.
        bits = bits_of(values[starts[0] : end[-1]])
        missing = int(np.prod(shape)) - bits.size
        return jnp.pad(bits, (0, missing), constant_values=PADDING).reshape(shape)
    place = jnp.arange(rows.owner.size * rows.length, dtype=jnp.int32).reshape(-1, rows.length)
    return _values_at(values, b * place + rows.of(shift), rows.of(end), b).reshape(shape)


def _values_at(values: Array, first: Array, end: Array, b: int) -> Array:
    """Magnitudes of the b values from each position on, i32[..., b], and padding from `end` on."""
    at = first[..., None] + jnp.arange(b, dtype=jnp.int32)
    bits = bits_of(values.at[at].get(mode="clip", wrap_negative_indices=False))
    return jnp.where(at < end[..., None], bits, PADDING)


def _chosen(bits: Array, rows: Rows, counts: np.ndarray) -> Array:
    """Places of the k largest values of each part, ascending: i32[rows, length] -> i32[mu]."""
    least, ties = _kth_largest(bits, rows, counts)
    words = bits.reshape(*bits.shape[:1], -1, _WORD)
    above = bitmap(words > least[..., None]).reshape(words.shape[:2])
    equal = bitmap(words == least[..., None]).reshape(words.shape[:2])
    ones = jnp.stack([lax.population_count(x).reshape(-1) for x in (above, equal)])
    ones = ones.astype(jnp.int32)
    before = running_sum(ones) - ones
    part_starts = jnp.asarray(rows.start[rows.owner] // _WORD)
    before_part = entries_at(before.T, part_starts).T  # i32[2, rows]
    ones, before = (x.reshape(2, *above.shape) for x in (ones, before))
    before = before - before_part[:, :, None]
    chosen = above | first_ones(equal, jnp.clip(ties - before[1], 0, ones[1]))
    earlier = rows.of(np.cumsum(counts) - counts)
    rank = before[0] + jnp.minimum(before[1], ties) + earlier
    upto = rank.astype(jnp.uint32) + lax.population_count(chosen)
    return ones_of(chosen.reshape(-1), upto.reshape(-1), int(counts.sum())).astype(jnp.int32)


def _kth_largest(bits: Array, rows: Rows, counts: np.ndarray) -> tuple[Array, Array]:
    """The k-th largest value of each row's part, and how many equal values are among the k.

    i32[rows, 1] each.
    """

    def turn(_, state):
        t, missing, shift = state
        digit = (bits - t) >> shift  # below 0 or from 16 on if the digits before are others
        words = []
        for i in range(8):  # two counts in a word
            ones = jnp.where(digit == 2 * i, 1, jnp.where(digit == 2 * i + 1, 1 << 16, 0))
            words.append(jnp.sum(ones, 1).astype(jnp.uint32))
        reach, picked, left = jnp.zeros_like(t), jnp.zeros_like(t), missing
        for x in _of_parts(words, rows)[:0:-1]:  # from the largest digit on; 0 needs no count
            reach += x[:, None]
            picked += (reach >= missing).astype(jnp.int32)
            left = jnp.where(reach < missing, missing - reach, left)
        return t + (picked << shift), left, shift - _DIGIT

    zeros = jnp.zeros_like(bits, shape=(rows.owner.size, 1))
    start = (zeros, zeros + rows.of(counts), zeros + _DIGIT * (_PASSES - 1))
    t, missing, _ = lax.fori_loop(0, _PASSES, turn, start)
    return t, missing


def _of_parts(words: Sequence[Array], rows: Rows) -> Sequence[Array]:
    """How often each digit occurs in each row's part, 16 times i32[rows]; two counts in a word."""
    if rows.first.size == rows.owner.size:
        return [x.astype(jnp.int32) for word in words for x in (word & 0xFFFF, word >> 16)]
    both = jnp.stack(words)
    counts = jnp.stack([both & 0xFFFF, both >> 16], 1).reshape(16, 1, -1).astype(jnp.int32)
    owner = jnp.asarray(rows.owner)
    in_part = owner == jnp.arange(rows.first.size, dtype=jnp.int32)[:, None]
    sums = jnp.sum(jnp.where(in_part, counts, 0), 2)
    return list(sums.at[:, owner].get(mode="promise_in_bounds"))
