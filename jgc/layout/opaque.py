"""What XLA on CPU must not see through: static numbers, so that leaves of equal size compile once, and arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

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


def each(fn: Callable[[PyTree], PyTree], x: PyTree, few: bool = False) -> PyTree:
    """fn of every entry of the leading axis of x; on CPU one after another, on GPU all at once (`vmap`).

    On TPU all at once if `few` values are gathered: then an axis of K entries is the last one, and filled up to 128.

    On CPU the loop does what no barrier does: it keeps XLA from computing the result once more in each of its uses, and
    from compiling it there. And fn compiles as what the node did itself.
    """
    if backend() == "tpu" and not few:
        x = jax.tree.map(node_by_node, x)
    at_once = backend() == "gpu" or (backend() == "tpu" and few)
    return jax.vmap(fn)(x) if at_once else lax.map(fn, x)


def node_by_node(x: Array) -> Array:
    """x [K, n] so laid out on a TPU that a loop over K reads one row at a time.

    XLA would put K last, for then it can cut fields out of gathered messages without a copy. But each of K steps would
    read all of x: 256 nodes with 23,500 values each took 30 reads of the gradient.
    """
    if backend() != "tpu" or x.ndim < 2:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
