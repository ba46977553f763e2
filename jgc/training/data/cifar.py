"""CIFAR-10 and CIFAR-100 as TensorFlow Datasets prepares them, read without TensorFlow (see `data.prepared`).

References:
    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from jgc.training.data.cache import Arrays, cached, fingerprint_of, folder_hash
from jgc.training.data.dataset import Augment, DamagedDataError, Dataset, Images, data_folder
from jgc.training.data.prepared import find_prepared, reading

SPLITS = ("train", "test")
SHAPE = (32, 32, 3)  # of an image
STATISTICS = {  # (classes, mean, std) of the training images, per channel and in 0 to 255: the values in common use
    "cifar10": (10, (125.307, 122.950, 113.865), (62.993, 62.089, 66.705)),
    "cifar100": (100, (129.304, 124.070, 112.434), (68.170, 65.392, 70.418)),
}
_DECODER = 1  # raise it with every edit of `_decode` that changes its result: cached arrays are then decoded again

_log = logging.getLogger(__name__)


def load_cifar(name: str = "cifar10", data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """CIFAR-10 or CIFAR-100: 50,000 training and 10,000 test images, uint8[n, 32, 32, 3], cropped and flipped.

    The first call decodes for 6 to 20 s; later ones read the arrays from `data.cache`. CIFAR-100 has its fine labels.
    `data_dir` is the folder that holds `<name>/<version>`.

    Raises:
        ValueError: an unknown name.
        MissingDataError: `data_dir` has no complete array_record version, or an image is damaged.
    """
    if name not in STATISTICS:
        raise ValueError(f"`name` must be one of {', '.join(map(repr, STATISTICS))}, got {name!r}")
    folder = find_prepared(name, data_folder(data_dir), SPLITS)
    num_classes, mean, std = STATISTICS[name]
    fingerprint = fingerprint_of(folder, sorted(file for file in folder.iterdir() if file.is_file()), _DECODER)
    entry = f"{name}-{folder.name}-{folder_hash(folder)}"
    arrays = cached(entry, fingerprint, lambda: _decode(folder, num_classes))
    train, test = ((arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in SPLITS)
    scale = np.array(mean, np.float32), np.array(std, np.float32)
    return Dataset(name, *train, *test, num_classes, *scale, Augment(pad=4, flip=True))


def _decode(folder: Path, num_classes: int) -> Arrays:
    """All images and labels of both splits: {train,test}_images uint8[n, 32, 32, 3] and _labels int32[n]."""
    import tensorflow_datasets as tfds  # takes half a second to import, and a cached run does not need it

    _log.info("decoding %s, once", folder)
    with reading(f"{folder} as TensorFlow Datasets prepares it"):
        builder = tfds.builder_from_directory(folder)
        sources = {split: builder.as_data_source(split=split) for split in SPLITS}
    arrays: Arrays = {}
    for split, source in sources.items():
        images, labels = np.empty((len(source), *SHAPE), np.uint8), np.empty(len(source), np.int32)
        for i in range(len(source)):
            name = f"image {i} of the {split} split in {folder}"
            images[i], labels[i] = _example(source, i, name, num_classes)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    return arrays


def _example(source: Any, i: int, name: str, num_classes: int) -> tuple[Images, int]:
    """The i-th image uint8[32, 32, 3] and its label; `name` stands for them in errors."""
    with reading(name):
        example = source[i]
        image, label = example["image"], int(example["label"])
    if image.shape != SHAPE:
        want, got = ("x".join(map(str, shape)) for shape in (SHAPE, image.shape))
        raise DamagedDataError(f"{name} must be {want}, got {got}")
    if not 0 <= label < num_classes:
        raise DamagedDataError(f"the label of {name} must be from 0 to {num_classes - 1}, got {label}")
    return image, label
