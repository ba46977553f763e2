"""Scenes: images with a label for each pixel, warped for training and judged by every labelled pixel.

Batches are pure functions of (seed, step), as those of `data.loader`, out of the same sequence of examples. Pixels
without a label are `VOID`: they count neither in the loss nor in a score. Validation images are the data set's own; a
model is judged by its test images, whole.
"""

import zlib
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from jgc.training.data.augment import normalise
from jgc.training.data.loader import augment_rng, share_of
from jgc.training.data.score import MEAN_IOU, PIXEL_ACCURACY
from jgc.training.data.source import VOID, EvalBatch, Labels, Pictures, Source
from jgc.training.data.warp import Bytes, Draw, Warp, coefficients, draw, warped

Colour = tuple[int, int, int]

NO_LABEL = 255  # of a pixel, as stored
EVALUATED_AT_ONCE = 4  # images of a batch in evaluation
SHOWN = 4  # test images whose masks a run draws at its end


class Labelled(NamedTuple):
    """Images uint8[n, h, w, 3], and labels uint8[n, h, w], from 0 on or NO_LABEL."""

    images: Bytes
    labels: Bytes


class Scenes(NamedTuple):
    """A data set of scenes in memory, as stored: batches are normalised.

    Attributes:
        name: for messages.
        train: to train on.
        validation: to take a validation loss of.
        test: to judge by.
        classes: names of the labels, by number.
        colours: of the labels in pictures, red, green and blue in 0 to 255.
        mean: f32[3], of the training images in 0 to 255.
        std: f32[3], likewise; a model sees (image - mean) / std.
        crop: pixels on each side of a training example.
        warp: of training images.
    """

    name: str
    train: Labelled
    validation: Labelled
    test: Labelled
    classes: tuple[str, ...]
    colours: tuple[Colour, ...]
    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]
    crop: int
    warp: Warp = Warp()


def shrunk(scenes: Scenes, by: int) -> Scenes:
    """The scenes at a lower resolution: means of by x by pixels, and the label of the one in the middle.

    What a number of pixels that is no multiple leaves over, at the right and at the bottom, is dropped.

    Raises:
        ValueError: for a factor below 1, or one that leaves nothing of an image.
    """
    h, w = (size // max(by, 1) for size in scenes.train.labels.shape[1:])
    if by < 1 or min(h, w) < 1:
        size = "x".join(map(str, scenes.train.labels.shape[:0:-1]))
        raise ValueError(f"images of {size} pixels can be shrunk by 1 or more and to no less than a pixel, got {by}")

    def one(image: Bytes) -> Bytes:
        return np.asarray(Image.fromarray(image).reduce(by))[:h, :w]

    def all_of(split: Labelled) -> Labelled:
        labels = split.labels[:, by // 2 :: by, by // 2 :: by][:, :h, :w]
        return Labelled(np.stack([one(image) for image in split.images]), np.ascontiguousarray(labels))

    if by == 1:
        return scenes
    return scenes._replace(
        train=all_of(scenes.train), validation=all_of(scenes.validation), test=all_of(scenes.test)
    )


def scene_source(scenes: Scenes) -> Source:
    """The scenes as training sees them, judged by the accuracy of the test images' pixels and the mean IoU.

    Raises:
        ValueError: for a crop below 1.
    """
    if scenes.crop < 1:
        raise ValueError(f"the crop must be at least 1 pixel on each side, got {scenes.crop}")
    splits = (scenes.train, scenes.validation, scenes.test)
    shapes, sums = [split.images.shape for split in splits], [zlib.crc32(split.labels.tobytes()) for split in splits]
    return Source(
        kind="scenes",
        classes=len(scenes.classes),
        score=PIXEL_ACCURACY,
        further=(MEAN_IOU,),
        void=True,
        inputs=lambda count: np.zeros((count, scenes.crop, scenes.crop, 3), np.float32),
        batch=partial(scene_batch, scenes),
        evaluation=partial(whole_images, scenes, scenes.test),
        validation=partial(whole_images, scenes, scenes.validation),
        epoch_steps=lambda batch_size: len(scenes.train.labels) / batch_size,
        pictures=partial(pictures, scenes),
        facts=f"{scenes.name} of shapes {shapes}, labels of checksums {sums}",
    )


def scene_batch(
    scenes: Scenes, seed: int, step: int, nodes: int, batch_size: int, local: slice = slice(None)
) -> tuple[npt.NDArray[np.float32], Labels]:
    """The training batch of a step, warped and normalised, split over the nodes.

    Args:
        scenes: where from.
        seed: of order and warps.
        step: from 0.
        nodes: how many nodes share the batch; node i has the i-th of `nodes` equal, disjoint parts.
        batch_size: of the global batch.
        local: the nodes to build the parts of, where a process holds only some; all by default.

    Returns:
        images f32[nodes, batch_size / nodes, crop, crop, 3], labels int32[nodes, batch_size / nodes, crop, crop],
        VOID where there is none; fewer nodes where `local` says so.

    Raises:
        ValueError: where the nodes do not divide the batch, or a number is out of range.
    """
    mine, taken = share_of(len(scenes.train.labels), seed, step, nodes, batch_size, local)
    drawn = draw(augment_rng(seed, step), batch_size, scenes.warp)
    crop, outside = scenes.crop, tuple(round(float(x)) for x in scenes.mean)
    height, width = scenes.train.labels.shape[1:]
    hows = [coefficients(Draw(*(x[i] for x in drawn)), width, height, crop) for i in mine]
    images = [warped(scenes.train.images[i], how, crop, outside) for i, how in zip(taken, hows, strict=True)]
    labels = [warped(scenes.train.labels[i], how, crop, NO_LABEL) for i, how in zip(taken, hows, strict=True)]
    pixels = normalise(np.stack(images), scenes.mean, scenes.std)
    shape = (-1, batch_size // nodes, crop, crop)
    return pixels.reshape(*shape, 3), numbers(np.stack(labels)).reshape(shape)


def numbers(labels: Bytes) -> Labels:
    """Labels as stored, uint8[...], to int32[...] with VOID."""
    return np.where(labels == NO_LABEL, VOID, labels.astype(np.int32))


def whole_images(scenes: Scenes, split: Labelled, multiple: int) -> Iterator[EvalBatch]:
    """The images of a split in order, not changed but normalised, in batches of one shape.

    Args:
        scenes: for the normalisation.
        split: validation or test.
        multiple: the size of a batch is one of its multiples; the last is filled up with zeros.

    Returns:
        An iterator over batches; `mask` is False at pixels without a label, whose label is 0, and in what is filled up.
    """
    size = -(-min(EVALUATED_AT_ONCE, len(split.labels)) // multiple) * multiple
    for start in range(0, len(split.labels), size):
        images = normalise(split.images[start : start + size], scenes.mean, scenes.std)
        labels = numbers(split.labels[start : start + size])
        fill = ((0, size - len(labels)), (0, 0), (0, 0))
        mask = labels != VOID
        yield EvalBatch(np.pad(images, (*fill, (0, 0))), np.pad(np.where(mask, labels, 0), fill), np.pad(mask, fill))


def pictures(scenes: Scenes) -> Pictures:
    """A few test images, evenly out of all, for a run to show what it makes of them."""
    shown = np.linspace(0, len(scenes.test.labels) - 1, min(SHOWN, len(scenes.test.labels)), dtype=int)
    images, labels = scenes.test.images[shown], numbers(scenes.test.labels[shown])
    inputs = normalise(images, scenes.mean, scenes.std)
    return Pictures(inputs, images, labels, scenes.classes, scenes.colours)
