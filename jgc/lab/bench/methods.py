"""What every method costs in every phase, beside the dense step of the same run: time by part, memory and bytes.

    python -m jgc bench methods --workload digits_convnet5 --methods topk,qsgd,onebit

All that is timed runs in turn in one process, round after round, each piece compiled by itself. After the gradients,
which are the same for all, a step is the compressor's aggregate and the optimiser's update. Of a method that `compose`
built, the aggregate divides: what a node computes before sending (memory, encode), and the rest. Gradients are those of
random images, and every phase starts from the state of a run's first step, as in `bench.step_time`. First and last
layer get no treatment of their own: they are compressed by the method that is measured, like all others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc import compress
from jgc.compress import Method, method_of
from jgc.lab.bench.pieces import aggregated, encoded, updated
from jgc.lab.bench.step_time import parts_of, updater, variables_of
from jgc.lab.bench.timing import Times, Work, rounds
from jgc.lab.report.tables import ratio, table
from jgc.layout.pack import make_packing
from jgc.method.guard import logical
from jgc.training.config import Config, LayersConfig, check, resolve
from jgc.training.errors import UserError, did_you_mean
from jgc.training.program import compile_gradients
from jgc.training.step import Gradients, Parts, TrainState
from jgc.types import Compressor, Nodes, PyTree
from jgc.wire.account import sent_by

DENSE = "dense"  # what all others are compared with
GRADIENTS, UPDATE, AGGREGATE, BEFORE, OPTIMIZER = "gradients", "update", "aggregate", "before", "optimizer"


class Row(NamedTuple):
    """One phase of one method.

    Attributes:
      method, phase: their names.
      seconds: f64[repeats] each of UPDATE (everything after the gradients), AGGREGATE (the compressor alone), BEFORE
        (of that, memory and encode) and OPTIMIZER. No BEFORE where the method does not divide.
      up: bytes that a worker and a leader send up in a step, logically; the same where there is no leader.
    """

    method: str
    phase: str
    seconds: dict[str, Times]
    up: tuple[float, float]


class Costs(NamedTuple):
    """Outcome of the benchmark; the first row is the dense step's.

    Attributes:
      workload, nodes, repeats: what was asked for.
      values: numbers in the gradient, n.
      gradients: f64[repeats], seconds in which all nodes' gradients are computed.
      rows: every phase of every method.
      held: by method, bytes of its state per parameter: shared, and each node's own.
    """

    workload: str
    nodes: int
    repeats: int
    values: int
    gradients: Times
    rows: tuple[Row, ...]
    held: dict[str, tuple[float, float]]


def measure(workload: str, nodes: int, repeats: int, methods: Sequence[str] = (), alpha: float | None = None) -> Costs:
    """Time every phase of methods, and count what they hold and send.

    Args:
      workload: a name in `jgc.training.workloads`.
      nodes: K.
      repeats: rounds over all that is timed.
      methods: names; all that are registered if there are none. The dense step is always measured.
      alpha: share selected, for the methods that select; None for the workload's.

    Raises:
      UserError: an unknown method or workload, or a batch that the nodes do not divide.
    """
    configs = [configured(method, workload, nodes, alpha) for method in chosen(methods)]
    variables = variables_of(configs[0])
    work: dict[str, Callable[[], Any]] = {}
    phases: list[tuple[str, str, dict[str, str], tuple[float, float]]] = []  # method, phase, names in `work`, bytes up
    held = {}
    for config in configs:
        parts, state, batch = parts_of(config, variables)
        compressor, name = parts.compressor, method_of(config.compressor).name
        if not work:  # the same for all methods
            gradients_of = compile_gradients(parts, state, batch)
            work[GRADIENTS] = partial(gradients_of, state.params, state.own, batch)
            gradients = work[GRADIENTS]()
        held[name] = bytes_held(compressor, state.params, parts.nodes)
        work[f"{name} {OPTIMIZER}"] = updated(parts, state, gradients.grads)
        for phase in compressor.schedule:
            names = {OPTIMIZER: f"{name} {OPTIMIZER}"}
            for piece, run in _pieces(parts, phase.value, state, gradients).items():
                names[piece] = f"{len(phases)} {piece}"
                work[names[piece]] = run
            wire = logical(compressor, phase.value, state.params, parts.nodes)
            phases.append((name, phase.name, names, (sent_by("worker", wire), sent_by("leader", wire))))
    seconds = rounds(work, repeats)
    rows = tuple(
        Row(name, phase_name, {piece: seconds[key] for piece, key in names.items()}, up)
        for name, phase_name, names, up in phases
    )
    values = make_packing(variables["params"]).size
    return Costs(workload, nodes, repeats, values, seconds[GRADIENTS], rows, held)


def names_of(wanted: Sequence[str]) -> list[str]:
    """Methods of those names, or all that are registered.

    Raises:
      UserError: a name is not registered.
    """
    known = list(compress.METHODS)
    for name in wanted:
        if name not in known:
            raise UserError(f"unknown method {name!r}{did_you_mean(name, known)} (one of {', '.join(known)})")
    return list(wanted) or known


def chosen(names: Sequence[str]) -> list[Method]:
    """The methods of those names, or all; the dense one first, asked for or not.

    Raises:
      UserError: a name is not registered.
    """
    return [compress.METHODS[name] for name in dict.fromkeys((DENSE, *names_of(names)))]


def configured(method: Method, workload: str, nodes: int, alpha: float | None) -> Config:
    """A run of a method with the workload's settings, but without layers that go another way.

    Raises:
      UserError: an unknown workload, or a batch that the nodes do not divide.
    """
    config = resolve(Config(compressor=method.settings(), workload=workload, nodes=nodes))
    check(config)
    fields = {field.name for field in dataclasses.fields(config.compressor)}
    changes = {"alpha": alpha} if alpha is not None and "alpha" in fields else {}
    settings = dataclasses.replace(config.compressor, **changes)
    return dataclasses.replace(config, compressor=settings, layers=LayersConfig(dense="", top_k=""))


def bytes_held(compressor: Compressor, params: PyTree, nodes: Nodes) -> tuple[float, float]:
    """Bytes of a compressor's state per parameter of the model: shared, and of each node's own."""
    state = jax.eval_shape(partial(compressor.init, nodes=nodes), jax.random.key(0), params)
    shared, local = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in state)
    n = make_packing(params).size
    return shared / n, local / nodes.count / n


# --- what is timed --------------------------------------------------------------------------------------------------


def _pieces(parts: Parts, phase: Any, state: TrainState, gradients: Gradients) -> Work:
    """The pieces of one phase's step after the gradients, but for the optimiser's."""
    work = {
        UPDATE: updater(parts, phase, state, gradients),
        AGGREGATE: aggregated(parts, phase, state.compressor, gradients.grads),
    }
    if parts.compressor.core.stages is not None:
        work[BEFORE] = encoded(parts, phase, state.compressor, gradients.grads)
    return work


# --- the page -------------------------------------------------------------------------------------------------------


def markdown(costs: Costs, machine: str) -> str:
    """The outcome as a page."""
    spread = "half the distance between the quartiles" if costs.repeats > 1 else "not known from one round"
    sent = [bytes_cells(row, costs) for row in costs.rows]
    return "\n\n".join([
        f"`{costs.workload}`, {costs.values:,} parameters, {costs.nodes} nodes, all layers alike; {machine}.",
        f"Gradients of all nodes: {milliseconds(costs.gradients)} ms, the same for all. Times are of all nodes on this "
        f"machine together, medians of {costs.repeats} rounds in turn; the spread is {spread}. Nothing is sent "
        "over a network. Each piece is compiled by itself, so that parts need not add up to the whole.",
        "## Time",
        table(
            ["method", "phase", "after the gradients, ms", "whole step, ms", "of the dense step", "aggregate, ms",
             "of it before sending (memory, encode)", "of it the rest (exchange, decode, keep)", "optimiser, ms"],
            [time_cells(row, costs) for row in costs.rows],
        ),
        "A dash: the method is not made of a codec, a memory and an exchange, and does not divide. The rest is the "
        "difference, round by round; the guard against non-finite gradients is in it.",
        "## Bytes sent up in a step, and memory",
        table(["method", "phase", "worker", "ratio", "leader", "ratio"], sent),
        "Logical bytes of one node, from shapes; upper bounds where a method finds its sizes in the run. The "
        "compressor's state, beside parameters and optimiser, in bytes per parameter:",
        table(
            ["method", "shared", "each node's own"],
            [[name, *(f"{size:.4g}" for size in sizes)] for name, sizes in costs.held.items()],
        ),
    ]) + "\n"  # fmt: skip


def time_cells(row: Row, costs: Costs) -> list[str]:
    """A row of the first table."""
    step, dense = (costs.gradients + r.seconds[UPDATE] for r in (row, costs.rows[0]))
    aggregate, before = row.seconds[AGGREGATE], row.seconds.get(BEFORE)
    rest = None if before is None else aggregate - before
    times = [milliseconds(x) for x in (aggregate, before, rest, row.seconds[OPTIMIZER])]
    update = milliseconds(row.seconds[UPDATE])
    return [row.method, row.phase, update, milliseconds(step), shown(step / dense, 3), *times]


def bytes_cells(row: Row, costs: Costs) -> list[str]:
    """A row of the second table."""
    return [row.method, row.phase, *(cell for up in row.up for cell in
            (f"{up:,.0f}", ratio(4 * costs.values / up if up else None)))]  # fmt: skip


def milliseconds(seconds: Times | None) -> str:
    """Median and spread in milliseconds, or a dash for what was not measured."""
    return "-" if seconds is None else shown(1e3 * seconds, 2)


def shown(values: Times, digits: int) -> str:
    """Median and half the distance between the quartiles.

    Example:
      >>> shown(np.array([1.0, 2.0, 3.0, 4.0, 9.0]), 1), shown(np.array([1.0]), 1)
      ('3.0 ± 1.0', '1.0')
    """
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.{digits}f}" + (f" ± {(high - low) / 2:.{digits}f}" if values.size > 1 else "")
