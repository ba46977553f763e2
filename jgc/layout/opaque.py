"""What XLA on CPU must not see through: static numbers, so that leaves of equal size compile once, and arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend
from jgc.types import Array, PyTree


def hidden(numbers: Sequence[int], nothing: Array | bool) -> Sequence[Array]:
    """The numbers as i32[] whose values XLA does not know; on other backends than CPU, plain constants.

    XLA on CPU compiles equal operations once, 15 ms each. A start of a slice that it knows makes them unequal. So the
    numbers come out of a loop that takes no step, which XLA cannot know.

    Args:
      numbers: static.
      nothing: bool[] or i32[] of any value up to 1, not known when compiling, the same on all nodes.

    Example:
      >>> [int(x) for x in hidden([0, 3, 7], jnp.bool_(True))]
      [0, 3, 7]
    """
    if backend() != "cpu" or not numbers:
        return tuple(jnp.int32(number) for number in numbers)
    first: Any = tuple(np.int32(number) for number in numbers)  # made by NumPy: JAX would place each on a device

    def changed(carry):  # in place, in a way that XLA cannot undo
        i, numbers = carry
        return i + 1, tuple(number + i for number in numbers)

    return lax.while_loop(lambda carry: carry[0] < jnp.asarray(nothing, jnp.int32), changed, (jnp.int32(1), first))[1]


def dynamic_part(x: Array, start: Array, size: int) -> Array:
    """x[..., start : start + size], where `start` i32[] is not static, and not counted from the end."""
    return lax.dynamic_slice_in_dim(x, start, size, -1, allow_negative_indices=False)


def with_part(x: Array, part: Array, start: Array) -> Array:
    """x[..., n] with x[..., start : start + m] replaced by a part [..., m]; `start` as in `dynamic_part`."""
    return lax.dynamic_update_slice_in_dim(x, part, start, -1, allow_negative_indices=False)


def sealed(x: PyTree, nothing: Array | bool) -> PyTree:
    """x, with arrays f32[..., n] that XLA on CPU takes for new ones; on other backends x itself.

    XLA on CPU computes the last of a chain of in-place updates once for each of its uses, and copies the whole array
    each time. It never computes a loop twice. The loop here takes no step, as in `hidden`.

    Args:
      x: arrays with at least one value, of equal rank.
      nothing: as in `hidden`. What it depends on is computed before x may be overwritten.
    """
    if backend() != "cpu":
        return x

    def changed(carry):
        i, x = carry
        return i + 1, jax.tree.map(lambda x: with_part(x, x[..., :1], i), x)

    return lax.while_loop(lambda carry: carry[0] < jnp.asarray(nothing, jnp.int32), changed, (jnp.int32(1), x))[1]
