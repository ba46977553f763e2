"""Models by name: Flax (linen) modules with readable parameter paths.

    model = make_model("resnet20", num_classes=10)
    variables = model.module.init(key, images, train=False)    # {"params": ..., "batch_stats": ...}

With `norm="group"` or `norm="none"` there is no collection `batch_stats`. To add a model: one file with a function that
returns a `Model`, and one line in `MODELS`.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from jgc.training.errors import did_you_mean
from jgc.training.models.alexnet import AlexNet, alexnet
from jgc.training.models.base import ConvNorm, Model, WithAuxiliary
from jgc.training.models.convnet5 import ConvNet5, convnet5
from jgc.training.models.gpt import GPT, gpt
from jgc.training.models.lstm import LanguageModel, lstm
from jgc.training.models.pspnet import PSPNet, pspnet
from jgc.training.models.resnet import ResNet, resnet
from jgc.training.models.vgg import VGG, vgg

__all__ = [
    "GPT",
    "MODELS",
    "VGG",
    "AlexNet",
    "ConvNet5",
    "ConvNorm",
    "LanguageModel",
    "Model",
    "PSPNet",
    "ResNet",
    "WithAuxiliary",
    "alexnet",
    "convnet5",
    "gpt",
    "lstm",
    "make_model",
    "pspnet",
    "resnet",
    "vgg",
]

MODELS: MappingProxyType[str, Callable[..., Model]] = MappingProxyType(
    {
        "alexnet": alexnet,
        "convnet5": convnet5,
        # parameters without the embeddings; gpt124m has GPT-2's 124 million with its 50,257 tokens
        "gpt800k": partial(gpt, units=128, layers=4, heads=4, context=256),
        "gpt3m": partial(gpt, units=256, layers=4, heads=8, context=256),
        "gpt25m": partial(gpt, units=512, layers=8, heads=8, context=256),
        "gpt124m": partial(gpt, units=768, layers=12, heads=12, context=1024),
        "lstm": lstm,
        "pspnet18": partial(pspnet, 18),
        "pspnet18_half": partial(pspnet, 18, width=32),
        "pspnet50": partial(pspnet, 50),
        "resnet18": partial(resnet, 18),
        "resnet20": partial(resnet, 20),
        "resnet32": partial(resnet, 32),
        "resnet50": partial(resnet, 50),
        "resnet101": partial(resnet, 101),
        "vgg11": partial(vgg, 11),
        "vgg13": partial(vgg, 13),
        "vgg14": partial(vgg, 14),
        "vgg16": partial(vgg, 16),
        "vgg19": partial(vgg, 19),
    }
)


def make_model(name: str, num_classes: int, **settings: Any) -> Model:
    """The model called `name`.

    Args:
        name: a key of `MODELS`.
        num_classes: length of the logits.
        **settings: of that model's function, such as `resnet`.

    Raises:
        ValueError: for a name that is not in `MODELS`, or a setting out of range.
        TypeError: for a setting that the model does not have.

    Example:
        >>> make_model("resnet50", 1000, norm="group").last_layer
        '^head/'
    """
    if name not in MODELS:
        hint = did_you_mean(name, list(MODELS))
        raise ValueError(f"a model's `name` must be one of {', '.join(MODELS)}, got {name!r}{hint}")
    return MODELS[name](num_classes, **settings)
