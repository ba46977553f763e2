"""The mean of all nodes' codes of every value on a TPU: decoded block by block of tiles.

To reshape a vector a TPU moves all its values, unless their tiles of 8 x 128 stay as they are; and
XLA writes to memory every step of a decoder that it does not fuse. Here all shapes are of whole
tiles, and unfused arrays have the size of a block. `quantized_words.plain_mean` is the reference.

A field of w bits of n codes is u32[w, T, 8, 128], n = 32 T tiles, and the codes are u32[32, T, 8,
128]: word tile [i % w, t] holds the fields of code tiles [i, t]. XLA for TPU fuses all steps of
that if only the first axis ever changes, and if it is cut once for all widths: into
[32 / w1, w1 / w2, ..., w_last].
"""

from collections.abc import Callable
from functools import reduce
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import plain
from jgc.layout.pack import Layers, values_of
from jgc.types import Array
from jgc.wire.bits import LANES, TILE, fields_of, whole_words
from jgc.wire.quantized_words import Payload, Quantiser, floats_of, scales_of
from jgc.wire.scales import layers_of_tiles, repeated

_BLOCK = 64  # tiles of each of 32 ranges
_AT_ONCE = 8  # nodes added up in one operation
_MOST_STARTS = 3  # of layers inside a tile
# (node, first tile of a block, number of its tiles) -> scales of its values
Scale = Callable[[int | Array, Array, int], Array]


def fits(q: Quantiser, words: int, layers: Layers) -> bool:
    """Whether this number of words is whole tiles, and scales can be laid out in tiles."""
    tiles, rest = divmod(words, q.bits * TILE)
    if plain() or rest or not tiles or words != whole_words(values_of(layers)) // 32 * q.bits:
        return False
    if q.bucket:
        return q.bucket % LANES == 0
    return len(layers_of_tiles(layers, 32 * tiles)) <= _MOST_STARTS + 1


def mean_in_tiles(q: Quantiser, words: Array, rest: Payload, layers: Layers) -> Array:
    """The mean over nodes of decoded payloads, f32[n]: codes in words u32[K, tiles, 8, 128], and
    the other fields, each [K, ...]."""
    nodes, n = len(words), values_of(layers)
    tiles, axis = words.shape[1] // q.bits, first_axis(q.bits)
    words = words.reshape(nodes, q.bits, tiles, *words.shape[2:])
    scale_of = _scale_of_buckets if q.bucket else _scale_of_layers
    scales = [scale_of(q, x, layers, tiles) for x in scales_of(q, rest)]
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


def _scale_of_buckets(q: Quantiser, scales: Array, layers: Layers, tiles: int) -> Scale:
    """The scales f32[K, G] of a block's values, in a shape that broadcasts with them."""
    nodes, axis, count = len(scales), first_axis(q.bits), 32 * tiles * 8
    rows = jnp.repeat(scales, q.bucket // LANES, axis=1)
    rows = jnp.pad(rows, ((0, 0), (0, max(0, count - rows.shape[1]))))[:, :count]
    rows = rows.reshape(nodes, 32, tiles * 8)

    def of(node, start, block):
        x = lax.dynamic_slice(rows, (node, 0, start * 8), (1, 32, block * 8))
        return x.reshape(*axis, block, 8, 1)

    return of


def _scale_of_layers(q: Quantiser, scales: Array, layers: Layers, tiles: int) -> Scale:
    """`_scale_of_buckets` of one scale a layer."""
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
            scale = jnp.where(place < cut(end, 0, start, block), scale, cut(x, node, start, block))
        return scale

    return of


# --- `jgc.wire.bits` in tiles ---------------------------------------------------------------------


def first_axis(bits: int) -> tuple[int, ...]:
    """How the 32 of codes u32[32, T, 8, 128] are cut up.

    Example:
      >>> first_axis(9), first_axis(4), first_axis(7)
      ((4, 8, 1), (8, 4), (8, 2, 2, 1))
    """
    widths = [width for _, width in fields_of(bits)]
    return (32 // widths[0], *(a // b for a, b in pairwise(widths)), widths[-1])


def unpack_block(words: Array, bits: int, node: int | Array, start: Array, tiles: int) -> Array:
    """Codes of `bits` bits in a block of `tiles` tiles from `start` on, in [0, T), of one node.

    Takes the words of all nodes, u32[K, bits, T, 8, 128]; returns u32[*first_axis, tiles, 8, 128].
    """
    axis, codes, at = first_axis(bits), [], 0
    for i, (low, width) in enumerate(fields_of(bits)):
        x = lax.dynamic_slice(words, (node, at, start, 0, 0), (1, width, tiles, 8, LANES))
        x = x.reshape(*[1] * (i + 1), *axis[i + 1 :], tiles, 8, LANES)
        shift = _place(axis) // np.uint32(width) * np.uint32(width)
        codes.append(((x >> shift) & np.uint32(2**width - 1)) << np.uint32(low))
        at += width
    return reduce(jnp.bitwise_or, codes)


def _place(axis: tuple[int, ...]) -> Array:
    """0 to 31 along the first axis as it is cut up."""
    place, stride = jnp.uint32(0), 32
    for i, size in enumerate(axis):
        stride //= size
        place = place + lax.broadcasted_iota(jnp.uint32, (*axis, 1, 1, 1), i) * np.uint32(stride)
    return place
