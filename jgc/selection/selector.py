"""How a node selects values, the k largest of each layer or of every chunk, and codes positions."""

from typing import Literal, NamedTuple

import numpy as np

from jgc.layout.pack import Layers, values_of
from jgc.selection.chunks import (
    CHUNK,
    check_chunk,
    cut_in_chunks,
    largest_in_chunks,
    pack_chunk_positions,
    unpack_chunk_positions,
)  # fmt: skip
from jgc.selection.ranges import Range
from jgc.selection.top_k import largest_in_ranges
from jgc.types import Array
from jgc.wire import elias_fano
from jgc.wire.sums import range_sums

SelectBy = Literal["layer", "chunks"]


class Selector(NamedTuple):
    """Which values a node sends of each layer, and how positions are coded. Static.

    The k largest of each layer, exactly: k is the share alpha of it, but at least `min_values`, or
    all it has. Ties go to the lower position. Positions are in Elias-Fano code.

    Attributes:
      alpha: share of the values.
      min_values: least number of values of each layer.
      chunk: 0, or values of a chunk: then the k largest of every chunk (`jgc.selection.chunks`).
      together: whether all layers are searched as one.

    Example:
      >>> from jgc.layout.pack import Layer
      >>> layers = (Layer("a", 0, 5000, (50, 100)), Layer("b", 5000, 20, (20,)))
      >>> Selector(0.001).counts(layers)
      (5, 1)
    """

    alpha: float
    min_values: int = 1
    chunk: int = 0
    together: bool = False

    def counts(self, layers: Layers) -> tuple[int, ...]:
        """Number of values of each layer, or of all together; mu is their sum."""
        if self.chunk:
            return cut_in_chunks(layers, *self[:3]).of_layers
        sizes = [x.size for x in layers]
        if self.together and layers:
            sizes = [sum(sizes)]
        return tuple(min(n, max(self.min_values, round(self.alpha * n))) for n in sizes)

    def positions(self, v: Array, layers: Layers) -> Array:
        """Positions of the values to send of v f32[n], ascending, i32[mu]."""
        if self.chunk:
            return largest_in_chunks(v, layers, cut_in_chunks(layers, *self[:3]))
        counts = self.counts(layers)
        if self.together and layers:
            return largest_in_ranges(v, [Range(0, values_of(layers), *counts)])
        ranges = [Range(x.start, x.size, k) for x, k in zip(layers, counts, strict=True)]
        return largest_in_ranges(v, ranges)

    def pack(self, positions: Array, layers: Layers) -> Array:
        """Positions i32[mu] as u32[words]."""
        if self.chunk:
            return pack_chunk_positions(positions, layers, cut_in_chunks(layers, *self[:3]))
        return elias_fano.encode(positions, values_of(layers))

    def unpack(self, packed: Array, layers: Layers) -> Array:
        """The inverse of `pack`, i32[mu]."""
        if self.chunk:
            return unpack_chunk_positions(packed, layers, cut_in_chunks(layers, *self[:3]))
        return elias_fano.decode(packed, values_of(layers), sum(self.counts(layers)))


def make_selector(
    alpha: float, min_values: int = 1, selection: SelectBy = "layer", chunk: int = CHUNK
) -> Selector:
    """The selector of a share alpha of each layer, or of every chunk of `chunk` values of a layer.

    Raises:
      ValueError: alpha outside (0, 1], min_values below 1; for chunks, a length that is not a power
        of two from 16 to 65,536, or alpha below one value of a chunk; a chunk without
        selection="chunks".

    Example:
      >>> from jgc.layout.pack import Layer
      >>> layers = (Layer("a", 0, 8192, (64, 128)), Layer("b", 8192, 1000, (1000,)))
      >>> make_selector(1 / 64, selection="chunks").counts(layers)
      (128, 16)
    """
    check_alpha(alpha)
    if min_values < 1:
        raise ValueError(f"min_values must be at least 1, got {min_values}")
    if selection == "chunks":
        check_chunk(alpha, chunk)
        return Selector(alpha, min_values, chunk)
    if chunk != CHUNK:
        raise ValueError(f"chunk={chunk} does nothing without selection='chunks'")
    return Selector(alpha, min_values)


def check_alpha(alpha: float) -> None:
    """Raise ValueError unless alpha is in (0, 1]."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1] (0.001 sends 0.1 % of the values), got {alpha}")


def layer_means(x: Array, counts: tuple[int, ...]) -> Array:
    """Mean of each layer's selected values x f32[mu], f32[layers]."""
    return range_sums(x, counts) / np.array(counts, np.float32)
