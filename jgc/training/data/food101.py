"""Food-101: 101 dishes with 750 training and 250 test images each, up to 512 pixels long.

Read from the folders as distributed; these files are used:

    food-101/
        meta/train.txt          an image on each line, apple_pie/1005649: class/image
        meta/test.txt           likewise
        images/apple_pie/*.jpg

Label 0 is the first class by name. Images stay in their files, see `data.streamed`.

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

    `data_dir` is the folder that holds `food-101`, or that folder. Raises MissingDataError.
    """
    parent = data_folder(data_dir)
    folder = parent if (parent / "meta").is_dir() else parent / FOLDER
    to = shlex.quote(str(folder.parent))
    with errors_of("food101", f"mkdir -p {to} && cd {to} && curl -LO {ADDRESS} && tar xzf {FOLDER}.tar.gz"):
        names = {split: lines_of(folder / "meta" / f"{split}.txt") for split in ("train", "test")}
        classes = sorted({name.partition("/")[0] for name in names["train"]})
        files = {of: listing(folder / "images" / of) for of in classes}
        there = {f"{of}/{x.removesuffix('.jpg')}" for of, found in files.items() for x in found if x.endswith(".jpg")}
        train, test = (_pictures(folder, split, names[split], classes, there) for split in names)
    return Streamed("food101", train, test, len(classes))


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
