"""Ranges of a vector from which the largest magnitudes are selected, and how magnitudes compare."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jgc.types import Array

PADDING = -1  # below the bits of every magnitude


class Range(NamedTuple):
    """A range of a vector and the number k of values to take from it, 0 <= k <= size. Static."""

    start: int
    size: int
    k: int


def bits_of(values: Array) -> Array:
    """Non-negative integers in the order of the magnitudes, i32 of the same shape.

    NaN comes after infinity, and 0.0 equals -0.0.

    Example:
      >>> bits = bits_of(jnp.array([0.0, -0.0, -1.0, jnp.inf, jnp.nan]))
      >>> (bits[1:] - bits[:-1] > 0).tolist()
      [False, True, True, True]
    """
    return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
