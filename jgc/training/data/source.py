"""A data set as training sees it: functions that every kind brings along, so that nothing else asks for the kind.

`data.loader` makes one of images and labels, `data.scenes` one of images with a label for each pixel,
`data.text` one of a text.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jgc.training.data.score import Score

Inputs = Any  # a tree of arrays whose first axis counts examples
Labels = npt.NDArray[np.int32]
VOID = -1  # in place of a label that does not count


class EvalBatch(NamedTuple):
    """Inputs [b, ...], labels int32[b, ...], and a mask, bool like the labels: False where the batch is filled up."""

    inputs: Inputs
    labels: Labels
    mask: npt.NDArray[np.bool_]


class Pictures(NamedTuple):
    """Examples whose labels and predictions can be shown as pictures.

    Attributes:
        inputs: of the model, [m, ...].
        images: uint8[m, h, w, 3], what they show.
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
    """What a data set gives to training. An example is what a batch is counted in: an image, or a stream of text.

    Attributes:
        kind: what it holds, "images", "scenes" or "text".
        classes: how many labels there are.
        score: what a model is judged by.
        inputs: `(count) -> Inputs`: zeros in the shapes of so many examples.
        batch: `(seed, step, nodes, batch_size, local=slice(None)) -> (Inputs, labels)`, the training batch of a step
            split over the nodes, leading axes [nodes, batch_size / nodes], or of the nodes `local` alone. A pure
            function: nothing but the step says where in the data a run is.
        evaluation: `(multiple) -> iterator of EvalBatch`: all that the score is taken over, in batches of one shape
            whose first axis is a multiple of `multiple`. A model that carries a state from batch to batch is given
            them in this order.
        validation: the same of data held out from training, for a validation loss; None where nothing is held out.
        epoch_steps: `(batch_size) -> float`: steps in which all training data is seen once. Raises ValueError for a
            batch that the data has not enough for.
        facts: in one line, what has to be the same of the data in all processes of a run.
        further: what else evaluating gives, beside the score.
        void: whether training labels may be VOID, which then count nowhere.
        pictures: what a run shows at its end; None where there is nothing to see.
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
