"""Values in fixed point, in units that all nodes share, so that an all-reduce adds them up exactly and in any order."""

import jax.numpy as jnp

from jgc import comm
from jgc.types import Array

_STEPS = {"int32": 2.0**16, "int16": 2.0**8, "float32": 1.0}


def units(dtype: str) -> float:
    """Steps of the fixed point in 1: 2^16 for int32, 2^8 for int16; floats are no fixed point and stay as they are."""
    return _STEPS[dtype]


def to_fixed(x: Array, dtype: str, nodes: int) -> Array:
    """x in fixed point, clipped so that the sum over so many nodes fits; floats stay as they are.

    Example:
      >>> to_fixed(jnp.array([1.0, -0.5, 1e9]), "int16", 8).tolist()
      [256, -128, 4095]
    """
    if dtype == "float32":
        return x
    largest = comm.largest_summand(dtype, nodes)
    return jnp.clip(jnp.round(x * units(dtype)), -largest, largest).astype(dtype)
