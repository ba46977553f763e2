"""The networks of LGC's autoencoder as Flax modules. Only `autoencoder` imports this file, when it builds them.

Source: LGC paper, Section IV-A, Tables I and II.
"""

import flax.linen as nn
import jax.numpy as jnp

from jgc.types import Array


class Encoder(nn.Module):
    """Table I: f32[..., m, 1] -> code f32[..., m / 16, 4]."""

    channels: int
    filters: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for filters in self.filters:
            x = nn.leaky_relu(nn.Conv(filters, (3,), strides=(2,))(x))
        return nn.Conv(self.channels, (1,))(x)


class Decoder(nn.Module):
    """Table II: code f32[..., m / 16, 4] -> f32[..., m, 1].

    An innovation f32[..., m, 1] is concatenated before the last convolution; the ring's decoder has none.
    """

    filters: tuple[int, ...]
    strides: tuple[int, ...]
    linear: bool = False  # no non-linearities: the mean of codes then decodes to the mean of the decoded vectors

    @nn.compact
    def __call__(self, code: Array, innovation: Array | None = None) -> Array:
        x = code
        for filters, stride in zip(self.filters, self.strides, strict=True):
            x = nn.ConvTranspose(filters, (3,), strides=(stride,))(x)
            x = x if self.linear else nn.leaky_relu(x)
        return nn.Conv(1, (1,))(x if innovation is None else jnp.concatenate([x, innovation], axis=-1))
