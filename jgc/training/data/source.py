"""`Source`: a data set as training sees it, the same functions for every kind of data.

Made by `data.loader` from images, by `data.streamed` from image files, by `data.scenes` from images with a label for
each pixel, and by `data.text` from a text.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jgc.training.data.score import Score

Inputs = Any  # a tree of arrays whose first axis counts examples
Labels = npt.NDArray[np.int32]
VOID = -1  # a label that counts neither in the loss nor in a score


class EvalBatch(NamedTuple):
    """Inputs [b, ...], labels int32[b, ...], and a mask bool[b, ...]: False for labels that do not count."""

    inputs: Inputs
    labels: Labels
    mask: npt.NDArray[np.bool_]


class Pictures(NamedTuple):
    """Examples for masks.png.

    Attributes:
        inputs: of the model, [m, ...].
        images: uint8[m, h, w, 3], the same images for display.
        labels: int32[m, h, w], or VOID.
        classes: names of the labels.
        colours: red, green and blue of the labels, in 0 to 255.
    """

    inputs: Inputs
    images: npt.NDArray[np.uint8]
    labels: Labels
    classes: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]


class Source(NamedTuple):
    """The functions of a data set. An example is an image, or a stream of text.

    Attributes:
        kind: "images", "scenes" or "text".
        classes: number of labels.
        score: that models are compared by.
        inputs: `(count) -> Inputs`: zeros in the shapes of `count` examples.
        batch: `(seed, step, nodes, batch_size, local=slice(None)) -> (Inputs, labels)`, the training batch of a step
            split over the nodes, leading axes [nodes, batch_size / nodes], of the nodes `local`. A pure function: the
            step alone is the position in the data.
        evaluation: `(multiple) -> iterator of EvalBatch`: all data for the score, in batches of one shape whose first
            axis is divisible by `multiple`. A recurrent model carries its state over them in this order.
        validation: the same for the validation loss, with data held out from training; None if there is none.
        epoch_steps: `(batch_size) -> float`: steps of an epoch. Raises ValueError for more streams than a text has
            windows for; a batch of more images than there are repeats some.
        facts: one line that must be equal in all processes of a run.
        further: scores beside `score`.
        void: whether training labels may be VOID.
        pictures: examples for masks.png; None without them.
        vocabulary: of a text of characters, for a sample at the end; else empty.
    """

    kind: str
    classes: int
    score: Score
    inputs: Callable[[int], Inputs]
    batch: Callable[..., tuple[Inputs, Labels]]
    evaluation: Callable[[int], Iterator[EvalBatch]]
    validation: Callable[[int], Iterator[EvalBatch]] | None
    epoch_steps: Callable[[int], float]
    facts: str
    further: tuple[Score, ...] = ()
    void: bool = False
    pictures: Callable[[], Pictures] | None = None
    vocabulary: tuple[str, ...] = ()
