"""Positions of the k largest magnitudes of a range, exact, in little more than one read of it.

`lax.top_k` goes through all n values with a heap on CPU, and sorts them all on some GPUs. Here

1. the range is divided into blocks of b neighbouring values, of which the k with the largest maxima are kept (ties
   between maxima to the lower block), in ascending order. That is the only pass over n values;
2. of the k b values in these blocks, in ascending order of position, the k largest are kept (ties to the lower
   position).

This is exact, ties included: let the value x at position p be in a block that is not kept. Each of the k blocks that
are kept has a maximum above x, or one that equals x and the maximum of p's own block; it is then a lower block, and its
maximum has a lower position than p. So k values come before x, and x is not among the k first.

Both steps are the same problem, solved without sorting: non-negative floats are ordered as their bits are, so that the
k-th largest is found digit by digit, counting how many values reach a candidate, and all above it and the first of
those that equal it are written down as a bitmap, whose ones are the positions, in order.

Reductions are in two stages, first over an axis that leaves lanes of 8 neighbours: XLA on CPU makes vector instructions
of that alone, and reads the n values as fast as `max(abs)` does (9 ms of processor time in place of 27 for 25.6M).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.types import Array
from jgc.wire.elias_fano import ones

Variant = Literal["blocks", "threshold", "plain"]

_LANES = 8
_GROUP = 32 * _LANES  # values that are counted together; the axis of 32 is the longest that XLA on CPU unrolls
_PADDING = -1  # below the bits of every magnitude


class Range(NamedTuple):
    """A range of a vector and how many of its values to take, 0 <= k <= size."""

    start: int
    size: int
    k: int


def largest_positions(values: Array, k: int, variant: Variant | None = None) -> Array:
    """Positions of the k entries of largest magnitude, ascending, i32[k]; ties go to the lower position.

    NaN counts as larger than infinity; 0.0 and -0.0 are equal.

    Args:
      values: f32[n], n < 2^31.
      k: how many, static, 0 <= k <= n.
      variant: "blocks" as described above; "threshold" goes through the digits with all values; "plain" sorts what
        `lax.top_k` gives. They give the same; by default what is fastest on CPU for these sizes.

    Raises:
      ValueError: k is not between 0 and n.

    Example:
      >>> largest_positions(jnp.array([1.0, -3.0, 0.0, 3.0, 3.0]), 2)
      Array([1, 3], dtype=int32)
    """
    return largest_in_ranges(values, [Range(0, values.size, k)], variant)


def largest_in_ranges(values: Array, ranges: Sequence[Range], variant: Variant | None = None) -> Array:
    """The same for every range of a vector, in one program: compiling it takes as long for many ranges as for one.

    Args:
      values: f32[n].
      ranges: static; they may be of any sizes.
      variant: of all ranges; by default of each what is fastest on CPU.

    Returns:
      i32[mu], positions in `values`, ascending within each range, one range after the other; mu is the sum of all k.

    Raises:
      ValueError: a k is not between 0 and its range's size, or a range is not within the values.

    Example:
      >>> largest_in_ranges(jnp.array([1.0, -3.0, 0.0, 3.0, 3.0, 4.0]), [Range(0, 4, 1), Range(4, 2, 1)])
      Array([1, 5], dtype=int32)
    """
    for start, size, k in ranges:
        if not 0 <= k <= size:
            raise ValueError(f"k must be between 0 and {size}, the number of values, got {k}")
        if start < 0 or start + size > values.size:
            raise ValueError(
                f"a range must lie within the {values.size} values, got start {start} and size {size}"
            )
    together = [i for i, one in enumerate(ranges) if (variant or fastest(one.size, one.k)) != "plain" and one.k]
    found: dict[int, Array] = {}
    if together:
        chosen = [ranges[i] for i in together]
        positions = _selected(values, chosen, 1 if variant == "threshold" else block_of(chosen))
        ends = np.cumsum([one.k for one in chosen])[:-1].tolist()
        found = dict(zip(together, jnp.split(positions, ends), strict=True))
    for i, (start, size, k) in enumerate(ranges):
        if i not in found and k in (0, size):
            found[i] = start + jnp.arange(k, dtype=jnp.int32)
        elif i not in found:
            found[i] = start + jnp.sort(lax.top_k(jnp.abs(values[start : start + size]), k)[1])
    parts = [found[i] for i in range(len(ranges))]
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), jnp.int32)


def fastest(size: int, k: int) -> Variant:
    """What is fastest on CPU (measured: `python -m jgc bench select`); not yet measured on GPU.

    Example:
      >>> fastest(25_600_000, 25_600), fastest(1000, 10), fastest(10**6, 10**6)
      ('blocks', 'plain', 'plain')
    """
    return "plain" if size < 10_000 or k == size else "blocks"


def block_of(ranges: Sequence[Range]) -> int:
    """b, the largest power of two up to sqrt(2 n/k) in every range: about as many blocks as values in those kept.

    Blocks of 2 are none: to go through all values takes no longer (measured for n from 1e4 to 1e7, often half as long).

    Example:
      >>> [block_of([Range(0, n, k)]) for n, k in [(25_600_000, 25_600), (10**6, 250_000), (10**9, 1)]]
      [32, 1, 256]
    """
    b = 256
    while b > 1 and any(b * b * k > 2 * size for _, size, k in ranges):
        b //= 2
    return b if b > 2 else 1


def _selected(values: Array, ranges: Sequence[Range], b: int) -> Array:
    """The two steps, or the second alone if b is 1: i32[mu]."""
    counts = [one.k for one in ranges]
    first = jnp.asarray(np.repeat([one.start for one in ranges], counts).astype(np.int32))
    parts = [values[start : start + size] for start, size, _ in ranges]
    if b == 1:
        return first + _above_threshold([_bits(part) for part in parts], counts)
    blocks = _above_threshold([_block_maxima(part, b) for part in parts], counts)
    positions = blocks[:, None] * b + jnp.arange(b, dtype=jnp.int32)
    found = _bits(values.at[first[:, None] + positions].get(mode="clip"))
    if any(one.size % b for one in ranges):  # their last blocks end beyond the range
        sizes = np.repeat([one.size for one in ranges], counts).astype(np.int32)
        found = jnp.where(positions < sizes[:, None], found, _PADDING)
    ends = np.cumsum(counts)
    kept = _above_threshold([part.reshape(-1) for part in jnp.split(found, ends[:-1].tolist())], counts)
    before = np.repeat(ends - counts, counts).astype(np.int32)  # blocks of earlier ranges
    return first + blocks[before + kept // b] * b + kept % b


def _bits(values: Array) -> Array:
    """Integers ordered as the magnitudes are, i32[n], none negative."""
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF


def _block_maxima(values: Array, b: int) -> Array:
    """The largest of every b neighbouring magnitudes, as bits, i32[ceil(n / b)]; the last block may be shorter."""
    whole = values.size // b * b
    lanes = min(b, _LANES)
    rows = _bits(values[:whole]).reshape(-1, b // lanes, lanes)
    maxima = jnp.max(lax.optimization_barrier(jnp.max(rows, 1)), 1)  # one fused loop would use no vector instructions
    if whole == values.size:
        return maxima
    return jnp.concatenate([maxima, jnp.max(_bits(values[whole:]), keepdims=True)])


def _above_threshold(parts: Sequence[Array], counts: Sequence[int]) -> Array:
    """Positions in each part of its k largest, ascending, the first ones among equals: i32[n_i] each -> i32[mu].

    At least k of a part are not padding.
    """
    padded = [jnp.pad(part, (0, -part.size % _GROUP), constant_values=_PADDING) for part in parts]
    bits, sizes = jnp.concatenate(padded), np.array([part.size for part in padded])
    owner = np.repeat(np.arange(len(parts), dtype=np.int32), sizes // _GROUP)  # of each group, the part
    threshold = jnp.repeat(_kth_largest(bits, owner, counts)[owner], _LANES)  # of each word of 32 values
    rows = bits.reshape(-1, 32)
    above, equal = _bitmap(rows > threshold[:, None]), _bitmap(rows == threshold[:, None])
    owner = np.repeat(owner, _LANES)
    missing = np.array(counts, np.int32) - _sums(_ones_in(above), owner, len(parts))
    ties = _ones_in(equal)
    earlier = jnp.cumsum(ties) - ties  # in all parts
    earlier -= earlier[((np.cumsum(sizes) - sizes) // 32)[owner]]
    words = above | _first_ones(equal, jnp.clip(missing[owner] - earlier, 0, ties))
    positions = ones(words, 0, jnp.arange(sum(counts), dtype=jnp.uint32))
    return (positions - np.repeat(np.cumsum(sizes) - sizes, counts).astype(np.uint32)).astype(jnp.int32)


def _kth_largest(bits: Array, owner: np.ndarray, counts: Sequence[int]) -> Array:
    """Of each part the largest t >= 0 that at least k of its values reach, i32[parts], from the highest digit on."""
    width = 1 if jax.default_backend() == "cpu" else 4  # bits in a digit: work on CPU, passes elsewhere, are few
    digits = jnp.arange(1, 2**width, dtype=jnp.int32)
    groups, wanted = bits.reshape(-1, 1, 32, _LANES), np.array(counts, np.int32)[:, None]

    def refine(i, t):
        shift = 32 - width - i * width
        candidates = t[:, None] + (digits << shift)  # those beyond 2^31 wrap around to negative ones
        reach = groups >= lax.optimization_barrier(candidates[owner])[:, :, None, None]
        lanes = lax.optimization_barrier(jnp.sum(reach, 2, dtype=jnp.int32))
        reached = (_sums(jnp.sum(lanes, 2), owner, len(counts)) >= wanted) & (candidates > 0)
        return t + (jnp.sum(reached, 1, dtype=jnp.int32) << shift)

    return lax.fori_loop(1 if width == 1 else 0, 32 // width, refine, jnp.zeros_like(bits, shape=len(counts)))


def _sums(values: Array, owner: np.ndarray, parts: int) -> Array:
    """Sums over the groups of each part: i32[groups, ...] -> i32[parts, ...]."""
    if parts == 1:
        return jnp.sum(values, 0, keepdims=True, dtype=jnp.int32)
    return jax.ops.segment_sum(values, owner, parts, indices_are_sorted=True)


def _ones_in(words: Array) -> Array:
    return lax.population_count(words).astype(jnp.int32)


def _bitmap(mask: Array) -> Array:
    """bool[m, 32] in words, u32[m]."""
    bits = mask.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.sum(bits, 1, dtype=jnp.uint32)


def _first_ones(words: Array, wanted: Array) -> Array:
    """Words u32[m] with their lowest ones alone, as many of each as wanted, i32[m]: by halves."""
    left, end = wanted.astype(jnp.uint32), jnp.zeros_like(words)
    for width in (16, 8, 4, 2, 1):
        below = lax.population_count(words >> end & jnp.uint32(2**width - 1))
        upper = left > below
        end, left = jnp.where(upper, end + width, end), jnp.where(upper, left - below, left)
    mask = (jnp.uint32(2) << end) - 1  # up to and with bit `end`, which is the last one wanted; all 32 if 2 << 31 is 0
    return jnp.where(wanted > 0, words & mask, 0)
