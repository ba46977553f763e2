"""What the scalar quantisers share: the groups of values that have one scale, and how a quantiser becomes a method."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jgc.compress.compose import Codec, Layers, Payload, compose
from jgc.compress.exchange import gather
from jgc.memory import error_feedback, no_memory
from jgc.pack import values_of
from jgc.types import Array, Compressor, Key


@dataclasses.dataclass(frozen=True)
class Quantising:
    """Settings of methods that send a code of every value."""

    error_feedback: bool = False
    """add what quantising lost to the next gradient"""


def quantized(codec: Codec, config: Quantising) -> Compressor:
    """The method in which every node gets all nodes' codes, with error feedback or without."""
    return compose(codec, error_feedback() if config.error_feedback else no_memory(), gather())


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

    return Codec(name, False, False, encode, decode, mean, values_of)


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
