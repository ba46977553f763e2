"""Shared by the scalar quantisers: settings, rotation, and the exchanges of codes."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax.numpy as jnp

from jgc import comm
from jgc.layout.pack import values_of, whole
from jgc.method import Codec, Step, compose, from_step, phases
from jgc.method.exchange import Tiled, gather, payload_sizes
from jgc.method.memory import Memory, error_feedback, no_memory
from jgc.method.messages import both_ways
from jgc.types import Array, Compressor, Key, Nodes
from jgc.wire import quantized_tiles, quantized_words
from jgc.wire.hadamard import check_block, rotate, rotate_back
from jgc.wire.quantized_words import Quantiser


@dataclasses.dataclass(frozen=True)
class Quantising:
    """Settings of methods that send a code for every value."""

    error_feedback: bool = False
    """add the quantisation error to the next gradient"""
    exchange: Literal["gather", "ring", "two_shot"] = "gather"
    """gather: every node gets all nodes' codes; ring: every hop decodes, adds and quantises partial
    sums; two_shot: every node adds up a share of the values in f32 and quantises the mean"""
    hadamard: int = 0
    """consecutive values rotated together before they are coded, a power of two, which spreads
    outliers over their block; 0 for none"""


def quantized(quantiser: Quantiser, config: Quantising) -> Compressor:
    """The method that sends a code of every value, with or without error feedback."""
    codec, memory = codec_of(quantiser), error_feedback() if config.error_feedback else no_memory()
    of_rotated = rotated(codec, config.hadamard, quantiser.bucket)
    if config.exchange in REDUCING:
        return reduced(codec, memory, quantiser, config)
    return compose(of_rotated, memory, gather())


def codec_of(q: Quantiser) -> Codec:
    """The codec that packs a quantiser's codes into words."""
    fits, mean = partial(quantized_tiles.fits, q), partial(quantized_tiles.mean_in_tiles, q)
    return Codec(
        name=q.name,
        linear=False,
        encode=partial(quantized_words.encode, q),
        decode=partial(quantized_words.decode, q),
        mean=partial(quantized_words.mean_of, q),
        elements=values_of,
        agree=q.agree,
        tiled=Tiled(q.field, fits, mean))


def rotated(codec: Codec, block: int, bucket: int) -> Codec:
    """The codec of rotated vectors (`jgc.wire.hadamard`); decoded values and means are rotated
    back. `block` values are rotated together, 0 for none; `bucket` values share a scale, or 0."""
    check_block(block)
    if not block:
        return codec
    if bucket and bucket % block and block % bucket:
        raise ValueError(f"hadamard must divide the {bucket} values of a scale or be a multiple of "
                         f"them, got {block}")  # fmt: skip

    def rotate_first(fn):
        return lambda v, layers: fn(rotate(v, block), layers)

    def back(decode):
        return lambda *payload_and_layers: rotate_back(decode(*payload_and_layers), block)

    tiled = codec.tiled
    return codec._replace(
        encode=lambda key, v, *rest: codec.encode(key, rotate(v, block), *rest),
        decode=back(codec.decode),
        mean=back(codec.mean),
        agree=None if codec.agree is None else rotate_first(codec.agree),
        tiled=None if tiled is None else tiled._replace(mean=back(tiled.mean)))


# --- codes of sums, which cannot be added up ------------------------------------------------------

# the mean of segments by exchange, and the number of its segments
REDUCING: dict[str, tuple[Callable[..., tuple[Array, Array]], Callable[[Nodes], int]]] = {
    "ring": (comm.ring_quantized_mean, comm.ring_size),
    "two_shot": (comm.two_shot_quantized_mean, lambda nodes: nodes.count),
}


def reduced(
    codec: Codec, memory: Memory, quantiser: Quantiser, config: Quantising
) -> Compressor:
    """The method whose nodes send codes of their values and codes of sums: a ring, or two shots.

    A node sends 2 (K - 1) / K payloads instead of the K - 1 of a gather. Relative to the variance
    of a single node's rounding, a gather's is 1 / K. The others':

    - ring, K roundings of ever larger sums, 2 (K - 1) transfers in a row: measured on 4 and 16
      nodes, 0.5 to 1.3 for unrelated gradients; 0.8 to 1.5 for equal ones, `natural` 2.5 and 5;
    - two_shot, two roundings and two collectives; the second rounds a mean: 2 / K for unrelated
      gradients, whose mean is sqrt(K) times smaller than they are; 1 for equal ones.

    Differs from the same quantiser with a gather
      1. Segments hold whole buckets, and a segment smaller than a bucket is one bucket. One scale
         per layer becomes one scale per segment. The last bucket is filled up: with zeros, or
         where a scale is a mean (`averages`) with copies of its values, each as often as the others
         or once more.
      2. A node's residual takes the error of the sums that it quantised, too; in a ring, these
         errors only. The mean over nodes of residual plus aggregate is the same.
      3. In a ring, several nodes on one device are summed uncompressed before the ring between
         devices. In two shots every node sends, in all layouts.
    """

    bucket, block = quantiser.bucket, config.hadamard

    def step(phase, key, v, state, layers, nodes):
        # as a whole, because a segment can be smaller than a block
        x = rotate(v, block) if block else v
        mean, lost = reduced_mean(codec, bucket, config.exchange, key, x, nodes, quantiser.averages)
        if block:
            mean, lost = rotate_back(mean, block), rotate_back(lost, block)
        return Step(mean, v - lost, elements=v.size)

    def messages(phase, layers, nodes):
        return both_ways(segment_sizes(codec, bucket, values_of(layers), nodes.count))

    return from_step(step, memory=memory, schedule=phases.single(codec.name), messages=messages)


def reduced_mean(
    codec: Codec, bucket: int, exchange: str, key: Key, v: Array, nodes: Nodes,
    averages: bool = False,
) -> tuple[Array, Array]:
    """Mean of v f32[n] over nodes by codes of sums, and this node's quantisation errors, f32[n].

    The codec must have no `agree`; the key is the same on all nodes.
    """
    mean_of_segments, count = REDUCING[exchange]
    places = count(nodes)
    size = segment_size(v.size, places, bucket)
    layers, more = (whole(size, "segment"),), places * size - v.size
    # Zeros would lower a mean, copies raise the Euclidean norm.
    last = v[v.size - v.size % max(min(bucket or size, size), 1) :]  # empty if buckets are full
    filling = jnp.resize(last, (more,)) if averages else jnp.zeros((more,), v.dtype)
    segments = jnp.concatenate([v, filling]).reshape(places, -1)
    mean, lost = mean_of_segments(
        key, segments, nodes=nodes,
        encode=lambda key, x: codec.encode(key, x, layers),
        decode=lambda payload: jnp.asarray(codec.decode(payload, layers)))
    return mean.reshape(-1)[: v.size], lost.reshape(-1)[: v.size]


def segment_size(n: int, places: int, bucket: int) -> int:
    """Number of values per segment: whole buckets, unless a segment is smaller than one.

    Example:
      >>> segment_size(10_000, 4, 512), segment_size(10_000, 4, 0), segment_size(100, 4, 512)
      (2560, 2500, 25)
    """
    size = -(-n // places)
    return -(-size // bucket) * bucket if 0 < bucket <= size else size


def segment_sizes(codec: Codec, bucket: int, n: int, places: int) -> dict[str, float]:
    """Bytes by field of the codes of n values in segments, without the last ones' padding."""
    size = segment_size(n, places, bucket)
    full, rest = divmod(n, size) if n else (0, 0)
    first, last = (payload_sizes(codec, (whole(part, "segment"),)) for part in (size, rest))
    return {field: full * first[field] + (last[field] if rest else 0.0) for field in first}
