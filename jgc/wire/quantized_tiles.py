"""The mean of all nodes' codes of every value on a TPU: decoded block by block of tiles.

A TPU moves all values of a vector to give them another shape, unless their tiles of 8 x 128 stay
as they are; and XLA writes every step of a decoder that it does not fuse. Here all shapes are of
whole tiles, and what is not fused has the size of a block. `quantized_words.plain_mean` is the
plain reference.
"""

from collections.abc import Callable
from functools import reduce

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import plain
from jgc.layout.pack import Layers, values_of
from jgc.types import Array
from jgc.wire.bits import LANES, TILE, whole_words
from jgc.wire.quantized_words import Payload, Quantiser, floats_of, scales_of
from jgc.wire.scales import layers_of_tiles, repeated
from jgc.wire.tiled_bits import first_axis, tiles_of, unpack_block

_BLOCK = 64  # tiles of each of 32 ranges
_AT_ONCE = 8  # nodes added up in one operation
_MOST_STARTS = 3  # of layers inside a tile
# (node, first tile of a block, number of its tiles) -> scales of its values
Scale = Callable[[int | Array, Array, int], Array]


def fits(q: Quantiser, words: int, layers: Layers) -> bool:
    """Whether that many words are whole tiles, and scales can be laid out in tiles."""
    tiles = tiles_of(words, q.bits)
    if plain() or not tiles or words != whole_words(values_of(layers)) // 32 * q.bits:
        return False
    if q.bucket:
        return q.bucket % LANES == 0
    return len(layers_of_tiles(layers, 32 * tiles)) <= _MOST_STARTS + 1


def mean_in_tiles(q: Quantiser, words: Array, rest: Payload, layers: Layers) -> Array:
    """The mean over nodes of decoded payloads, f32[n].

    Args:
      q: how to decode them.
      words: u32[K, tiles, 8, 128], each node's codes.
      rest: the other fields, each [K, ...].
      layers: ranges of the n values.
    """
    nodes, n = len(words), values_of(layers)
    tiles, axis = words.shape[1] // q.bits, first_axis(q.bits)
    words = words.reshape(nodes, q.bits, tiles, *words.shape[2:])
    scales = [_scale(q, x, layers, tiles) for x in scales_of(q, rest)]
    block = min(_BLOCK, tiles)

    def write(i, out):
        start = jnp.minimum(i * block, tiles - block)  # the last block may repeat some tiles

        def values(node):
            codes = floats_of(q, unpack_block(words, q.bits, node, start, block))
            return q.value(codes, *(scale(node, start, block) for scale in scales))

        first = nodes % _AT_ONCE or min(nodes, _AT_ONCE)
        total = reduce(jnp.add, [values(k) for k in range(first)])
        if nodes > first:

            def add(turn, total):
                several = [values(first + turn * _AT_ONCE + k) for k in range(_AT_ONCE)]
                return reduce(jnp.add, several, total)

            total = lax.fori_loop(0, (nodes - first) // _AT_ONCE, add, total)
        mean = q.finish(total, nodes)
        return lax.dynamic_update_slice(out, mean, (*[0] * len(axis), start, 0, 0))

    # zeros like the words vary over the same mesh axes
    out = jnp.zeros_like(words, jnp.float32, (*axis, *words.shape[2:]))
    return lax.fori_loop(0, -(-tiles // block), write, out).reshape(-1)[:n]


def _scale(q: Quantiser, scales: Array, layers: Layers, tiles: int) -> Scale:
    """The scales f32[K, G] of a block's values, in a shape that broadcasts with them."""
    if q.bucket:
        return _scale_of_buckets(q, scales, tiles)
    return _scale_of_layers(q, scales, layers, tiles)


def _scale_of_buckets(q: Quantiser, scales: Array, tiles: int) -> Scale:
    nodes, axis, count = len(scales), first_axis(q.bits), 32 * tiles * 8
    rows = jnp.repeat(scales, q.bucket // LANES, axis=1)
    rows = jnp.pad(rows, ((0, 0), (0, max(0, count - rows.shape[1]))))[:, :count]
    rows = rows.reshape(nodes, 32, tiles * 8)

    def of(node, start, block):
        x = lax.dynamic_slice(rows, (node, 0, start * 8), (1, 32, block * 8))
        return x.reshape(*axis, block, 8, 1)

    return of


def _scale_of_layers(q: Quantiser, scales: Array, layers: Layers, tiles: int) -> Scale:
    nodes, axis = len(scales), first_axis(q.bits)
    levels = layers_of_tiles(layers, 32 * tiles)
    each = [repeated(scales, which).reshape(nodes, 32, tiles) for which, _ in levels]
    ends = [jnp.asarray(end.reshape(1, 32, tiles)) for _, end in levels]
    place = np.arange(TILE, dtype=np.int32).reshape(8, LANES)

    def cut(x, node, start, block):
        return lax.dynamic_slice(x, (node, 0, start), (1, 32, block)).reshape(*axis, block, 1, 1)

    def of(node, start, block):
        scale = cut(each[0], node, start, block)
        for x, end in zip(each[1:], ends[1:], strict=True):
            later = place < cut(end, 0, start, block)
            scale = jnp.where(later, scale, cut(x, node, start, block))
        return scale

    return of
