"""Bytes besides the gradients: metrics, batch statistics for evaluation and validation, diagnose steps.

Counted for one device in the layout of one node per device; in the run's layout if parameters are sharded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.loops.step_program import make_diagnosis
from jgc.nodes.layouts import as_one_per_device
from jgc.nodes.placement import SHARED, placements_of
from jgc.training.output.metrics import Line
from jgc.training.run.setup import Setup
from jgc.training.steps.costs import PhaseCost
from jgc.training.steps.evaluate import LOSS, on_mean_stats
from jgc.training.steps.step import METRICS, Parts, TrainState, collection
from jgc.types import PyTree


def other_bytes(
    setup: Setup, state: TrainState, costs: Sequence[PhaseCost], lines: Sequence[Line], pictures: bool = False
) -> dict[str, Any]:
    """Bytes each time and number of times, by purpose. `pictures`: whether the run drew masks.png."""
    parts, score, every = setup.parts, setup.source.score, setup.parts.config.local.every
    divided = placements_of(state.params) != jax.tree.map(lambda _: SHARED, state.params)
    apart = parts if divided else parts._replace(nodes=as_one_per_device(parts.nodes))
    metrics = jax.ShapeDtypeStruct((parts.nodes.count, len(METRICS) - 1), jnp.float32)  # all nodes agree on `finite`
    stats = _shapes(collection(state, "batch_stats"))
    evaluations = sum((score.name in line) + (LOSS in line) for line in lines) + pictures
    return {
        # with local steps each node's metrics stay where they are
        "metrics": {"times": 0 if every else len(lines), "bytes": _bytes_of(on_mean_stats(apart), metrics)},
        "batch statistics": {"times": evaluations, "bytes": _bytes_of(on_mean_stats(apart), stats)},
        "diagnose": {cost.phase.name: _diagnose(apart, state, cost, lines) for cost in costs if cost.compresses},
    }


def _diagnose(apart: Parts, state: TrainState, cost: PhaseCost, lines: Sequence[Line]) -> dict[str, Any]:
    times = sum("true_cosine" in line for line in lines if line["phase"] == cost.phase.name)
    if not times:
        return {"times": 0, "bytes": 0.0}
    compressor = state.compressor if apart.local is None else state.compressor[0]
    nodes, where = apart.nodes, placements_of((state.params, compressor))
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((nodes.count, *p.shape), p.dtype), state.params)
    compare = make_diagnosis(apart.exchanged, cost.phase.value, nodes, *where)
    sent = _bytes_of(compare, jax.random.key(0), jnp.int32(0), grads, _shapes(compressor))
    return {"times": times, "bytes": sent}


def _bytes_of(fn: Callable[..., Any], *args: PyTree) -> float:
    with comm.ledger() as sent:
        jax.eval_shape(fn, *args)
    return float(sum(s.bytes for s in sent))


def _shapes(tree: PyTree) -> PyTree:
    return jax.eval_shape(lambda: tree)
