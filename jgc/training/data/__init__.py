"""Data sets, and batches as pure functions of (seed, step). NumPy only, no JAX.

    dataset = load_dataset("cifar10")
    images, labels = make_batch(dataset, seed=0, step=0, nodes=8, batch_size=128)

There are four types: `Dataset` (images in memory), `Streamed` (images in files), `Scenes` (images with a label per
pixel) and `Text`. Training uses each through a `Source`:

    source = source_of(load_dataset("ptb"))
    window, labels = source.batch(seed=0, step=0, nodes=4, batch_size=20)

To add a data set, write a function that returns one of these types and list it in `DATASETS`.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
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
from jgc.training.data.score import ACCURACY, PERPLEXITY, Score, final, further_of, score_of
from jgc.training.data.source import VOID, EvalBatch, Pictures, Source
from jgc.training.data.streamed import Streamed, streamed_source
from jgc.training.data.text import Text, Window, text_source
from jgc.training.data.tiny_imagenet import load_tiny_imagenet
from jgc.training.errors import did_you_mean

__all__ = [
    "ACCURACY", "DATASETS", "PERPLEXITY", "VOID", "Augment", "Dataset", "EvalBatch", "Labelled", "MissingDataError",
    "Pictures", "Scenes", "Score", "Source", "Streamed", "Text", "Window", "batch_indices", "final", "further_of",
    "hold_out", "load_camvid", "load_cifar", "load_dataset", "load_digits", "load_food101", "load_imagenet",
    "load_ptb", "load_ptb_characters", "load_tiny_imagenet", "make_batch", "prefetch", "score_of", "shrunk",
    "source_of", "streamed_source", "test_batches",
]  # fmt: skip


def _digits(data_dir: Any, **settings: Any) -> Dataset:
    if data_dir is not None and not data_folder(data_dir).is_dir():  # an existing folder may have other data sets
        raise MissingDataError(f"there is no folder {data_dir}; the digits need none, they come with scikit-learn")
    return load_digits(**settings)


AnyData = Dataset | Streamed | Scenes | Text

DATASETS: Mapping[str, Callable[..., AnyData]] = {
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


def load_dataset(name: str, data_dir: str | os.PathLike[str] | None = None, **settings: Any) -> AnyData:
    """A data set by its name in `DATASETS`.

    Args:
        name: a key of `DATASETS`.
        data_dir: folder of data sets; None: TFDS's default, $TFDS_DATA_DIR or ~/tensorflow_datasets.
        **settings: of the loader, such as `shift` for the digits.

    Raises:
        ValueError: an unknown name.
        MissingDataError: the data set is not in `data_dir`; the message says how to fetch it.

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
        dataset: of any type.
        validation: fraction of the training images to hold out; 0 for scenes and texts, which have validation data.

    Raises:
        ValueError: a window or crop below 1, a validation text of fewer than two words, or an invalid fraction.

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
        raise ValueError(f"{dataset.name} comes with {what}: nothing can be held out, got {validation}")
    return text_source(dataset) if isinstance(dataset, Text) else scene_source(dataset)
