"""Random scale, rotation, mirroring and crop of an image with a label for each pixel, as one affine map.

Zhao et al. 2017, Section 5.1, without its random blur. Labels take the nearest pixel, images are interpolated
bilinearly. As in `data.augment` a draw covers the global batch and is applied to any part of it.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

Bytes = npt.NDArray[np.uint8]


class Warp(NamedTuple):
    """Ranges of the random changes to training images."""

    scale: tuple[float, float] = (0.5, 2.0)  # smallest and largest, uniform
    degrees: float = 10.0  # largest rotation in either direction, uniform
    flip: bool = True  # mirror left to right with probability 1/2


class Draw(NamedTuple):
    """One warp per example of a batch: f64[b] each, but flip bool[b]."""

    scale: npt.NDArray[np.float64]  # of the image's size
    angle: npt.NDArray[np.float64]  # rotation counterclockwise, in radians
    flip: npt.NDArray[np.bool_]  # whether to mirror
    # position of the crop, from 0 (left, top) to 1
    right: npt.NDArray[np.float64]
    down: npt.NDArray[np.float64]


def draw(rng: np.random.Generator, count: int, warp: Warp) -> Draw:
    """Draw for `count` examples."""
    scale = rng.uniform(*warp.scale, count)
    angle = np.radians(rng.uniform(-warp.degrees, warp.degrees, count))
    flip = rng.random(count) < (0.5 if warp.flip else 0.0)
    right, down = rng.random((2, count))
    return Draw(scale, angle, flip, right, down)


def coefficients(draw: Draw, width: int, height: int, crop: int) -> tuple[float, ...]:
    """(a, b, c, d, e, f): pixel (x, y) of the crop comes from (a x + b y + c, d x + e y + f) in the image.

    Coordinates refer to the pixels' edges, as in Pillow. A scaled image smaller than the crop is centred.

    Example:
        >>> unmoved = Draw(scale=2.0, angle=0.0, flip=False, right=1.0, down=0.0)
        >>> coefficients(unmoved, width=8, height=6, crop=4)
        (0.5, 0.0, 6.0, 0.0, 0.5, 0.0)
    """
    slack = draw.scale * width - crop, draw.scale * height - crop
    x0, y0 = (space * (at if space > 0 else 0.5) for space, at in zip(slack, (draw.right, draw.down), strict=True))
    x0, y0 = x0 - draw.scale * width / 2, y0 - draw.scale * height / 2  # from the middle of the scaled image
    cos, sin = np.cos(draw.angle) / draw.scale, np.sin(draw.angle) / draw.scale
    sign = -1 if draw.flip else 1
    first = (sign * cos, -sign * sin, sign * (cos * x0 - sin * y0) + width / 2)
    second = (sin, cos, sin * x0 + cos * y0 + height / 2)
    return tuple(float(x) + 0.0 for x in first + second)  # + 0.0: no minus zero


def warped(image: Bytes, how: tuple[float, ...], crop: int, outside: Any) -> Bytes:
    """uint8[h, w, 3] or [h, w] to uint8[crop, crop, 3] or [crop, crop], with `outside` beyond the image's border."""
    by = Image.Resampling.NEAREST if image.ndim == 2 else Image.Resampling.BILINEAR
    size, kind = (crop, crop), Image.Transform.AFFINE
    return np.asarray(Image.fromarray(image).transform(size, kind, how, by, fillcolor=outside))
