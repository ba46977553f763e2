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
        excess = [matrix.rows - matrix.cols for matrix in self.matrices]
        more, chosen = 0, {}  # values of a column that even steps send more than odd ones
        for i in sorted(range(len(excess)), key=lambda i: -abs(excess[i])):
            chosen[i] = abs(more + excess[i]) <= abs(more - excess[i])
            more += excess[i] if chosen[i] else -excess[i]
        return tuple(chosen[i] for i in range(len(excess)))


def make_plan(layers: Sequence[Layer], rank: int) -> Plan:
    """Send a layer as factors if it has more values than its factors of that rank.

    Example:
      >>> from jgc.layout.pack import make_packing
      >>> shapes = {"bias": (64,), "conv": (3, 3, 8, 64), "head": (64, 2)}
      >>> tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
      >>> make_plan(make_packing(tree).layers, rank=2)
      Plan(matrices=(Matrix(layer=0, rows=72, cols=64),), dense=(1, 2))
    """
    all_matrices = [Matrix(i, math.prod(layer.shape[:-1]), layer.shape[-1])
                    for i, layer in enumerate(layers)]  # fmt: skip
    small = [(m.rows + m.cols) * rank < layers[m.layer].size for m in all_matrices]
    pairs = list(zip(all_matrices, small, strict=True))
    return Plan(tuple(m for m, yes in pairs if yes), tuple(m.layer for m, yes in pairs if not yes))


def random_factors(key: Key, plan: Plan, rank: int) -> tuple[Array, ...]:
    """Random Q f32[cols, r] of every matrix for a first step, columns of length 1."""
    return tuple(
        unit(jax.random.normal(jax.random.fold_in(key, i), (matrix.cols, rank), jnp.float32))
        for i, matrix in enumerate(plan.matrices))
