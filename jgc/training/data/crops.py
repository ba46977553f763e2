"""Crops of encoded images: random boxes for training, central ones for evaluation, and their decoding.

As in `data.augment` a draw covers the global batch. A box has fractional pixel coordinates, so its area and aspect are
exactly those drawn; Pillow crops and resizes in one call, averaging over the area of each new pixel. A JPEG file is
decoded at 1/2, 1/4 or 1/8 of its size if that is enough for the crop, in a quarter of the time or less.

References:
    Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, Section 6: the crops.
"""

import io
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

AREA = (0.08, 1.0)  # of the image
ASPECT = (3 / 4, 4 / 3)  # width over height
TRIES = 10
CENTRAL = 224 / 256  # an evaluated crop's side, relative to the resized image's

# Pillow raises these for a file that is no image, or a truncated one
BROKEN = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)

BoxOf = Callable[[int, int], "Box"]  # of an image's width and height


class Box(NamedTuple):
    """A part of an image, in fractional pixels."""

    left: float
    top: float
    right: float
    bottom: float


class Crops(NamedTuple):
    """One random crop per image: numbers f64[b, TRIES, 4] from 0 to 1, flip bool[b]."""

    numbers: npt.NDArray[np.float64]
    flip: npt.NDArray[np.bool_]


def draw_crops(rng: np.random.Generator, count: int) -> Crops:
    """Draw for `count` images of any size; each is mirrored with probability 1/2."""
    return Crops(rng.random((count, TRIES, 4)), rng.random(count) < 0.5)


def inception_box(numbers: npt.NDArray[np.float64], width: int, height: int) -> Box:
    """The crop of an image that f64[TRIES, 4] numbers from 0 to 1 encode.

    Each try is an area (uniform), an aspect (log-uniform) and a position. The first that fits is taken. If none fits,
    as in an image three times as long as wide, the crop is the largest central one that the aspects allow.
    """
    area, aspect, x, y = numbers.T
    area = (AREA[0] + (AREA[1] - AREA[0]) * area) * (width * height)
    aspect = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** aspect
    w, h = np.sqrt(area * aspect), np.sqrt(area / aspect)
    fits = (w <= width) & (h <= height)
    if not fits.any():
        return _box((min(width, height * ASPECT[1]), min(height, width / ASPECT[0])), (0.5, 0.5), (width, height))
    i = int(fits.argmax())
    return _box((float(w[i]), float(h[i])), (float(x[i]), float(y[i])), (width, height))


def central_box(width: int, height: int) -> Box:
    """The crop for evaluation: the central 224x224 after resizing the shorter side to 256 pixels.

    Example:
        >>> central_box(512, 256)
        Box(left=144.0, top=16.0, right=368.0, bottom=240.0)
    """
    side = CENTRAL * min(width, height)
    return _box((side, side), (0.5, 0.5), (width, height))


def _box(size: tuple[float, float], at: tuple[float, float], image: tuple[int, int]) -> Box:
    """A box of a size in an image; `at` moves it from the left and top edge (0) to the right and bottom edge (1)."""
    (w, h), (x, y), (width, height) = size, at, image
    left, top = x * (width - w), y * (height - h)
    return Box(left, top, min(left + w, width), min(top + h, height))


def cut(content: bytes, size: int, box_of: BoxOf) -> npt.NDArray[np.uint8]:
    """Decode a part of an image to uint8[size, size, 3], also of a grayscale or CMYK image."""
    with Image.open(io.BytesIO(content)) as image:
        width, height = image.size
        box = box_of(width, height)
        shrink = max(1.0, min(box.right - box.left, box.bottom - box.top) / size)
        drafted = image.draft("RGB", (ceil(width / shrink), ceil(height / shrink)))
        scale = drafted[1][2] / width if drafted else 1.0  # a power of two; the pixels are rounded up
        colours = image if image.mode == "RGB" else image.convert("RGB")
        scaled = (box.left * scale, box.top * scale, box.right * scale, box.bottom * scale)
        return np.asarray(colours.resize((size, size), Image.Resampling.BILINEAR, box=scaled))
