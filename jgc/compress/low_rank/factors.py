"""The matrices of a model's layers and their factors, for PowerSGD and ACP-SGD."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc.layout.matrices import unit
from jgc.layout.pack import Layer
from jgc.types import Array, Key

Averaged = Callable[[Sequence[Array], str], list[Array]]


class Matrix(NamedTuple):
    """A layer, by its place among the layers, as a matrix [rows, cols]."""

    layer: int
    rows: int
    cols: int

    @property
    def excess(self) -> int:
        """Rows less columns."""
        return self.rows - self.cols


class Plan(NamedTuple):
    """Layers sent as factors, and places of layers sent uncompressed, each in order. Static."""

    matrices: tuple[Matrix, ...]
    dense: tuple[int, ...]

    @property
    def p_first(self) -> tuple[bool, ...]:
        """Which matrices send P in even steps and Q in odd ones, so that both send about as much.

        Example:
          >>> Plan((Matrix(0, 90, 10), Matrix(1, 60, 20), Matrix(2, 50, 10)), ()).p_first
          (True, False, False)
        """
        more, chosen = 0, {}  # values of a column that even steps send more than odd ones
        for i in sorted(range(len(self.matrices)), key=lambda i: -abs(self.matrices[i].excess)):
            excess = self.matrices[i].excess
            chosen[i] = abs(more + excess) <= abs(more - excess)
            more += excess if chosen[i] else -excess
        return tuple(chosen[i] for i in range(len(self.matrices)))


def make_plan(layers: Sequence[Layer], rank: int) -> Plan:
    """Send a layer as factors if it has more values than its factors of that rank.

    Example:
      >>> from jgc.layout.pack import make_packing
      >>> shapes = {"bias": (64,), "conv": (3, 3, 8, 64), "head": (64, 2)}
      >>> tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
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


def elements_of(plan: Plan, layers: Sequence[Layer], rank: int) -> tuple[int, int]:
    """Numbers of values that a node sends: in the factors P and Q, and uncompressed."""
    factors = rank * sum(matrix.rows + matrix.cols for matrix in plan.matrices)
    return factors, sum(layers[i].size for i in plan.dense)


def random_factors(key: Key, plan: Plan, rank: int) -> tuple[Array, ...]:
    """Q of every matrix for a first step, f32[cols, r]: normally distributed, columns of length 1.
    """
    return tuple(
        unit(jax.random.normal(jax.random.fold_in(key, i), (matrix.cols, rank), jnp.float32))
        for i, matrix in enumerate(plan.matrices)
    )
