"""Tiny ImageNet: 200 classes of 64x64 images, each with 500 to train on and 50 to evaluate on.

Read from the class folders as distributed; these files are used:

    tiny-imagenet-200/
        wnids.txt                          a class on each line, such as n02124075; label 0 is the first
        train/n02124075/images/*.JPEG      its training images
        val/val_annotations.txt            an image, its class and a box on each line
        val/images/*.JPEG

Grayscale images become RGB. Evaluation uses the validation images, because the labels of the test images are not
public.

References:
    Stanford CS231N, "Tiny ImageNet Challenge", 2015.
    Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 2015.
"""

import logging
import os
import shlex
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jgc.training.data.cache import Arrays, cached, fingerprint_of, folder_hash
from jgc.training.data.dataset import Augment, DamagedDataError, Dataset, MissingDataError, data_folder, errors_of
from jgc.training.data.files import channel_statistics, decoded, lines_of

FOLDER = "tiny-imagenet-200"
ADDRESS = f"http://cs231n.stanford.edu/{FOLDER}.zip"
SIZE = 64  # pixels on each side
_DECODER = 1  # raise it with every edit of `_decode` that changes its result: cached arrays are then decoded again

_log = logging.getLogger(__name__)


class Split(NamedTuple):
    """Image files, and the label of each: int32[n]."""

    files: list[Path]
    labels: np.ndarray


def load_tiny_imagenet(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Tiny ImageNet: 100,000 training images and 10,000 validation images as test images, uint8[n, 64, 64, 3].

    The first call decodes for about a minute; later ones read the arrays, 1.4 GB, from `data.cache`. Crops are padded
    by 8 pixels, 1/8 of the size as for CIFAR. `data_dir` is the folder that holds `tiny-imagenet-200`, or that folder.
    Raises MissingDataError: a file is missing or damaged.
    """
    parent = data_folder(data_dir)
    folder = parent if (parent / "wnids.txt").is_file() else parent / FOLDER
    to = shlex.quote(str(folder.parent))
    with errors_of("tiny_imagenet", f"mkdir -p {to} && cd {to} && curl -LO {ADDRESS} && unzip -qo {FOLDER}.zip"):
        wnids = lines_of(folder / "wnids.txt")
        train, val = _train(folder, wnids), _val(folder, wnids)
        sums = [zlib.crc32(split.labels.tobytes()) for split in (train, val)]
        fingerprint = fingerprint_of(folder, train.files + val.files, _DECODER, *sums)
        arrays = cached(f"tiny_imagenet-{folder_hash(folder)}", fingerprint, lambda: _decode(folder, train, val))
    return Dataset(name="tiny_imagenet", **arrays, num_classes=len(wnids), augment=Augment(pad=8, flip=True))


def _train(folder: Path, wnids: list[str]) -> Split:
    """The training images, class by class. Classes have equally many images, or were not fully unpacked."""
    classes = {wnid: sorted((folder / "train" / wnid / "images").glob("*.JPEG")) for wnid in wnids}
    most = max(map(len, classes.values()))
    for wnid, files in classes.items():
        if len(files) < max(most, 1):
            of = f" of {most}" if most else ""
            raise MissingDataError(f"{folder / 'train' / wnid / 'images'} has {len(files)}{of} images")
    labels = np.repeat(np.arange(len(wnids), dtype=np.int32), most)
    return Split([file for files in classes.values() for file in files], labels)


def _val(folder: Path, wnids: list[str]) -> Split:
    """The validation images, in the order of the annotations."""
    annotations, images = folder / "val" / "val_annotations.txt", folder / "val" / "images"
    there = {file.name for file in images.glob("*.JPEG")}
    files, labels = [], []
    for line in lines_of(annotations):
        name, wnid, *_ = [*line.split(), ""]
        if wnid not in wnids:
            raise DamagedDataError(f"{annotations} names no class of wnids.txt in {line!r}")
        if name not in there:
            raise MissingDataError(f"{images / name} is not there, of {len(there)} images in its folder")
        files.append(images / name)
        labels.append(wnids.index(wnid))
    return Split(files, np.array(labels, np.int32))


def _decode(folder: Path, train: Split, val: Split) -> Arrays:
    """Images uint8[n, 64, 64, 3] and labels int32[n] of both splits, mean and std f32[3]."""
    _log.info("decoding %s, once", folder)
    arrays: Arrays = {}
    for name, split in (("train", train), ("test", val)):
        images = np.empty((len(split.files), SIZE, SIZE, 3), np.uint8)
        for i, file in enumerate(split.files):
            pixels = decoded(file)
            if pixels.shape[:2] != (SIZE, SIZE):
                h, w = pixels.shape[:2]
                raise DamagedDataError(f"{file} must have {SIZE}x{SIZE} pixels, got {h}x{w}")
            images[i] = pixels
        arrays |= {f"{name}_images": images, f"{name}_labels": split.labels}
    mean, std = channel_statistics(arrays["train_images"])
    return arrays | {"mean": mean, "std": std}
