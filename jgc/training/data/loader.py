"""Batches of images as pure functions of (seed, step): the position in the data is the step, nothing else is saved.

Resuming at step s gives bit for bit the batches that an uninterrupted run would have seen. Concatenated over
the nodes, a batch is the same however many nodes share it.

Training data is one endless sequence, one random permutation of all n examples per epoch, and step s takes
positions s * batch to (s + 1) * batch of it. Every epoch therefore shows every example exactly once, nothing
is dropped, and a batch that crosses the border between two epochs (only such a batch) may hold an example
twice.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from jgc.training.data.augment import Draw, apply, draw, normalise
from jgc.training.data.dataset import Augment, Dataset, Labels, hold_out
from jgc.training.data.score import ACCURACY
from jgc.training.data.source import EvalBatch, Source

T = TypeVar("T")

# Independent streams of random numbers under one seed.
_ORDER, _AUGMENT = 0, 1
EVALUATED_IMAGES = 500  # of a batch in evaluation


def image_source(dataset: Dataset, validation: float = 0.0) -> Source:
    """The images as training sees them, judged by the accuracy on the test images.

    Args:
        dataset: the images.
        validation: share of the training images to hold out.

    Raises:
        ValueError: for a share of less than one image, or of all.
    """
    dataset, held = hold_out(dataset, validation) if validation else (dataset, None)
    labels = [zlib.crc32(x.tobytes()) for x in (dataset.train_labels, dataset.test_labels)]
    shapes = [x.shape for x in (dataset.train_images, dataset.test_images)]
    return Source(
        kind="images",
        classes=dataset.num_classes,
        score=ACCURACY,
        inputs=lambda count: np.zeros((count, *dataset.image_shape), np.float32),
        batch=partial(make_batch, dataset),
        evaluation=partial(_evaluation, dataset),
        validation=None if held is None else partial(_evaluation, held),
        epoch_steps=lambda batch_size: len(dataset.train_labels) / batch_size,
        # the labels stand for the images too
        facts=f"{dataset.name} of shapes {shapes[0]} and {shapes[1]}, labels of checksums {labels}",
    )


def _evaluation(dataset: Dataset, multiple: int) -> Iterator[EvalBatch]:
    """The test images of a data set, in batches of a multiple of `multiple`."""
    size = min(EVALUATED_IMAGES, len(dataset.test_labels))
    return test_batches(dataset, -(-size // multiple) * multiple)


def _rng(seed: int, stream: int, index: int) -> np.random.Generator:
    """The generator of one epoch's order or one step's augmentation.

    Numbers of 32 bits at most: numpy spreads a larger one over two words, and (seed, stream, index) could
    then spell another triple.
    """
    if not (0 <= seed < 2**32 and 0 <= index < 2**32):
        raise ValueError(f"`seed` and `step` must be from 0 to 2**32 - 1, got {seed} and {index}")
    return np.random.default_rng([seed, stream, index])


@lru_cache(maxsize=4)  # a pure function; a step needs one epoch's order, or two
def _order(seed: int, epoch: int, n: int) -> npt.NDArray[np.int64]:
    """The permutation int64[n] of one epoch, read-only."""
    order = _rng(seed, _ORDER, epoch).permutation(n)
    order.flags.writeable = False
    return order


def batch_indices(seed: int, step: int, batch_size: int, n: int) -> npt.NDArray[np.int64]:
    """Which examples the global batch of a step holds.

    Args:
        seed: of the order.
        step: from 0.
        batch_size: of the global batch; it may be larger than n.
        n: number of examples.

    Returns:
        int64[batch_size], from 0 to n - 1. The module's docstring says how epochs are laid out.

    Raises:
        ValueError: for a number out of range.

    Example:
        >>> bool((np.sort(batch_indices(seed=0, step=7, batch_size=4, n=4)) == np.arange(4)).all())
        True
    """
    if step < 0 or batch_size < 1 or n < 1:
        raise ValueError(
            f"`step` must be at least 0, `batch_size` and `n` at least 1, got {step}, {batch_size} and {n}"
        )
    epoch, offset = divmod(step * batch_size, n)
    taken = []
    while batch_size > 0:
        part = _order(seed, epoch, n)[offset : offset + batch_size]
        taken.append(part)
        epoch, offset, batch_size = epoch + 1, 0, batch_size - len(part)
    return np.concatenate(taken)


def augment_rng(seed: int, step: int) -> np.random.Generator:
    """The random numbers that change the training examples of a step."""
    return _rng(seed, _AUGMENT, step)


def share_of(
    n: int, seed: int, step: int, nodes: int, batch_size: int, local: slice
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What some of the nodes have of the global batch of a step.

    Returns:
        places in the batch and numbers of the examples there, from 0 to n - 1, node after node.

    Raises:
        ValueError: where the nodes do not divide the batch, or a number is out of range.

    Example:
        >>> share_of(n=10, seed=0, step=0, nodes=4, batch_size=8, local=slice(1, 2))[0]
        array([2, 3])
    """
    if nodes < 1 or batch_size % nodes:
        raise ValueError(f"`nodes` must divide `batch_size`, got {nodes} nodes and a batch of {batch_size}")
    mine = np.arange(batch_size).reshape(nodes, -1)[local].ravel()
    return mine, batch_indices(seed, step, batch_size, n)[mine]


def make_batch(
    dataset: Dataset, seed: int, step: int, nodes: int, batch_size: int, local: slice = slice(None)
) -> tuple[npt.NDArray[np.float32], Labels]:
    """The training batch of a step, augmented and normalised, split over the nodes.

    Args:
        dataset: where from.
        seed: of order and augmentation.
        step: from 0.
        nodes: how many nodes share the batch; node i has the i-th of `nodes` equal, disjoint parts.
        batch_size: of the global batch.
        local: the nodes to build the parts of, where a process holds only some; all by default.

    Returns:
        images f32[nodes, batch_size / nodes, h, w, c], labels int32[nodes, batch_size / nodes]; fewer nodes
        where `local` says so.

    Raises:
        ValueError: where the nodes do not divide the batch, or a number is out of range.

    Example:
        >>> from jgc.training.data import load_digits
        >>> make_batch(load_digits(), seed=0, step=0, nodes=4, batch_size=32)[0].shape
        (4, 8, 8, 8, 1)
    """
    mine, taken = share_of(len(dataset.train_labels), seed, step, nodes, batch_size, local)
    images, labels = dataset.train_images[taken], dataset.train_labels[taken]
    if dataset.augment != Augment():
        dy, dx, flip = draw(augment_rng(seed, step), batch_size, dataset.augment)
        images = apply(images, Draw(dy[mine], dx[mine], flip[mine]), dataset.augment.pad)
    images, per_node = normalise(images, dataset.mean, dataset.std), batch_size // nodes
    return images.reshape(-1, per_node, *dataset.image_shape), labels.reshape(-1, per_node)


def test_batches(dataset: Dataset, batch_size: int) -> Iterator[EvalBatch]:
    """The test images in order, normalised, in batches of one shape, so that evaluation compiles once.

    Args:
        dataset: where from.
        batch_size: of each batch; the last one is filled up with zeros and label 0 where `mask` is False.

    Returns:
        An iterator of ceil(n / batch_size) batches.

    Raises:
        ValueError: for a batch size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be positive, got {batch_size}")
    return (
        _test_batch(dataset, start, batch_size) for start in range(0, len(dataset.test_labels), batch_size)
    )


def _test_batch(dataset: Dataset, start: int, batch_size: int) -> EvalBatch:
    images = normalise(dataset.test_images[start : start + batch_size], dataset.mean, dataset.std)
    labels = dataset.test_labels[start : start + batch_size]
    fill = (0, batch_size - len(labels))
    mask = np.arange(batch_size) < len(labels)
    return EvalBatch(np.pad(images, (fill, (0, 0), (0, 0), (0, 0))), np.pad(labels, fill), mask)


def prefetch(fn: Callable[[int], T], start: int, stop: int, depth: int = 2) -> Iterator[T]:
    """fn(start), ..., fn(stop - 1), each computed in a background thread up to `depth` steps ahead.

    Args:
        fn: a function of the step, such as a `partial` of `make_batch`; called in order, in one thread.
        start: first step.
        stop: the step after the last.
        depth: how many results may wait.

    Returns:
        An iterator. An exception in `fn` is raised at its step. Leaving the loop early, or `close()`, cancels
        what has not begun and waits for what has.

    Raises:
        ValueError: at once, for a depth below 1.

    Example:
        >>> list(prefetch(lambda step: step**2, 0, 4))
        [0, 1, 4, 9]
    """
    if depth < 1:
        raise ValueError(f"`depth` must be at least 1, got {depth}")
    return _prefetch(fn, start, stop, depth)


def _prefetch(fn: Callable[[int], T], start: int, stop: int, depth: int) -> Iterator[T]:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="jgc-prefetch") as pool:
        pending: deque[Future[T]] = deque(pool.submit(fn, s) for s in range(start, min(start + depth, stop)))
        try:
            for ahead in range(start + depth, stop + depth):
                result = pending.popleft().result()
                if ahead < stop:
                    pending.append(pool.submit(fn, ahead))
                yield result
        finally:  # an error, or the loop was left: the pool's own exit would first run all that is pending
            for future in pending:
                future.cancel()
