"""A data set of images in memory, the folder of data sets, and errors for missing or damaged ones."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8] | npt.NDArray[np.float32]  # [n, h, w, c]
Labels = npt.NDArray[np.int32]  # [n]


class MissingDataError(FileNotFoundError):
    """A data set, or a part of it, is missing. One line: what, where it should be, how to fetch it."""


class DamagedDataError(MissingDataError):
    """A file of a data set has wrong content. One line: which file, and what would be right."""


@contextmanager
def errors_of(name: str, fetch: str) -> Iterator[None]:
    """Add a data set's name to errors inside the block, and to those on missing files how to fetch it."""
    try:
        yield
    except DamagedDataError as error:
        raise DamagedDataError(f"{name}: {error}") from error
    except MissingDataError as error:
        raise MissingDataError(f"{name} is missing: {error}; to fetch it once: {fetch}") from error
    except OSError as error:
        raise DamagedDataError(f"{name}: cannot read {error.filename or 'its files'} ({reason(error)})") from error


def unreadable(path: Path, error: Exception) -> MissingDataError:
    """The error for a file or folder that cannot be read: missing or damaged."""
    missing = isinstance(error, FileNotFoundError)
    return (MissingDataError if missing else DamagedDataError)(f"cannot read {path} ({reason(error)})")


def reason(error: Exception) -> str:
    """The text of an error of the system or a library, in one line."""
    text = getattr(error, "strerror", None) or str(error).partition(" <_io")[0]  # Pillow adds a buffer's address
    return " ".join(text.split()) or type(error).__name__


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """The absolute path of the folder of data sets; for None TFDS's default."""
    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(default if data_dir is None else data_dir).expanduser().resolve()


class Augment(NamedTuple):
    """Random changes to training images; none by default."""

    pad: int = 0  # zeros on each side (before normalisation) before a random crop to the image's size
    flip: bool = False  # mirror left to right with probability 1/2


class Dataset(NamedTuple):
    """Images and labels as numpy arrays, as stored: the loader normalises."""

    name: str  # for messages
    train_images: Images  # uint8 or f32[n, h, w, c]
    train_labels: Labels  # int32[n], from 0 to num_classes - 1
    test_images: Images  # as train_images
    test_labels: Labels  # as train_labels
    num_classes: int  # how many labels there are
    mean: npt.NDArray[np.float32]  # f32[c], in the units of the stored images (0 to 255 for uint8)
    std: npt.NDArray[np.float32]  # f32[c], likewise; a model sees (image - mean) / std
    augment: Augment = Augment()  # for training images only

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(h, w, c) of one image."""
        h, w, c = self.train_images.shape[1:]
        return h, w, c


def hold_out(dataset: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """The data set without a fraction of its training images, and one with these as its test images."""
    training, held = held_out(len(dataset.train_labels), share, dataset.name)
    images, labels = dataset.train_images, dataset.train_labels
    rest = dataset._replace(train_images=images[training], train_labels=labels[training])
    return rest, dataset._replace(test_images=images[held], test_labels=labels[held])


def held_out(total: int, share: float, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sorted numbers of the training images to keep and of those to hold out, always the same."""
    count = round(share * total)
    if not (0 <= share < 1 and 0 < count < total):
        raise ValueError(
            f"a validation set must have at least one of the {total} training images of {name} and leave one "
            f"to train on, got the share {share}"
        )
    order = np.random.default_rng(0).permutation(total)
    return np.sort(order[count:]), np.sort(order[:count])
