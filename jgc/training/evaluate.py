"""The score and the loss of a model on held-out data, with the batch statistics averaged over the nodes."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jgc import comm
from jgc.data import ACCURACY, PERPLEXITY, EvalBatch, Source
from jgc.nodes import LOCAL, SHARED, on_nodes, place_array
from jgc.training.step import Parts, TrainState
from jgc.types import Array, PyTree

LOSS = "validation_loss"
Batches = Callable[[int], Iterator[EvalBatch]]  # given what their size must be a multiple of


def make_evaluate(parts: Parts, source: Source) -> Callable[[TrainState], float]:
    """`state -> score`, over all that `source` has for evaluation."""
    return _over_all(parts, source.evaluation, source.score.name)


def make_validate(parts: Parts, source: Source) -> Callable[[TrainState], float] | None:
    """`state -> validation loss`, the mean cross-entropy over what is held out; None where a run asks for none."""
    asked = parts.config.schedule == "validation" or parts.config.data.validation > 0
    return _over_all(parts, source.validation, LOSS) if asked and source.validation is not None else None


def _over_all(parts: Parts, batches: Batches, figure: str) -> Callable[[TrainState], float]:
    """A figure over all of some data.

    A recurrent model starts without a state, whatever the run carries, and hands its own on from batch to batch.
    """
    of_label, of_mean = MEASURES[figure]
    mean_stats, add_up = make_mean_stats(parts), jax.jit(partial(_sums, parts.apply, of_label))

    def evaluate(state: TrainState) -> float:
        stats = mean_stats(state.batch_stats)
        variables = {"params": state.params, **({"batch_stats": stats} if stats else {})}
        carried: dict[str, PyTree] = {}
        sums = []
        for batch in _placed(parts, batches):
            carried, of_batch = add_up({**variables, **carried}, *batch)
            sums.append(of_batch)
        total, count = np.array(jax.device_get(sums), np.float64).sum(axis=0)
        return of_mean(total / count)

    return evaluate


def _is_right(logits: Array, labels: Array) -> Array:
    return jnp.argmax(logits, -1) == labels


def _cross_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


MEASURES: dict[str, tuple[Callable[[Array, Array], Array], Callable[[float], float]]] = {
    ACCURACY.name: (_is_right, float),
    PERPLEXITY.name: (_cross_entropy, lambda loss: float(np.exp(loss))),
    LOSS: (_cross_entropy, float),
}
"""By its name: a figure of each label from logits [..., classes] and labels [...], and what its mean makes."""


def _sums(
    apply: Callable, of_label: Callable, variables: PyTree, inputs: PyTree, labels: Array, mask: Array
) -> tuple[dict[str, PyTree], tuple[Array, Array]]:
    """What the model carries on, and the sum of a figure over a batch's labels with their number."""
    logits, new = apply(variables, inputs, train=False, mutable=["carry"])
    return dict(new), (jnp.sum(jnp.where(mask, of_label(logits, labels), 0)), jnp.sum(mask))


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


def _placed(parts: Parts, batches: Batches) -> Iterator[EvalBatch]:
    """What is evaluated, split over the devices."""
    nodes = parts.nodes
    if nodes.mesh is None:
        return batches(1)
    axes = (*nodes.slow, *nodes.fast)
    sharding = NamedSharding(nodes.mesh, P(axes))  # type: ignore[arg-type]
    return (jax.tree.map(lambda x: place_array(x, sharding), batch) for batch in batches(nodes.size(axes)))
