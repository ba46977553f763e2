"""Rounding to narrow float formats by arithmetic on f32, to the nearest value or at random.

Every step is an operation on f32 or on bits: no conversion that XLA may remove (`jgc.comm.rounded`
says which it does), and none that a device lacks, as most lack 4-bit floats.
"""

from typing import Any

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
    """Finite x f32 rounded to values of a narrower float dtype, in f32; clipped to its range.

    To the nearest, ties to even; or up or down by `noise`, random numbers in [0, 1) of x's shape,
    so that x is the mean where it is within the range.

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


def codes_of(x: Array, dtype: DTypeLike) -> Array:
    """The bits of values of a float dtype of 4 or 8 bits: sign, exponent, mantissa; u32.

    x is f32, finite values of the dtype (`round_to`).

    Example:
      >>> codes_of(jnp.array([0.5, 6.0, -0.0]), jnp.float4_e2m1fn).tolist()
      [1, 7, 8]
    """
    narrow, shift, offset = _layout(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size = lax.bitcast_convert_type(bits & np.uint32(0x7FFFFFFF), jnp.float32)
    subnormal = (size * (1 / float(narrow.smallest_subnormal))).astype(jnp.uint32)
    normal = (bits & np.uint32(0x7FFFFFFF)) >> np.uint32(shift)
    size_code = jnp.where(size < float(narrow.smallest_normal), subnormal, normal - offset)
    return size_code | bits >> np.uint32(31) << np.uint32(narrow.bits - 1)


def values_of_codes(codes: Array, dtype: DTypeLike) -> Array:
    """The inverse of `codes_of`: u32 -> f32.

    Example:
      >>> values_of_codes(jnp.arange(16, dtype=jnp.uint32), jnp.float4_e2m1fn).tolist()[6:10]
      [4.0, 6.0, -0.0, -0.5]
    """
    narrow, shift, offset = _layout(dtype)
    size_code = codes & np.uint32((1 << narrow.bits - 1) - 1)
    normal = lax.bitcast_convert_type((size_code + offset) << np.uint32(shift), jnp.float32)
    subnormal = size_code.astype(jnp.int32).astype(jnp.float32) * float(narrow.smallest_subnormal)
    size = jnp.where(size_code < np.uint32(1 << narrow.nmant), subnormal, normal)
    return jnp.where(codes >> np.uint32(narrow.bits - 1) > 0, -size, size)


def _layout(dtype: DTypeLike) -> tuple[Any, int, np.uint32]:
    """Of a narrow dtype: its `finfo`, how far an f32 is shifted, what is then subtracted."""
    narrow = jnp.finfo(dtype)
    return narrow, _MANTISSA - narrow.nmant, np.uint32((_BIAS - 1 + narrow.minexp) << narrow.nmant)
