"""Lists of image files and their labels, for data sets in folders."""

import os
import zlib
from pathlib import Path

import numpy as np

from jgc.training.data.dataset import DamagedDataError, Labels, unreadable
from jgc.training.data.streamed import Encoded, Stored


def listing(folder: Path) -> list[str]:
    """The sorted names in a folder, without hidden ones.

    Raises:
        MissingDataError: the folder is missing or cannot be read.
    """
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise unreadable(folder, error) from error


def lines_of(path: Path) -> list[str]:
    """The non-blank lines of a text file, at least one.

    Raises:
        MissingDataError: the file is missing, cannot be read, is no text, or is empty.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    if not lines:
        raise DamagedDataError(f"{path} is empty")
    return lines


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
