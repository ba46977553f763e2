"""Data sets, and batches as pure functions of (seed, step). NumPy only, no JAX.

    dataset = load_dataset("cifar10")
    images, labels = make_batch(dataset, seed=0, step=0, nodes=8, batch_size=128)

Four kinds of data: `Dataset` (images in memory), `Streamed` (images in files), `Scenes` (images with a label for each
pixel) and `Text`. Training sees each as a `Source` of functions:

    source = source_of(load_dataset("ptb"))
    window, labels = source.batch(seed=0, step=0, nodes=4, batch_size=20)

To add a data set: one file with a function that returns one of them, and one line in `DATASETS`.
"""

import os
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from jgc.training.data.camvid import load_camvid
from jgc.training.data.cifar import load_cifar
from jgc.training.data.dataset import Augment, Dataset, MissingDataError, data_folder, hold_out
from jgc.training.data.digits import load_digits
from jgc.training.data.food101 import load_food101
from jgc.training.data.imagenet import load_imagenet
from jgc.training.data.loader import batch_indices, image_source, make_batch, prefetch, test_batches
from jgc.training.data.ptb import load_ptb, load_ptb_characters
from jgc.training.data.scenes import Labelled, Scenes, scene_source, shrunk
from jgc.training.data.score import (
    ACCURACY,
    BITS,
    MEAN_IOU,
    NATS,
    PERPLEXITY,
    PIXEL_ACCURACY,
    SCORES,
    Score,
    final,
    further_of,
    score_of,
)
from jgc.training.data.source import VOID, EvalBatch, Pictures, Source
from jgc.training.data.streamed import Streamed, streamed_source
from jgc.training.data.text import Text, Window, text_source
from jgc.training.data.tiny_imagenet import load_tiny_imagenet
from jgc.training.errors import did_you_mean

__all__ = [
    "ACCURACY",
    "BITS",
    "DATASETS",
    "MEAN_IOU",
    "NATS",
    "PERPLEXITY",
    "PIXEL_ACCURACY",
    "SCORES",
    "VOID",
    "Augment",
    "Dataset",
    "EvalBatch",
    "Labelled",
    "MissingDataError",
    "Pictures",
    "Scenes",
    "Score",
    "Source",
    "Streamed",
    "Text",
    "Window",
    "batch_indices",
    "final",
    "further_of",
    "hold_out",
    "image_source",
    "load_camvid",
    "load_cifar",
    "load_dataset",
    "load_digits",
    "load_food101",
    "load_imagenet",
    "load_ptb",
    "load_ptb_characters",
    "load_tiny_imagenet",
    "make_batch",
    "prefetch",
    "scene_source",
    "score_of",
    "shrunk",
    "source_of",
    "streamed_source",
    "test_batches",
    "text_source",
]


def _digits(data_dir: Any, **settings: Any) -> Dataset:
    if data_dir is not None and not data_folder(data_dir).is_dir():  # an existing folder may have other data sets
        raise MissingDataError(f"there is no folder {data_dir}; the digits need none, they come with scikit-learn")
    return load_digits(**settings)


AnyData = Dataset | Streamed | Scenes | Text

DATASETS: MappingProxyType[str, Callable[..., AnyData]] = MappingProxyType(
    {
        "digits": _digits,
        "cifar10": partial(load_cifar, "cifar10"),
        "cifar100": partial(load_cifar, "cifar100"),
        "camvid": load_camvid,
        "food101": load_food101,
        "imagenet": load_imagenet,
        "ptb": load_ptb,
        "ptb_characters": load_ptb_characters,
        "tiny_imagenet": load_tiny_imagenet,
    }
)


def load_dataset(name: str, data_dir: str | os.PathLike[str] | None = None, **settings: Any) -> AnyData:
    """The data set called `name`.

    Args:
        name: a key of `DATASETS`.
        data_dir: where prepared data lies; None: TFDS's default. The digits need none, but a folder must be there.
        **settings: of that data set's function, such as `shift` of the digits.

    Raises:
        ValueError: for a name that is not in `DATASETS`.
        MissingDataError: where the data set is not in `data_dir`; its one line says how to fetch it.

    Example:
        >>> load_dataset("digits").num_classes
        10
    """
    if name not in DATASETS:
        hint = did_you_mean(name, list(DATASETS))
        raise ValueError(f"a data set's `name` must be one of {', '.join(DATASETS)}, got {name!r}{hint}")
    return DATASETS[name](data_dir=data_dir, **settings)


def source_of(dataset: AnyData, validation: float = 0.0) -> Source:
    """The `Source` of a data set.

    Args:
        dataset: of any kind.
        validation: share of the training images to hold out; scenes and texts have their own validation data.

    Raises:
        ValueError: for a window or crop below 1, or a validation text of less than two words; for a share that is less
            than one image or all of them, or that is given for data with its own validation data.

    Example:
        >>> source_of(load_dataset("digits")).score.title
        'test accuracy'
    """
    if isinstance(dataset, Dataset):
        return image_source(dataset, validation)
    if isinstance(dataset, Streamed):
        return streamed_source(dataset, validation)
    if validation:
        what = "a validation text" if isinstance(dataset, Text) else "validation images"
        raise ValueError(f"{dataset.name} has {what} of its own: none is held out, got {validation}")
    return text_source(dataset) if isinstance(dataset, Text) else scene_source(dataset)
