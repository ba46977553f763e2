"""Pack codes of a few bits into 32-bit words inside the compiled step: 4 bits cost 4 bits on the wire.

Words are bit planes: of 32 codes of b bits, word j holds bit j of each. So every width packs without gaps. The only
overhead is the padding to a multiple of 32 codes.

    words = pack_bits(codes, bits=3)          # u32[n], below 8 -> u32[3 ceil(n / 32)]
    codes = unpack_bits(words, bits=3, n=n)
"""

import jax.numpy as jnp
import numpy as np

from jgc.types import Array

_WIDTH = 32  # bits of a word, and codes of a group


def packed_words(n: int, bits: int) -> int:
    """Number of words for n codes.

    Example:
      >>> packed_words(100, 4)
      16
    """
    return -(-n // _WIDTH) * bits


def pack_bits(codes: Array, bits: int) -> Array:
    """Pack codes into words.

    Args:
      codes: u32[n], each below 2^bits; higher bits are dropped.
      bits: 1 to 32.

    Returns:
      u32[packed_words(n, bits)].

    Raises:
      ValueError: bits outside 1 to 32.
    """
    _check(bits)
    codes = jnp.pad(codes.astype(jnp.uint32), (0, -codes.size % _WIDTH)).reshape(-1, 1, _WIDTH)
    planes = (codes >> _numbers(bits)[:, None]) & np.uint32(1)  # [n / 32, bits, 32]
    return jnp.sum(planes << _numbers(_WIDTH), axis=-1, dtype=jnp.uint32).reshape(-1)


def unpack_bits(words: Array, bits: int, n: int) -> Array:
    """The inverse of `pack_bits`: u32[packed_words(n, bits)] -> u32[n]."""
    _check(bits)
    planes = (words.reshape(-1, bits, 1) >> _numbers(_WIDTH)) & np.uint32(1)  # [n / 32, bits, 32]
    return jnp.sum(planes << _numbers(bits)[:, None], axis=1, dtype=jnp.uint32).reshape(-1)[:n]


def _numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


def _check(bits: int) -> None:
    if not 1 <= bits <= _WIDTH:
        raise ValueError(f"bits must be 1 to {_WIDTH}, got {bits}")
