"""CIFAR-10 and CIFAR-100 as TensorFlow Datasets prepares them, read without TensorFlow.

Preparing (downloading) needs TensorFlow, once; reading array_record files needs tensorflow-datasets,
array_record, and the two packages that it does not declare, importlib_resources and pillow. Nothing is ever
downloaded here.

References:
    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import json
import logging
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from jgc.data.cache import Arrays, cached, place
from jgc.data.dataset import Augment, Dataset, MissingDataError, data_folder

SPLITS = ("train", "test")

# (classes, mean, std) of the training images, per channel and in 0 to 255: the values in common use.
STATISTICS = {
    "cifar10": (10, (125.307, 122.950, 113.865), (62.993, 62.089, 66.705)),
    "cifar100": (100, (129.304, 124.070, 112.434), (68.170, 65.392, 70.418)),
}

# To be raised with every edit of `_decode` that changes what it returns: cached arrays are then made again.
_DECODER = 1

_log = logging.getLogger(__name__)


def load_cifar(name: str = "cifar10", data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """CIFAR-10 or CIFAR-100, 50,000 images to train and 10,000 to test on, with crop-and-flip augmentation.

    The first call decodes for 6 to 20 s; later ones read the arrays from `jgc.data.cache`.

    Args:
        name: "cifar10" or "cifar100" (its 100 fine labels).
        data_dir: the folder that holds `<name>/<version>`; None: TFDS's own, `$TFDS_DATA_DIR` or
            `~/tensorflow_datasets`.

    Returns:
        A Dataset of uint8[n, 32, 32, 3] images.

    Raises:
        ValueError: for another name.
        MissingDataError: where no complete array_record version of it is in `data_dir`.

    Example:
        >>> load_cifar("cifar10", "../shared/data/tfds").image_shape  # doctest: +SKIP
        (32, 32, 3)
    """
    if name not in STATISTICS:
        raise ValueError(f"`name` must be one of {', '.join(map(repr, STATISTICS))}, got {name!r}")
    folder = _prepared(name, data_folder(data_dir))
    arrays = cached(f"{name}-{folder.name}-{place(folder)}", _fingerprint(folder), lambda: _decode(folder))
    num_classes, mean, std = STATISTICS[name]
    return Dataset(
        name=name,
        **arrays,
        num_classes=num_classes,
        mean=np.array(mean, np.float32),
        std=np.array(std, np.float32),
        augment=Augment(pad=4, flip=True),
    )


def _prepared(name: str, data_dir: Path) -> Path:
    """The folder of the newest version of `name` that is complete and in array_record format."""
    found = sorted((data_dir / name).glob("*.*.*/dataset_info.json"), key=lambda file: _version(file.parent))
    problem = f"no version of it is in {data_dir / name}"
    for file in reversed(found):
        problem_here = _problem(file.parent, json.loads(file.read_text()))
        if not problem_here:
            return file.parent
        problem = f"{file.parent} {problem_here}"
    raise MissingDataError(
        f"{name} is missing: {problem}; to fetch it once: {_fetch_command(name, data_dir)}"
    )


def _version(folder: Path) -> tuple[int, ...]:
    """(3, 0, 2) of "3.0.2"; () of a name that is no version, which then sorts first."""
    parts = folder.name.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _problem(folder: Path, info: dict[str, Any]) -> str:
    """Why a prepared folder cannot be read, or ""."""
    if info.get("fileFormat") != "array_record":
        return f"holds {info.get('fileFormat', 'tfrecord')} files, not array_record"
    for split in info["splits"]:
        want = len(split["shardLengths"])
        have = len(list(folder.glob(f"*-{split['name']}.array_record-*")))
        if have != want:
            return f"has {have} of the {want} files of the {split['name']} split"
    return ""


def _fetch_command(name: str, data_dir: Path) -> str:
    """A shell command that downloads and prepares the data set where it was looked for."""
    code = (
        "import tensorflow_datasets as tfds; "
        f'tfds.builder("{name}", data_dir={json.dumps(str(data_dir))}, file_format="array_record")'
        ".download_and_prepare()"
    )
    return f"pip install tensorflow tensorflow-datasets && python -c {shlex.quote(code)}"


def _fingerprint(folder: Path) -> str:
    """Decoder; name, size and time of every file: a data set that was prepared again has another one."""
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    return json.dumps(
        [_DECODER, str(folder), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)]
    )


def _decode(folder: Path) -> Arrays:
    """All images and labels of both splits: {train,test}_images uint8[n, h, w, c] and _labels int32[n]."""
    import tensorflow_datasets as tfds  # half a second, and not needed where the cache has the arrays

    _log.info("decoding %s, once", folder)
    builder = tfds.builder_from_directory(folder)
    arrays: Arrays = {}
    for split in SPLITS:
        source = builder.as_data_source(split=split)
        images = np.empty((len(source), *builder.info.features["image"].shape), np.uint8)
        labels = np.empty(len(source), np.int32)
        for i in range(len(source)):
            example = source[i]
            images[i], labels[i] = example["image"], example["label"]
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    return arrays
