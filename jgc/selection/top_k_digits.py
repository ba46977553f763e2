"""`largest_in_ranges` for GPUs: the same positions, found by a few short kernels that the host never waits for.

Parts of a vector lie one after the other in rows of equal length. The k-th largest value of each part is found digit by
digit: a pass reads every value once, counts the 16 values of the next digit in each row, adds the counts of each part's
rows, and picks the digit. XLA knows the number of passes, so that the host reads no condition back.

Of many values, `jgc.selection.top_k`'s two steps: search the maxima of blocks of b neighbours, then the values of the
kept blocks. Of few values, or where nearly all blocks would be kept, one search of all values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.selection.threshold import PADDING, bitmap, entries_at, first_ones
from jgc.selection.top_k_tiles import Range, bits_of
from jgc.types import Array
from jgc.wire.elias_fano import ones_of, running_sum

_DIGIT = 4  # bits found in a pass
_PASSES = 8
_STEP = 2**25  # values that a GPU reads while it runs the kernels of one more search, about
_LONGEST = 4096  # values of a row; counts of two digits share a word, so less than 2^16
_WORD = 32


class Rows(NamedTuple):
    """Parts laid out in whole rows, one after the other. Static.

    Attributes:
      length: values of a row, a multiple of 32.
      owner: the part of each row, i32[rows]; the last one's for padding behind it.
      first: the first row of each part, i32[parts].
    """

    length: int
    owner: np.ndarray
    first: np.ndarray

    @property
    def start(self) -> np.ndarray:
        """The place of each part's first value."""
        return self.first * self.length

    def of(self, x: Sequence[int] | np.ndarray) -> Array:
        """The number of each row's part, i32[rows, 1]."""
        return jnp.asarray(np.asarray(x)[self.owner, None].astype(np.int32))


def rows_of(sizes: np.ndarray) -> Rows:
    """The longest rows, powers of two, that padding fills to at most a fifth; one row a part where that suffices.

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
    return Rows(length, np.repeat(np.arange(sizes.size, dtype=np.int32), rows), np.cumsum(rows) - rows)


def alike(a: Rows, sizes: np.ndarray) -> tuple[Rows, Rows]:
    """`a` and rows for these sizes, of equal shape unless one has twice the values: so their kernels compile once."""
    b = _rows(sizes, a.length)
    few, many = sorted([a.owner.size, b.owner.size])
    if many > 2 * few:
        return a, rows_of(sizes)
    a, b = (x._replace(owner=np.pad(x.owner, (0, many - x.owner.size), mode="edge")) for x in (a, b))
    return a, b


def block_for(sizes: np.ndarray, counts: np.ndarray) -> int:
    """b, or 1 for one search of all values: whichever reads least.

    Example:
      >>> [block_for(np.array([n]), np.array([k])) for n, k in [(25_600_000, 25_600), (10**6, 10**3), (10**8, 10**8)]]
      [32, 1, 1]
    """

    def read(b: int) -> int:
        if b == 1:
            return int(_PASSES * sizes.sum())
        blocks = -(-sizes // b)
        return int(sizes.sum() + _PASSES * (blocks + b * np.minimum(counts, blocks)).sum() + _STEP)

    return min((1, 4, 8, 16, 32, 64, 128, 256), key=read)


def largest_by_digits(values: Array, ranges: Sequence[Range], b: int | None = None) -> Array:
    """Positions of the k entries of largest magnitude of each range, i32[mu]; ties go to the lower position.

    They ascend within each range; one range's come after the other's.

    Args:
      values: f32[n].
      ranges: static.
      b: block length; 1 for a single search. Default: `block_for`.
    """
    used = [one for one in ranges if one.k]
    if not used:
        return jnp.zeros((0,), jnp.int32)
    starts, sizes, counts = (np.array(x) for x in zip(*used, strict=True))
    if (counts == sizes).all():
        return jnp.concatenate([one.start + jnp.arange(one.k, dtype=jnp.int32) for one in used])
    b = b or block_for(sizes, counts)
    blocks_of = -(-sizes // b)
    kept_counts = np.minimum(counts, blocks_of)
    rows = rows_of(blocks_of)
    if b > 1:
        rows, kept = alike(rows, b * kept_counts)
    shift, end = starts - b * rows.start, starts + sizes  # of place i, the values start at shift + b i
    bits = _bits_at(values, rows, starts, end, b)
    if b == 1:
        chosen = _chosen(bits, rows, counts)
        return chosen + entries_at(rows.of(shift)[:, 0], chosen // rows.length)
    blocks = _chosen(jnp.max(bits, 2), rows, kept_counts)
    before = np.cumsum(kept_counts) - kept_counts
    slot = jnp.arange(kept.owner.size * kept.length // b, dtype=jnp.int32).reshape(-1, kept.length // b)
    number = slot + kept.of(before - kept.start // b)  # of a kept block; behind the last of its part, any
    first = b * entries_at(blocks, jnp.minimum(number, blocks.size - 1)) + kept.of(shift)
    is_used = number < kept.of(before + kept_counts)
    found = _values_at(values, first, jnp.where(is_used, kept.of(end), 0), b)
    place = _chosen(found.reshape(-1, kept.length), kept, counts)
    return entries_at(first.reshape(-1), place // b) + place % b


def _bits_at(values: Array, rows: Rows, starts: np.ndarray, end: np.ndarray, b: int) -> Array:
    """Magnitudes of the values that each place stands for, i32[rows, length(, b)], with padding behind each part."""
    shape = (rows.owner.size, rows.length, *([b] if b > 1 else []))
    shift = starts - b * rows.start
    if (shift == shift[0]).all() and (starts[1:] == end[:-1]).all():  # adjacent, of whole rows but the last: no copy
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
    """Places of the k largest values of each part, ascending, part after part: i32[rows, length] -> i32[mu]."""
    least, ties = _kth_largest(bits, rows, counts)
    words = bits.reshape(*bits.shape[:1], -1, _WORD)
    above, equal = (bitmap(x).reshape(words.shape[:2]) for x in (words > least[..., None], words == least[..., None]))
    ones = jnp.stack([lax.population_count(x).reshape(-1) for x in (above, equal)]).astype(jnp.int32)
    before = running_sum(ones) - ones
    before_part = entries_at(before.T, jnp.asarray(rows.start[rows.owner] // _WORD)).T  # i32[2, rows]
    ones, before = (x.reshape(2, *above.shape) for x in (ones, before))
    before = before - before_part[:, :, None]
    chosen = above | first_ones(equal, jnp.clip(ties - before[1], 0, ones[1]))
    rank = before[0] + jnp.minimum(before[1], ties) + rows.of(np.cumsum(counts) - counts)
    upto = rank.astype(jnp.uint32) + lax.population_count(chosen)
    return ones_of(chosen.reshape(-1), upto.reshape(-1), int(counts.sum())).astype(jnp.int32)


def _kth_largest(bits: Array, rows: Rows, counts: np.ndarray) -> tuple[Array, Array]:
    """The k-th largest value of each row's part, and how many values equal to it are among the k: i32[rows, 1] each."""

    def turn(_, state):
        t, missing, shift = state
        digit = (bits - t) >> shift  # below 0 or from 16 on if the digits before are other ones
        words = [
            jnp.sum(jnp.where(digit == 2 * i, 1, jnp.where(digit == 2 * i + 1, 1 << 16, 0)), 1).astype(jnp.uint32)
            for i in range(8)
        ]
        reach, picked, left = jnp.zeros_like(t), jnp.zeros_like(t), missing
        for x in _of_parts(words, rows)[:0:-1]:  # from the largest digit on; 0 needs no count
            reach += x[:, None]
            picked += (reach >= missing).astype(jnp.int32)
            left = jnp.where(reach < missing, missing - reach, left)
        return t + (picked << shift), left, shift - _DIGIT

    zeros = jnp.zeros_like(bits, shape=(rows.owner.size, 1))
    t, missing, _ = lax.fori_loop(0, _PASSES, turn, (zeros, zeros + rows.of(counts), zeros + _DIGIT * (_PASSES - 1)))
    return t, missing


def _of_parts(words: Sequence[Array], rows: Rows) -> Sequence[Array]:
    """How often each digit occurs in the part of each row: words u32[rows] of two counts each -> 16 times i32[rows]."""
    if rows.first.size == rows.owner.size:
        return [x.astype(jnp.int32) for word in words for x in (word & 0xFFFF, word >> 16)]
    both = jnp.stack(words)
    counts = jnp.stack([both & 0xFFFF, both >> 16], 1).reshape(16, 1, -1).astype(jnp.int32)
    owner = jnp.asarray(rows.owner)
    mine = owner == jnp.arange(rows.first.size, dtype=jnp.int32)[:, None]
    return list(jnp.sum(jnp.where(mine, counts, 0), 2).at[:, owner].get(mode="promise_in_bounds"))
