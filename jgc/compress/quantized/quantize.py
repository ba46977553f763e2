"""What the scalar quantisers share: the groups of values that have one scale, and how a quantiser becomes a method."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.layout.pack import values_of, whole
from jgc.memory import Memory, error_feedback, no_memory
from jgc.method import phases
from jgc.method.compose import Codec, Payload, compose, payload_sizes
from jgc.method.exchange import gather
from jgc.method.from_step import Layers, Step, from_step
from jgc.method.messages import both_ways
from jgc.types import Array, Compressor, Key, Nodes


@dataclasses.dataclass(frozen=True)
class Quantising:
    """Settings of methods that send a code of every value."""

    error_feedback: bool = False
    """add what quantising lost to the next gradient"""
    exchange: Literal["gather", "ring"] = "gather"
    """gather: every node gets all nodes' codes; ring: partial sums, decoded and quantised again at every hop"""


def quantized(codec: Codec, config: Quantising, bucket: int = 0) -> Compressor:
    """The method that sends codes of all values, with error feedback or without.

    Args:
      codec: of any values.
      config: says how codes travel and whether what they lose is kept.
      bucket: values with one scale, which a ring does not divide; 0 where the layers have one.

    Raises:
      ValueError: an unknown exchange.
    """
    if config.exchange not in ("gather", "ring"):
        raise ValueError(f"exchange must be 'gather' or 'ring', got {config.exchange!r}")
    memory = error_feedback() if config.error_feedback else no_memory()
    return ring(codec, memory, bucket) if config.exchange == "ring" else compose(codec, memory, gather())


# --- a ring of codes that cannot be added up ---------------------------------------------------------------------


def ring(codec: Codec, memory: Memory, bucket: int) -> Compressor:
    """The method in which codes go round a ring, decoded, added to and quantised again at every hop.

    A node sends 2 (K - 1) / K times one payload, and not K - 1 payloads. For that a value is quantised K times, as part
    of ever larger sums. Random rounding stays without bias; but its variance, which falls as 1 / K where nodes gather,
    stays about half that of a single node for gradients that have nothing in common, and grows as K / 3 for equal ones.

    Differs from the same quantiser with a gather
      1. Segments hold whole buckets; a segment below a bucket is one. One scale a layer becomes one scale a segment.
      2. Error feedback keeps what a node lost of the sums that it quantised, not of its own gradient: the mean over
         nodes of what is kept and what comes out is the same.
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
      codec: one that needs no agreement beforehand.
      bucket: values with one scale, or 0.
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
    """Values of each segment of n: whole buckets, unless not even one would be full.

    Example:
      >>> segment_size(10_000, 4, 512), segment_size(10_000, 4, 0), segment_size(100, 4, 512)
      (2560, 2500, 25)
    """
    size = -(-n // places)
    return -(-size // bucket) * bucket if 0 < bucket <= size else size


def ring_sizes(codec: Codec, bucket: int, n: int, places: int) -> dict[str, float]:
    """Bytes by kind of the codes of n values in segments, without those that fill up the last ones."""
    size = segment_size(n, places, bucket)
    full, rest = divmod(n, size) if n else (0, 0)
    sizes = {part: payload_sizes(codec, (whole(part, "segment"),)) for part in (size, rest)}
    return {field: full * sizes[size][field] + (sizes[rest][field] if rest else 0.0) for field in sizes[size]}


# --- codecs -------------------------------------------------------------------------------------------------------


def scalar_codec(
    name: str, encode: Callable[[Key, Array, Layers], Payload], decode: Callable[[Payload, Layers], Array]
) -> Codec:
    """A codec that has a code of every value.

    Args:
      name: for error messages, and of the phase.
      encode: `(key, v f32[n], layers) -> payload`.
      decode: `(payload, layers) -> f32[n]`.
    """

    def mean(payloads, layers):
        return over_nodes(lambda payload: decode(payload, layers), payloads, values_of(layers))

    return Codec(name, False, encode, decode, mean, values_of)


def over_nodes(decode: Callable[[Payload], Array], payloads: Payload, n: int) -> Array:
    """The mean over nodes of what their payloads stand for, f32[n], one node after the other.

    Not [K, n] at once, which for a large model does not fit; and the products of decoding are not fused with the sum,
    so that the bits are the same in every layout.
    """
    count = jax.tree.leaves(payloads)[0].shape[0]

    def add(total, payload):
        return total + jax.lax.optimization_barrier(decode(payload)), None

    return jax.lax.scan(add, jnp.zeros((n,), jnp.float32), payloads)[0] / count


# --- groups of values with a scale of their own: buckets of consecutive values, or with bucket = 0 the layers ----


def check_bucket(bucket: int) -> None:
    """Raise ValueError unless bucket is at least 0."""
    if bucket < 0:
        raise ValueError(f"bucket must be at least 0 (0 for one scale a layer), got {bucket}")


def each_group(reduce: Callable[[Array], Array], x: Array, layers: Layers, bucket: int) -> Array:
    """`reduce` of every group: f32[n] -> f32[G]; the last bucket is filled up with zeros.

    Args:
      reduce: `[..., m] -> [...]`, not changed by zeros.
      x: f32[n].
      layers: ranges of x.
      bucket: values in a group, or 0 for the layers.
    """
    bucket = min(bucket, x.size)
    if bucket:
        return reduce(jnp.pad(x, (0, -x.size % bucket)).reshape(-1, bucket))
    parts = [reduce(x[layer.start : layer.start + layer.size]) for layer in layers if layer.size]
    return jnp.stack(parts) if parts else jnp.zeros((0,), x.dtype)


def summed(x: Array) -> Array:
    """Sum along the last axis."""
    return jnp.sum(x, axis=-1)


def largest(x: Array) -> Array:
    """The largest along the last axis."""
    return jnp.max(x, axis=-1)


def root_mean_square(x: Array) -> Array:
    """Root mean square along the last axis, of magnitudes; squares of tiny values do not vanish."""
    top = largest(x)
    return top * jnp.sqrt(jnp.mean(divide(x, top[..., None]) ** 2, axis=-1))


def divide(x: Array, by: Array) -> Array:
    """x / by in [0, 1] for 0 <= x <= by; 0 where both are 0."""
    return jnp.minimum(x / jnp.where(by > 0, by, 1), 1)


def over_groups(scales: Array, layers: Layers, bucket: int) -> Array:
    """Every value's own scale: f32[G] -> f32[n]."""
    n = values_of(layers)
    bucket = min(bucket, n)
    if bucket:
        return jnp.broadcast_to(scales[:, None], (scales.size, bucket)).reshape(-1)[:n]
    sizes = [layer.size for layer in layers if layer.size]
    return jnp.concatenate([jnp.broadcast_to(scales[i], (size,)) for i, size in enumerate(sizes)]) if sizes else scales
