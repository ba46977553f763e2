"""The mean of all nodes' codes of every value on a TPU: decoded and added up a block of tiles after the other.

A TPU moves all values of a vector to give them another shape, unless their tiles of 8 x 128 stay as they are; and XLA
writes every step of a decoder that it does not fuse. Here all shapes are of whole tiles, and what is not fused has the
size of a block.
"""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.layout.pack import Layers, values_of
from jgc.types import Array
from jgc.wire.bits import LANES, TILE
from jgc.wire.tiled_bits import first_axis, tiles_of, unpack_block

BLOCK = 64  # tiles of each of 32 ranges
AT_ONCE = 8  # nodes added up in one operation
MOST_STARTS = 3  # of layers inside a tile
Scale = Callable[[int | Array, Array, int], Array]  # (node, start of a block, its tiles) -> of its values


class InTiles(NamedTuple):
    """How to decode a payload whose codes are words of whole tiles.

    Attributes:
      field: the payload's words.
      bits: of a code.
      value: `(codes, *scales) -> f32`, elementwise.
      scales: `rest of the payload, each [K, ...] -> vectors of scales`, f32[K, G] each.
      bucket: number of values that share a scale, or 0 for one per layer.
      finish: `(sum over nodes, K) -> mean`, elementwise.
    """

    field: str
    bits: int
    value: Callable[..., Array]
    scales: Callable[[dict[str, Array]], tuple[Array, ...]] = lambda rest: ()
    bucket: int = 0
    finish: Callable[[Array, int], Array] = lambda total, nodes: total / nodes


def fits(code: InTiles, words: int, layers: Layers) -> bool:
    """Whether so many words are whole tiles, and scales can be laid out in tiles."""
    if not tiles_of(words, code.bits):
        return False
    if code.bucket:
        return code.bucket % LANES == 0
    return len(layers_of_tiles(layers, 32 * tiles_of(words, code.bits))) <= MOST_STARTS + 1


def mean_in_tiles(code: InTiles, words: Array, rest: dict[str, Array], layers: Layers) -> Array:
    """The mean over nodes of decoded payloads, f32[n].

    Args:
      code: how to decode them.
      words: u32[K, tiles, 8, 128], each node's codes.
      rest: the other fields, each [K, ...].
      layers: ranges of the n values.
    """
    nodes, n = len(words), values_of(layers)
    tiles = words.shape[1] // code.bits
    words = words.reshape(nodes, code.bits, tiles, *words.shape[2:])
    scales = [_scale(code, x, layers, tiles) for x in code.scales(rest)]
    block = min(BLOCK, tiles)

    def write(i, out):
        start = jnp.minimum(i * block, tiles - block)  # the last block may repeat some of the one before

        def values(node):
            codes = unpack_block(words, code.bits, node, start, block)
            return code.value(codes, *(scale(node, start, block) for scale in scales))

        first = nodes % AT_ONCE or min(nodes, AT_ONCE)
        total = reduce(jnp.add, [values(k) for k in range(first)])
        if nodes > first:

            def add(turn, total):
                return reduce(jnp.add, [values(first + turn * AT_ONCE + k) for k in range(AT_ONCE)], total)

            total = lax.fori_loop(0, (nodes - first) // AT_ONCE, add, total)
        found = code.finish(total, nodes)
        return lax.dynamic_update_slice(out, found, (*[0] * len(first_axis(code.bits)), start, 0, 0))

    # zeros like the words vary over the same mesh axes
    out = jnp.zeros_like(words, jnp.float32, (*first_axis(code.bits), *words.shape[2:]))
    return lax.fori_loop(0, -(-tiles // block), write, out).reshape(-1)[:n]


def _scale(code: InTiles, scales: Array, layers: Layers, tiles: int) -> Scale:
    """The scales f32[K, G] of a block's values, in a shape that broadcasts with them."""
    nodes, axis = len(scales), first_axis(code.bits)
    if code.bucket:
        rows = jnp.repeat(scales, code.bucket // LANES, axis=1)
        rows = jnp.pad(rows, ((0, 0), (0, max(0, 32 * tiles * 8 - rows.shape[1]))))[:, : 32 * tiles * 8]
        rows = rows.reshape(nodes, 32, tiles * 8)

        def of_rows(node, start, block):
            x = lax.dynamic_slice(rows, (node, 0, start * 8), (1, 32, block * 8))
            return x.reshape(*axis, block, 8, 1)

        return of_rows

    def cut(x, node, start, block):
        return lax.dynamic_slice(x, (node, 0, start), (1, 32, block)).reshape(*axis, block, 1, 1)

    levels = layers_of_tiles(layers, 32 * tiles)
    each = [repeated(scales, which).reshape(nodes, 32, tiles) for which, _ in levels]
    ends = [jnp.asarray(end.reshape(1, 32, tiles)) for _, end in levels]
    place = np.arange(TILE, dtype=np.int32).reshape(8, LANES)

    def of(node, start, block):
        found = cut(each[0], node, start, block)
        for x, end in zip(each[1:], ends[1:], strict=True):
            found = jnp.where(place < cut(end, 0, start, block), found, cut(x, node, start, block))
        return found

    return of


def layers_of_tiles(layers: Layers, tiles: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each tile of values its first layer, then its second, ..., and where in the tile it starts."""
    ends = np.cumsum([layer.size for layer in layers if layer.size])
    first = np.arange(tiles) * TILE
    which = np.minimum(np.searchsorted(ends, first, side="right"), len(ends) - 1)
    last = np.minimum(np.searchsorted(ends, first + TILE - 1, side="right"), len(ends) - 1)
    found = [(which, np.zeros(tiles, np.int32))]
    while (which < last).any():
        start = np.where(which < last, ends[which] - first, TILE).astype(np.int32)
        which = np.minimum(which + 1, last)
        found.append((which, start))
    return found


def repeated(scales: Array, which: np.ndarray) -> Array:
    """scales[:, which] for ascending `which`."""
    one, counts = np.unique(which, return_counts=True)
    parts = [jnp.broadcast_to(scales[:, i, None], (len(scales), n)) for i, n in zip(one, counts, strict=True)]
    return jnp.concatenate(parts, 1)
