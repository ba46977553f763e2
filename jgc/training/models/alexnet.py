"""AlexNet for 32x32 images: five convolutions, three of them pooled, and one dense layer.

The EGC paper trains "AlexNet on Cifar10" in PyTorch and does not say which. ImageNet's AlexNet (57 million parameters
with 10 classes) would pool a 32x32 image to nothing. This is the form for CIFAR in common PyTorch collections: the
widths and kernels of Krizhevsky's one-tower AlexNet (as in torchvision), padding 5 instead of 2 in the first
convolution, 2x2 pooling, and only the last of the three dense layers. 2,472,266 parameters with 10 classes. Its
published accuracy on CIFAR-10 is 77 %; the paper's runs end at 69 to 75 %.

Without a norm it needs a tenth of the learning rate of a network with one; `norm="batch"` and `norm="group"` add one
after each convolution. It has no dropout, because it lacks the dense layers between which AlexNet's dropout stands.

References:
    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997, 2014.
    W. Yang, pytorch-classification, https://github.com/bearpaw/pytorch-classification, 2017: the form for CIFAR.

Differs from it:
    1. He et al.'s initialisation of weights instead of PyTorch's; biases start at zero.
    2. Global average pooling before the dense layer, so larger images fit; a 32x32 image has one pixel left there.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jgc.training.models.base import ConvNorm, Model, Norm, check_model, check_size, head

KERNELS, STRIDES = (11, 5, 3, 3, 3), (4, 1, 1, 1, 1)
POOLED = (True, True, False, False, True)  # whether 2x2 pooling follows each layer


class AlexNet(nn.Module):
    """Five times convolution, optional norm and ReLU, three times followed by pooling; then the head.

    Parameters: `layer1/conv/{kernel,bias}`, ..., `head/{kernel,bias}`; with a norm `layer1/conv/kernel`,
    `layer1/norm/{scale,bias}`, ...
    """

    num_classes: int
    widths: tuple[int, ...] = (64, 192, 384, 256, 256)
    norm: Norm = "none"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        check_size(images, 32)
        x = images.astype(self.dtype)
        layers = zip(self.widths, KERNELS, STRIDES, POOLED, strict=True)
        for i, (width, kernel, stride, pooled) in enumerate(layers, start=1):
            layer = ConvNorm(width, kernel, stride, self.norm, dtype=self.dtype, name=f"layer{i}")
            x = nn.relu(layer(x, train))
            if pooled:
                x = nn.max_pool(x, (2, 2), (2, 2))
        return head(x, self.num_classes)


def alexnet(
    num_classes: int, *, widths: Sequence[int] = AlexNet.widths, norm: Norm = "none", dtype: Any = jnp.float32
) -> Model:
    """An AlexNet for images f32[b, h, w, c] of 32x32 pixels or more; `widths` are the channels of its convolutions."""
    check_model(num_classes, norm)
    if len(widths) != len(KERNELS) or min(widths) < 1:
        raise ValueError(f"`widths` must be {len(KERNELS)} positive numbers, got {tuple(widths)}")
    return Model(AlexNet(num_classes, tuple(widths), norm, dtype), first_layer=r"^layer1/conv/", last_layer=r"^head/")
