"""Scores and validation loss of a model, with batch statistics averaged over the nodes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec as P

from jgc import comm
from jgc.backend import backend_of
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import LOCAL, SHARED
from jgc.nodes.placing import place_array, to_host
from jgc.training.data.score import ACCURACY, BITS, MEAN_IOU, NATS, PERPLEXITY, PIXEL_ACCURACY
from jgc.training.data.source import EvalBatch, Pictures, Source
from jgc.training.steps.step import Parts, TrainState, collection
from jgc.types import Array, PyTree

LOSS = "validation_loss"
Batches = Callable[[int], Iterator[EvalBatch]]  # `(multiple) -> batches`, of a size divisible by `multiple`


class Measure(NamedTuple):
    """Figures over a data set that do not depend on how it is batched."""

    # `(logits [..., classes], labels [...], mask [...]) -> arrays`, each summed over the batches
    sums: Callable[[Array, Array, Array], tuple[Array, ...]]
    figures: Callable[..., dict[str, float]]  # `(*sums in f64) -> figures by name`


def _mean_of(name: str, of_label: Callable[[Array, Array], Array], of_mean: Callable[[float], float]) -> Measure:
    """`of_mean` of the mean of `of_label` over all labels."""

    def sums(logits: Array, labels: Array, mask: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(mask, of_label(logits, labels), 0)), jnp.sum(mask)

    return Measure(sums, lambda total, count: {name: of_mean(total / count)})


def _nats(total: float, count: float) -> dict[str, float]:
    return {NATS.name: float(total / count), BITS.name: float(total / count / np.log(2))}


def _is_right(logits: Array, labels: Array) -> Array:
    return jnp.argmax(logits, -1) == labels


def _cross_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def confusion(logits: Array, labels: Array, mask: Array) -> tuple[Array]:
    """Confusion matrix i32[classes, classes]: row of the true class, column of the predicted one."""
    classes = logits.shape[-1]
    cells = labels * classes + jnp.argmax(logits, -1)
    counts = jnp.bincount(cells.ravel(), weights=mask.ravel().astype(jnp.int32), length=classes**2)
    return (counts.reshape(classes, classes),)


def of_confusion(counts: npt.NDArray[np.float64], classes: int | None = None) -> dict[str, float]:
    """Pixel accuracy, and mean intersection over union over the classes that occur.

    `classes`: of the data set, the first ones; further outputs of a model are wrong, but no classes.
    """
    right = np.diag(counts)
    union = counts.sum(axis=0) + counts.sum(axis=1) - right
    shares = (right / np.where(union > 0, union, np.nan))[:classes]
    return {PIXEL_ACCURACY.name: float(right.sum() / counts.sum()), MEAN_IOU.name: float(np.nanmean(shares))}


MEASURES: dict[str, Measure] = {
    ACCURACY.name: _mean_of(ACCURACY.name, _is_right, float),
    PERPLEXITY.name: _mean_of(PERPLEXITY.name, _cross_entropy, lambda loss: float(np.exp(loss))),
    NATS.name: _mean_of(NATS.name, _cross_entropy, float)._replace(figures=_nats),
    LOSS: _mean_of(LOSS, _cross_entropy, float),
    PIXEL_ACCURACY.name: Measure(confusion, of_confusion),
}
"""By the name of the score, or of the loss."""


class Shown(NamedTuple):
    """Example images, and the labels int32[m, h, w] that a model predicts for them."""

    pictures: Pictures
    labels: npt.NDArray[np.int32]


def make_evaluate(parts: Parts, source: Source) -> Callable[[TrainState], dict[str, float]]:
    """`state -> the score and further figures by name`, over the source's evaluation data."""
    measure = MEASURES[source.score.name]
    if measure.figures is of_confusion:
        measure = measure._replace(figures=partial(of_confusion, classes=source.classes))
    return _over_all(parts, source.evaluation, measure)


def make_validate(parts: Parts, source: Source) -> Callable[[TrainState], float] | None:
    """`state -> validation loss`, the mean cross-entropy over held-out data; None if the run needs none."""
    config = parts.config
    asked = config.schedule == "validation" or config.data.validation > 0 or config.correction.every > 0
    if not asked or source.validation is None:
        return None
    figures = _over_all(parts, source.validation, MEASURES[LOSS])
    return lambda state: figures(state)[LOSS]


def show(parts: Parts, source: Source, state: TrainState) -> Shown | None:
    """The model's predictions for the source's example images; None if it has none. All processes must call it."""
    if source.pictures is None:
        return None
    pictures = source.pictures()
    variables = jax.tree.map(to_host, _make_variables(parts)(state))  # without collectives
    logits = jax.jit(partial(parts.apply, train=False))(variables, pictures.inputs)
    return Shown(pictures, np.asarray(jnp.argmax(logits, -1), np.int32))


def _make_variables(parts: Parts) -> Callable[[TrainState], dict[str, PyTree]]:
    """`state -> variables to evaluate with`: mean batch statistics, and no carried state."""
    mean_stats = jax.jit(on_mean_stats(parts))

    def variables(state: TrainState) -> dict[str, PyTree]:
        stats = mean_stats(collection(state, "batch_stats"))
        return {"params": state.params, **({"batch_stats": stats} if stats else {})}

    return variables


def _over_all(parts: Parts, batches: Batches, measure: Measure) -> Callable[[TrainState], dict[str, float]]:
    """`state -> figures` over a data set. A recurrent model starts without a carry and passes it on between batches."""
    make_variables = _make_variables(parts)
    in_turn = parts.nodes.mesh is not None and backend_of(parts.nodes) == "cpu"

    @jax.jit
    def add_up(variables, inputs, labels, mask):
        logits, new = parts.apply(variables, inputs, train=False, mutable=["carry"])
        return dict(new), measure.sums(logits, labels, mask)

    def evaluate(state: TrainState) -> dict[str, float]:
        variables = make_variables(state)
        carried: dict[str, PyTree] = {}
        sums = []
        for batch in _placed(parts, batches):
            carried, of_batch = add_up({**variables, **carried}, *batch)
            # devices of a CPU are threads: concurrent collectives of several batches can wait forever
            sums.append(jax.block_until_ready(of_batch) if in_turn else of_batch)
        of_batches = zip(*jax.device_get(sums), strict=True)
        return measure.figures(*(np.array(counts, np.float64).sum(axis=0) for counts in of_batches))

    return evaluate


def on_mean_stats(parts: Parts) -> Callable[[PyTree], PyTree]:
    """Batch statistics `[K, ...] -> [...]`, their mean over the nodes, in one collective; nothing without any."""

    def mean(stats):
        flat, unravel = ravel_pytree(stats)
        return unravel(comm.pmean(flat, parts.nodes, "statistics"))

    on_axis = on_nodes(mean, parts.nodes, ins=(LOCAL,), outs=SHARED)
    return lambda stats: on_axis(stats) if jax.tree.leaves(stats) else stats


def _placed(parts: Parts, batches: Batches) -> Iterator[EvalBatch]:
    """The evaluation batches, sharded over the devices."""
    nodes = parts.nodes
    if nodes.mesh is None:
        return batches(1)
    axes = (*nodes.slow, *nodes.fast)
    sharding = NamedSharding(nodes.mesh, P(axes))  # type: ignore[arg-type]
    return (jax.tree.map(lambda x: place_array(x, sharding), batch) for batch in batches(nodes.size(axes)))
