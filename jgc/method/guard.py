"""The guard in front of every method: no NaN, Inf or absurdly large gradient enters a memory."""

from collections.abc import Sequence

import jax.numpy as jnp

from jgc import comm
from jgc.layout.squares import squared_norm
from jgc.types import Array

# Methods square gradients, add them up over nodes and steps, and some square those sums: all of it
# must fit into f32.
LARGEST_NORM = 1e15


def unusable(arrays: Sequence[Array]) -> Array:
    """Whether the arrays hold NaN or Inf, or have a norm of `LARGEST_NORM` and more together, bool[].

    Example:
      >>> [bool(unusable([jnp.array([1.0, x])])) for x in (-1e14, 2e15, 3e38, jnp.nan, -jnp.inf)]
      [False, True, True, True, True]
    """
    # One pass, as long as that of a plain sum. A square that overflows is Inf, and NaN goes
    # through the sum.
    squares = squared_norm([x.astype(comm.at_least_f32(x.dtype)) for x in arrays])
    return ~(squares < LARGEST_NORM**2)  # not `>=`, which is false for NaN


def not_finite(x: Array) -> Array:
    """Whether x holds NaN or Inf, bool[].

    Example:
      >>> [bool(not_finite(jnp.array([1.0, last]))) for last in (3e38, jnp.nan, -jnp.inf)]
      [False, True, True]
    """
    # A sum propagates NaN on every backend; XLA's maximum on CPU drops it where it compares 4,096
    # values or more as vectors. The sum takes as long as one read of x; all(isfinite) takes 1.5
    # times as long on CPU.
    return ~jnp.isfinite(jnp.sum(0 * x))
