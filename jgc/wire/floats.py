"""Rounding to narrow float formats by arithmetic on f32, to the nearest value or at random.

Every step is an operation on f32 or on bits: no conversion that XLA may remove (`jgc.comm.rounded`
says which it does), and none that a device lacks, as most lack 4-bit floats.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jgc.types import Array

_MANTISSA, _BIAS = 23, 127  # of an f32
_LEAST = -110  # exponents below it would need a unit, or its inverse, that no f32 holds


def exponent_of(x: Array) -> Array:
    """floor(log2 |x|) of f32, i32; -127 for zeros and subnormals, 128 for Inf and NaN."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(_MANTISSA)
    return (bits & np.uint32(255)).astype(jnp.int32) - _BIAS


def power_of_two(exponent: Array) -> Array:
    """2^exponent for i32 in [-126, 127], f32."""
    return lax.bitcast_convert_type((exponent + _BIAS) << _MANTISSA, jnp.float32)


def round_to(x: Array, dtype: DTypeLike, noise: Array | float | None = None) -> Array:
    """x f32 rounded to values of a narrower float dtype, in f32; clipped to the dtype's range.

    Args:
      x: finite.
      dtype: such as bfloat16, float8_e4m3fn or float4_e2m1fn.
      noise: None for the nearest value, ties to even; or random numbers in [0, 1) of x's shape, to
        round up or down so that x is the mean, where x is within the range.

    Example:
      >>> round_to(jnp.array([0.3, 2.5, -5.1, 100.0]), jnp.float4_e2m1fn).tolist()
      [0.5, 2.0, -6.0, 6.0]
    """
    narrow = jnp.finfo(dtype)
    exponent = jnp.maximum(exponent_of(x), max(int(narrow.minexp), _LEAST))
    unit = power_of_two(exponent - narrow.nmant)
    level = jnp.abs(x) * power_of_two(narrow.nmant - exponent)  # exact, as the product below
    if noise is None:
        level = jnp.round(level)
    else:
        low = jnp.floor(level)
        level = low + (noise < level - low).astype(jnp.float32)
    return jnp.copysign(jnp.minimum(level * unit, float(narrow.max)), x)


def e2m1_codes(x: Array) -> Array:
    """The bits of 4-bit floats E2M1, u32 below 16: sign, two bits of exponent, one of mantissa.

    Args:
      x: f32 values of the format: 0, 1/2, 1, 3/2, 2, 3, 4 and 6 with either sign.
    """
    size = jnp.abs(x)
    index = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
    negative = lax.bitcast_convert_type(x, jnp.uint32) >> np.uint32(31)
    return index.astype(jnp.uint32) | negative << np.uint32(3)


def e2m1_values(codes: Array) -> Array:
    """The inverse of `e2m1_codes`: u32 -> f32.

    Example:
      >>> e2m1_values(jnp.arange(16, dtype=jnp.uint32)).tolist()[6:10]
      [4.0, 6.0, -0.0, -0.5]
    """
    index = (codes & np.uint32(7)).astype(jnp.int32).astype(jnp.float32)
    size = jnp.where(index < 4, index / 2, jnp.where(index < 6, index - 2, 2 * index - 8))
    return jnp.where(codes >= 8, -size, size)
