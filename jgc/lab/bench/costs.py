"""The outcome of `bench methods`, and its page."""

import math
from typing import NamedTuple

import numpy as np

from jgc.lab.shared.tables import ratio, table
from jgc.lab.shared.timing import Times

DENSE = "dense"  # all others are compared with it
GRADIENTS, UPDATE, AGGREGATE, BEFORE, OPTIMIZER = "gradients", "update", "aggregate", "before", "optimizer"


class Row(NamedTuple):
    """One phase of one method.

    Attributes:
      method, phase: their names.
      seconds: f64[repeats] each of UPDATE (everything after the gradients), AGGREGATE (the compressor), BEFORE
        (memory and encoder, part of AGGREGATE) and OPTIMIZER. No BEFORE if the method is not composed.
      up: logical bytes that a worker and a leader send up in a step; equal if there is no leader.
    """

    method: str
    phase: str
    seconds: dict[str, Times]
    up: tuple[float, float]


class Costs(NamedTuple):
    """Outcome of the benchmark; the first row is the dense step's.

    Attributes:
      workload, nodes, repeats: as given.
      values: numbers in the gradient, n.
      gradients: f64[repeats], seconds of all nodes' gradients.
      rows: every phase of every method.
      held: by method, bytes of its state per parameter: shared and per node.
    """

    workload: str
    nodes: int
    repeats: int
    values: int
    gradients: Times
    rows: tuple[Row, ...]
    held: dict[str, tuple[float, float]]


def markdown(costs: Costs, machine: str) -> str:
    """The page."""
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
             "of it before sending (memory, encode)", "of it the rest (exchange, decode, update)", "optimiser, ms"],
            [time_cells(row, costs) for row in costs.rows],
        ),
        "A dash: the method is not composed of a codec, a memory and an exchange. The rest is the difference, round by "
        "round, and includes the guard against non-finite gradients.",
        "## Bytes sent up in a step, and memory",
        table(["method", "phase", "worker", "ratio", "leader", "ratio"], sent),
        "Logical bytes of one node, from shapes; upper bounds where a method finds its sizes in the run. The "
        "compressor's state, in bytes per parameter:",
        table(
            ["method", "shared", "per node"],
            [[name, *(f"{size:.4g}" for size in sizes)] for name, sizes in costs.held.items()],
        ),
    ]) + "\n"  # fmt: skip


def time_cells(row: Row, costs: Costs) -> list[str]:
    """A row of the first table."""
    step, dense = whole_step(row, costs), whole_step(costs.rows[0], costs)
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
    """Median and spread in milliseconds, or a dash if not measured."""
    return "-" if seconds is None else shown(1e3 * seconds, 2)


def shown(values: Times, digits: int | None = None) -> str:
    """Median and half the distance between the quartiles, with `digits` decimals; None: three significant digits.

    Example:
      >>> shown(np.array([1.0, 2.0, 3.0, 4.0, 9.0]), 1), shown(np.array([1.0]), 1)
      ('3.0 ± 1.0', '1.0')
      >>> [shown(np.array([x, 1.1 * x])) for x in (0.0567, 1.24, 1234.0)]
      ['0.0595 ± 0.0014', '1.30 ± 0.03', '1296 ± 31']
    """
    low, middle, high = np.percentile(values, [25, 50, 75])
    if digits is None:
        digits = max(0, 2 - math.floor(math.log10(middle))) if middle > 0 else 0
    return f"{middle:.{digits}f}" + (f" ± {(high - low) / 2:.{digits}f}" if values.size > 1 else "")


def whole_step(row: Row, costs: Costs) -> Times:
    """Seconds of a step in each round: gradients and update."""
    return costs.gradients + row.seconds[UPDATE]
