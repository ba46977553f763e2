"""The 1-D convolutional autoencoder of LGC: one encoder, a decoder per node, their loss and their training step.

Shapes: mu values selected per node, padded with zeros to m, a multiple of 16; K nodes.

Source: LGC paper, Section IV-A, Tables I and II, equations (3) to (7).
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jgc.types import Array, Key, PyTree

STRIDE = 16  # of the encoder as a whole
CHANNELS = 4  # of the code


class Weights(NamedTuple):
    """Encoder weights, and decoder weights with a leading axis [K]."""

    encoder: PyTree
    decoders: PyTree


class Trained(NamedTuple):
    """The autoencoder in training: weights and the state of its optimiser."""

    weights: Weights
    optimiser: PyTree


class Losses(NamedTuple):
    """f32[] each: equation (6) and equation (5), as means over their terms."""

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
    """Numbers in the code of mu values: four for every 16, a quarter of them.

    Example:
      >>> code_size(32)
      8
    """
    return padded(mu) // STRIDE * CHANNELS


class Encoder(nn.Module):
    """Table I: f32[..., m, 1] -> code f32[..., m / 16, 4]."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for filters in (64, 128, 256, 64):
            x = nn.leaky_relu(nn.Conv(filters, (3,), strides=(2,))(x))
        return nn.Conv(CHANNELS, (1,))(x)


class Decoder(nn.Module):
    """Table II with the innovation f32[..., m, 1] concatenated before the last convolution.

    Five strided deconvolutions would multiply the length by 32, the encoder divides it by 16: the first has stride 1.
    """

    @nn.compact
    def __call__(self, code: Array, innovation: Array) -> Array:
        x = code
        for filters, stride in ((4, 1), (32, 2), (64, 2), (128, 2), (32, 2)):
            x = nn.leaky_relu(nn.ConvTranspose(filters, (3,), strides=(stride,))(x))
        return nn.Conv(1, (1,))(jnp.concatenate([x, innovation], axis=-1))


def encode(encoder: PyTree, x: Array) -> Array:
    """f32[..., m] -> code f32[..., m / 16, 4], equation (3)."""
    return jnp.asarray(Encoder().apply(encoder, x[..., None]))


def decode(decoder: PyTree, code: Array, innovation: Array) -> Array:
    """One node's decoder: code f32[m / 16, 4], innovation f32[m] -> f32[m], equation (4)."""
    return jnp.asarray(Decoder().apply(decoder, code, innovation[..., None]))[..., 0]


def init(key: Key, mu: int, nodes: int) -> Weights:
    """Fresh weights. All decoders start from the same ones, so that what a node learns is its own difference."""
    m = padded(mu)
    encoder_key, decoder_key = jax.random.split(key)
    encoder = Encoder().init(encoder_key, jnp.zeros((1, m, 1)))
    code, innovation = jnp.zeros((1, m // STRIDE, CHANNELS)), jnp.zeros((1, m, 1))
    decoder = Decoder().init(decoder_key, code, innovation)
    return Weights(encoder, jax.tree.map(lambda x: jnp.broadcast_to(x, (nodes, *x.shape)), decoder))


def losses(weights: Weights, x: Array, innovations: Array, chosen: Array) -> Losses:
    """Losses of one training step.

    Args:
      weights: of encoder and decoders.
      x: what every node's decoder is to give, f32[K, m]; also what the encoder gets.
      innovations: f32[K, m], zero where nothing is sent.
      chosen: i32[], the node whose code serves all decoders.
    """
    codes = encode(weights.encoder, x)  # [K, m / 16, 4]
    decoded = jax.vmap(decode, in_axes=(0, None, 0))(weights.decoders, codes[chosen], innovations)
    nodes = x.shape[0]
    spread = jnp.mean((codes - jnp.mean(codes, axis=0)) ** 2)  # mean over pairs is twice K / (K - 1) of it
    similarity = 2 * nodes / max(nodes - 1, 1) * spread
    return Losses(jnp.mean((x - decoded) ** 2), similarity)


def train(
    trained: Trained, optimiser: optax.GradientTransformation, x: Array, innovations: Array, chosen: Array,
    weight_reconstruction: float, weight_similarity: float,
) -> tuple[Trained, Losses]:
    """One step on the loss (7)."""

    def loss(weights):
        parts = losses(weights, x, innovations, chosen)
        return weight_reconstruction * parts.reconstruction + weight_similarity * parts.similarity, parts

    gradient, parts = jax.grad(loss, has_aux=True)(trained.weights)
    updates, optimiser_state = optimiser.update(gradient, trained.optimiser, trained.weights)
    return Trained(optax.apply_updates(trained.weights, updates), optimiser_state), parts
