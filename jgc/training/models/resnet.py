"""Residual networks: the CIFAR family 6n+2 (20, 32) and the ImageNet family (18, 50, 101).

| depth | block | stages | widths | shortcut if the shape changes |
|---|---|---|---|---|
| 20, 32 | basic, two 3x3 | 3, 3, 3 and 5, 5, 5 | 16, 32, 64 | identity, padded with zeros (option A) |
| 18 | basic, two 3x3 | 2, 2, 2, 2 | 64 to 512 | 1x1 convolution (option B) |
| 50, 101 | bottleneck, 1x1, 3x3, 1x1 | 3, 4, 6, 3 and 3, 4, 23, 3 | 64 to 512, times 4 | 1x1 convolution |

References:
    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.

Differs from the paper:
    1. The bottleneck's stride is on its 3x3 convolution, not on its first 1x1 ("v1.5"), as in torchvision and in most
       published accuracies of a ResNet-50.
    2. `zero_init=True`, off by default, starts the last scale of each block at zero (Goyal et al. 2017). All gradients
       of convolutions in the blocks, except shortcuts, are then exactly zero in the first step, so a compressor that
       fits itself to that step sees little of the model.
"""

from typing import Any, Literal, NamedTuple, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from jgc.training.models.base import ConvNorm, Model, Norm, check_choice, check_model, check_positive, head

Stem = Literal["cifar", "imagenet"]
Shortcut = Literal["identity", "projection"]


class Family(NamedTuple):
    """The architecture of a depth."""

    stages: tuple[int, ...]  # blocks in each stage
    width: int  # channels of the first stage, doubled with each further one
    bottleneck: bool
    stem: Stem
    shortcut: Shortcut


FAMILIES = {
    18: Family((2, 2, 2, 2), 64, False, "imagenet", "projection"),
    20: Family((3, 3, 3), 16, False, "cifar", "identity"),
    32: Family((5, 5, 5), 16, False, "cifar", "identity"),
    50: Family((3, 4, 6, 3), 64, True, "imagenet", "projection"),
    101: Family((3, 4, 23, 3), 64, True, "imagenet", "projection"),
}


def _pad_shortcut(x: jax.Array, features: int, stride: int) -> jax.Array:
    """Option A: every stride-th pixel, with zero channels appended: [b, h, w, c] to [b, h', w', features]."""
    x = x[:, ::stride, ::stride]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, features - x.shape[-1])))


class Block(nn.Module):
    """A residual block, basic or bottleneck: dtype[b, h, w, c] to dtype[b, h/stride, w/stride, width (* 4)].

    `dilation` is that of its 3x3 convolutions. Parameters: `layer1/...`, `layer2/...`, (`layer3/...`), and
    `shortcut/...` if the shape changes.
    """

    width: int
    stride: int
    bottleneck: bool
    shortcut: Shortcut
    norm: Norm
    zero_init: bool
    dtype: Any
    dilation: int = 1

    def conv(self, features: int, kernel: int, name: str, **settings: Any) -> ConvNorm:
        return ConvNorm(features, kernel, norm=self.norm, dtype=self.dtype, name=name, **settings)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        features = self.width * (4 if self.bottleneck else 1)
        if self.bottleneck:
            y = nn.relu(self.conv(self.width, 1, "layer1")(x, train))
            y = nn.relu(self.conv(self.width, 3, "layer2", stride=self.stride, dilation=self.dilation)(y, train))
            y = self.conv(features, 1, "layer3", zero_scale=self.zero_init)(y, train)
        else:
            y = nn.relu(self.conv(self.width, 3, "layer1", stride=self.stride, dilation=self.dilation)(x, train))
            y = self.conv(features, 3, "layer2", zero_scale=self.zero_init, dilation=self.dilation)(y, train)
        if self.stride != 1 or x.shape[-1] != features:
            if self.shortcut == "identity":
                x = _pad_shortcut(x, features, self.stride)
            else:
                x = self.conv(features, 1, "shortcut", stride=self.stride)(x, train)
        return nn.relu(x + y)


def features(
    images: jax.Array, train: bool, family: Family, norm: Norm, zero_init: bool, dtype: Any,
    dilations: tuple[int, ...] = (1, 1, 1, 1),
) -> list[jax.Array]:  # fmt: skip
    """The stem and the stages of residual blocks: images f32[b, h, w, c] to dtype[b, h', w', c'] after each stage.

    Call it inside a module's compact method. The first stage and those with a dilation above 1 keep their input's
    resolution, the others halve it.
    """
    kernel, stride = (3, 1) if family.stem == "cifar" else (7, 2)
    x = nn.relu(ConvNorm(family.width, kernel, stride, norm, dtype=dtype, name="stem")(images.astype(dtype), train))
    if family.stem == "imagenet":
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
    maps, same = [], (family.bottleneck, family.shortcut, norm, zero_init, dtype)
    for stage, (blocks, dilation) in enumerate(zip(family.stages, dilations, strict=False)):
        for i in range(blocks):
            stride, name = 2 if stage > 0 and i == 0 and dilation == 1 else 1, f"stage{stage + 1}_block{i + 1:02d}"
            x = Block(family.width * 2**stage, stride, *same, dilation, name=name)(x, train)
        maps.append(x)
    return maps


class ResNet(nn.Module):
    """Stem, stages of residual blocks, global average pooling, dense head.

    Parameters: `stem/conv/kernel`, `stem/norm/{scale,bias}`, `stage1_block01/layer1/conv/kernel`, ...,
    `head/{kernel,bias}`.
    """

    num_classes: int
    family: Family
    norm: Norm = "batch"
    zero_init: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        *_, x = features(images, train, self.family, self.norm, self.zero_init, self.dtype)
        return head(x, self.num_classes)


def resnet(
    depth: int, num_classes: int, *, stem: Stem | None = None, shortcut: Shortcut | None = None, norm: Norm = "batch",
    zero_init: bool = False, dtype: Any = jnp.float32, width: int | None = None,
) -> Model:  # fmt: skip
    """A ResNet for images f32[b, h, w, c].

    `stem` is "cifar" (3x3, stride 1) or "imagenet" (7x7, stride 2, then max pooling), `shortcut` "identity" or
    "projection", `width` the channels of the stem; None for the depth's. `zero_init`: see the module.
    """
    check_model(num_classes, norm, ("batch", "group"))  # without a norm the activations grow from block to block
    check_choice("depth", depth, tuple(FAMILIES))
    chosen: dict[str, Any] = {"stem": stem, "shortcut": shortcut, "width": width}
    family = FAMILIES[depth]._replace(**{name: x for name, x in chosen.items() if x is not None})
    check_choice("stem", family.stem, get_args(Stem))
    check_choice("shortcut", family.shortcut, get_args(Shortcut))
    if family.shortcut == "identity" and family.bottleneck:
        raise ValueError(f"`shortcut` of a bottleneck ResNet must be 'projection', got 'identity' with depth {depth}")
    check_positive(width=family.width)
    module = ResNet(num_classes, family, norm, zero_init, dtype)
    return Model(module, first_layer=r"^stem/conv/", last_layer=r"^head/")
