"""How arrays lie on each kind of device, and what its compiler must not see through.

    hidden, sealed              XLA on CPU: leaves of equal size compile once, and nothing twice
    in_tiles, as_flat, cut      a TPU keeps a node's vectors as rows of 128 values, filled up with
                                zeros to whole tiles; other devices keep f32[n]
    each                        gathered messages: decoded at once, or one after another

A TPU works on tiles of 8 x 128 values. It lays out f32[1, n], a node's vector in an array [K, n],
in tiles of 1 x 128, and f32[n] in whole ones: to move all of it from one layout into the other and
back costs 16 reads of the gradient in every step. Rows of 128 lie as f32[n] does, and nothing
moves. A step takes either form, whatever device it runs on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jgc.backend import backend, plain
from jgc.types import Array, PyTree
from jgc.wire.bits import LANES, TILE


def hidden(numbers: Sequence[int], nothing: Array | bool) -> Sequence[Array]:
    """The numbers as i32[] whose values XLA does not know; on other backends than CPU, plain
    constants.

    XLA on CPU compiles equal operations once, 15 ms each. A start of a slice that it knows makes
    them unequal. So the numbers come out of a loop that takes no step, which XLA cannot know.

    Args:
      numbers: static.
      nothing: bool[] or i32[] of any value up to 1, not known when compiling, the same on all
        nodes.

    Example:
      >>> [int(x) for x in hidden([0, 3, 7], jnp.bool_(True))]
      [0, 3, 7]
    """
    if backend() != "cpu" or not numbers:
        return tuple(jnp.int32(number) for number in numbers)
    # made by NumPy: JAX would place each on a device
    first: Any = tuple(np.int32(number) for number in numbers)

    def changed(carry):  # in place, in a way that XLA cannot undo
        i, numbers = carry
        return i + 1, tuple(number + i for number in numbers)

    return lax.while_loop(
        lambda carry: carry[0] < jnp.asarray(nothing, jnp.int32), changed, (jnp.int32(1), first)
    )[1]


def dynamic_part(x: Array, start: Array, size: int) -> Array:
    """x[..., start : start + size], where `start` i32[] is not static, and not counted from the
    end."""
    return lax.dynamic_slice_in_dim(x, start, size, -1, allow_negative_indices=False)


def with_part(x: Array, part: Array, start: Array) -> Array:
    """x[..., n] with x[..., start : start + m] replaced by a part [..., m]; `start` as in
    `dynamic_part`."""
    return lax.dynamic_update_slice_in_dim(x, part, start, -1, allow_negative_indices=False)


def sealed(x: PyTree, nothing: Array | bool) -> PyTree:
    """x, with arrays f32[..., n] that XLA on CPU takes for new ones; on other backends x itself.

    XLA on CPU computes the last of a chain of in-place updates once for each of its uses, and
    copies the whole array each time. It never computes a loop twice. The loop here takes no step,
    as in `hidden`.

    Args:
      x: arrays with at least one value, of equal rank.
      nothing: as in `hidden`. What it depends on is computed before x may be overwritten.
    """
    if backend() != "cpu":
        return x

    def changed(carry):
        i, x = carry
        return i + 1, jax.tree.map(lambda x: with_part(x, x[..., :1], i), x)

    return lax.while_loop(
        lambda carry: carry[0] < jnp.asarray(nothing, jnp.int32), changed, (jnp.int32(1), x)
    )[1]


def in_tiles(x: Array) -> Array:
    """A vector [n] as rows [m, 128] of whole tiles, filled up with zeros.

    Example:
      >>> in_tiles(jnp.ones(1030)).shape
      (16, 128)
    """
    return jnp.pad(x, (0, -x.size % TILE)).reshape(-1, LANES)


def as_flat(x: Array) -> Array:
    """The vector [n] itself, or rows as one vector with the zeros at its end."""
    # The barrier keeps XLA from moving the reshape into the addition that follows, for which it
    # would copy a vector.
    return x if x.ndim == 1 else lax.optimization_barrier(x.reshape(-1))


def decodes_tiles(tiled: Any, words: int, layers: Any) -> bool:
    """Whether a code of so many words is decoded by `tiled`, a `jgc.method.exchange.Tiled` or
    None."""
    return backend() == "tpu" and tiled is not None and tiled.fits(words, layers)


def cut(x: Array, n: int) -> Array:
    """The first n values of a vector."""
    return x if x.size == n else x[:n]


def filled(x: Array, size: int) -> Array:
    """A vector with zeros behind it, `size` values in all."""
    return x if x.size == size else jnp.pad(x, (0, size - x.size))


def in_form(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Saved vectors [..., n] or rows [..., m, 128] in the other form, if that has the given shape;
    else unchanged.

    Example:
      >>> saved = np.ones((2, 1030))
      >>> in_form(saved, (2, 16, 128)).shape, in_form(saved, (2, 1031)).shape
      ((2, 16, 128), (2, 1030))
    """
    rows, flat = (x.shape, shape) if x.ndim > len(shape) else (shape, x.shape)
    tiles = -(-flat[-1] // TILE) * TILE if flat else 0
    if rows[:-2] != flat[:-1] or rows[-2:] != (tiles // LANES, LANES):
        return x
    values = x.reshape(*flat[:-1], -1)[..., : flat[-1]]
    behind = 0 if x.shape == rows else tiles - flat[-1]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, behind)]).reshape(shape)


def each(fn: Callable[[PyTree], PyTree], x: PyTree, few: bool = False) -> PyTree:
    """fn of every entry of the leading axis of x; on CPU one after another, on GPU at once
    (`vmap`).

    On TPU all at once if `few` values are gathered: then an axis of K entries is the last one, and
    filled up to 128.

    On CPU the loop does what no barrier does: it keeps XLA from computing the result once more in
    each of its uses, and from compiling it there. And fn compiles as what the node did itself.
    """
    if plain():
        return jax.vmap(fn)(x)
    if backend() == "tpu" and not few:
        x = jax.tree.map(node_by_node, x)
    at_once = backend() == "gpu" or (backend() == "tpu" and few)
    return jax.vmap(fn)(x) if at_once else lax.map(fn, x)


def node_by_node(x: Array) -> Array:
    """x [K, n] so laid out on a TPU that a loop over K reads one row at a time.

    XLA would put K last, for then it can cut fields out of gathered messages without a copy. But
    each of K steps would read all of x: 256 nodes with 23,500 values each took 30 reads of the
    gradient.
    """
    if backend() != "tpu" or x.ndim < 2:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
