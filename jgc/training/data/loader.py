"""Batches of images as pure functions of (seed, step), so a checkpoint needs no position in the data.

Resuming at step s gives the batches of an uninterrupted run, bit for bit. Concatenated over the nodes, a batch does not
depend on the number of nodes. Training data is an endless sequence with one random permutation of all n examples per
epoch; step s takes positions s * batch to (s + 1) * batch. Only a batch across two epochs may repeat an example.
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

_ORDER, _AUGMENT = 0, 1  # independent streams of random numbers under one seed
EVALUATED_IMAGES = 500  # batch size of evaluation, at most


def image_source(dataset: Dataset, validation: float = 0.0) -> Source:
    """The `Source` of images in memory; the score is the accuracy on the test images."""
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
        # a checksum of the images would take long
        facts=f"{dataset.name} of shapes {shapes[0]} and {shapes[1]}, labels of checksums {labels}",
    )


def _evaluation(dataset: Dataset, multiple: int) -> Iterator[EvalBatch]:
    """The test images, in batches of a size divisible by `multiple`."""
    size = min(EVALUATED_IMAGES, len(dataset.test_labels))
    return test_batches(dataset, -(-size // multiple) * multiple)


def _rng(seed: int, stream: int, index: int) -> np.random.Generator:
    """The generator of one epoch's order or one step's augmentation."""
    # NumPy splits a number of more than 32 bits into two words: (seed, stream, index) would not be unique
    if not (0 <= seed < 2**32 and 0 <= index < 2**32):
        raise ValueError(f"`seed` and `step` must be from 0 to 2**32 - 1, got {seed} and {index}")
    return np.random.default_rng([seed, stream, index])


@lru_cache(maxsize=4)  # a step needs the order of one or two epochs
def _order(seed: int, epoch: int, n: int) -> npt.NDArray[np.int64]:
    """The permutation int64[n] of one epoch, read-only."""
    order = _rng(seed, _ORDER, epoch).permutation(n)
    order.flags.writeable = False
    return order


def batch_indices(seed: int, step: int, batch_size: int, n: int) -> npt.NDArray[np.int64]:
    """The numbers of the examples in the global batch of a step, int64[batch_size] from 0 to n - 1."""
    if step < 0 or batch_size < 1 or n < 1:
        raise ValueError(f"`step` must be at least 0, `batch_size` and `n` at least 1, got {step}, {batch_size}, {n}")
    epoch, offset = divmod(step * batch_size, n)
    indices = []
    while batch_size > 0:
        indices.append(_order(seed, epoch, n)[offset : offset + batch_size])
        epoch, offset, batch_size = epoch + 1, 0, batch_size - len(indices[-1])
    return np.concatenate(indices)


def augment_rng(seed: int, step: int) -> np.random.Generator:
    """The random generator of a step's augmentation."""
    return _rng(seed, _AUGMENT, step)


def share_of(
    n: int, seed: int, step: int, nodes: int, batch_size: int, local: slice
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The part of a step's global batch that belongs to the nodes `local`: positions in it, numbers of its examples.

    Example:
        >>> share_of(n=10, seed=0, step=0, nodes=4, batch_size=8, local=slice(1, 2))[0]
        array([2, 3])
    """
    if nodes < 1 or batch_size % nodes:
        raise ValueError(f"`nodes` must divide `batch_size`, got {nodes} nodes and a batch of {batch_size}")
    of_process = np.arange(batch_size).reshape(nodes, -1)[local].ravel()
    return of_process, batch_indices(seed, step, batch_size, n)[of_process]


def make_batch(
    dataset: Dataset, seed: int, step: int, nodes: int, batch_size: int, local: slice = slice(None)
) -> tuple[npt.NDArray[np.float32], Labels]:
    """The training batch of a step, augmented and normalised, split over the nodes.

    Images f32[nodes, batch_size / nodes, h, w, c] and labels int32[nodes, batch_size / nodes]. Node i has the i-th of
    `nodes` equal, disjoint parts; `local` are the nodes of this process.
    """
    of_process, indices = share_of(len(dataset.train_labels), seed, step, nodes, batch_size, local)
    images, labels = dataset.train_images[indices], dataset.train_labels[indices]
    if dataset.augment != Augment():
        dy, dx, flip = draw(augment_rng(seed, step), batch_size, dataset.augment)
        images = apply(images, Draw(dy[of_process], dx[of_process], flip[of_process]), dataset.augment.pad)
    images, per_node = normalise(images, dataset.mean, dataset.std), batch_size // nodes
    return images.reshape(-1, per_node, *dataset.image_shape), labels.reshape(-1, per_node)


def test_batches(dataset: Dataset, batch_size: int) -> Iterator[EvalBatch]:
    """The test images in order, normalised, in batches of one shape so that evaluation compiles once."""
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be positive, got {batch_size}")

    def batch(start: int) -> EvalBatch:
        images = normalise(dataset.test_images[start : start + batch_size], dataset.mean, dataset.std)
        return padded(images, dataset.test_labels[start : start + batch_size], batch_size)

    return map(batch, range(0, len(dataset.test_labels), batch_size))


def padded(images: npt.NDArray[np.float32], labels: Labels, size: int) -> EvalBatch:
    """A batch of `size` images [b, h, w, c] with labels [b], filled up with zeros where its mask is False."""
    fill = (0, size - len(labels))
    images = np.pad(images, (fill, (0, 0), (0, 0), (0, 0)))
    return EvalBatch(images, np.pad(labels, fill), np.arange(size) < len(labels))


def prefetch(fn: Callable[[int], T], start: int, stop: int, depth: int = 2) -> Iterator[T]:
    """fn(start), ..., fn(stop - 1), computed in a background thread up to `depth` steps ahead."""
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
        finally:  # after an error or an early exit: the pool's own exit would run all pending calls
            for future in pending:
                future.cancel()
