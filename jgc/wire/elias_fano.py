"""Elias-Fano code of sorted positions, inside the compiled step: near the entropy bound.

The code of k positions out of n has two parts, the low one first:

    low     the lowest w = floor(log2(n/k)) bits of each position as they are, k w bits
    high    the remaining bits as a bitmap of k ones and ceil(n / 2^w) zeros: position i has the
            high part h if the i-th one is bit h + i

At k/n = 0.1 % the code takes 12.0 bits per position; the entropy bound is 11.4, an int32 takes 32.

    code = encode(positions, n)     # i32[k], ascending -> u32[words(n, k)]
    positions = decode(code, n, k)

Bit b of the code is bit b % 32 of word b // 32; the only overhead is the rest of the last word.
Neither side allocates anything of size n, and all sizes depend only on n and k.

Source: Elias, Efficient storage and retrieval by content and address of static files, J. ACM 21(2),
1974; Fano, On the number of bits required to implement an associative memory, MIT Project MAC,
1971.
"""

import jax.numpy as jnp
from jax import lax

from jgc.backend import plain
from jgc.types import Array
from jgc.wire.bitmaps import bitmap, ones_of, running_sum

_LARGEST = 2**31  # largest n for int32 positions; bit numbers of a code then stay below 2^32


def elias_fano_bits(n: int, k: int) -> int:
    """Size of the code in bits: at most 2 bits a position, plus one bit, above the entropy bound.

    Example:
      >>> elias_fano_bits(1024, 8) == 8 * 7 + 8 + 8
      True
    """
    if not 0 <= k <= n:
        raise ValueError(f"`k` positions out of `n` need 0 <= k <= n, got k={k}, n={n}")
    return k * low_bits(n, k) + k + -(-n >> low_bits(n, k)) if k else 0


def words(n: int, k: int) -> int:
    """Size of the code in words.

    Example:
      >>> words(2_400_000, 2_400), 32 * words(2_400_000, 2_400) / 2_400
      (897, 11.96)
    """
    if n > _LARGEST:
        raise ValueError(f"`n` must be at most 2**31 for int32 positions, got {n}")
    return -(-elias_fano_bits(n, k) // 32)


def low_bits(n: int, k: int) -> int:
    """w = floor(log2(n/k)): a further low bit would cost k bits and save n / 2^(w+1) < k."""
    return (n // k).bit_length() - 1


def encode(positions: Array, n: int) -> Array:
    """Encode ascending positions i32[k] below n, not checked, repeats allowed: u32[words(n, k)].

    Raises ValueError unless k <= n <= 2^31.

    Example:
      >>> encode(jnp.array([3, 17, 40]), n=64)
      Array([88083], dtype=uint32)
    """
    k = positions.shape[0]
    size = words(n, k)
    if k == 0:
        return jnp.zeros((0,), jnp.uint32)
    if plain():
        return encode_plain(positions, n)
    w = low_bits(n, k)
    p, i = positions.astype(jnp.uint32), jnp.arange(k, dtype=jnp.uint32)
    low = p & jnp.uint32(2**w - 1)
    low_at, high_at = i * jnp.uint32(w), jnp.uint32(k * w) + (p >> w) + i  # bit numbers
    shift = low_at & 31
    beyond = low >> (31 - shift) >> 1  # bits in the next word; a shift by 32 is undefined
    # No two of these share a bit, so adding words gives their union. On CPU a scatter with repeated
    # words is fastest: 0.02 ms for k = 2,400, where prefix sums and a search take 0.1 ms.
    where = jnp.concatenate([low_at >> 5, (low_at >> 5) + 1, high_at >> 5]).astype(jnp.int32)
    what = jnp.concatenate([low << shift, beyond, jnp.uint32(1) << (high_at & 31)])
    # A word beyond the last one would get only zeros, and is dropped.
    zeros = jnp.zeros((size,), jnp.uint32)
    return zeros.at[where].add(what, mode="drop", wrap_negative_indices=False)


def decode(code: Array, n: int, k: int) -> Array:
    """The inverse of `encode`: u32[words(n, k)] -> i32[k], ascending.

    Example:
      >>> decode(encode(jnp.array([3, 17, 40]), n=64), n=64, k=3)
      Array([ 3, 17, 40], dtype=int32)
    """
    if code.shape != (words(n, k),):
        raise ValueError(
            f"the code of {k} positions out of {n} is u32[{words(n, k)}], got {list(code.shape)}")
    if k == 0:
        return jnp.zeros((0,), jnp.int32)
    if plain():
        return decode_plain(code, n, k)
    w = low_bits(n, k)
    i = jnp.arange(k, dtype=jnp.uint32)
    low_at = i * jnp.uint32(w)
    word, shift = (low_at >> 5).astype(jnp.int32), low_at & 31
    first = code.at[word].get(mode="promise_in_bounds", wrap_negative_indices=False)
    # After the last word any value will do: its bits are not used.
    following = code.at[word + 1].get(mode="clip", wrap_negative_indices=False)
    low = (first >> shift | following << (31 - shift) << 1) & jnp.uint32(2**w - 1)
    # The high parts: the ones from bit k w on, which may lie within a word.
    start = k * w // 32
    hidden = jnp.where(jnp.arange(code.size - start) == 0, jnp.uint32(k * w % 32), 0)
    ones = code[start:] >> hidden << hidden
    high_at = ones_of(ones, running_sum(lax.population_count(ones)), k)
    return (high_at + jnp.uint32(32 * start) - jnp.uint32(k * w) - i << w | low).astype(jnp.int32)


def encode_plain(positions: Array, n: int) -> Array:
    """The plain reference of `encode`: one boolean for each bit of the code."""
    k, w = positions.size, low_bits(n, positions.size)
    bits = jnp.zeros((32 * words(n, k),), bool)
    bits = bits.at[: k * w].set((positions[:, None] >> jnp.arange(w) & 1 == 1).reshape(-1))
    bits = bits.at[k * w + (positions >> w) + jnp.arange(k)].set(True)
    return bitmap(bits.reshape(-1, 32))


def decode_plain(code: Array, n: int, k: int) -> Array:
    """The plain reference of `decode`."""
    w = low_bits(n, k)
    bits = (code[:, None] >> jnp.arange(32, dtype=jnp.uint32) & 1).reshape(-1).astype(jnp.int32)
    low = jnp.sum(bits[: k * w].reshape(k, w) << jnp.arange(w), axis=1)
    high = jnp.nonzero(bits[k * w :], size=k)[0] - jnp.arange(k)
    return (high << w | low).astype(jnp.int32)
