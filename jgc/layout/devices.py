"""How arrays lie on each kind of device, and what its compiler must not see through.

    hidden, sealed              XLA on CPU: leaves of equal size compile once, and nothing twice
    in_tiles, as_flat, cut      a TPU keeps a node's vectors as rows of 128 values, filled up with
                                zeros to whole tiles; other devices keep f32[n]
    each                        gathered messages: decoded together, or one by one
    squared_norm, unusable      many arrays read once: in few kernels, or in long stretches

A TPU works on tiles of 8 x 128 values. It lays out f32[1, n], a node's vector in an array [K, n],
in tiles of 1 x 128, and f32[n] in whole ones: moving all of it from one layout into the other and
back costs 16 reads of the gradient in every step. Rows of 128 lie as f32[n] does, and nothing
moves. Steps accept both layouts on every device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jgc.backend import backend, plain
from jgc.types import Array, PyTree
from jgc.wire.bits import LANES, TILE

# Methods square gradients, add them up over nodes and steps, and some square those sums: all of it
# must fit into f32.
LARGEST_NORM = 1e15
SMALL = 2**16  # arrays up to this size are joined; copying larger ones costs more than it saves
_AT_ONCE = 16  # stretches of memory
_IN_A_KERNEL = 64  # arrays: XLA on GPU writes a concatenation of more than 96 to memory

# x[..., start : start + size], and x with a part from `start` on replaced, for a `start` i32[] that
# is not static and does not count from the end
dynamic_part = partial(lax.dynamic_slice_in_dim, axis=-1, allow_negative_indices=False)
with_part = partial(lax.dynamic_update_slice_in_dim, axis=-1, allow_negative_indices=False)


def hidden(numbers: Sequence[int], nothing: Array | bool) -> Sequence[Array]:
    """The numbers as i32[] whose values XLA on CPU does not know; elsewhere constants.

    XLA on CPU compiles equal operations once, 15 ms each. A known start of a slice makes them
    unequal. So the numbers come out of a loop that takes no step, which XLA cannot know: `nothing`
    is a bool[] or i32[] of any value up to 1, unknown when compiling, the same on all nodes.

    Example:
      >>> [int(x) for x in hidden([0, 3, 7], jnp.bool_(True))]
      [0, 3, 7]
    """
    if backend() != "cpu" or not numbers:
        return tuple(jnp.int32(number) for number in numbers)
    # made by NumPy: JAX would place each on a device
    first: Any = tuple(np.int32(number) for number in numbers)
    return _in_a_loop(lambda i, numbers: tuple(number + i for number in numbers), first, nothing)


def sealed(x: PyTree, nothing: Array | bool) -> PyTree:
    """x, with arrays f32[..., n] that XLA on CPU takes for new ones; elsewhere x itself.

    XLA on CPU computes the last of a chain of in-place updates once for each of its uses, and
    copies the whole array each time. It never computes a loop twice. The loop here takes no step,
    as in `hidden`; what `nothing` depends on is computed before x may be overwritten.
    """
    if backend() != "cpu":
        return x
    return _in_a_loop(
        lambda i, x: jax.tree.map(lambda x: with_part(x, x[..., :1], i), x), x, nothing
    )


def _in_a_loop(change: Callable[[Array, PyTree], PyTree], x: PyTree, nothing: Any) -> PyTree:
    """x after a loop of `change` that takes no turn, which XLA cannot know."""
    return lax.while_loop(
        lambda carry: carry[0] < jnp.asarray(nothing, jnp.int32),
        lambda carry: (carry[0] + 1, change(*carry)),
        (jnp.int32(1), x),
    )[1]


# --- vectors as rows of whole tiles ---------------------------------------------------------------


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
    """Whether a code of this number of words is decoded by `jgc.method.exchange.Tiled`."""
    return backend() == "tpu" and tiled is not None and tiled.fits(words, layers)


def cut(x: Array, n: int) -> Array:
    """The first n values of a vector."""
    return x if x.size == n else x[:n]


def filled(x: Array, size: int) -> Array:
    """A vector with zeros behind it, `size` values in all."""
    return x if x.size == size else jnp.pad(x, (0, size - x.size))


def in_form(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Saved vectors [..., n] or rows [..., m, 128] in the form of `shape`; others unchanged.

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


# --- gathered messages ----------------------------------------------------------------------------


def each(fn: Callable[[PyTree], PyTree], x: PyTree, few: bool = False) -> PyTree:
    """fn of every entry of the leading axis of x: on CPU one by one, on GPU by `vmap`.

    On TPU by `vmap` if `few` values are gathered: then an axis of K entries is the last one, and
    filled up to 128. On CPU the loop does what no barrier does: it keeps XLA from computing the
    result again in each of its uses, and from compiling it there.
    """
    if plain():
        return jax.vmap(fn)(x)
    if backend() == "tpu" and not few:
        x = jax.tree.map(node_by_node, x)
    at_once = backend() == "gpu" or (backend() == "tpu" and few)
    return jax.vmap(fn)(x) if at_once else lax.map(fn, x)


def node_by_node(x: Array) -> Array:
    """x [K, n] in a layout in which a loop over K on a TPU reads one row at a time."""
    # XLA would put K last, for then it can cut fields out of gathered messages without a copy. But
    # each of K steps would read all of x: 256 nodes with 23,500 values each took 30 reads of the
    # gradient.
    if backend() != "tpu" or x.ndim < 2:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


# --- the norm of many arrays ----------------------------------------------------------------------


def unusable(arrays: Sequence[Array]) -> Array:
    """Whether the arrays hold NaN or Inf, or their common norm is at least `LARGEST_NORM`, bool[].

    Example:
      >>> [bool(unusable([jnp.array([1.0, x])])) for x in (-1e14, 2e15, 3e38, jnp.nan, -jnp.inf)]
      [False, True, True, True, True]
    """
    # One pass, as long as that of a plain sum. A square that overflows is Inf, and NaN goes
    # through the sum.
    wide = [x if x.dtype.itemsize >= 4 else x.astype(jnp.float32) for x in arrays]
    return ~(squared_norm(wide) < LARGEST_NORM**2)  # not `>=`, which is false for NaN


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


def squared_norm(arrays: Sequence[Array]) -> Array:
    """The sum of the squares of arrays of 32 or 64 bits, f32[]: Inf where it overflows.

    Example:
      >>> squared_norm([jnp.array([[3.0, 4.0]]), jnp.array([1.0])])
      Array(26., dtype=float32)
    """
    if backend() == "gpu":
        return _in_few_kernels(arrays)
    on_tpu = backend() == "tpu"
    # Small ones are one array. On TPU only biases and norms join: matrices would have to
    # change their layout.
    is_small = [x.size <= SMALL and (x.ndim < 2 or not on_tpu) for x in arrays]
    small = [x.reshape(-1) for x, joins in zip(arrays, is_small, strict=True) if joins]
    large = [x for x, joins in zip(arrays, is_small, strict=True) if not joins]
    if len(small) > 1:
        small = [jnp.concatenate(small)]
    groups = _stretches(large) if on_tpu else [[x] for x in large]
    total = jnp.float32(0)
    for group in [small, *groups]:
        squares = [jnp.square(x) for x in group]
        if squares:
            total += jnp.sum(sum(squares[1:], start=squares[0])).astype(jnp.float32)
    return total


def squares_of_new(arrays: Sequence[Array]) -> Array:
    """As `squared_norm`, of f32 arrays with at least one dimension that are being computed.

    The operation that computes an array also sums its squares: on GPU row by row, for one more
    kernel to add up.
    """
    if backend() != "gpu":
        return sum([jnp.sum(jnp.square(x)) for x in arrays], jnp.float32(0))
    rows = [jnp.sum(jnp.square(x), axis=-1).reshape(-1) for x in arrays]
    # `abs`: as in `_in_few_kernels`
    return jnp.sum(jnp.abs(jnp.concatenate([jnp.zeros(1, jnp.float32), *rows])))


def _in_few_kernels(arrays: Sequence[Array]) -> Array:
    """The sum of squares in two kernels for 64 arrays: leaf by leaf it takes two for each."""
    # A kernel that reads a concatenation finds each value's array by comparing one length after
    # the other. So arrays of equal size are added up first, and the concatenation has one part for
    # each size.
    total = jnp.float32(0)
    in_order = sorted((x.reshape(-1) for x in arrays), key=lambda x: (x.dtype.name, x.size))
    for _, of_dtype in groupby(in_order, key=lambda x: x.dtype):
        alike = list(of_dtype)
        for start in range(0, len(alike), _IN_A_KERNEL):
            parts = [
                sum(map(jnp.square, of_size), start=jnp.zeros((), alike[0].dtype))
                for _, of_size in groupby(alike[start : start + _IN_A_KERNEL], key=lambda x: x.size)
            ]
            # `abs` changes nothing. Without it XLA sums every part of a concatenation in a separate
            # kernel.
            total += jnp.sum(jnp.abs(jnp.concatenate(parts))).astype(jnp.float32)
    return total


def _stretches(arrays: Sequence[Array]) -> Iterator[list[Array]]:
    """All values of the arrays, in groups of up to 16 arrays of one shape."""
    # A TPU reads 16 stretches of memory in 0.6 of the cycles that it takes for one after the other.
    # So arrays of equal shape go together, and where there are few of a shape, each is cut into
    # parts of whole tiles of 8 rows.
    rows = [x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x for x in arrays]
    for (size, *_), of_shape in groupby(sorted(rows, key=lambda x: x.shape), key=lambda x: x.shape):
        alike = list(of_shape)
        while alike:
            together, alike = alike[:_AT_ONCE], alike[_AT_ONCE:]
            cuts = _AT_ONCE // len(together)
            part = size // cuts // 8 * 8
            yield [
                x[i * part : (i + 1) * part] for x in together for i in range(cuts if part else 0)
            ]
            yield [x[cuts * part :] for x in together if cuts * part < size]
