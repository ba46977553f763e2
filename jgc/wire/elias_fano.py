"""Sorted positions in the fewest bits whose number is known beforehand, inside the compiled step.

The Elias-Fano code of k positions out of n: the lowest l = floor(log2(n/k)) bits of each as they are, k l bits; what is
above them, which rises slowly, as a bitmap of k ones and ceil(n / 2^l) zeros: the i-th one, at bit h + i, says that
position i has the high part h. At k/n = 0.1 % that is 12.0 bits a position; the bound is 11.4 and an int32 is 32.

    code = encode(positions, n)     # i32[k], ascending -> u32[words(n, k)]
    positions = decode(code, n, k)

Bit b of the code is bit b % 32 of word b // 32, the low parts come first, and all that is wasted is what is left of the
last word. Nothing of size n is made on either side, and all sizes depend on n and k alone.

Source: Elias, Efficient storage and retrieval by content and address of static files, J. ACM 21(2), 1974; Fano, On the
number of bits required to implement an associative memory, MIT Project MAC, 1971.
"""

import jax.numpy as jnp
from jax import lax

from jgc.types import Array
from jgc.wire.positions import elias_fano_bits

_LARGEST = 2**31  # values that an int32 position can be one of; bits of a code then stay below 2^32


def words(n: int, k: int) -> int:
    """Words of the code of k positions out of n: `elias_fano_bits(n, k)` in whole words.

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
    """The code of positions.

    Args:
      positions: i32[k], ascending, 0 <= p < n; a position may occur several times. What is neither is not noticed.
      n: how many values there are to point at, k <= n <= 2^31.

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
    beyond = lows >> (31 - shift) >> 1  # what of it belongs into the next word; a shift by 32 has no meaning
    one, bit = _place(jnp.uint32(k * low) + (p >> low) + i)
    # No two of these have a bit in common, so that a sum of words is their union. A scatter that meets a word several
    # times is the fastest way on CPU here: 0.02 ms for k = 2,400, where prefix sums and a search take 0.1 ms.
    where = jnp.concatenate([word, word + 1, one])  # a word beyond the last gets nothing but zeros, and is dropped
    what = jnp.concatenate([lows << shift, beyond, jnp.uint32(1) << bit])
    return jnp.zeros((size,), jnp.uint32).at[where].add(what, mode="drop")


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
    following = code.at[word + 1].get(mode="clip")  # beyond the last word any will do: none of its bits are used
    lows = (code[word] >> shift | following << (31 - shift) << 1) & jnp.uint32(2**low - 1)
    high = ones(code, k * low, i) - jnp.uint32(k * low) - i
    return (high << low | lows).astype(jnp.int32)


def _low(n: int, k: int) -> int:
    """l = floor(log2(n/k)): another bit there would cost k, and save n / 2^(l+1) < k in the bitmap."""
    return (n // k).bit_length() - 1


def _place(bit: Array) -> tuple[Array, Array]:
    """Word and shift of bits of the code, i32[k] and u32[k]."""
    return (bit >> 5).astype(jnp.int32), bit & 31


def ones(code: Array, start: int, i: Array) -> Array:
    """Where the i-th ones from bit `start` on are, u32[k]: by whole words first, then within one."""
    first = start // 32
    bitmap = code[first:].at[0].set(code[first] >> start % 32 << start % 32)
    counts = lax.population_count(bitmap)
    upto = jnp.cumsum(counts, dtype=jnp.uint32)
    # The word of the i-th one: how many words end before it. Counted, for a search takes twice as long on CPU, and
    # four times under vmap.
    ended = jnp.zeros((i.size,), jnp.int32).at[upto].add(1, mode="drop", indices_are_sorted=True)
    word = jnp.cumsum(ended)
    bits, rank = bitmap[word], i - (upto - counts)[word]
    bit = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):  # which bit of the word is its one of that rank: by halves
        below = lax.population_count(bits >> bit & jnp.uint32(2**width - 1))
        upper = rank >= below
        bit, rank = jnp.where(upper, bit + width, bit), jnp.where(upper, rank - below, rank)
    return jnp.uint32(32) * (word + first).astype(jnp.uint32) + bit
