"""PSPNet: a label for every pixel, from a dilated ResNet and averages over the scene on four scales.

| part | what it does |
|---|---|
| ResNet | 18 or 50 layers; its last two stages dilated by 2 and 4 and not strided: 1/8 of the resolution is left |
| pyramid | averages of 1x1, 2x2, 3x3 and 6x6 parts of the scene, each with a 1x1 convolution to 1/4 of the channels |
| final | all of it side by side, a 3x3 convolution to 1/4 of the channels, and the head, a 1x1 convolution |
| auxiliary | in training alone: a 3x3 convolution of the third stage to 1/4 of its channels, and a head of its own |

Both heads' logits are stretched to the size of the images. pspnet18 is ours, for machines without an accelerator: the
same with ResNet-18, whose stages have a quarter of the channels; pspnet18_half has half of these.

References:
    Zhao, Shi, Qi, Wang and Jia, "Pyramid Scene Parsing Network", CVPR 2017, and its release in PyTorch,
    https://github.com/hszhao/semseg.

Differs from the paper:
    1. All weights start at random. The paper's ResNet has been trained on ImageNet, and in the release the layers after
       it have ten times its learning rate; here all have one.
    2. No dropout of 0.1 before the heads: a node's gradient has no random key.
    3. The stem is He et al.'s, a 7x7 convolution of 64 channels; the release has three of 3x3, to 128 channels.
    4. Batch statistics are each node's own; the paper's are those of all GPUs together.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jgc.training.models.base import (
    ConvNorm,
    Model,
    Norm,
    WithAuxiliary,
    check_choice,
    check_model,
    check_width,
    he_normal,
)
from jgc.training.models.resnet import FAMILIES, features

BINS = (1, 2, 3, 6)  # parts of the scene in each direction
DILATIONS = (1, 1, 2, 4)  # of the ResNet's stages


def parts(size: int, bins: int) -> np.ndarray:
    """The matrix f32[bins, size] that averages over equal parts of a row of pixels, as PyTorch's adaptive pooling.

    Part i reaches from floor(i size / bins) to ceil((i + 1) size / bins): no pixel is left out, and where the parts do
    not come out even, or are more than the pixels, some share pixels.

    Example:
        >>> parts(4, 3)
        array([[0.5, 0.5, 0. , 0. ],
               [0. , 0.5, 0.5, 0. ],
               [0. , 0. , 0.5, 0.5]], dtype=float32)
    """
    i, pixel = np.arange(bins)[:, None], np.arange(size)
    inside = (pixel >= i * size // bins) & (pixel < -(-(i + 1) * size // bins))
    return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)


def between(size: int, new: int) -> np.ndarray:
    """The matrix f32[new, size] that interpolates a row of pixels linearly between its ends, which stay ends.

    Example:
        >>> between(2, 3)
        array([[1. , 0. ],
               [0.5, 0.5],
               [0. , 1. ]], dtype=float32)
    """
    at = np.linspace(0, size - 1, new)[:, None]
    return np.maximum(0, 1 - np.abs(at - np.arange(size))).astype(np.float32)


def pooled(x: jax.Array, bins: int) -> jax.Array:
    """Averages over bins x bins parts of each image: dtype[b, h, w, c] to dtype[b, bins, bins, c], for any h and w."""
    return _in_both_directions(x, *(parts(size, bins) for size in x.shape[1:3]))


def stretched(x: jax.Array, height: int, width: int) -> jax.Array:
    """Bilinear interpolation that leaves the corners in the corners: dtype[b, h, w, c] to dtype[b, height, width, c].

    As in the release. An image of 8 n + 1 pixels has n + 1 features in a row, which lie on every eighth pixel.
    """
    return _in_both_directions(x, between(x.shape[1], height), between(x.shape[2], width))


def _in_both_directions(x: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """A matrix over the rows and one over the columns of each image, dtype[b, h, w, c]."""
    return jnp.einsum("ih,bhwc,jw->bijc", rows.astype(x.dtype), x, columns.astype(x.dtype))


class Head(nn.Module):
    """A 3x3 convolution with its norm, and logits at the size of the images: dtype[b, h, w, c] to f32[b, H, W, n]."""

    num_classes: int
    width: int
    norm: Norm
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, size: tuple[int, int], train: bool) -> jax.Array:
        x = nn.relu(ConvNorm(self.width, 3, norm=self.norm, dtype=self.dtype, name="layer")(x, train))
        x = nn.Conv(self.num_classes, (1, 1), kernel_init=he_normal, name="head")(x.astype(jnp.float32))
        return stretched(x, *size)


class PSPNet(nn.Module):
    """Images f32[b, h, w, c] to logits f32[b, h, w, num_classes]; in training `WithAuxiliary`.

    Parameters: `stem/...`, `stage1_block01/...`, ..., `pyramid1/...`, `pyramid2/...`, `pyramid3/...`, `pyramid6/...`,
    `final/layer/...`, `final/head/{kernel,bias}`, `auxiliary/layer/...`, `auxiliary/head/{kernel,bias}`.
    """

    num_classes: int
    depth: int
    width: int
    norm: Norm = "batch"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array | WithAuxiliary:
        family = FAMILIES[self.depth]._replace(width=self.width)
        settings: dict[str, Any] = {"norm": self.norm, "dtype": self.dtype}
        *_, third, last = features(images, train, family, zero_init=False, dilations=DILATIONS, **settings)
        h, w = last.shape[1:3]
        quarter, scales = last.shape[3] // 4, [last]
        for bins in BINS:
            mean = ConvNorm(quarter, 1, name=f"pyramid{bins}", **settings)(pooled(last, bins), train)
            scales.append(stretched(nn.relu(mean), h, w))
        size = (images.shape[1], images.shape[2])
        final = Head(self.num_classes, quarter, name="final", **settings)
        logits = final(jnp.concatenate(scales, axis=-1), size, train)
        if not (train or self.is_initializing()):
            return logits
        auxiliary = Head(self.num_classes, third.shape[3] // 4, name="auxiliary", **settings)(third, size, train)
        return WithAuxiliary(logits, auxiliary) if train else logits


def pspnet(
    depth: int, num_classes: int, *, norm: Norm = "batch", dtype: Any = jnp.float32, width: int | None = None
) -> Model:
    """A PSPNet for images f32[b, h, w, c] of any size.

    Args:
        depth: of its ResNet, 18 or 50.
        num_classes: labels that a pixel can have.
        norm: "batch" or "group".
        dtype: of the activations; parameters, statistics and logits stay f32.
        width: channels of the ResNet's stem; None: its own, 64.

    Raises:
        ValueError: for a setting out of range, naming the value.

    Example:
        >>> pspnet(50, 11).last_layer
        '^final/head/'
    """
    check_model(num_classes, norm, ("batch", "group"))
    check_choice("depth", depth, (18, 50))
    width = FAMILIES[depth].width if width is None else width
    check_width(width)
    module = PSPNet(num_classes, depth, width, norm, dtype)
    return Model(module, first_layer=r"^stem/conv/", last_layer=r"^final/head/", kind="scenes")
