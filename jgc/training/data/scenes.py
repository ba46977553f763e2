"""Scenes: images with a label for each pixel, warped for training and evaluated whole.

Batches are pure functions of (seed, step) with the same order of examples as in `data.loader`. Pixels without a label
are `VOID`: they count neither in the loss nor in a score.
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
EVALUATED_AT_ONCE = 4  # batch size of evaluation, at most
SHOWN = 4  # test images in masks.png


class Labelled(NamedTuple):
    """Images uint8[n, h, w, 3], and labels uint8[n, h, w], NO_LABEL for pixels without one."""

    images: Bytes
    labels: Bytes


class Scenes(NamedTuple):
    """A data set of scenes in memory, as stored: batches are normalised."""

    name: str  # for messages
    train: Labelled  # to train on
    validation: Labelled  # for a validation loss
    test: Labelled  # for the score
    classes: tuple[str, ...]  # names of the labels, by number
    colours: tuple[Colour, ...]  # of the labels in masks.png, red, green and blue in 0 to 255
    mean: npt.NDArray[np.float32]  # f32[3], of the training images in 0 to 255
    std: npt.NDArray[np.float32]  # f32[3], likewise; a model sees (image - mean) / std
    crop: int  # pixels on each side of a training example
    warp: Warp = Warp()  # of training images


def shrunk(scenes: Scenes, by: int) -> Scenes:
    """The scenes at 1/by of the resolution: means of by x by pixels, with the label of the middle one.

    Pixels at the right and the bottom that do not fill a block are dropped.
    """
    h, w = (size // max(by, 1) for size in scenes.train.labels.shape[1:])
    if by < 1 or min(h, w) < 1:
        size = "x".join(map(str, scenes.train.labels.shape[:0:-1]))
        raise ValueError(f"images of {size} pixels can be shrunk by 1 or more and to no less than a pixel, got {by}")

    def all_of(split: Labelled) -> Labelled:
        images = [np.asarray(Image.fromarray(image).reduce(by))[:h, :w] for image in split.images]
        labels = split.labels[:, by // 2 :: by, by // 2 :: by][:, :h, :w]
        return Labelled(np.stack(images), np.ascontiguousarray(labels))

    if by == 1:
        return scenes
    return scenes._replace(train=all_of(scenes.train), validation=all_of(scenes.validation), test=all_of(scenes.test))


def scene_source(scenes: Scenes) -> Source:
    """The `Source` of scenes; the scores are pixel accuracy and mean IoU on the test images."""
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
    """`data.loader.make_batch` for scenes: f32[nodes, b, crop, crop, 3] and int32[nodes, b, crop, crop] or VOID."""
    of_process, indices = share_of(len(scenes.train.labels), seed, step, nodes, batch_size, local)
    drawn = draw(augment_rng(seed, step), batch_size, scenes.warp)
    crop, outside = scenes.crop, tuple(round(float(x)) for x in scenes.mean)
    height, width = scenes.train.labels.shape[1:]
    hows = [coefficients(Draw(*(x[i] for x in drawn)), width, height, crop) for i in of_process]
    images = [warped(scenes.train.images[i], how, crop, outside) for i, how in zip(indices, hows, strict=True)]
    labels = [warped(scenes.train.labels[i], how, crop, NO_LABEL) for i, how in zip(indices, hows, strict=True)]
    pixels = normalise(np.stack(images), scenes.mean, scenes.std)
    shape = (-1, batch_size // nodes, crop, crop)
    return pixels.reshape(*shape, 3), numbers(np.stack(labels)).reshape(shape)


def numbers(labels: Bytes) -> Labels:
    """Stored labels uint8[...] to int32[...], with VOID for NO_LABEL."""
    return np.where(labels == NO_LABEL, VOID, labels.astype(np.int32))


def whole_images(scenes: Scenes, split: Labelled, multiple: int) -> Iterator[EvalBatch]:
    """The normalised images of a split in order, in batches of one shape."""
    size = -(-min(EVALUATED_AT_ONCE, len(split.labels)) // multiple) * multiple
    for start in range(0, len(split.labels), size):
        images = normalise(split.images[start : start + size], scenes.mean, scenes.std)
        labels = numbers(split.labels[start : start + size])
        fill = ((0, size - len(labels)), (0, 0), (0, 0))
        mask = labels != VOID
        yield EvalBatch(np.pad(images, (*fill, (0, 0))), np.pad(np.where(mask, labels, 0), fill), np.pad(mask, fill))


def pictures(scenes: Scenes) -> Pictures:
    """A few evenly spaced test images, for masks.png."""
    shown = np.linspace(0, len(scenes.test.labels) - 1, min(SHOWN, len(scenes.test.labels)), dtype=int)
    images, labels = scenes.test.images[shown], numbers(scenes.test.labels[shown])
    inputs = normalise(images, scenes.mean, scenes.std)
    return Pictures(inputs, images, labels, scenes.classes, scenes.colours)
