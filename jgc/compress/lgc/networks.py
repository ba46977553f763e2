"""The networks of LGC's autoencoder as Flax modules, imported only when they are built.

Their convolutions, all with a kernel of 3 or of 1, are matrix products. They have the parameters,
names and results of Flax's `Conv` and `ConvTranspose`, but XLA on CPU takes three times as long for
a convolution whose kernel has a node axis, ten times for its gradient.

Source: LGC paper, Section IV-A, Tables I and II.
"""

import flax.linen as nn
import jax.numpy as jnp

from jgc.types import Array


class Conv(nn.Module):
    """f32[..., n, c] -> f32[..., n / stride, filters], padded; kernel 3 at stride 2, else 1."""

    filters: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.stride == 1:
            return _affine(self, x, 1)
        pairs = x.reshape(*x.shape[:-2], -1, 2 * x.shape[-1])  # x[2 i], x[2 i + 1]
        after = _neighbour(pairs[..., : x.shape[-1]], 1)
        return _affine(self, jnp.concatenate([pairs, after], axis=-1), 3)


class ConvTranspose(nn.Module):
    """f32[..., n, c] -> f32[..., stride n, filters], zero padding; a kernel of 3, stride 1 or 2."""

    filters: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.stride == 1:
            windows = jnp.concatenate([_neighbour(x, -1), x, _neighbour(x, 1)], axis=-1)
            return _affine(self, windows, 3)
        kernel, bias = _parameters(self, 3, x.shape[-1])
        products = x @ jnp.concatenate([kernel[0], kernel[2], kernel[1]], axis=-1)
        before, even, odd = jnp.split(products, 3, axis=-1)
        pairs = jnp.concatenate([_neighbour(before, -1) + even, odd], axis=-1)  # y[2 i], y[2 i + 1]
        y = pairs.reshape(*x.shape[:-2], -1, self.filters)
        return y + jnp.broadcast_to(bias, y.shape)


def _affine(module: Conv | ConvTranspose, windows: Array, size: int) -> Array:
    """Windows f32[..., n, size c] times the kernel, plus the bias: f32[..., n, filters]."""
    kernel, bias = _parameters(module, size, windows.shape[-1] // size)
    y = windows @ kernel.reshape(-1, module.filters)
    return y + jnp.broadcast_to(bias, y.shape)


def _parameters(module: Conv | ConvTranspose, size: int, channels: int) -> tuple[Array, Array]:
    """Flax's kernel f32[size, channels, filters] and bias f32[filters]."""
    shape = (size, channels, module.filters)
    kernel = module.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
    return kernel, module.param("bias", nn.initializers.zeros, (module.filters,), jnp.float32)


def _neighbour(x: Array, by: int) -> Array:
    """x[i + by] at i, `by` 1 or -1, zeros beyond the ends; x f32[..., n, c]."""
    zeros = jnp.zeros_like(x[..., :1, :])
    parts = [x[..., 1:, :], zeros] if by > 0 else [zeros, x[..., :-1, :]]
    return jnp.concatenate(parts, axis=-2)


class Encoder(nn.Module):
    """Table I: f32[..., m, 1] -> code f32[..., m / 16, 4]."""

    channels: int
    filters: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for filters in self.filters:
            x = nn.leaky_relu(Conv(filters, stride=2)(x))
        return Conv(self.channels)(x)


class Decoder(nn.Module):
    """Table II: code f32[..., m / 16, 4] -> f32[..., m, 1].

    An innovation f32[..., m, 1] enters before the last convolution; the ring has none.
    """

    filters: tuple[int, ...]
    strides: tuple[int, ...]
    linear: bool = False  # the mean of codes then decodes to the mean of the decoded vectors

    @nn.compact
    def __call__(self, code: Array, innovation: Array | None = None) -> Array:
        x = code
        for filters, stride in zip(self.filters, self.strides, strict=True):
            x = ConvTranspose(filters, stride)(x)
            x = x if self.linear else nn.leaky_relu(x)
        return Conv(1)(x if innovation is None else jnp.concatenate([x, innovation], axis=-1))
