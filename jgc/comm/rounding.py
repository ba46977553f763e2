"""Rounding to narrower floats that no compiler removes.

XLA for GPU removes a conversion f32 -> bf16, f16 or f8 -> f32 inside a program, also through a pair
of `bitcast_convert_type` (`xla_allow_excess_precision`, on by default). The residual v - rounded(v)
would be 0, and the rounding error lost. XLA for CPU and TPU keeps such conversions.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jgc.backend import backend
from jgc.types import Array


def at_least_f32(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype for sums of values of a float dtype. JAX does not promote floats of 8 bits.

    Example:
      >>> at_least_f32(jnp.dtype(jnp.float8_e4m3fn)), at_least_f32(jnp.dtype(jnp.float64))
      (dtype('float32'), dtype('float64'))
    """
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """x rounded to the nearest value of a float dtype, in x's dtype: for residuals x - rounded.

    Equal, bit for bit, to `x.astype(dtype).astype(x.dtype)`, which XLA for GPU removes. Does
    nothing to an x that is no wider than `dtype`.

    Args:
      x: floats of any shape, of 32 bits or more, or of `dtype` itself.
      dtype: such as bfloat16, float16, float8_e4m3fn, float8_e5m2.

    Example:
      >>> rounded(jnp.array([1 / 3, 1000.0]), jnp.bfloat16)
      Array([3.3398438e-01, 1.0000000e+03], dtype=float32)
    """
    dtype = jnp.dtype(dtype)
    if x.dtype.itemsize <= dtype.itemsize:
        return x
    if backend() != "gpu":
        return x.astype(dtype).astype(x.dtype)
    wide, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    # all exponents of x, because `reduce_precision` makes subnormals 0, and has an Inf where
    # float8_e4m3fn has numbers
    out = lax.reduce_precision(x, exponent_bits=wide.nexp, mantissa_bits=narrow.nmant)
    if narrow.nexp == wide.nexp:
        return out
    least = float(narrow.smallest_subnormal)  # a power of two, so that the products are exact
    subnormal = jnp.abs(x) < float(narrow.smallest_normal)
    out = jnp.where(subnormal, jnp.round(x * (1 / least)) * least, out)
    with np.errstate(invalid="ignore"):
        beyond = float(np.asarray(np.inf).astype(dtype))  # Inf, or NaN if the dtype has no Inf
    return jnp.where(jnp.abs(out) > float(narrow.max), jnp.copysign(beyond, out), out)


def narrowed(x: Array, dtype: DTypeLike) -> Array:
    """x in a float dtype, clipped to its range, beyond which a plain cast makes Inf or NaN.

    Converted back, the result is that of `rounded` on every backend.

    Example:
      >>> narrowed(jnp.array([1.0, -1e6, jnp.nan]), jnp.float16).tolist()
      [1.0, -65504.0, nan]
    """
    top = float(jnp.finfo(dtype).max)
    x = x if top >= float(jnp.finfo(x.dtype).max) else jnp.clip(x, -top, top)
    return rounded(x, dtype).astype(dtype)
