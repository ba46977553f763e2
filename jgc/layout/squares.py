"""The sum of the squares of many arrays, in one read of them."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import jax.numpy as jnp

from jgc.backend import backend
from jgc.layout.pack import SMALL
from jgc.types import Array

_AT_ONCE = 16  # stretches of memory
_IN_A_KERNEL = 64  # arrays: XLA on GPU writes a concatenation of more than 96 to memory


def squared_norm(arrays: Sequence[Array]) -> Array:
    """The sum of the squares of all values, f32[]: Inf where it overflows, NaN if one is NaN.

    Args:
      arrays: of floats of 32 or 64 bits, of any shapes.

    Example:
      >>> squared_norm([jnp.array([[3.0, 4.0]]), jnp.array([1.0])])
      Array(26., dtype=float32)
    """
    if backend() == "gpu":
        return _in_few_kernels(arrays)
    on_tpu = backend() == "tpu"
    # Small ones are one array. On TPU these are biases and norms alone: matrices would have to change their layout.
    is_small = [x.size <= SMALL and (x.ndim < 2 or not on_tpu) for x in arrays]
    small = [x.reshape(-1) for x, is_one in zip(arrays, is_small, strict=True) if is_one]
    large = [x for x, is_one in zip(arrays, is_small, strict=True) if not is_one]
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

    The operation that computes an array also sums its squares: on GPU row by row, for one more kernel to add up.
    """
    if backend() != "gpu":
        return sum([jnp.sum(jnp.square(x)) for x in arrays], jnp.float32(0))
    rows = [jnp.sum(jnp.square(x), axis=-1).reshape(-1) for x in arrays]
    return jnp.sum(jnp.abs(jnp.concatenate([jnp.zeros(1, jnp.float32), *rows])))  # `abs`: as in `_in_few_kernels`


def _in_few_kernels(arrays: Sequence[Array]) -> Array:
    """The sum of squares in two kernels for 64 arrays: leaf by leaf it takes two for each.

    A kernel that reads a concatenation finds each value's array by comparing one length after another. So arrays of
    equal size are added up first, and the concatenation has one part for each size.
    """
    total = jnp.float32(0)
    in_order = sorted((x.reshape(-1) for x in arrays), key=lambda x: (x.dtype.name, x.size))
    for _, of_dtype in groupby(in_order, key=lambda x: x.dtype):
        alike = list(of_dtype)
        for start in range(0, len(alike), _IN_A_KERNEL):
            parts = [
                sum(map(jnp.square, of_size), start=jnp.zeros((), alike[0].dtype))
                for _, of_size in groupby(alike[start : start + _IN_A_KERNEL], key=lambda x: x.size)
            ]
            # `abs` changes nothing. Without it XLA sums every part of a concatenation in a kernel for itself.
            total += jnp.sum(jnp.abs(jnp.concatenate(parts))).astype(jnp.float32)
    return total


def _stretches(arrays: Sequence[Array]) -> Iterator[list[Array]]:
    """All values of the arrays, in groups of up to 16 arrays of one shape.

    A TPU reads 16 stretches of memory in 0.6 of the cycles that it takes for one after the other. So arrays of equal
    shape go together, and where there are few of a shape, each is cut into parts of whole tiles of 8 rows.
    """
    rows = [x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x for x in arrays]
    for (size, *_), of_shape in groupby(sorted(rows, key=lambda x: x.shape), key=lambda x: x.shape):
        alike = list(of_shape)
        while alike:
            together, alike = alike[:_AT_ONCE], alike[_AT_ONCE:]
            cuts = _AT_ONCE // len(together)
            part = size // cuts // 8 * 8
            yield [x[i * part : (i + 1) * part] for x in together for i in range(cuts if part else 0)]
            yield [x[cuts * part :] for x in together if cuts * part < size]
