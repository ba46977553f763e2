"""CIFAR-10 and CIFAR-100 as TensorFlow Datasets prepares them, read without TensorFlow.

`data.prepared` says which packages that needs.

References:
    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from jgc.training.data.cache import Arrays, cached, folder_hash
from jgc.training.data.dataset import Augment, DamagedDataError, Dataset, Images, data_folder
from jgc.training.data.prepared import find_prepared, reading

SPLITS = ("train", "test")
SHAPE = (32, 32, 3)  # of an image

# (classes, mean, std) of the training images, per channel and in 0 to 255: the values in common use.
STATISTICS = {
    "cifar10": (10, (125.307, 122.950, 113.865), (62.993, 62.089, 66.705)),
    "cifar100": (100, (129.304, 124.070, 112.434), (68.170, 65.392, 70.418)),
}

# Raise it with every edit of `_decode` that changes its result: cached arrays are then decoded again.
_DECODER = 1

_log = logging.getLogger(__name__)


def load_cifar(name: str = "cifar10", data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """CIFAR-10 or CIFAR-100, 50,000 images to train and 10,000 to test on, with crop-and-flip augmentation.

    The first call decodes for 6 to 20 s; later ones read the arrays from `data.cache`.

    Args:
        name: "cifar10" or "cifar100" (its 100 fine labels).
        data_dir: the folder that holds `<name>/<version>`; None: TFDS's default, `$TFDS_DATA_DIR` or
            `~/tensorflow_datasets`.

    Returns:
        A Dataset of uint8[n, 32, 32, 3] images.

    Raises:
        ValueError: for another name.
        MissingDataError: `data_dir` has no complete array_record version, or an image is damaged.

    Example:
        >>> load_cifar("cifar10", "../shared/data/tfds").image_shape  # doctest: +SKIP
        (32, 32, 3)
    """
    if name not in STATISTICS:
        raise ValueError(f"`name` must be one of {', '.join(map(repr, STATISTICS))}, got {name!r}")
    folder = find_prepared(name, data_folder(data_dir), SPLITS)
    num_classes, mean, std = STATISTICS[name]
    entry = f"{name}-{folder.name}-{folder_hash(folder)}"
    arrays = cached(entry, _fingerprint(folder), lambda: _decode(folder, num_classes))
    return Dataset(
        name=name,
        **arrays,
        num_classes=num_classes,
        mean=np.array(mean, np.float32),
        std=np.array(std, np.float32),
        augment=Augment(pad=4, flip=True),
    )


def _fingerprint(folder: Path) -> str:
    """The decoder's version, and name, size and time of every file."""
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return json.dumps(
        [_DECODER, str(folder), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)]
    )


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
