"""The matrices of all layers: products, orthonormal columns, and how they are cut out of batches.

A program with an operation for each matrix is long and, on a GPU, has as many kernels. So matrices
of one shape are computed together (`Batches`). The plain references cut matrices out by plain
indices and add no rows of zeros.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jgc.backend import plain
from jgc.layout.batches import Batches, each_of, in_fewer, stacked, turns
from jgc.layout.devices import hidden, sealed
from jgc.types import Array

DEPENDENT = 1e-6  # largest rounding error left of a unit column that depends on others
_FEW = 8  # columns of a thin matrix
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)  # f32 on every device


def products(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    """A B of the first matrices of both lists, of the second ones, and so on."""
    return each_of(_matmul, a, b)


def thin_products(p: Sequence[Array], m: Sequence[Array]) -> list[Array]:
    """P' M, f32[r, cols], of each p f32[rows, r] and m f32[rows, cols]."""
    # Not M' P: XLA on CPU takes ten times as long for a product with a transposed large matrix.
    return stacked(each_of(lambda m, p: _matmul(p.T, m), m, p))


def outer(p: Array, q: Array) -> Array:
    """P Q of p f32[rows, r] and q f32[r, cols]."""
    if plain() or p.shape[1] > _FEW:
        return _matmul(p, q)
    # A sum of few products is fused with what follows; XLA on CPU writes a matrix product to
    # memory.
    rest = (p[:, i, None] * q[i, None] for i in range(1, p.shape[1]))
    return sum(rest, p[:, 0, None] * q[0, None])


Cut = Callable[..., list[Array]]


def cutter(count: int, unknown: Array) -> Cut:
    """`cut(batches[, heights, apart])`: the `count` matrices in order, the first `heights` rows.

    `unknown` is a bool[], False, which XLA cannot know.
    """
    numbers = hidden(range(count), unknown)

    def cut(batches: Batches, heights: Sequence[int] = (), apart: bool = True) -> list[Array]:
        if plain():
            arrays = [batches.arrays[batch][i] for batch, i in batches.places]
        else:
            arrays = batches.each(numbers)
        if heights:
            arrays = [x[:height] for x, height in zip(arrays, heights, strict=True)]
        if plain() or not apart:
            return arrays
        # sealed: to cut them out inside of later products would take as long as all else in these
        return stacked(sealed(arrays, unknown))

    return cut


def orthonormal_columns(batches: Batches) -> Batches:
    """`orthonormal` of every matrix; some get rows of zeros at their end."""
    batches = batches if plain() else in_fewer(batches)
    return batches._replace(arrays=[jax.vmap(orthonormal)(x) for x in batches.arrays])


def orthonormal(p: Array) -> Array:
    """The columns of p f32[rows, r], made orthonormal; a dependent column becomes zero.

    Gram-Schmidt with two passes per column: one pass is inaccurate if its remainder is small.

    Example:
      >>> orthonormal(jnp.array([[3.0, 6.0, 0.0], [0.0, 0.0, -2.0]]))
      Array([[ 1.,  0.,  0.],
             [ 0.,  0., -1.]], dtype=float32)
    """

    def turn(j, basis):  # two for each column: the second after a pass that may be inaccurate
        i = j // 2
        x = basis[:, i]
        earlier = jnp.where(jnp.arange(p.shape[1]) < i, _matmul(basis.T, x), 0)
        left = x - _matmul(basis, earlier)
        square = jnp.sum(left**2)
        # the two are the square of x
        depends = square <= DEPENDENT**2 * (square + jnp.sum(earlier**2))
        return basis.at[:, i].set(jnp.where(depends, 0.0, left / jnp.sqrt(square)))

    return turns(2, 2 * p.shape[1], turn, unit(p))


def unit(x: Array, zeros: Array | float = 0.0) -> Array:
    """Scale the columns of x to length 1; columns of zeros become columns of `zeros`.

    No square over- or underflows.

    Example:
      >>> unit(jnp.array([[3e30, 0.0], [-4e30, 0.0]]))
      Array([[ 0.6,  0. ],
             [-0.8,  0. ]], dtype=float32)
    """
    largest = jnp.max(jnp.abs(x), axis=0, keepdims=True)
    scaled = x / jnp.where(largest > 0, largest, 1.0)  # now of length at least 1, if not zero
    length = jnp.sqrt(jnp.sum(scaled * scaled, axis=0, keepdims=True))
    return jnp.where(largest > 0, scaled / jnp.maximum(length, 1.0), zeros)
