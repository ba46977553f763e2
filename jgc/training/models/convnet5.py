"""ConvNet5: five convolutions, each with a norm and ReLU.

The small model of Abrahamyan et al., "Learned Gradient Compression for Distributed Deep Learning" (TNNLS 2021, section
VI-E). The paper says only "five convolutional layers ... after each convolution, batch normalization and ReLU". Widths,
strides and the head are ours: 389,610 parameters with 8x8x1 images and 10 classes.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jgc.training.models.base import ConvNorm, Model, Norm, check_model, head

LAYERS = 5


class ConvNet5(nn.Module):
    """Five times 3x3 convolution, norm and ReLU; then global average pooling and a dense head.

    Parameters: `layer1/conv/kernel`, `layer1/norm/{scale,bias}`, ..., `head/{kernel,bias}`.
    """

    num_classes: int
    widths: tuple[int, ...] = (32, 64, 128, 128, 128)
    strides: tuple[int, ...] = (1, 2, 1, 2, 1)
    norm: Norm = "batch"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = images.astype(self.dtype)
        for i, (width, stride) in enumerate(zip(self.widths, self.strides, strict=True), start=1):
            layer = ConvNorm(width, stride=stride, norm=self.norm, dtype=self.dtype, name=f"layer{i}")
            x = nn.relu(layer(x, train))
        return head(x, self.num_classes)


def convnet5(
    num_classes: int,
    *,
    widths: Sequence[int] = (32, 64, 128, 128, 128),
    strides: Sequence[int] = (1, 2, 1, 2, 1),
    norm: Norm = "batch",
    dtype: Any = jnp.float32,
) -> Model:
    """A ConvNet5 for images f32[b, h, w, c] of any size."""
    check_model(num_classes, norm)
    for name, values in (("widths", widths), ("strides", strides)):
        if len(values) != LAYERS or min(values) < 1:
            raise ValueError(f"`{name}` must be {LAYERS} positive numbers, got {tuple(values)}")
    module = ConvNet5(num_classes, tuple(widths), tuple(strides), norm, dtype)
    return Model(module, first_layer=r"^layer1/conv/", last_layer=r"^head/")
