"""Accuracy on the test images, with the batch statistics averaged over the nodes."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jgc import comm
from jgc.data import Dataset, test_batches
from jgc.nodes import LOCAL, SHARED, on_nodes, place_array
from jgc.training.step import Parts, TrainState
from jgc.types import PyTree

BATCH = 500


def make_evaluate(parts: Parts, dataset: Dataset) -> Callable[[TrainState], float]:
    """`state -> accuracy on all test images, in [0, 1]`."""
    mean_stats, count = make_mean_stats(parts), jax.jit(_counter(parts.apply))

    def evaluate(state: TrainState) -> float:
        stats = mean_stats(state.batch_stats)
        correct = [count(state.params, stats, *batch) for batch in _batches(parts, dataset)]
        return sum(int(c) for c in correct) / len(dataset.test_labels)

    return evaluate


def make_mean_stats(parts: Parts) -> Callable[[PyTree], PyTree]:
    """Batch statistics `[K, ...] -> [...]`, their mean over the nodes, in one collective."""
    return jax.jit(on_mean_stats(parts))


def on_mean_stats(parts: Parts) -> Callable[[PyTree], PyTree]:
    """The same, not compiled. Nothing is sent where there are no statistics."""

    def mean(stats):
        flat, unravel = ravel_pytree(stats)
        return unravel(comm.mean(flat, parts.nodes, "statistics"))

    on_axis = on_nodes(mean, parts.nodes, ins=(LOCAL,), outs=SHARED)
    return lambda stats: on_axis(stats) if jax.tree.leaves(stats) else stats


def _counter(apply: Callable) -> Callable:
    def count(params, stats, images, labels, mask):
        variables = {"params": params, "batch_stats": stats} if stats else {"params": params}
        logits = apply(variables, images, train=False)
        return jnp.sum((jnp.argmax(logits, -1) == labels) & mask)

    return count


def _batches(parts: Parts, dataset: Dataset) -> Iterable[tuple]:
    """Test batches, split over the devices."""
    nodes = parts.nodes
    if nodes.mesh is None:
        return test_batches(dataset, min(BATCH, len(dataset.test_labels)))
    axes = (*nodes.slow, *nodes.fast)
    size = -(-min(BATCH, len(dataset.test_labels)) // nodes.size(axes)) * nodes.size(axes)
    sharding = NamedSharding(nodes.mesh, P(axes))  # type: ignore[arg-type]
    return (tuple(place_array(x, sharding) for x in batch) for batch in test_batches(dataset, size))
