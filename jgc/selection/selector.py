"""How a node selects the values that it sends, the k largest of each layer or of every chunk, and codes positions."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jgc.layout.pack import Layers
from jgc.selection.chunks import (
    CHUNK,
    check_chunk,
    cut_in_chunks,
    largest_in_chunks,
    pack_chunk_positions,
    unpack_chunk_positions,
)
from jgc.selection.select import (
    check_alpha,
    check_min_values,
    counts_per_layer,
    pack_positions,
    top_positions,
    unpack_positions,
)
from jgc.types import Array

SelectBy = Literal["layer", "chunks"]


class Selector(NamedTuple):
    """Which values a node sends of each layer, and how their positions are coded. Sizes are static.

    Attributes:
      counts: `layers -> number of values of each layer`; mu is their sum.
      positions: `(v f32[n], layers) -> i32[mu]`, ascending.
      pack: `(positions i32[mu], layers) -> u32[words]`.
      unpack: `(packed, layers) -> i32[mu]`, the inverse of `pack`.
    """

    counts: Callable[[Layers], tuple[int, ...]]
    positions: Callable[[Array, Layers], Array]
    pack: Callable[[Array, Layers], Array]
    unpack: Callable[[Array, Layers], Array]


def make_selector(
    alpha: float, min_values: int = 1, selection: SelectBy = "layer", chunk: int = CHUNK
) -> Selector:
    """The selector of a share alpha of each layer, at least `min_values`.

    Args:
      alpha: share of the values, in (0, 1].
      min_values: least number of values of each layer.
      selection: "layer": the largest of each layer, exactly; "chunks": of every chunk of each layer.
      chunk: values of a chunk.

    Raises:
      ValueError: alpha outside (0, 1], min_values below 1, an unknown selection; for chunks, a length that is not a
        power of two from 16 to 65,536, or alpha below one value of a chunk; a chunk without selection="chunks".

    Example:
      >>> from jgc.layout.pack import Layer
      >>> layers = (Layer("a", 0, 8192, (64, 128)), Layer("b", 8192, 1000, (1000,)))
      >>> make_selector(1 / 64, selection="chunks").counts(layers)
      (128, 16)
    """
    check_alpha(alpha)
    check_min_values(min_values)
    if selection not in get_args(SelectBy):
        raise ValueError(f"selection must be 'layer' or 'chunks', got {selection!r}")
    if selection == "chunks":
        check_chunk(alpha, chunk)
        return by_chunk(alpha, min_values, chunk)
    if chunk != CHUNK:
        raise ValueError(f"chunk={chunk} does nothing without selection='chunks'")
    return by_layer(alpha, min_values)


def by_layer(alpha: float, min_values: int) -> Selector:
    """The k largest values of each layer, exactly; positions in Elias-Fano code."""
    counts = partial(counts_per_layer, alpha=alpha, min_values=min_values)
    return Selector(
        counts=counts,
        positions=lambda v, layers: top_positions(v, layers, counts(layers)),
        pack=pack_positions,
        unpack=lambda packed, layers: unpack_positions(packed, layers, counts(layers)),
    )


def by_chunk(alpha: float, min_values: int, chunk: int) -> Selector:
    """The k largest values of every chunk of each layer; see `jgc.selection.chunks`."""
    cut = partial(cut_in_chunks, alpha=alpha, min_values=min_values, chunk=chunk)
    return Selector(
        counts=lambda layers: cut(layers).of_layers,
        positions=lambda v, layers: largest_in_chunks(v, layers, cut(layers)),
        pack=lambda positions, layers: pack_chunk_positions(positions, layers, cut(layers)),
        unpack=lambda packed, layers: unpack_chunk_positions(packed, layers, cut(layers)),
    )


def position_bytes(selector: Selector, layers: Layers) -> float:
    """Bytes of the packed positions of one node.

    Example:
      >>> from jgc.layout.pack import Layer
      >>> position_bytes(make_selector(1 / 64), (Layer("a", 0, 4096, (64, 64)),))
      64.0
    """
    positions = jax.ShapeDtypeStruct((sum(selector.counts(layers)),), jnp.int32)
    return 4.0 * jax.eval_shape(lambda p: selector.pack(p, layers), positions).size
