"""The 1-D convolutional autoencoder of LGC: one encoder, a decoder per node, losses and training.

Shapes: mu values selected per node, padded with zeros to m, a multiple of 16; K nodes.

Source: LGC paper, Section IV-A, Tables I and II, equations (3) to (7).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc.types import Array, Key, PyTree

if TYPE_CHECKING:
    import optax
    from flax import linen as nn

STRIDE = 16  # total stride of the encoder
CHANNELS = 4  # channels of the code
ENCODER_FILTERS = (64, 128, 256, 64)  # Table I; the project's tests use fewer
DECODER_FILTERS = (4, 32, 64, 128, 32)  # Table II
# Five strides of 2 would multiply the length by 32; the encoder divides it by 16.
DECODER_STRIDES = (1, 2, 2, 2, 2)


class Weights(NamedTuple):
    """Encoder weights, and decoder weights with a leading axis [K]."""

    encoder: PyTree
    decoders: PyTree


class Pair(NamedTuple):
    """Weights of one encoder and one decoder, for the mean over nodes (Section IV-B)."""

    encoder: PyTree
    decoder: PyTree


class Trained(NamedTuple):
    """The autoencoder in training: weights (`Weights` or `Pair`) and the state of its optimiser."""

    weights: Any
    optimiser: PyTree


class Losses(NamedTuple):
    """f32[] each: equations (6) or (11), and (5), as means over their terms."""

    reconstruction: Array
    similarity: Array


def padded(mu: int) -> int:
    """m: mu rounded up to a multiple of 16, at least 16.

    Example:
      >>> padded(17)
      32
    """
    return max(1, -(-mu // STRIDE)) * STRIDE


def code_size(mu: int) -> int:
    """Number of values in the code of mu values: 4 for every 16.

    Example:
      >>> code_size(32)
      8
    """
    return padded(mu) // STRIDE * CHANNELS


def _encoder() -> "nn.Module":
    from jgc.compress.lgc.networks import Encoder  # here: `import jgc` must not wait for Flax

    return Encoder(CHANNELS, ENCODER_FILTERS)


def _decoder(linear: bool = False) -> "nn.Module":
    from jgc.compress.lgc.networks import Decoder  # here: `import jgc` must not wait for Flax

    return Decoder(DECODER_FILTERS, DECODER_STRIDES, linear)


def encode(encoder: PyTree, x: Array) -> Array:
    """f32[..., m] -> code f32[..., m / 16, 4], equation (3)."""
    return jnp.asarray(_encoder().apply(encoder, x[..., None]))


def decode(decoder: PyTree, code: Array, innovation: Array) -> Array:
    """One node's decoder: code f32[m / 16, 4], innovation f32[m] -> f32[m], equation (4)."""
    return jnp.asarray(_decoder().apply(decoder, code, innovation[..., None]))[..., 0]


def decode_mean(decoder: PyTree, code: Array, linear: bool) -> Array:
    """The ring's one decoder: a code or a mean of codes f32[m / 16, 4] -> f32[m], equation (10)."""
    return jnp.asarray(_decoder(linear).apply(decoder, code))[..., 0]


def init(key: Key, mu: int, nodes: int) -> Weights:
    """Fresh weights. All decoders start equal, so that each learns how its node differs."""
    m = padded(mu)
    encoder_key, decoder_key = jax.random.split(key)
    encoder = _encoder().init(encoder_key, jnp.zeros((1, m, 1)))
    code, innovation = jnp.zeros((1, m // STRIDE, CHANNELS)), jnp.zeros((1, m, 1))
    decoder = _decoder().init(decoder_key, code, innovation)
    return Weights(encoder, jax.tree.map(lambda x: jnp.broadcast_to(x, (nodes, *x.shape)), decoder))


def init_pair(key: Key, mu: int, linear: bool) -> Pair:
    """Fresh weights of one encoder and one decoder."""
    m = padded(mu)
    encoder_key, decoder_key = jax.random.split(key)
    encoder = _encoder().init(encoder_key, jnp.zeros((1, m, 1)))
    return Pair(
        encoder, _decoder(linear).init(decoder_key, jnp.zeros((1, m // STRIDE, CHANNELS))))


def losses(weights: Weights, x: Array, innovations: Array, chosen: Array) -> Losses:
    """Losses of one training step. x f32[K, m] is the encoder's input, and the target of every
    node's decoder; innovations f32[K, m] are zero where nothing is sent; all decoders use the code
    of the node `chosen`."""
    codes = encode(weights.encoder, x)  # [K, m / 16, 4]
    decoded = jax.vmap(decode, in_axes=(0, None, 0))(weights.decoders, codes[chosen], innovations)
    nodes = x.shape[0]
    spread = jnp.mean((codes - jnp.mean(codes, axis=0, keepdims=True)) ** 2)
    # the mean over pairs of nodes is 2 K / (K - 1) times the spread
    similarity = 2 * nodes / max(nodes - 1, 1) * spread
    return Losses(jnp.mean((x - decoded) ** 2), similarity)


def mean_losses(weights: Pair, x: Array, linear: bool) -> Losses:
    """Losses of a training step with one decoder, (8) to (11); x f32[K, m] of all nodes."""
    code = jnp.mean(encode(weights.encoder, x), axis=0)  # [m / 16, 4]
    decoded = decode_mean(weights.decoder, code, linear)
    return Losses(jnp.mean((jnp.mean(x, axis=0) - decoded) ** 2), jnp.float32(0))


def terms(nodes: int, m: int) -> tuple[float, float]:
    """Numbers of terms in the sums (6) and (5), the latter over ordered pairs of nodes.

    Example:
      >>> terms(2, 32)
      (64.0, 16.0)
    """
    return float(nodes * m), float(nodes * (nodes - 1) * m // STRIDE * CHANNELS)


def train(
    trained: Trained, optimiser: "optax.GradientTransformation",
    losses_of: Callable[[Any], Losses], reconstruction: float, similarity: float,
) -> tuple[Trained, Losses]:  # fmt: skip
    """One optimiser step on the loss (7), the sum of `losses_of(weights)` with these factors."""
    import optax  # here: `import jgc` must not wait for it

    def loss(weights):
        parts = losses_of(weights)
        return reconstruction * parts.reconstruction + similarity * parts.similarity, parts

    gradient, parts = jax.grad(loss, has_aux=True)(trained.weights)
    # optax's steps need it where the user's promotion is "strict"
    with jax.numpy_dtype_promotion("standard"):
        updates, optimiser_state = optimiser.update(gradient, trained.optimiser, trained.weights)
    return Trained(optax.apply_updates(trained.weights, updates), optimiser_state), parts
