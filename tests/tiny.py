"""Networks that compile in a moment, also for text and for scenes, instead of `jgc.training.models.make_model`."""

from typing import Any

import flax.linen as nn

from jgc.lab.chaos import tiny
from jgc.lab.chaos.tiny import tiny_conv_model as tiny_conv_model
from jgc.training.models import Model, WithAuxiliary, gpt, lstm
from jgc.training.models.pspnet import stretched
from jgc.types import Array


class TinyScenes(nn.Module):
    """A convolution with a batch norm, and two heads for every pixel."""

    classes: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Any:
        """Logits of every pixel; of both heads while training."""
        size = x.shape[1:3]
        x = nn.Conv(8, (4, 4), strides=4, name="conv")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="norm")(x))
        heads = (nn.Conv(self.classes, (1, 1), name=name)(x) for name in ("head", "other"))
        logits, auxiliary = (stretched(x, *size) for x in heads)
        return WithAuxiliary(logits, auxiliary) if train else logits


def tiny_model(name: str, num_classes: int, **settings: Any) -> Model:
    """A small model of the kind that `name` is."""
    if name == "lstm":
        return lstm(num_classes, units=8, **settings)
    if name.startswith("gpt"):
        return gpt(num_classes, units=16, layers=1, heads=2, **settings)
    if name.startswith("pspnet"):
        return Model(TinyScenes(num_classes), r"^conv/", r"^head/", "scenes")
    return tiny.tiny_model(name, num_classes, **settings)
