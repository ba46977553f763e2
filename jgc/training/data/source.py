"""`Source`: a data set as training uses it, with the same functions for every type of data."""

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
    """Examples for masks.png."""

    inputs: Inputs  # of the model, [m, ...]
    images: npt.NDArray[np.uint8]  # uint8[m, h, w, 3], the same images for display
    labels: Labels  # int32[m, h, w], or VOID
    classes: tuple[str, ...]  # names of the labels
    colours: tuple[tuple[int, int, int], ...]  # red, green and blue of the labels, in 0 to 255


class Source(NamedTuple):
    """The functions of a data set. An example is an image, or a stream of text."""

    kind: str  # "images", "scenes" or "text"
    classes: int  # number of labels
    score: Score  # that models are compared by
    inputs: Callable[[int], Inputs]  # `(count) -> Inputs`: zeros in the shapes of `count` examples
    # `(seed, step, nodes, batch_size, local=slice(None)) -> (Inputs, labels)`: a step's training batch for the nodes
    # `local`, leading axes [nodes, batch_size / nodes]; a pure function, so the step is the position in the data
    batch: Callable[..., tuple[Inputs, Labels]]
    # `(multiple) -> batches` of one shape, whose first axis `multiple` divides, with all data for the score. A
    # recurrent model carries its state over them in this order
    evaluation: Callable[[int], Iterator[EvalBatch]]
    validation: Callable[[int], Iterator[EvalBatch]] | None  # likewise for the validation loss, of held-out data
    epoch_steps: Callable[[int], float]  # of a batch size; ValueError for more streams than a text has windows for
    facts: str  # one line that must be equal in all processes of a run
    further: tuple[Score, ...] = ()  # scores in addition to `score`
    void: bool = False  # whether training labels may be VOID
    pictures: Callable[[], Pictures] | None = None  # examples for masks.png; None without them
    vocabulary: tuple[str, ...] = ()  # of a text of characters, for a sample at the end; else empty
