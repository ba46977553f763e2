"""Elias-Fano code of sorted positions, inside the compiled step: near the entropy bound, and of static size.

The code of k positions out of n has two parts:

    low     the lowest l = floor(log2(n/k)) bits of each position as they are, k l bits
    high    the remaining bits as a bitmap of k ones and ceil(n / 2^l) zeros: position i has the high part h if the
            i-th one is bit h + i

At k/n = 0.1 % the code takes 12.0 bits per position. The entropy bound is 11.4; an int32 takes 32.

    code = encode(positions, n)     # i32[k], ascending -> u32[words(n, k)]
    positions = decode(code, n, k)

Bit b of the code is bit b % 32 of word b // 32. The low parts come first. The only overhead is the rest of the last
word. Neither side allocates anything of size n, and all sizes depend only on n and k.

Source: Elias, Efficient storage and retrieval by content and address of static files, J. ACM 21(2), 1974; Fano, On the
number of bits required to implement an associative memory, MIT Project MAC, 1971.
"""

import jax.numpy as jnp
from jax import lax

from jgc.backend import backend
from jgc.types import Array
from jgc.wire.positions import elias_fano_bits

_ROW = 64  # values summed up together where there are more than the cache holds
_LARGEST = 2**31  # largest n for int32 positions; bit numbers of a code then stay below 2^32


def words(n: int, k: int) -> int:
    """Number of words of the code: `elias_fano_bits(n, k)` rounded up to whole words.

    Raises:
      ValueError: not 0 <= k <= n <= 2^31.

    Example:
      >>> words(2_400_000, 2_400), 32 * words(2_400_000, 2_400) / 2_400
      (897, 11.96)
    """
    if n > _LARGEST:
        raise ValueError(f"`n` must be at most 2**31 for int32 positions, got {n}")
    return -(-elias_fano_bits(n, k) // 32)


def encode(positions: Array, n: int) -> Array:
    """Encode positions.

    Args:
      positions: i32[k], ascending, 0 <= p < n; a position may occur several times. Not checked.
      n: length of the vector that positions point into, k <= n <= 2^31.

    Returns:
      u32[words(n, k)].

    Raises:
      ValueError: n is less than k or more than 2^31.

    Example:
      >>> encode(jnp.array([3, 17, 40]), n=64)
      Array([88083], dtype=uint32)
    """
    k = positions.shape[0]
    size = words(n, k)
    if k == 0:
        return jnp.zeros((0,), jnp.uint32)
    low = _low(n, k)
    p, i = positions.astype(jnp.uint32), jnp.arange(k, dtype=jnp.uint32)
    lows = p & jnp.uint32(2**low - 1)
    word, shift = _place(i * jnp.uint32(low))  # where each low part starts
    beyond = lows >> (31 - shift) >> 1  # its bits in the next word; two shifts, as a shift by 32 is undefined
    one, bit = _place(jnp.uint32(k * low) + (p >> low) + i)
    # No two of these share a bit, so adding words gives their union. On CPU a scatter with repeated words is fastest:
    # 0.02 ms for k = 2,400, where prefix sums and a search take 0.1 ms.
    where = jnp.concatenate([word, word + 1, one])  # a word beyond the last one would get only zeros, and is dropped
    what = jnp.concatenate([lows << shift, beyond, jnp.uint32(1) << bit])
    return jnp.zeros((size,), jnp.uint32).at[where].add(what, mode="drop", wrap_negative_indices=False)


def decode(code: Array, n: int, k: int) -> Array:
    """The inverse of `encode`: u32[words(n, k)] -> i32[k], ascending.

    Example:
      >>> decode(encode(jnp.array([3, 17, 40]), n=64), n=64, k=3)
      Array([ 3, 17, 40], dtype=int32)
    """
    if code.shape != (words(n, k),):
        raise ValueError(f"the code of {k} positions out of {n} is u32[{words(n, k)}], got {list(code.shape)}")
    if k == 0:
        return jnp.zeros((0,), jnp.int32)
    low = _low(n, k)
    i = jnp.arange(k, dtype=jnp.uint32)
    word, shift = _place(i * jnp.uint32(low))
    own = code.at[word].get(mode="promise_in_bounds", wrap_negative_indices=False)
    # after the last word any value will do: its bits are not used
    following = code.at[word + 1].get(mode="clip", wrap_negative_indices=False)
    lows = (own >> shift | following << (31 - shift) << 1) & jnp.uint32(2**low - 1)
    high = ones(code, k * low, k) - jnp.uint32(k * low) - i
    return (high << low | lows).astype(jnp.int32)


def _low(n: int, k: int) -> int:
    """l = floor(log2(n/k)): one more low bit would cost k bits and save n / 2^(l+1) < k in the bitmap."""
    return (n // k).bit_length() - 1


def _place(bit: Array) -> tuple[Array, Array]:
    """Word index and shift of bits of the code, i32[k] and u32[k]."""
    return (bit >> 5).astype(jnp.int32), bit & 31


def ones(code: Array, start: int, k: int) -> Array:
    """Bit numbers of the first k ones from bit `start` on, u32[k]; there are no more."""
    first = start // 32
    shift = jnp.where(jnp.arange(code.size - first) == 0, jnp.uint32(start % 32), 0)
    bitmap = code[first:] >> shift << shift
    upto = running_sum(lax.population_count(bitmap))
    return jnp.uint32(32 * first) + ones_of(bitmap, upto, k)


def running_sum(x: Array) -> Array:
    """The sums up to each value of the last axis, of integers. On CPU faster than `cumsum`, and with less to compile.

    Example:
      >>> running_sum(jnp.array([1, 0, 2, 5]))
      Array([1, 1, 3, 8], dtype=int32)
    """
    if backend() != "cpu":
        return jnp.cumsum(x, -1, dtype=x.dtype)
    n = x.shape[-1]
    if n <= _ROW**3:
        return _doubled_sums(x)
    rows = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % _ROW)]).reshape(*x.shape[:-1], -1, _ROW)
    inside = _doubled_sums(rows)
    ends = inside[..., -1]
    return (inside + (running_sum(ends) - ends)[..., None]).reshape(*x.shape[:-1], -1)[..., :n]


def _doubled_sums(x: Array) -> Array:
    """The sums up to each value: turn i makes those of the last 2^i values those of twice as many."""
    n = x.shape[-1]

    def add(i, x):
        longer = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(n, 0)])
        return x + lax.dynamic_slice_in_dim(longer, n - (1 << i), n, -1, allow_negative_indices=False)

    return lax.fori_loop(0, (n - 1).bit_length(), add, x)


def ones_of(bitmap: Array, upto: Array, k: int) -> Array:
    """Bit numbers of the k ones of a bitmap, u32[k]; `upto` u32[words]: ones up to the end of each word."""
    if backend() == "gpu":
        return _written_ones(bitmap, upto, k)
    i = jnp.arange(k, dtype=jnp.uint32)
    # The word of the i-th one is the number of words that end before it. They are counted: a search takes twice as long
    # on CPU, and four times as long under vmap.
    ended = jnp.zeros_like(upto, shape=(k,)).at[upto].add(1, mode="drop", indices_are_sorted=True)
    word = running_sum(ended)
    bits, end = (x.at[word].get(mode="promise_in_bounds") for x in (bitmap, upto))
    rank = i - (end - lax.population_count(bits))
    bit = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):  # bisect for the word's one of that rank
        below = lax.population_count(bits >> bit & jnp.uint32(2**width - 1))
        upper = rank >= below
        bit, rank = jnp.where(upper, bit + width, bit), jnp.where(upper, rank - below, rank)
    return jnp.uint32(32) * word + bit


def _written_ones(bitmap: Array, upto: Array, k: int) -> Array:
    """`ones_of` for GPUs: every bit that is one writes its number to its place, in one kernel."""
    bit = jnp.arange(32, dtype=jnp.uint32)
    rank = (upto - lax.population_count(bitmap))[:, None] + lax.population_count(
        bitmap[:, None] & ((jnp.uint32(1) << bit) - 1)
    )
    place = jnp.where(bitmap[:, None] >> bit & 1 == 1, rank, jnp.uint32(k)).reshape(-1).astype(jnp.int32)
    numbers = jnp.arange(place.size, dtype=jnp.uint32)
    ones = jnp.zeros_like(upto, shape=(k,))
    return ones.at[place].set(numbers, mode="drop", unique_indices=True, wrap_negative_indices=False)
