"""Random bits that are a hash of each position, keyed by two random words.

Not cryptographic, but unbiased for rounding, and XLA computes it where it is used; the bits of
`jax.random.bits` are computed in passes through memory.

Source: the constants of lowbias32, Wellons 2018, "Prospecting for Hash Functions".
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.types import Array, Key


def noise(key: Key, shape: tuple[int, ...]) -> Array:
    """Random numbers in [0, 1), multiples of 2^-24: f32 of a shape, to round at random."""
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    bits = hashed(first, second, shape) >> 8
    return bits.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)


def to_bfloat16(key: Key, x: Array) -> Array:
    """Finite f32 -> bf16 of the same shape, rounded up or down at random so that x is the mean."""
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (hashed(first, second, x.shape) >> 16)
    return lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


def hashed(first: Array, second: Array, shape: tuple[int, ...]) -> Array:
    """32 bits for each position, u32 of a shape, from two words u32[]."""
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) * np.uint32(0x9E3779B9) + first
    x = (x ^ x >> 16) * np.uint32(0x21F0AAAD) + second
    x = (x ^ x >> 15) * np.uint32(0x735A2D97)
    return x ^ x >> 15
