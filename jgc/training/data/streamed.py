"""Data sets too large for memory: images are read and decoded while training, by several threads.

As in `data.loader` a batch is a pure function of (seed, step) and does not depend on the number of nodes or threads. A
process decodes only the part of its nodes. Each thread takes an image from its file's bytes to normalised pixels;
Pillow and NumPy release the GIL. `data.loader.prefetch` makes batches ahead of the steps that use them.

Training uses Inception's crops, mirrored at random, evaluation the central part of every image (`data.crops`).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgc.training.data.augment import normalise
from jgc.training.data.crops import BROKEN, BoxOf, central_box, cut, draw_crops, inception_box
from jgc.training.data.dataset import DamagedDataError, Labels, held_out, reason
from jgc.training.data.loader import augment_rng, padded, prefetch, share_of
from jgc.training.data.score import ACCURACY
from jgc.training.data.source import EvalBatch, Source

EVALUATED = 128  # batch size of evaluation, at most

# of ImageNet's training images, per channel in 0 to 255: the values in common use, for other photographs too
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class Encoded(NamedTuple):
    """A stored image: its name for messages, its file's bytes, its label."""

    name: str
    content: bytes
    label: int


class Stored(NamedTuple):
    """Stored images of one split."""

    size: int  # n, how many
    read: Callable[[int], Encoded]  # image i of n; called by several threads. Raises MissingDataError
    facts: str  # one line that must be equal in all processes of a run


class Streamed(NamedTuple):
    """Images that stay in their files."""

    name: str  # for messages
    train: Stored  # images to train on
    test: Stored  # images to evaluate on
    num_classes: int  # labels are from 0 to num_classes - 1
    crop: int = 224  # pixels on each side of a crop, in training and evaluation
    threads: int = 0  # number of decoding threads; 0: one per processor of this process
    mean: Sequence[float] = MEAN  # by channel, in 0 to 255
    std: Sequence[float] = STD  # likewise; a model sees (image - mean) / std


def streamed_source(dataset: Streamed, validation: float = 0.0) -> Source:
    """The `Source` of streamed images; the score is the accuracy on the test images."""
    if dataset.crop < 1 or dataset.threads < 0:
        raise ValueError(f"`crop` must be at least 1 and `threads` at least 0, got {dataset.crop}, {dataset.threads}")
    held = None
    if validation:
        training, out = held_out(dataset.train.size, validation, dataset.name)
        held = partial(central_batches, dataset, subset(dataset.train, out))
        dataset = dataset._replace(train=subset(dataset.train, training))
    return Source(
        kind="images",
        classes=dataset.num_classes,
        score=ACCURACY,
        inputs=lambda count: np.zeros((count, dataset.crop, dataset.crop, 3), np.float32),
        batch=partial(streamed_batch, dataset),
        evaluation=partial(central_batches, dataset, dataset.test),
        validation=held,
        epoch_steps=lambda batch_size: dataset.train.size / batch_size,
        facts=f"{dataset.name}, to train on {dataset.train.facts}, to evaluate on {dataset.test.facts}",
    )


def subset(pictures: Stored, which: npt.NDArray[np.int64]) -> Stored:
    """The images with the numbers `which`."""
    return Stored(len(which), lambda i: pictures.read(int(which[i])), f"{len(which)} of {pictures.facts}")


def streamed_batch(
    dataset: Streamed, seed: int, step: int, nodes: int, batch_size: int, local: slice = slice(None)
) -> tuple[npt.NDArray[np.float32], Labels]:
    """`data.loader.make_batch` for streamed images; reads only the images of the nodes `local`."""
    of_process, indices = share_of(dataset.train.size, seed, step, nodes, batch_size, local)
    numbers, flip = draw_crops(augment_rng(seed, step), batch_size)
    boxes = [partial(inception_box, numbers[i]) for i in of_process]
    images, labels = decode(dataset, dataset.train, indices, boxes, flip[of_process])
    return images.reshape(-1, batch_size // nodes, *images.shape[1:]), labels.reshape(-1, batch_size // nodes)


def central_batches(dataset: Streamed, pictures: Stored, multiple: int) -> Iterator[EvalBatch]:
    """The central crops of stored images in order, in prefetched batches of a size divisible by `multiple`."""
    size = -(-min(EVALUATED, pictures.size) // multiple) * multiple

    def batch(number: int) -> EvalBatch:
        indices = np.arange(number * size, min((number + 1) * size, pictures.size))
        boxes, flip = [central_box] * len(indices), np.zeros(len(indices), bool)
        return padded(*decode(dataset, pictures, indices, boxes, flip), size)

    return prefetch(batch, 0, -(-pictures.size // size))


def decode(
    dataset: Streamed, pictures: Stored, indices: npt.NDArray[np.int64], boxes: Sequence[BoxOf], flip: np.ndarray
) -> tuple[npt.NDArray[np.float32], Labels]:
    """Decode normalised crops of images by all threads: f32[b, crop, crop, 3] and labels int32[b].

    `indices` int64[b] are the numbers of the images, `boxes` their crops, `flip` bool[b] whether to mirror them.
    """
    images = np.empty((len(indices), dataset.crop, dataset.crop, 3), np.float32)
    labels = np.empty(len(indices), np.int32)
    mean, std = np.array(dataset.mean, np.float32), np.array(dataset.std, np.float32)

    def take(i: int) -> None:
        encoded = pictures.read(int(indices[i]))
        if not 0 <= encoded.label < dataset.num_classes:
            raise DamagedDataError(
                f"the label of {encoded.name} must be from 0 to {dataset.num_classes - 1}, got {encoded.label}"
            )
        try:
            pixels = cut(encoded.content, dataset.crop, boxes[i])
        except BROKEN as error:
            raise DamagedDataError(f"cannot decode {encoded.name} ({reason(error)})") from error
        images[i] = normalise((pixels[:, ::-1] if flip[i] else pixels)[None], mean, std)[0]
        labels[i] = encoded.label

    with ThreadPoolExecutor(dataset.threads or processors(), thread_name_prefix="jgc-decode") as pool:
        for _ in pool.map(take, range(len(indices))):  # raises the error of the first image that has one
            pass
    return images, labels


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
