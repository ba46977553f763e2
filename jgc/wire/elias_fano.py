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

from jgc.backend import backend, plain
from jgc.types import Array

_LARGEST = 2**31  # largest n for int32 positions; bit numbers of a code then stay below 2^32
_ROW = 64  # values summed up together if the array exceeds the cache


def low_and_all_bits(n: int, k: int) -> tuple[int, int]:
    """w = floor(log2(n/k)), and the bits of the code; ValueError unless 0 <= k <= n <= 2^31."""
    if not 0 <= k <= n:
        raise ValueError(f"`k` positions out of `n` need 0 <= k <= n, got k={k}, n={n}")
    if n > _LARGEST:
        raise ValueError(f"`n` must be at most 2**31 for int32 positions, got {n}")
    if k == 0:
        return 0, 0
    w = (n // k).bit_length() - 1  # one more would cost k bits and save n / 2^(w+1) < k
    return w, k * w + k + -(-n >> w)


def elias_fano_bits(n: int, k: int) -> int:
    """Size of the code in bits: at most 2 bits a position, plus one bit, above the entropy bound.

    Example:
      >>> elias_fano_bits(1024, 8) == 8 * 7 + 8 + 8
      True
    """
    return low_and_all_bits(n, k)[1]


def words(n: int, k: int) -> int:
    """Size of the code in words.

    Example:
      >>> words(2_400_000, 2_400), 32 * words(2_400_000, 2_400) / 2_400
      (897, 11.96)
    """
    return -(-elias_fano_bits(n, k) // 32)


def encode(positions: Array, n: int) -> Array:
    """Encode ascending positions i32[k] below n, not checked, repeats allowed: u32[words(n, k)].

    Raises ValueError unless k <= n <= 2^31.

    Example:
      >>> encode(jnp.array([3, 17, 40]), n=64)
      Array([88083], dtype=uint32)
    """
    k = positions.shape[0]
    w, size = low_and_all_bits(n, k)
    if k == 0:
        return jnp.zeros((0,), jnp.uint32)
    if plain():
        return encode_plain(positions, n)
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
    zeros = jnp.zeros((-(-size // 32),), jnp.uint32)
    return zeros.at[where].add(what, mode="drop", wrap_negative_indices=False)


def decode(code: Array, n: int, k: int) -> Array:
    """The inverse of `encode`: u32[words(n, k)] -> i32[k], ascending.

    Example:
      >>> decode(encode(jnp.array([3, 17, 40]), n=64), n=64, k=3)
      Array([ 3, 17, 40], dtype=int32)
    """
    w, size = low_and_all_bits(n, k)
    if code.shape != (-(-size // 32),):
        raise ValueError(
            f"the code of {k} positions out of {n} is u32[{words(n, k)}], got {list(code.shape)}")
    if k == 0:
        return jnp.zeros((0,), jnp.int32)
    if plain():
        return decode_plain(code, n, k)
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
    k = positions.size
    w, _ = low_and_all_bits(n, k)
    bits = jnp.zeros((32 * words(n, k),), bool)
    bits = bits.at[: k * w].set((positions[:, None] >> jnp.arange(w) & 1 == 1).reshape(-1))
    bits = bits.at[k * w + (positions >> w) + jnp.arange(k)].set(True)
    return bitmap(bits.reshape(-1, 32))


def decode_plain(code: Array, n: int, k: int) -> Array:
    """The plain reference of `decode`."""
    w, _ = low_and_all_bits(n, k)
    bits = (code[:, None] >> jnp.arange(32, dtype=jnp.uint32) & 1).reshape(-1).astype(jnp.int32)
    low = jnp.sum(bits[: k * w].reshape(k, w) << jnp.arange(w), axis=1)
    high = jnp.nonzero(bits[k * w :], size=k)[0] - jnp.arange(k)
    return (high << w | low).astype(jnp.int32)


# --- bitmaps in words of 32 bits ------------------------------------------------------------------


def bitmap(mask: Array) -> Array:
    """bool[..., 32] as words, u32[m]; the first of 32 is the lowest bit.

    Example:
      >>> bitmap(jnp.arange(32) < 3)
      Array([7], dtype=uint32)
    """
    shifts = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * (mask.ndim - 1) + (32,))
    return jnp.sum(mask.astype(jnp.uint32) << shifts, -1, dtype=jnp.uint32).reshape(-1)


def first_ones(words: Array, wanted: Array) -> Array:
    """Words u32[m] with only their lowest ones, `wanted` i32[m] of each, found by bisection."""
    left, end = wanted.astype(jnp.uint32), jnp.zeros_like(words)
    for width in (16, 8, 4, 2, 1):
        below = lax.population_count(words >> end & jnp.uint32(2**width - 1))
        upper = left > below
        end, left = jnp.where(upper, end + width, end), jnp.where(upper, left - below, left)
    # Bits 0 to `end`, the last one wanted; 2 << 31 is 0, so the mask has all 32 for end = 31.
    mask = (jnp.uint32(2) << end) - 1
    return jnp.where(wanted > 0, words & mask, 0)


def ones_of(words: Array, upto: Array, k: int) -> Array:
    """Numbers of the k bits that are ones, ascending, u32[k]. `upto` u32[m] counts the ones up to
    the end of each word.

    Example:
      >>> ones_of(jnp.array([5, 2], jnp.uint32), jnp.array([2, 3], jnp.uint32), 3)
      Array([ 0,  2, 33], dtype=uint32)
    """
    if plain():
        bits = words[:, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        return jnp.nonzero(bits.reshape(-1), size=k)[0].astype(jnp.uint32)
    if backend() == "gpu":
        return _ones_by_scatter(words, upto, k)
    i = jnp.arange(k, dtype=jnp.uint32)
    # The word of the i-th one is the number of words that end before it. Counting them takes half
    # the time of a search on CPU, and a quarter under vmap.
    zeros = jnp.zeros_like(upto, shape=(k,))
    word = running_sum(zeros.at[upto].add(1, mode="drop", indices_are_sorted=True))
    word_bits, end = (x.at[word].get(mode="promise_in_bounds") for x in (words, upto))
    rank = i - (end - lax.population_count(word_bits))
    bit = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):  # bisect for the word's one of that rank
        below = lax.population_count(word_bits >> bit & jnp.uint32(2**width - 1))
        upper = rank >= below
        bit, rank = jnp.where(upper, bit + width, bit), jnp.where(upper, rank - below, rank)
    return jnp.uint32(32) * word + bit


def _ones_by_scatter(words: Array, upto: Array, k: int) -> Array:
    """`ones_of` for GPUs: every bit that is one writes its number to its place, in one kernel."""
    bit = jnp.arange(32, dtype=jnp.uint32)
    before = lax.population_count(words[:, None] & ((jnp.uint32(1) << bit) - 1))
    rank = (upto - lax.population_count(words))[:, None] + before
    is_one = words[:, None] >> bit & 1 == 1
    # Zero bits have place k, past the end, and are dropped: so all places written are distinct.
    place = jnp.where(is_one, rank, jnp.uint32(k)).reshape(-1).astype(jnp.int32)
    numbers, zeros = jnp.arange(place.size, dtype=jnp.uint32), jnp.zeros_like(upto, shape=(k,))
    return zeros.at[place].set(numbers, mode="drop", unique_indices=True,
                               wrap_negative_indices=False)  # fmt: skip


def running_sum(x: Array) -> Array:
    """Cumulative sums of integers along the last axis.

    Example:
      >>> running_sum(jnp.array([1, 0, 2, 5]))
      Array([1, 1, 3, 8], dtype=int32)
    """
    if plain() or backend() != "cpu":
        return jnp.cumsum(x, -1, dtype=x.dtype)
    # On CPU `cumsum` is slower than log2(n) additions in a loop, and takes longer to compile.
    n, axes = x.shape[-1], [(0, 0)] * (x.ndim - 1)
    if n > _ROW**3:  # more than the cache holds: within rows, then over the sums of rows
        rows = jnp.pad(x, [*axes, (0, -n % _ROW)]).reshape(*x.shape[:-1], -1, _ROW)
        inside = running_sum(rows)
        ends = inside[..., -1]
        sums = inside + (running_sum(ends) - ends)[..., None]
        return sums.reshape(*x.shape[:-1], -1)[..., :n]

    # turn i makes sums of 2^(i+1) values from sums of 2^i
    return lax.fori_loop(
        0,
        (n - 1).bit_length(),
        lambda i, x: x + lax.dynamic_slice_in_dim(
            jnp.pad(x, [*axes, (n, 0)]), n - (1 << i), n, -1, allow_negative_indices=False
        ),
        x,
    )
