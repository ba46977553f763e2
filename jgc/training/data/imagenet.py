"""ImageNet (ILSVRC 2012): 1,281,167 images of 1,000 classes to train on and 50,000 to evaluate on.

Read either as TensorFlow Datasets prepares it in array_record format (`imagenet2012/<version>`, see
`data.prepared`), or from class folders, in the folder given or in `imagenet` in it:

    train/n01440764/*.JPEG      a folder for each class: label 0 is the first by name
    val/n01440764/*.JPEG        the same classes; the distributed images are in one folder and must be sorted first

Images stay in their files, see `data.streamed`. There may be fewer than 1,000 class folders. Evaluation uses the
validation images, because the labels of the test images are not public.

References:
    Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 2015.
"""

import os
from pathlib import Path

import numpy as np

from jgc.training.data.dataset import DamagedDataError, MissingDataError, data_folder
from jgc.training.data.files import listing, pictures_in
from jgc.training.data.prepared import find_prepared, reading
from jgc.training.data.streamed import Encoded, Stored, Streamed

PREPARED = "imagenet2012"  # TensorFlow Datasets' name
SPLITS = ("train", "validation")
SUFFIXES = (".jpeg", ".jpg", ".png")


def load_imagenet(data_dir: str | os.PathLike[str] | None = None) -> Streamed:
    """ImageNet, with Inception's crops of 224x224 pixels. Listing the class folders takes some seconds.

    `data_dir` is the folder that holds `imagenet2012`, `imagenet`, or `train` and `val`. Raises MissingDataError.
    """
    folder = data_folder(data_dir)
    for unpacked in (folder, folder / "imagenet"):
        if (unpacked / "train").is_dir():
            return _of_folders(unpacked)
    try:
        return _prepared(find_prepared(PREPARED, folder, SPLITS))
    except DamagedDataError:
        raise
    except MissingDataError as error:
        raise MissingDataError(
            f"{error} (it reads the archives that ImageNet gives out on request, from "
            f"{folder / 'downloads' / 'manual'}); or give class folders, {folder}/train/n01440764/*.JPEG and so on"
        ) from error


def _of_folders(folder: Path) -> Streamed:
    """The images of train/ and val/, whose class folders must be the same."""
    classes = _classes(folder / "train")
    evaluated = _classes(folder / "val")
    if classes != evaluated:
        odd = sorted(set(classes) ^ set(evaluated))[0]
        has, lacks = ("train", "val") if odd in classes else ("val", "train")
        raise MissingDataError(
            f"imagenet must have the same class folders in train and val: {folder / lacks / odd} is missing, and "
            f"{folder / has} has one of that name"
        )
    train, test = (_pictures(folder / split, classes) for split in ("train", "val"))
    return Streamed("imagenet", train, test, len(classes))


def _classes(folder: Path) -> list[str]:
    """The names of the class folders in a folder."""
    classes = [name for name in listing(folder) if (folder / name).is_dir()]
    if not classes:
        raise MissingDataError(f"{folder} must hold a folder for each class, such as n01440764, and holds none")
    return classes


def _pictures(folder: Path, classes: list[str]) -> Stored:
    """The images class by class."""
    by_class = [[name for name in listing(folder / of) if name.lower().endswith(SUFFIXES)] for of in classes]
    empty = next((of for of, names in zip(classes, by_class, strict=True) if not names), None)
    if empty is not None:
        raise MissingDataError(f"{folder / empty} has no images (*.JPEG)")
    files = [f"{of}/{name}" for of, names in zip(classes, by_class, strict=True) for name in names]
    return pictures_in(folder, files, np.repeat(np.arange(len(classes), dtype=np.int32), [*map(len, by_class)]))


def _prepared(folder: Path) -> Streamed:
    """The encoded images of both splits."""
    import tensorflow_datasets as tfds  # takes half a second to import, and class folders do not need it

    with reading(f"{folder} as TensorFlow Datasets prepares it"):
        builder = tfds.builder_from_directory(folder)
        train, test = (_records(builder, folder, split) for split in SPLITS)
        return Streamed("imagenet", train, test, builder.info.features["label"].num_classes)


def _records(builder, folder: Path, split: str) -> Stored:
    """The images of a split."""
    import tensorflow_datasets as tfds

    records = builder.as_data_source(split=split, decoders={"image": tfds.decode.SkipDecoding()})

    def read(i: int) -> Encoded:
        name = f"image {i} of the {split} split in {folder}"
        with reading(name):
            record = records[i]
            file_name = bytes(record.get("file_name", b"")).decode()  # TFDS's preparation has it
            return Encoded(f"{file_name}, {name}" if file_name else name, record["image"], int(record["label"]))

    return Stored(len(records), read, f"{len(records)} images of {folder.name} as prepared")
