"""PSPNet: a label for every pixel, from a dilated ResNet and pooling of the scene on four scales.

| part | |
|---|---|
| ResNet | 18 or 50 layers; its last two stages are dilated by 2 and 4 instead of strided: 1/8 of the resolution |
| pyramid | averages over 1x1, 2x2, 3x3 and 6x6 parts of the scene, each with a 1x1 convolution to 1/4 of the channels |
| final | the concatenation of all, a 3x3 convolution to 1/4 of the channels, and the head, a 1x1 convolution |
| auxiliary | in training only: a 3x3 convolution of the third stage to 1/4 of its channels, and a second head |

Both heads' logits are interpolated to the size of the images. pspnet18 is ours, for machines without an accelerator: it
has ResNet-18, with a quarter of the channels; pspnet18_half has half of those.

References:
    Zhao, Shi, Qi, Wang and Jia, "Pyramid Scene Parsing Network", CVPR 2017, and its release in PyTorch,
    https://github.com/hszhao/semseg.

Differs from the paper:
    1. All weights start at random and have one learning rate. The paper's ResNet is pretrained on ImageNet, and in the
       release the layers after it have ten times its learning rate.
    2. No dropout (0.1) before the heads: a node's gradient has no random key.
    3. The stem is He et al.'s, a 7x7 convolution of 64 channels; the release has three of 3x3, to 128 channels.
    4. Batch statistics of each node; the paper's are over all GPUs.
    5. Features lie on every eighth pixel, so images whose sides are not 8 n + 1 pixels are padded with zeros to the
       next that are, and the logits cut. The release evaluates in crops of 8 n + 1 pixels, whose logits it averages.
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
    check_positive,
    he_normal,
)
from jgc.training.models.resnet import FAMILIES, features

BINS = (1, 2, 3, 6)  # parts of the scene in each direction
DILATIONS = (1, 1, 2, 4)  # of the ResNet's stages


def parts(size: int, bins: int) -> np.ndarray:
    """The matrix f32[bins, size] of PyTorch's adaptive average pooling of a row of pixels.

    Part i covers pixels floor(i size / bins) to ceil((i + 1) size / bins), so neighbouring parts may share a pixel.
    """
    i, pixel = np.arange(bins)[:, None], np.arange(size)
    inside = (pixel >= i * size // bins) & (pixel < -(-(i + 1) * size // bins))
    return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)


def between(size: int, new: int) -> np.ndarray:
    """The matrix f32[new, size] that interpolates a row of pixels linearly, with the first and last pixel aligned."""
    at = np.linspace(0, size - 1, new)[:, None]
    return np.maximum(0, 1 - np.abs(at - np.arange(size))).astype(np.float32)


def pooled(x: jax.Array, bins: int) -> jax.Array:
    """Averages over bins x bins parts of each image: dtype[b, h, w, c] to dtype[b, bins, bins, c]."""
    return _in_both_directions(x, *(parts(size, bins) for size in x.shape[1:3]))


def stretched(x: jax.Array, height: int, width: int) -> jax.Array:
    """Bilinear interpolation with aligned corners, as in the release: [b, h, w, c] to [b, height, width, c]."""
    return _in_both_directions(x, between(x.shape[1], height), between(x.shape[2], width))


def _in_both_directions(x: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """Apply a matrix to the rows and one to the columns of images dtype[b, h, w, c]."""
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
        height, width = images.shape[1:3]
        images = jnp.pad(images, ((0, 0), (0, (1 - height) % 8), (0, (1 - width) % 8), (0, 0)))
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
        logits = final(jnp.concatenate(scales, axis=-1), size, train)[:, :height, :width]
        if not (train or self.is_initializing()):
            return logits
        auxiliary = Head(self.num_classes, third.shape[3] // 4, name="auxiliary", **settings)(third, size, train)
        return WithAuxiliary(logits, auxiliary[:, :height, :width]) if train else logits


def pspnet(
    depth: int, num_classes: int, *, norm: Norm = "batch", dtype: Any = jnp.float32, width: int | None = None
) -> Model:
    """A PSPNet for images f32[b, h, w, c] of any size."""
    check_model(num_classes, norm, ("batch", "group"))
    check_choice("depth", depth, (18, 50))
    width = FAMILIES[depth].width if width is None else width
    check_positive(width=width)
    module = PSPNet(num_classes, depth, width, norm, dtype)
    return Model(module, first_layer=r"^stem/conv/", last_layer=r"^final/head/", kind="scenes")
