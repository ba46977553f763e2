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

from jgc.layout.pack import Layer
from jgc.types import Array, Key

DEPENDENT = 1e-6  # largest rounding error left of a unit column that depends on others

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Matrix(NamedTuple):
    """A range of the flat vector as a matrix [rows, cols]."""

    start: int
    rows: int
    cols: int

    def of(self, v: Array) -> Array:
        """The matrix in a vector f32[n]."""
        return v[self.start : self.start + self.rows * self.cols].reshape(self.rows, self.cols)


class Plan(NamedTuple):
    """Layers sent as factors, and layers sent uncompressed, each in the order of the flat vector. Static."""

    matrices: tuple[Matrix, ...]
    dense: tuple[Layer, ...]

    def elements(self, rank: int) -> tuple[int, int]:
        """Numbers of values that a node sends: in the factors P and Q, and uncompressed."""
        return rank * sum(m.rows + m.cols for m in self.matrices), sum(layer.size for layer in self.dense)


def make_plan(layers: Sequence[Layer], rank: int) -> Plan:
    """Send a layer as factors if it has more values than its factors of that rank.

    Example:
      >>> from jgc.layout.pack import make_packing
      >>> tree = {"bias": jnp.zeros(64), "conv": jnp.zeros((3, 3, 8, 64)), "head": jnp.zeros((64, 2))}
      >>> make_plan(make_packing(tree).layers, rank=2)
      Plan(matrices=(Matrix(start=0, rows=72, cols=64),),
           dense=(Layer(name='head', start=4608, size=128, shape=(64, 2)),
                  Layer(name='biases and norms', start=4736, size=64, shape=(64,))))
    """
    matrices, dense = [], []
    for layer in layers:
        *others, cols = layer.shape
        rows = math.prod(others)
        if (rows + cols) * rank < layer.size:
            matrices.append(Matrix(layer.start, rows, cols))
        else:
            dense.append(layer)
    return Plan(tuple(matrices), tuple(dense))


def random_factors(key: Key, plan: Plan, rank: int) -> tuple[Array, ...]:
    """Q of every matrix for a first step, f32[cols, r]: normally distributed, columns scaled to length 1."""
    keys = [jax.random.fold_in(key, i) for i in range(len(plan.matrices))]
    shapes = [(m.cols, rank) for m in plan.matrices]
    return tuple(unit(jax.random.normal(k, s, jnp.float32)) for k, s in zip(keys, shapes, strict=True))


def low_rank(
    plan: Plan, v: Array, start: Sequence[Array], averaged: Callable[[Sequence[Array], str], list[Array]]
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Algorithm 1 of the PowerSGD paper on all matrices of v f32[n].

    Args:
      plan: which layers are matrices.
      v: this node's vector.
      start: Q f32[cols, r] of every matrix, equal on all nodes.
      averaged: `(arrays, field) -> their means over nodes`, in one all-reduce.

    Returns:
      The mean f32[n], equal on all nodes; the part of v that counts as sent, f32[n]; the factors Q for the next step,
      equal on all nodes.
    """
    matrices = [matrix.of(v) for matrix in plan.matrices]
    dense = [v[layer.start : layer.start + layer.size] for layer in plan.dense]
    means = averaged([*(_matmul(m, q) for m, q in zip(matrices, start, strict=True)), *dense], "dense+factors")
    p = alike(orthonormal, means[: len(matrices)])
    own = [_matmul(m.T, x) for m, x in zip(matrices, p, strict=True)]
    q = averaged(own, "factors")

    starts = [*(matrix.start for matrix in plan.matrices), *(layer.start for layer in plan.dense)]

    def flat(factors, rest):
        parts = [_matmul(a, b.T).reshape(-1) for a, b in zip(p, factors, strict=True)]
        by_start = sorted(zip(starts, [*parts, *rest], strict=True), key=lambda pair: pair[0])
        return jnp.concatenate([part for _, part in by_start]) if by_start else jnp.zeros_like(v)

    # a zero column keeps its old direction, so that no direction is lost for good
    warm = tuple(jnp.where(jnp.any(x != 0, axis=0), unit(x), old) for x, old in zip(q, start, strict=True))
    return flat(q, means[len(matrices) :]), flat(own, dense), warm


def alike(fn: Callable[[Array], Array], arrays: Sequence[Array]) -> list[Array]:
    """fn of every array; equal shapes form one batch, so the program grows with the shapes, not with the layers."""
    out: list[Array] = list(arrays)
    for shape in dict.fromkeys(x.shape for x in arrays):
        where = [i for i, x in enumerate(arrays) if x.shape == shape]
        batch = jax.vmap(fn)(jnp.stack([arrays[i] for i in where]))
        for place, i in enumerate(where):
            out[i] = batch[place]
    return out


def orthonormal(p: Array) -> Array:
    """The columns of p f32[rows, r], made orthonormal; a column that depends on earlier ones becomes zero.

    Gram-Schmidt with two passes per column: one pass is inaccurate if its remainder is small.

    Example:
      >>> orthonormal(jnp.array([[3.0, 6.0, 0.0], [0.0, 0.0, -2.0]]))
      Array([[ 1.,  0.,  0.],
             [ 0.,  0., -1.]], dtype=float32)
    """

    def column(i, basis):
        left = _outside(basis, unit(p[:, i]))
        left = jnp.where(jnp.linalg.norm(left) > DEPENDENT, left, 0.0)
        return basis.at[:, i].set(unit(_outside(basis, unit(left))))

    first = jnp.zeros_like(p).at[:, 0].set(unit(p[:, 0]))
    return lax.fori_loop(1, p.shape[1], column, first)


def _outside(basis: Array, x: Array) -> Array:
    """The part of x f32[rows] orthogonal to the orthonormal columns of a basis."""
    return x - _matmul(basis, _matmul(basis.T, x))


def unit(x: Array) -> Array:
    """Scale the columns of x, or x if it is one, to length 1; zeros stay. No square over- or underflows.

    Example:
      >>> unit(jnp.array([[3e30, 0.0], [-4e30, 0.0]]))
      Array([[ 0.6,  0. ],
             [-0.8,  0. ]], dtype=float32)
    """
    largest = jnp.max(jnp.abs(x), axis=0)
    x = x / jnp.where(largest > 0, largest, 1.0)  # now of length at least 1, if not zero
    return x / jnp.maximum(jnp.sqrt(jnp.sum(x * x, axis=0)), 1.0)
