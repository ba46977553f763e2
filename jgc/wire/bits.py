"""Pack codes of a few bits into 32-bit words inside the compiled step: 4 bits take 4 bits.

A code of b bits is cut into fields of 16, 8, 4, 2 and 1 bits, so 3 bits are a field of 2 and a
field of 1. A field of w bits of n codes takes n w / 32 words; word j holds the fields of the codes
j, j + n w / 32, j + 2 n w / 32, ... So every width packs without gaps, and neighbouring codes lie
in neighbouring words, which vectorises. The only overhead is padding to a multiple of 32 codes.

    words = pack_bits(codes, bits=3)          # u32[n], below 8 -> u32[3 ceil(n / 32)]
    codes = unpack_bits(words, bits=3, n=n)
"""

import math
from functools import reduce

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend, plain
from jgc.types import Array

_WIDTH = 32  # bits of a word, and codes of a group
LANES, TILE = 128, 8 * 128  # values of a row, and of a tile, of a TPU
MANY = 2**20  # codes; padding this many to whole tiles adds at most 3 %


def whole_words(n: int) -> int:
    """How many codes the words of n codes hold; on a TPU many codes take whole tiles of 8 x 128.

    Example:
      >>> whole_words(100)
      128
    """
    unit = _WIDTH * TILE if backend() == "tpu" and n >= MANY else _WIDTH
    return -(-n // unit) * unit


def pack_bits(codes: Array, bits: int) -> Array:
    """Pack codes u32[n], each below 2^bits, into words u32[whole_words(n) / 32 * bits].

    Raises:
      ValueError: bits outside 1 to 32.
    """
    _check(bits)
    codes = codes.astype(jnp.uint32)
    behind = whole_words(codes.size) - codes.size
    codes = jnp.pad(codes, (0, behind)) if behind else codes
    if plain():
        return pack_plain(codes, bits)
    words = []
    for start, width in fields_of(bits):
        columns = _columns(codes.size * width // _WIDTH)
        rows = (codes >> np.uint32(start)).reshape(_WIDTH // width, -1, columns)
        mask = np.uint32(2**width - 1)
        fields = [(row & mask) << np.uint32(width * i) for i, row in enumerate(rows)]
        words.append(reduce(jnp.bitwise_or, fields).reshape(-1))
    return jnp.concatenate(words)


def unpack_bits(words: Array, bits: int, n: int) -> Array:
    """The inverse of `pack_bits`: u32[whole_words(n) / 32 * bits] -> u32[n]."""
    _check(bits)
    if plain():
        return unpack_plain(words, bits, n)
    fields, at = [], 0
    for start, width in fields_of(bits):
        count = words.size // bits * width
        shifts = np.arange(0, _WIDTH, width, dtype=np.uint32)[:, None, None]
        part = words[at : at + count].reshape(1, -1, _columns(count))
        rows = part >> shifts  # [32 / width, ., m]
        fields.append(((rows & np.uint32(2**width - 1)) << np.uint32(start)).reshape(-1))
        at += count
    return reduce(jnp.bitwise_or, fields)[:n]


def pack_plain(codes: Array, bits: int) -> Array:
    """The plain reference of `pack_bits`, for u32[n] with n a multiple of 32."""
    words = []
    for low, width in fields_of(bits):
        fields = (codes >> low & np.uint32(2**width - 1)).reshape(_WIDTH // width, -1)
        place = width * jnp.arange(_WIDTH // width, dtype=jnp.uint32)
        words.append(jnp.sum(fields << place[:, None], 0, dtype=jnp.uint32))
    return jnp.concatenate(words)


def unpack_plain(words: Array, bits: int, n: int) -> Array:
    """The plain reference of `unpack_bits`."""
    codes, rest = jnp.zeros((words.size // bits * _WIDTH,), jnp.uint32), words
    for low, width in fields_of(bits):
        count = words.size // bits * width
        place = width * jnp.arange(_WIDTH // width, dtype=jnp.uint32)
        fields = rest[:count] >> place[:, None] & np.uint32(2**width - 1)
        codes |= (fields << low).reshape(-1)
        rest = rest[count:]
    return codes[:n]


def ones_at(words: Array, n: int) -> Array:
    """How many of K messages have a one as their i-th code of one bit: u32[K, words] -> i32[n]."""
    if plain():
        ones = (unpack_plain(x, 1, n).astype(jnp.int32) for x in words)
        return sum(ones, jnp.zeros(n, jnp.int32))
    shifts = np.arange(_WIDTH, dtype=np.uint32)[:, None]

    def of_node(k):
        return (words[k][None] >> shifts & np.uint32(1)).astype(jnp.int32)  # [32, words]

    few = min(words.shape[0], 8)  # added in one fused operation, the others node by node
    first = reduce(jnp.add, [of_node(k) for k in range(few)])
    total = lax.fori_loop(few, words.shape[0], lambda k, total: total + of_node(k), first)
    return total.reshape(-1)[:n]


def _columns(count: int) -> int:
    """m: words are handled in rows [count / m, m]."""
    if backend() == "tpu":  # which pads the last axis to a multiple of 128
        return LANES if count and count % TILE == 0 else count or 1
    return math.gcd(count, 512) or 1  # XLA on CPU then vectorises the cutting into rows, too


def fields_of(bits: int) -> list[tuple[int, int]]:
    """Lowest bit and width of each field of a code, the widest first.

    Example:
      >>> fields_of(7)
      [(3, 4), (1, 2), (0, 1)]
    """
    fields, left = [], bits
    for width in (32, 16, 8, 4, 2, 1):
        if left >= width:
            left -= width
            fields.append((left, width))
    return fields


def _check(bits: int) -> None:
    if not 1 <= bits <= _WIDTH:
        raise ValueError(f"bits must be 1 to {_WIDTH}, got {bits}")
