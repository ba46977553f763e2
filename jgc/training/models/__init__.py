"""Models by name: Flax (linen) modules with readable parameter paths.

    model = make_model("resnet20", num_classes=10)
    variables = model.module.init(key, images, train=False)    # {"params": ..., "batch_stats": ...}

With `norm="group"` or `norm="none"` there is no collection `batch_stats`. To add a model, write a function that returns
a `Model` and list it in `MODELS`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jgc.training.errors import did_you_mean
from jgc.training.models.alexnet import alexnet
from jgc.training.models.base import ConvNorm, Model, WithAuxiliary
from jgc.training.models.convnet5 import convnet5
from jgc.training.models.gpt import gpt
from jgc.training.models.lstm import lstm
from jgc.training.models.pspnet import pspnet
from jgc.training.models.resnet import resnet
from jgc.training.models.vgg import vgg

__all__ = ["MODELS", "ConvNorm", "Model", "WithAuxiliary", "gpt", "lstm", "make_model", "pspnet"]

MODELS: Mapping[str, Callable[..., Model]] = {
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
    **{f"resnet{depth}": partial(resnet, depth) for depth in (18, 20, 32, 50, 101)},
    **{f"vgg{depth}": partial(vgg, depth) for depth in (11, 13, 14, 16, 19)},
}


def make_model(name: str, num_classes: int, **settings: Any) -> Model:
    """A model by its name in `MODELS`.

    Args:
        name: a key of `MODELS`.
        num_classes: length of the logits.
        **settings: of the model's function. All have `norm` ("batch", "group" or "none", as far as the model allows)
            and `dtype`, that of the activations; parameters, statistics and logits stay f32.

    Raises:
        ValueError: an unknown name, or a setting out of range.
        TypeError: a setting that the model does not have.

    Example:
        >>> make_model("resnet50", 1000, norm="group").last_layer
        '^head/'
    """
    if name not in MODELS:
        hint = did_you_mean(name, list(MODELS))
        raise ValueError(f"a model's `name` must be one of {', '.join(MODELS)}, got {name!r}{hint}")
    return MODELS[name](num_classes, **settings)
