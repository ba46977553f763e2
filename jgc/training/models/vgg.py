"""VGG networks for 32x32 images: 3x3 convolutions in five stages, each pooled, and one dense layer.

| depth | convolutions in each stage | parameters with 10 classes and batch norm |
|---|---|---|
| 11 | 1, 1, 2, 2, 2 | 9,228,362 |
| 13 | 2, 2, 2, 2, 2 | 9,413,066 |
| 14 | 2, 2, 3, 2, 2 | 10,003,402 |
| 16 | 2, 2, 3, 3, 3 | 14,724,042 |
| 19 | 2, 2, 4, 4, 4 | 20,035,018 |

Widths are 64, 128, 256, 512, 512. The EGC paper trains "VGG-19 on Cifar10" in PyTorch and does not say which. This is
the form for CIFAR in common PyTorch collections: five poolings reduce a 32x32 image to one pixel, the two hidden dense
layers of 4,096 and their dropout are absent, and a batch norm follows each convolution. The VGG paper has no norm, as
`norm="none"` here. Published accuracies of such a VGG-19 on CIFAR-10 are 93 %, the paper's runs end at 89 %.

Depth 14 is the LGC paper's "VGG11": a VGG-16 with 11 instead of 13 convolutions. It does not say which two are left
out; here it is one of the convolutions from 512 to 512 channels in each of the last two stages.

References:
    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015.
    K. Liu, pytorch-cifar, https://github.com/kuangliu/pytorch-cifar, 2017: the form for CIFAR.

Differs from it:
    1. No bias in a convolution before a norm, which would cancel it: 5,504 parameters fewer at depth 19.
    2. Global average pooling before the dense layer, so larger images fit.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jgc.training.models.base import ConvNorm, Model, Norm, check_choice, check_model, check_positive, check_size, head

STAGES = {  # by depth
    11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 14: (2, 2, 3, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4),
}  # fmt: skip
WIDENINGS = (1, 2, 4, 8, 8)  # channels of each stage relative to the first


class VGG(nn.Module):
    """Five stages of 3x3 convolution, norm, ReLU, with 2x2 pooling after each; then the head.

    Parameters: `stage1_layer1/conv/kernel`, `stage1_layer1/norm/{scale,bias}`, ..., `head/{kernel,bias}`; without a
    norm `stage1_layer1/conv/{kernel,bias}`, ...
    """

    num_classes: int
    depth: int
    width: int = 64
    norm: Norm = "batch"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        check_size(images, 32)
        x = images.astype(self.dtype)
        for stage, (layers, widening) in enumerate(zip(STAGES[self.depth], WIDENINGS, strict=True), start=1):
            for i in range(1, layers + 1):
                name = f"stage{stage}_layer{i}"
                layer = ConvNorm(self.width * widening, norm=self.norm, dtype=self.dtype, name=name)
                x = nn.relu(layer(x, train))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return head(x, self.num_classes)


def vgg(depth: int, num_classes: int, *, width: int = 64, norm: Norm = "batch", dtype: Any = jnp.float32) -> Model:
    """A VGG network for images f32[b, h, w, c] of 32x32 pixels or more."""
    check_model(num_classes, norm)
    check_choice("depth", depth, tuple(STAGES))
    check_positive(width=width)
    module = VGG(num_classes, depth, width, norm, dtype)
    return Model(module, first_layer=r"^stage1_layer1/conv/", last_layer=r"^head/")
