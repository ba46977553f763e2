"""Food-101: 101 dishes with 750 training and 250 test images each, up to 512 pixels long.

Read from the folders as distributed; these files are used:

    food-101/
        meta/train.txt          an image on each line, apple_pie/1005649: class/image
        meta/test.txt           likewise
        images/apple_pie/*.jpg

Label 0 is the first class by name. Images stay in their files, see `data.streamed`. This module downloads nothing.

References:
    Bossard, Guillaumin and Van Gool, "Food-101: Mining Discriminative Components with Random Forests", ECCV 2014.
"""

import os
import shlex
from pathlib import Path

import numpy as np

from jgc.training.data.dataset import DamagedDataError, MissingDataError, data_folder, errors_of
from jgc.training.data.files import lines_of, listing, pictures_in
from jgc.training.data.streamed import Stored, Streamed

FOLDER = "food-101"
ADDRESS = f"http://data.vision.ee.ethz.ch/cvl/{FOLDER}.tar.gz"


def load_food101(data_dir: str | os.PathLike[str] | None = None) -> Streamed:
    """Food-101, 75,750 images to train and 25,250 to evaluate on, with Inception's crops of 224x224 pixels.

    Args:
        data_dir: the folder that holds `food-101`, or that folder; None: TFDS's default, `$TFDS_DATA_DIR` or
            `~/tensorflow_datasets`.

    Raises:
        MissingDataError: a file is missing or damaged.

    Example:
        >>> load_food101("~/data").train.size  # doctest: +SKIP
        75750
    """
    parent = data_folder(data_dir)
    folder = parent if (parent / "meta").is_dir() else parent / FOLDER
    with errors_of("food101", _fetch_command(folder.parent)):
        names = {split: lines_of(folder / "meta" / f"{split}.txt") for split in ("train", "test")}
        classes = sorted({name.partition("/")[0] for name in names["train"]})
        there = {name for of in classes for name in _images(folder / "images", of)}
        train, test = (_pictures(folder, split, names[split], classes, there) for split in names)
    return Streamed("food101", train, test, len(classes))


def _fetch_command(data_dir: Path) -> str:
    """A shell command that downloads and unpacks the data set into the expected folder."""
    to = shlex.quote(str(data_dir))
    return f"mkdir -p {to} && cd {to} && curl -LO {ADDRESS} && tar xzf {FOLDER}.tar.gz"


def _images(folder: Path, of: str) -> list[str]:
    """The images of a class, by their names in the lists."""
    return [f"{of}/{name.removesuffix('.jpg')}" for name in listing(folder / of) if name.endswith(".jpg")]


def _pictures(folder: Path, split: str, names: list[str], classes: list[str], there: set[str]) -> Stored:
    """The images of a list. Raises MissingDataError if one is absent."""
    numbers = {of: i for i, of in enumerate(classes)}
    labels = np.array([numbers.get(name.partition("/")[0], -1) for name in names], np.int32)
    if (labels < 0).any():
        line = names[int(np.argmin(labels))]
        raise DamagedDataError(f"{folder / 'meta' / split}.txt names no class of train.txt in {line!r}")
    missing = next((name for name in names if name not in there), None)
    if missing is not None:
        raise MissingDataError(f"{folder / 'images' / missing}.jpg is not there, of {len(there)} images")
    return pictures_in(folder / "images", [f"{name}.jpg" for name in names], labels)
