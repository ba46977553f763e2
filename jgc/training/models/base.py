"""Shared by all models: the `Model` record, a convolution with its norm, and checks.

Parameter paths are part of the interface: per-layer policies are keyed by them. Modules therefore have explicit names
(`stem/conv/kernel`, `stage2_block01/layer1/norm/scale`), never Flax's counters.
"""

from typing import Any, Literal, NamedTuple, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from jgc.training.models.convolution import convolution

Norm = Literal["batch", "group", "none"]

CHANNELS_PER_GROUP = 16  # Wu and He 2018, table 3: as good as 32 groups, and it also fits narrow models

# N(0, 2 / fan_out), as He et al. 2015 initialise a ReLU network and as torchvision's ResNets do.
he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class WithAuxiliary(NamedTuple):
    """Output of a model with a second head in training: logits f32[..., num_classes] of both."""

    logits: jax.Array
    auxiliary: jax.Array


class Model(NamedTuple):
    """A network, and regular expressions that match its first and its last layer."""

    # `module.apply(variables, inputs, train=True, mutable=["batch_stats", "carry"])` takes images f32[b, h, w, c] or
    # windows of text and returns logits f32[b, num_classes], of words f32[b, T, num_classes], of pixels
    # f32[b, h, w, num_classes]; `WithAuxiliary` in training, with a second head. `carry` is a recurrent state
    module: nn.Module
    first_layer: str  # pattern for `re.search` in paths joined by "/": kernel and bias of the first convolution
    last_layer: str  # likewise for the head
    kind: str = "images"  # of its data, "images", "scenes" (images with a label for each pixel) or "text"


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError, naming the choices, if `value` is not one of them."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_model(num_classes: int, norm: str, norms: tuple[str, ...] = get_args(Norm)) -> None:
    """Raise ValueError at build time for settings that every model has."""
    check_positive(num_classes=num_classes)
    check_choice("norm", norm, norms)


def check_positive(**values: int) -> None:
    """Raise ValueError for a value below 1, by its name."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"`{name}` must be positive, got {value}")


def check_size(images: jax.Array, least: int) -> None:
    """Raise ValueError for images f32[b, h, w, c] smaller than a model's pooling allows."""
    h, w = images.shape[1:3]
    if min(h, w) < least:
        raise ValueError(f"`images` must be at least {least}x{least} pixels for this model, got {h}x{w}")


class ConvNorm(nn.Module):
    """A convolution and the norm after it: `conv/kernel`, `norm/{scale,bias}`.

    Maps dtype[b, h, w, c] to dtype[b, h', w', features].

    `norm="batch"` keeps running means and variances in the collection `batch_stats`, from the node's batch and without
    a collective. `norm="group"` has no running statistics. With `norm="none"` the convolution has a bias.
    """

    features: int
    kernel: int = 3
    stride: int = 1
    norm: Norm = "batch"
    zero_scale: bool = False
    dilation: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(
            self.features,
            (self.kernel, self.kernel),
            strides=self.stride,
            # as in PyTorch's ResNets; Flax's "SAME" pads an even image on one side only if the stride is 2
            padding=self.dilation * (self.kernel // 2),
            kernel_dilation=self.dilation,
            use_bias=self.norm == "none",
            kernel_init=he_normal,
            dtype=self.dtype,
            conv_general_dilated=convolution,
            name="conv",
        )(x)
        if self.norm == "none":
            return x
        scale_init = nn.initializers.zeros if self.zero_scale else nn.initializers.ones
        settings: dict[str, Any] = {"epsilon": 1e-5, "scale_init": scale_init, "dtype": self.dtype, "name": "norm"}
        if self.norm == "group":
            return nn.GroupNorm(None, group_size=min(CHANNELS_PER_GROUP, self.features), **settings)(x)
        # 0.9 of the old value; PyTorch's 0.1 is the weight of the new value
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, **settings)(x)


def head(x: jax.Array, num_classes: int) -> jax.Array:
    """Global average pooling and a dense layer `head`, both in f32: [b, h, w, c] to f32[b, num_classes]."""
    x = x.astype(jnp.float32).mean(axis=(1, 2))
    return nn.Dense(num_classes, name="head")(x)
