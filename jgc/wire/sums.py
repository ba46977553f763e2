"""Sums of groups of values that stay exact enough however many values a group has."""

import jax
import jax.numpy as jnp

from jgc.types import Array

AT_MOST = 2**16  # values that are added one after another, about


def group_sums(x: Array, group: Array, groups: int) -> Array:
    """The sum of each group's values.

    XLA adds the values of a scatter one after another on CPU: in f32, 1 added to 2^24 is lost. So a long vector adds
    into several sums for each group in turn, which are added in the end.

    Args:
      x: f32[n].
      group: of each value, i32[n], in [0, groups).
      groups: their number.

    Example:
      >>> group_sums(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 1, 0]), 3)
      Array([5., 2., 0.], dtype=float32)
    """
    rows = -(-x.size // AT_MOST) or 1
    if rows > 1:
        group = group * rows + jnp.arange(x.size, dtype=jnp.int32) % rows
    return jnp.sum(jax.ops.segment_sum(x, group, groups * rows).reshape(groups, rows), axis=1)
