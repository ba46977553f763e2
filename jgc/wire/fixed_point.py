"""Values in fixed point, in units that all nodes share: an all-reduce adds them exactly."""

import jax.numpy as jnp
import numpy as np

from jgc.types import Array

_STEPS = {"int32": 2.0**16, "int16": 2.0**8, "float32": 1.0}


def units(dtype: str) -> float:
    """Fixed-point steps per unit: 2^16 for int32, 2^8 for int16; 1 for float32, sent unchanged."""
    return _STEPS[dtype]


def to_fixed(x: Array, dtype: str, nodes: int) -> Array:
    """x in fixed point, clipped so that the sum over `nodes` nodes fits; float32 returns x.

    Example:
      >>> to_fixed(jnp.array([1.0, -0.5, 1e9]), "int16", 8).tolist()
      [256, -128, 4095]
    """
    if dtype == "float32":
        return x
    largest = largest_summand(dtype, nodes)
    return jnp.clip(jnp.round(x * units(dtype)), -largest, largest).astype(dtype)


def largest_summand(dtype: str, count: int) -> float:
    """The largest f32 such that the sum of `count` copies fits an integer dtype.

    Example:
      >>> largest_summand("int8", 8)
      15.0
    """
    bound = int(jnp.iinfo(dtype).max) // count
    largest = np.float32(bound)  # may round up
    return float(largest if int(largest) <= bound else np.nextafter(largest, np.float32(0)))
