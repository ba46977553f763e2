"""Data sets in folders: lists of image files, their labels and pixels."""

import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from jgc.training.data.crops import BROKEN
from jgc.training.data.dataset import DamagedDataError, Labels, unreadable
from jgc.training.data.streamed import Encoded, Stored


def listing(folder: Path) -> list[str]:
    """The sorted names in a folder, without hidden ones. Raises MissingDataError."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise unreadable(folder, error) from error


def lines_of(path: Path) -> list[str]:
    """The non-blank lines of a text file. Raises MissingDataError, also if there are none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    if not lines:
        raise DamagedDataError(f"{path} is empty")
    return lines


def decoded(file: Path, mode: str | None = "RGB") -> np.ndarray:
    """The pixels of an image file, converted to a mode; None: as stored, a palette image as its indices."""
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert(mode) if mode else image)
    except BROKEN as error:
        raise unreadable(file, error) from error


def pictures_in(folder: Path, files: list[str], labels: Labels) -> Stored:
    """Images by their paths below a folder, with a label each."""

    def read(i: int) -> Encoded:
        path = folder / files[i]
        try:
            return Encoded(str(path), path.read_bytes(), int(labels[i]))
        except OSError as error:
            raise unreadable(path, error) from error

    checksum = zlib.crc32("\n".join(files).encode(), zlib.crc32(np.ascontiguousarray(labels).tobytes()))
    return Stored(len(files), read, f"{len(files)} images of checksum {checksum:08x}")


def channel_statistics(images: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean and standard deviation of each channel: uint8[n, h, w, c] to f32[c] twice, in the units of the images.

    Example:
        >>> [x.tolist() for x in channel_statistics(np.array([1, 3], np.uint8).reshape(2, 1, 1, 1))]
        [[2.0], [1.0]]
    """
    sums = np.zeros((2, images.shape[-1]))
    at_once = max(1, 2**21 // images[0].size)  # a single np.mean would first convert all images to f64
    for start in range(0, len(images), at_once):
        x = images[start : start + at_once].reshape(-1, images.shape[-1]).astype(np.float64)
        sums += x.sum(axis=0), np.square(x).sum(axis=0)
    mean, square = sums / (images.size / images.shape[-1])
    return mean.astype(np.float32), np.sqrt(square - mean**2).astype(np.float32)
