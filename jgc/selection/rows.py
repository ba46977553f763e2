"""The largest rows of some layers as a shorter vector: for embeddings, of whose rows a step's gradient touches few.

A layer [V, ...] is a matrix of V rows. The short vector f32[m] holds the chosen rows of the layers that are cut, r in
all, and all values of the other layers. The rows of all cut layers are numbered through.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jgc.layout.pack import Layer, values_of
from jgc.selection.top_k import Range, largest_in_ranges
from jgc.types import Array


class Cut(NamedTuple):
    """A layer, and what the short vector has of it. Static.

    Attributes:
      layer: its range of the vector f32[n].
      short: its range of the short vector f32[m].
      rows: the range of its rows' numbers, and how many of them are chosen; None for a layer that is not cut.
    """

    layer: Layer
    short: Layer
    rows: Range | None

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.layer.size // self.layer.shape[0]


def cut(layers: Sequence[Layer], rows: int) -> tuple[Cut, ...]:
    """Cut every layer of two or more dimensions that has more than `rows` rows down to so many.

    Example:
      >>> embedding, head = cut((Layer("embedding", 0, 60, (20, 3)), Layer("head", 60, 6, (3, 2))), rows=4)
      >>> embedding.short, embedding.rows
      (Layer(name='embedding', start=0, size=12, shape=(4, 3)), Range(start=0, size=20, k=4))
      >>> head.short, head.rows
      (Layer(name='head', start=12, size=6, shape=(3, 2)), None)
    """
    plan: list[Cut] = []
    start = 0
    for layer in layers:
        shape, chosen = layer.shape, None
        if len(shape) > 1 and shape[0] > rows:
            chosen = Range(start, shape[0], rows)
            start += shape[0]
            shape = (rows, *shape[1:])
        size = layer.size if chosen is None else layer.size // layer.shape[0] * rows
        plan.append(Cut(layer, Layer(layer.name, values_of([one.short for one in plan]), size, shape), chosen))
    return tuple(plan)


def check_cut(layers: Sequence[Layer], rows: int) -> None:
    """Raise ValueError if there are layers, but none that `cut` cuts."""
    if layers and not any(one.rows for one in cut(layers, rows)):
        shapes = ", ".join(f"{layer.name} {list(layer.shape)}" for layer in layers)
        raise ValueError(f"rows={rows} leaves out nothing: give fewer than an embedding's rows; there are {shapes}")


def largest_rows(v: Array, plan: Sequence[Cut]) -> Array:
    """The numbers of the rows with the largest sums of magnitudes of each cut layer, ascending, i32[r]."""
    # Magnitudes, not squares, which vanish below 1e-23. On a language model's gradients both choose equally well.
    cuts = [one for one in plan if one.rows]
    sums = [jnp.sum(jnp.abs(_values(v, one.layer)).reshape(-1, one.width), axis=1) for one in cuts]
    ranges = [one.rows for one in cuts if one.rows]
    return largest_in_ranges(jnp.concatenate([jnp.zeros((0,), jnp.float32), *sums]), ranges)


def shorten(v: Array, rows: Array, plan: Sequence[Cut]) -> Array:
    """The short vector f32[m] of v f32[n]: the values of the rows i32[r], and the layers that are not cut."""
    parts = []
    for one, own in zip(plan, _rows_of_each(rows, plan), strict=True):
        values = _values(v, one.layer)
        parts.append(values if one.rows is None else values.reshape(-1, one.width)[own].reshape(-1))
    return jnp.concatenate([jnp.zeros((0,), jnp.float32), *parts])


def lengthen(positions: Array, rows: Array, plan: Sequence[Cut], counts: Sequence[int]) -> Array:
    """Positions i32[mu] in the short vector, ascending, as positions in the vector f32[n].

    Args:
      positions: in the short vector.
      rows: the chosen rows, i32[r].
      plan: the layers.
      counts: how many of the positions belong to each layer.
    """
    parts, start = [], 0
    for one, own, count in zip(plan, _rows_of_each(rows, plan), counts, strict=True):
        at = positions[start : start + count] - one.short.start
        if one.rows is not None:
            at = own[at // one.width] * one.width + at % one.width
        parts.append(one.layer.start + at)
        start += count
    return jnp.concatenate([jnp.zeros((0,), jnp.int32), *parts])


def _values(v: Array, layer: Layer) -> Array:
    return v[layer.start : layer.start + layer.size]


def _rows_of_each(rows: Array, plan: Sequence[Cut]) -> list[Array]:
    """The chosen rows of each layer, counted from its own first row; none of a layer that is not cut."""
    out, start = [], 0
    for one in plan:
        first, _, k = one.rows or Range(0, 0, 0)
        out.append(rows[start : start + k] - first)
        start += k
    return out
