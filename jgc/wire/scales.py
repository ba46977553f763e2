"""Scales that groups of values share: buckets of consecutive values, or with bucket = 0 the layers.

    scales = each_group(largest, jnp.abs(v), layers, bucket)    # f32[n] -> f32[G]
    over_groups(scales, layers, bucket)                         # f32[G] -> f32[n]
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jgc.backend import backend, plain
from jgc.layout.devices import filled
from jgc.layout.pack import Layers, values_of
from jgc.types import Array
from jgc.wire.bits import LANES, MANY, TILE, whole_words


def check_bucket(bucket: int) -> None:
    """Raise ValueError unless bucket is at least 0."""
    if bucket < 0:
        raise ValueError(f"bucket must be at least 0 (0 for one scale a layer), got {bucket}")


def each_group(reduced: Callable[[Array], Array], x: Array, layers: Layers, bucket: int) -> Array:
    """`reduced` of every group of `bucket` values, or of every layer: f32[n] -> f32[G].

    It reduces the last axis, and zeros, with which the last bucket is padded, must not change it.
    """
    bucket = min(bucket, x.size)
    if bucket and _are_rows(x.size, bucket) and reduced in (largest, summed):
        # over rows first, then over lanes: a TPU would move all values to make [G, bucket]
        rows = filled(x, whole_words(x.size)).reshape(-1, bucket // LANES, LANES)
        return reduced(reduced(jnp.swapaxes(rows, 1, 2)))[: -(-x.size // bucket)]
    if bucket:
        return reduced(jnp.pad(x, (0, -x.size % bucket)).reshape(-1, bucket))
    parts = [reduced(x[layer.start : layer.start + layer.size]) for layer in layers if layer.size]
    return jnp.stack(parts) if parts else jnp.zeros((0,), x.dtype)


def summed(x: Array) -> Array:
    """Sum along the last axis."""
    return jnp.sum(x, axis=-1)


def largest(x: Array) -> Array:
    """Maximum along the last axis."""
    return jnp.max(x, axis=-1)


def root_mean_square(x: Array) -> Array:
    """Root mean square of magnitudes along the last axis; tiny squares do not underflow."""
    top = largest(x)
    return top * jnp.sqrt(jnp.mean(fraction(x, top[..., None]) ** 2, axis=-1))


def fraction(x: Array, of: Array) -> Array:
    """x / of in [0, 1] for 0 <= x <= of; 0 where both are 0."""
    return jnp.minimum(x / jnp.where(of > 0, of, 1), 1)


def aligned(
    x: Array, scales: Sequence[Array], layers: Layers, bucket: int
) -> tuple[Array, list[Array]]:
    """x [n] and the scales of its values, in shapes that broadcast.

    These are [G, bucket] and [G, 1] if all buckets are full. On a TPU x may get as many zeros at
    its end as `pack_bits` would add.
    """
    bucket = min(bucket, x.size)
    if bucket and _are_rows(x.size, bucket):
        x = filled(x, whole_words(x.size)).reshape(-1, bucket // LANES, LANES)
        return x, [filled(scale, len(x))[:, None, None] for scale in scales]
    if bucket and x.size % bucket == 0:
        return x.reshape(-1, bucket), [scale[:, None] for scale in scales]
    return x, [over_groups(scale, layers, bucket) for scale in scales]


def _are_rows(n: int, bucket: int) -> bool:
    """Whether buckets of n values are whole rows of a TPU's tiles."""
    if plain() or backend() != "tpu":
        return False
    return bucket % LANES == 0 and whole_words(n) % math.lcm(bucket, TILE) == 0


def over_groups(scales: Array, layers: Layers, bucket: int) -> Array:
    """The scale of every value: f32[G] -> f32[n]."""
    n = values_of(layers)
    bucket = min(bucket, n)
    if bucket:
        return jnp.broadcast_to(scales[:, None], (scales.size, bucket)).reshape(-1)[:n]
    sizes = [layer.size for layer in layers if layer.size]
    if plain():
        return jnp.repeat(scales, np.array(sizes, np.int32), total_repeat_length=n)
    if backend() == "tpu" and n >= MANY:
        return _over_tiles(scales, layers)
    parts = [jnp.broadcast_to(scales[i], (size,)) for i, size in enumerate(sizes)]
    return jnp.concatenate(parts) if parts else scales


def _over_tiles(scales: Array, layers: Layers) -> Array:
    """`over_groups` of layers, tile by tile: few tiles have values of several layers.

    XLA for TPU takes long to compile a vector joined of many parts, and moves each part.
    """
    n = values_of(layers)
    place = np.arange(TILE, dtype=np.int32).reshape(1, -1, LANES)
    out = jnp.zeros((1, 1, 1), scales.dtype)
    for which, start in layers_of_tiles(layers, -(-n // TILE)):
        scale = repeated(scales[None], which)[0, :, None, None]
        out = jnp.where(place < start[:, None, None], out, scale)
    return out.reshape(-1)[:n]


def layers_of_tiles(layers: Layers, tiles: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each tile of values its first layer, its second, ..., and where in the tile it starts."""
    ends = np.cumsum([layer.size for layer in layers if layer.size])
    first = np.arange(tiles) * TILE
    which, last = (np.minimum(np.searchsorted(ends, x, side="right"), len(ends) - 1)
                   for x in (first, first + TILE - 1))  # fmt: skip
    levels = [(which, np.zeros(tiles, np.int32))]
    while (which < last).any():
        start = np.where(which < last, ends[which] - first, TILE).astype(np.int32)
        which = np.minimum(which + 1, last)
        levels.append((which, start))
    return levels


def repeated(scales: Array, which: np.ndarray) -> Array:
    """scales[:, which] for ascending `which`."""
    nodes, (groups, counts) = len(scales), np.unique(which, return_counts=True)
    pairs = zip(groups, counts, strict=True)
    return jnp.concatenate([jnp.broadcast_to(scales[:, i, None], (nodes, n)) for i, n in pairs], 1)
