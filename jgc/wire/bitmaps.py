"""Bitmaps in words of 32 bits, and the positions of their ones, without a sort."""

import jax.numpy as jnp
from jax import lax

from jgc.backend import backend, plain
from jgc.types import Array

_ROW = 64  # values summed up together if the array exceeds the cache


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
    # The word of the i-th one is the number of words that end before it. Counting them takes half
    # the time of a search on CPU, and a quarter under vmap.
    zeros = jnp.zeros_like(upto, shape=(k,))
    word = running_sum(zeros.at[upto].add(1, mode="drop", indices_are_sorted=True))
    word_bits, end = (x.at[word].get(mode="promise_in_bounds") for x in (words, upto))
    rank = jnp.arange(k, dtype=jnp.uint32) - (end - lax.population_count(word_bits))
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

    def add(i, x):  # turn i makes sums of 2^(i+1) values from sums of 2^i
        longer, start = jnp.pad(x, [*axes, (n, 0)]), n - (1 << i)
        return x + lax.dynamic_slice_in_dim(longer, start, n, -1, allow_negative_indices=False)

    return lax.fori_loop(0, (n - 1).bit_length(), add, x)
