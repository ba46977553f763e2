"""Shared by the scalar quantisers: groups of values with one scale, and methods made of a quantiser."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.backend import backend
from jgc.compress.quantized.in_parts import over_nodes
from jgc.compress.quantized.in_tiles import InTiles, fits, layers_of_tiles, mean_in_tiles, repeated
from jgc.layout.pack import values_of, whole
from jgc.layout.tiles import filled
from jgc.method import phases
from jgc.method.compose import Codec, Payload, Tiled, compose, payload_sizes
from jgc.method.exchange import gather
from jgc.method.from_step import Layers, Step, from_step
from jgc.method.memory import Memory, error_feedback, no_memory
from jgc.method.messages import both_ways
from jgc.types import Array, Compressor, Key, Nodes
from jgc.wire.bits import LANES, MANY, TILE, whole_words


@dataclasses.dataclass(frozen=True)
class Quantising:
    """Settings of methods that send a code for every value."""

    error_feedback: bool = False
    """add the quantisation error to the next gradient"""
    exchange: Literal["gather", "ring"] = "gather"
    """gather: every node gets all nodes' codes; ring: every hop decodes, adds and quantises partial sums"""


def quantized(codec: Codec, config: Quantising, bucket: int = 0) -> Compressor:
    """The method that sends a codec's codes of all values, with or without error feedback.

    Args:
      codec: encodes every value.
      config: chooses the exchange and error feedback.
      bucket: number of values that share a scale, which ring segments do not divide; 0 for one scale per layer.

    Raises:
      ValueError: an unknown exchange.
    """
    if config.exchange not in ("gather", "ring"):
        raise ValueError(f"exchange must be 'gather' or 'ring', got {config.exchange!r}")
    memory = error_feedback() if config.error_feedback else no_memory()
    return ring(codec, memory, bucket) if config.exchange == "ring" else compose(codec, memory, gather())


# --- a ring of codes that cannot be added up ---------------------------------------------------------------------


def ring(codec: Codec, memory: Memory, bucket: int) -> Compressor:
    """The method in which codes travel around a ring; every hop decodes, adds its own values and quantises the sum.

    A node sends 2 (K - 1) / K payloads in place of the K - 1 of a gather. In return a value is quantised K times, in
    ever larger sums. Random rounding stays unbiased. With a gather its variance falls as 1 / K. In rings of 4 and of 16
    nodes its variance, measured, is 0.5 to 1.3 times that of a single node if gradients are unrelated. If they are
    equal it is 0.8 to 1.5 times, but with `natural` 2.5 times on 4 nodes and 5 times on 16.

    Differs from the same quantiser with a gather
      1. Segments hold whole buckets, and a segment smaller than a bucket is one bucket. One scale per layer becomes one
         scale per segment.
      2. A node's residual takes the error of the sums that it quantised, not of its own gradient. The mean over nodes
         of residual plus aggregate is the same.
      3. Several nodes on one device are summed uncompressed before the ring between devices.
    """

    def step(phase, key, v, state, layers, nodes):
        mean, lost = ring_quantized_mean(codec, bucket, key, v, nodes)
        return Step(mean, v - lost, elements=v.size)

    def messages(phase, layers, nodes):
        return both_ways(ring_sizes(codec, bucket, values_of(layers), nodes.count))

    return from_step(step, memory=memory, schedule=phases.single(codec.name), messages=messages)


def ring_quantized_mean(codec: Codec, bucket: int, key: Key, v: Array, nodes: Nodes) -> tuple[Array, Array]:
    """Mean of v f32[n] over nodes by a ring of codes, and this node's quantisation errors, f32[n].

    Args:
      codec: a codec without `agree`.
      bucket: number of values that share a scale, or 0.
      key: the same on all nodes.
      v: f32[n].
      nodes: the layout.
    """
    places = comm.ring_size(nodes)
    layers = (whole(segment_size(v.size, places, bucket), "segment"),)

    def encode(key, x):
        return codec.encode(key, x, layers)

    def decode(payload):
        return jnp.asarray(codec.decode(payload, layers))

    segments = jnp.pad(v, (0, places * values_of(layers) - v.size)).reshape(places, -1)
    mean, lost = comm.ring_quantized_mean(key, segments, encode, decode, nodes)
    return mean.reshape(-1)[: v.size], lost.reshape(-1)[: v.size]


def segment_size(n: int, places: int, bucket: int) -> int:
    """Number of values per segment: whole buckets, unless a segment is smaller than one.

    Example:
      >>> segment_size(10_000, 4, 512), segment_size(10_000, 4, 0), segment_size(100, 4, 512)
      (2560, 2500, 25)
    """
    size = -(-n // places)
    return -(-size // bucket) * bucket if 0 < bucket <= size else size


def ring_sizes(codec: Codec, bucket: int, n: int, places: int) -> dict[str, float]:
    """Bytes by field of the codes of n values in segments, without the padding of the last ones."""
    size = segment_size(n, places, bucket)
    full, rest = divmod(n, size) if n else (0, 0)
    sizes = {part: payload_sizes(codec, (whole(part, "segment"),)) for part in (size, rest)}
    return {field: full * sizes[size][field] + (sizes[rest][field] if rest else 0.0) for field in sizes[size]}


# --- codecs -------------------------------------------------------------------------------------------------------


def scalar_codec(
    name: str, encode: Callable[[Key, Array, Layers], Payload], decode: Callable[[Payload, Layers], Array],
    tiled: InTiles | None = None,
) -> Codec:  # fmt: skip
    """A codec with a code for every value.

    Args:
      name: name of the codec and of the phase.
      encode: `(key, v f32[n], layers) -> payload`.
      decode: `(payload, layers) -> f32[n]`.
      tiled: how a TPU decodes it.
    """

    def mean(payloads, layers):
        return over_nodes(lambda payload: decode(payload, layers), payloads, values_of(layers))

    return with_tiles(Codec(name, False, encode, decode, mean, values_of), tiled)


def with_tiles(codec: Codec, tiled: InTiles | None) -> Codec:
    """The codec with a way to decode on a TPU, of this node's payload, too."""
    if tiled is None:
        return codec

    def mean(words, rest, layers):
        return mean_in_tiles(tiled, words, rest, layers)

    def decode(payload, layers):
        words = payload[tiled.field]
        if backend() != "tpu" or not fits(tiled, words.size, layers):
            return codec.decode(payload, layers)
        rest = {field: x[None] for field, x in payload.items() if field != tiled.field}
        return mean(words.reshape(1, -1, 8, 128), rest, layers)

    return codec._replace(decode=decode, tiled=Tiled(tiled.field, partial(fits, tiled), mean))


# --- groups of values with a scale of their own: buckets of consecutive values, or with bucket = 0 the layers ----


def check_bucket(bucket: int) -> None:
    """Raise ValueError unless bucket is at least 0."""
    if bucket < 0:
        raise ValueError(f"bucket must be at least 0 (0 for one scale a layer), got {bucket}")


def each_group(reduced: Callable[[Array], Array], x: Array, layers: Layers, bucket: int) -> Array:
    """`reduced` of every group: f32[n] -> f32[G]. The last bucket is padded with zeros.

    Args:
      reduced: `[..., m] -> [...]`, along the last axis; zeros must not change its result.
      x: f32[n].
      layers: ranges of x.
      bucket: number of values in a group, or 0 for one group per layer.
    """
    bucket = min(bucket, x.size)
    if bucket and are_rows(x.size, bucket) and reduced in (largest, summed):  # over rows first, then over lanes
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
    """The largest along the last axis."""
    return jnp.max(x, axis=-1)


def root_mean_square(x: Array) -> Array:
    """Root mean square of magnitudes along the last axis; squares of tiny values do not underflow."""
    top = largest(x)
    return top * jnp.sqrt(jnp.mean(divide(x, top[..., None]) ** 2, axis=-1))


def are_rows(n: int, bucket: int) -> bool:
    """Whether buckets of n values are whole rows of a TPU's tiles. It would move all values to make [G, bucket]."""
    return backend() == "tpu" and bucket % LANES == 0 and whole_words(n) % math.lcm(bucket, TILE) == 0


def divide(x: Array, by: Array) -> Array:
    """x / by in [0, 1] for 0 <= x <= by; 0 where both are 0."""
    return jnp.minimum(x / jnp.where(by > 0, by, 1), 1)


def beside_scales(x: Array, scales: Array, layers: Layers, bucket: int) -> tuple[Array, Array]:
    """x [n] and the scales of its values, in shapes that broadcast: [G, bucket] and [G, 1] if all buckets are full.

    On a TPU x may get zeros at its end, as many as `pack_bits` would add to it.
    """
    bucket = min(bucket, x.size)
    if bucket and are_rows(x.size, bucket):
        x = filled(x, whole_words(x.size)).reshape(-1, bucket // LANES, LANES)
        return x, filled(scales, len(x))[:, None, None]
    if bucket and x.size % bucket == 0:
        return x.reshape(-1, bucket), scales[:, None]
    return x, over_groups(scales, layers, bucket)


def over_groups(scales: Array, layers: Layers, bucket: int) -> Array:
    """The scale of every value: f32[G] -> f32[n]."""
    n = values_of(layers)
    bucket = min(bucket, n)
    if bucket:
        return jnp.broadcast_to(scales[:, None], (scales.size, bucket)).reshape(-1)[:n]
    if backend() == "tpu" and n >= MANY:
        return _over_tiles(scales, layers)
    sizes = [layer.size for layer in layers if layer.size]
    return jnp.concatenate([jnp.broadcast_to(scales[i], (size,)) for i, size in enumerate(sizes)]) if sizes else scales


def _over_tiles(scales: Array, layers: Layers) -> Array:
    """`over_groups` of layers, tile by tile: few tiles have values of several layers.

    XLA for TPU compiles a vector that is joined of many parts for long, and moves each part.
    """
    n = values_of(layers)
    place = np.arange(TILE, dtype=np.int32).reshape(1, -1, LANES)
    out = jnp.zeros((1, 1, 1), scales.dtype)
    for which, start in layers_of_tiles(layers, -(-n // TILE)):
        out = jnp.where(place < start[:, None, None], out, repeated(scales[None], which)[0, :, None, None])
    return out.reshape(-1)[:n]
