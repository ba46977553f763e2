"""The matrices of a tree of gradients, and one step of a power iteration on all of them at once (see powersgd.py).

    M [rows, cols] of a node;  P [rows, r] and Q [cols, r] equal on all nodes
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jgc.layout.batches import Batches, in_batches, in_fewer
from jgc.layout.launches import each_of, stacked, turns
from jgc.layout.opaque import hidden, sealed
from jgc.layout.pack import Layer
from jgc.types import Array, Key

DEPENDENT = 1e-6  # largest rounding error left of a unit column that depends on others

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Matrix(NamedTuple):
    """A layer, by its place among the layers, as a matrix [rows, cols]."""

    layer: int
    rows: int
    cols: int


class Plan(NamedTuple):
    """Layers sent as factors, and the places of layers sent uncompressed, each in order. Static."""

    matrices: tuple[Matrix, ...]
    dense: tuple[int, ...]

    def elements(self, layers: Sequence[Layer], rank: int) -> tuple[int, int]:
        """Numbers of values that a node sends: in the factors P and Q, and uncompressed."""
        return rank * sum(m.rows + m.cols for m in self.matrices), sum(layers[i].size for i in self.dense)


def make_plan(layers: Sequence[Layer], rank: int) -> Plan:
    """Send a layer as factors if it has more values than its factors of that rank.

    Example:
      >>> from jgc.layout.pack import make_packing
      >>> tree = {"bias": jnp.zeros(64), "conv": jnp.zeros((3, 3, 8, 64)), "head": jnp.zeros((64, 2))}
      >>> make_plan(make_packing(tree).layers, rank=2)
      Plan(matrices=(Matrix(layer=0, rows=72, cols=64),), dense=(1, 2))
    """
    matrices, dense = [], []
    for i, layer in enumerate(layers):
        *others, cols = layer.shape
        rows = math.prod(others)
        if (rows + cols) * rank < layer.size:
            matrices.append(Matrix(i, rows, cols))
        else:
            dense.append(i)
    return Plan(tuple(matrices), tuple(dense))


def random_factors(key: Key, plan: Plan, rank: int) -> tuple[Array, ...]:
    """Q of every matrix for a first step, f32[cols, r]: normally distributed, columns scaled to length 1."""
    keys = [jax.random.fold_in(key, i) for i in range(len(plan.matrices))]
    shapes = [(m.cols, rank) for m in plan.matrices]
    return tuple(unit(jax.random.normal(k, s, jnp.float32)) for k, s in zip(keys, shapes, strict=True))


def low_rank(
    plan: Plan, v: Sequence[Array], start: Sequence[Array], averaged: Callable[[Sequence[Array], str], list[Array]]
) -> tuple[list[Array], list[Array], tuple[Array, ...]]:
    """Algorithm 1 of the PowerSGD paper on all matrices of a node's layers.

    Args:
      plan: which layers are matrices.
      v: this node's layers, f32 of any shapes.
      start: Q f32[cols, r] of every matrix, equal on all nodes.
      averaged: `(arrays, field) -> their means over nodes`, in one all-reduce.

    Returns:
      The mean of each layer, equal on all nodes; the part of each layer that counts as sent; the factors Q for the next
      step, equal on all nodes.
    """
    if not plan.matrices:
        mean = averaged([v[i] for i in plan.dense], "dense+factors")
        return mean, list(v), ()
    matrices = [v[m.layer].reshape(m.rows, m.cols) for m in plan.matrices]
    products = in_batches(each_of(_matmul, matrices, start))
    means = averaged([*products.arrays, *(v[i] for i in plan.dense)], "dense+factors")
    count = len(products.arrays)
    columns = in_fewer(Batches(means[:count], products.places))
    bases = columns._replace(arrays=[jax.vmap(orthonormal)(x) for x in columns.arrays])
    never = start[0][0, 0] > 2  # columns have length 1, but XLA cannot know
    numbers = hidden(range(len(matrices)), never)
    # sealed: to cut them out in the products' own operations would take as long as all else in these
    p = stacked(sealed([x[: m.rows] for x, m in zip(bases.each(numbers), plan.matrices, strict=True)], never))
    # P' M [r, cols], not M' P: XLA on CPU takes ten times as long for a product with a transposed large matrix
    own = stacked(each_of(lambda m, x: _matmul(x.T, m), matrices, p))
    to_send = in_batches(own)
    sums = Batches(averaged(to_send.arrays, "factors"), to_send.places)
    q = stacked(sealed(sums.each(numbers), never))
    before = in_batches([x.T for x in start])
    # a zero column keeps its old direction, so that no direction is lost for good
    warm = [jax.vmap(lambda x, old: unit(x.T, old.T))(*pair) for pair in zip(sums.arrays, before.arrays, strict=True)]

    mean, sent = list(v), list(v)
    for i, x in zip(plan.dense, means[count:], strict=True):
        mean[i] = x
    for m, left, right, ours in zip(plan.matrices, p, q, own, strict=True):
        mean[m.layer] = outer(left, right).reshape(v[m.layer].shape)
        sent[m.layer] = outer(left, ours).reshape(v[m.layer].shape)
    return mean, sent, tuple(Batches(warm, sums.places).each(numbers))


def outer(p: Array, q: Array) -> Array:
    """P Q of p f32[rows, r] and q f32[r, cols]."""
    if p.shape[1] > 8:
        return _matmul(p, q)
    # a sum of few products is fused with what follows; XLA on CPU writes a matrix product to memory first
    return sum((p[:, i, None] * q[i, None] for i in range(1, p.shape[1])), p[:, 0, None] * q[0, None])


def orthonormal(p: Array) -> Array:
    """The columns of p f32[rows, r], made orthonormal; a column that depends on earlier ones becomes zero.

    Gram-Schmidt with two passes per column: one pass is inaccurate if its remainder is small.

    Example:
      >>> orthonormal(jnp.array([[3.0, 6.0, 0.0], [0.0, 0.0, -2.0]]))
      Array([[ 1.,  0.,  0.],
             [ 0.,  0., -1.]], dtype=float32)
    """

    def turn(j, basis):  # two for each column: the second after a pass that may have been inaccurate
        i = j // 2
        x = basis[:, i]
        earlier = jnp.where(jnp.arange(p.shape[1]) < i, _matmul(basis.T, x), 0)
        left = x - _matmul(basis, earlier)
        square = jnp.sum(left**2)
        depends = square <= DEPENDENT**2 * (square + jnp.sum(earlier**2))  # the two are the square of x
        return basis.at[:, i].set(jnp.where(depends, 0.0, left / jnp.sqrt(square)))

    return turns(2, 2 * p.shape[1], turn, unit(p))


def unit(x: Array, zeros: Array | float = 0.0) -> Array:
    """Scale the columns of x to length 1. No square over- or underflows. Columns of zeros become those of `zeros`.

    Example:
      >>> unit(jnp.array([[3e30, 0.0], [-4e30, 0.0]]))
      Array([[ 0.6,  0. ],
             [-0.8,  0. ]], dtype=float32)
    """
    largest = jnp.max(jnp.abs(x), axis=0, keepdims=True)
    scaled = x / jnp.where(largest > 0, largest, 1.0)  # now of length at least 1, if not zero
    length = jnp.sqrt(jnp.sum(scaled * scaled, axis=0, keepdims=True))
    return jnp.where(largest > 0, scaled / jnp.maximum(length, 1.0), zeros)
