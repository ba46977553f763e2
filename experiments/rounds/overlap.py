"""Overlap against none at equal seconds: the loss of each after a search over its outer step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from experiments.rounds.cells import BUCKET, Cell, Measured, Outer
from experiments.rounds.figures import loss_at
from jgc.rounds.loop import EAGER

METHOD, RATE, EVERY = "qsgd", "10mbit", 10
ENDLESS = 10**7  # steps: seconds end these runs
WITHOUT = (Outer(1.0, 0.6), Outer(0.7, 0.9), Outer(0.7, 0.6), Outer(1.0, 0.0))
WITH = (
    Outer(0.7, 0.6, 1.0), Outer(0.7, 0.3, 1.0), Outer(1.0, 0.0, 1.0),
    Outer(0.7, 0.3, 0.5), Outer(1.0, 0.0, 0.5), Outer(0.7, 0.6, 0.5), Outer(0.4, 0.9, 0.5),
    Outer(0.7, 0.0, 1 / 3), Outer(1.0, 0.0, 1 / 3), Outer(0.7, 0.3, 1 / 3),
    Outer(0.7, 0.9, EAGER), Outer(0.7, 0.6, EAGER), Outer(1.0, 0.6, EAGER), Outer(1.0, 0.3, EAGER),
)  # fmt: skip
"""Of the prototype's runs those that did not diverge, and what lies between them."""


def searched(like: Cell) -> list[Cell]:
    """The cells of the search, all with the seed of `like`."""
    cells = [(0, outer) for outer in WITHOUT] + [(1, outer) for outer in WITH]
    return [of_experiment(like, overlap, outer) for overlap, outer in cells]


def of_experiment(like: Cell, overlap: int, outer: Outer) -> Cell:
    """A cell of the experiment; `like` has its seconds, pace, seed, nodes and workload."""
    return like._replace(
        via=BUCKET, method=METHOD, rate=RATE, delay_ms=0.0, every=EVERY, overlap=overlap,
        outer=outer, steps=ENDLESS,
    )  # fmt: skip


def best(results: Mapping[Cell, Measured], like: Cell) -> list[Cell]:
    """The cells with the lowest loss, without and with overlap; none without results."""
    chosen = []
    for overlap in (0, 1):
        cells = [x for x in searched(like) if x.overlap == overlap and x in results]
        if cells:
            chosen.append(min(cells, key=lambda x: final(x, results)))
    return chosen


def repeated(results: Mapping[Cell, Measured], like: Cell, seeds: Sequence[int]) -> list[Cell]:
    """The best cells with all seeds."""
    return [cell._replace(seed=seed) for cell in best(results, like) for seed in seeds]


def final(cell: Cell, results: Mapping[Cell, Measured]) -> float:
    """The loss of a cell when its seconds are over; infinite if it diverged."""
    loss = loss_at(results[cell]["curve"], cell.seconds)
    return loss if loss == loss else float("inf")


class Pair(NamedTuple):
    """Two cells that differ in overlap, when the one with overlap ends.

    Attributes:
      cell: without overlap, of the first seed.
      utilisation: without overlap.
      losses: without and with overlap.
      seeds: of both.
    """

    cell: Cell
    utilisation: float
    losses: tuple[float, float]
    seeds: int


def pairs(chart: Mapping[Cell, Measured]) -> list[Pair]:
    """The pairs of a chart, by utilisation; without those whose other run ended earlier."""
    found = defaultdict(list)
    for cell, overlapped in chart.items():
        for other, run in chart.items():
            if cell.overlap and other == cell._replace(overlap=0, outer=other.outer):
                end = overlapped["curve"][-1][0]
                if run["curve"][-1][0] >= 0.98 * end:
                    losses = loss_at(run["curve"], end), overlapped["curve"][-1][2]
                    found[other._replace(seed=-1), cell.outer].append((other, run["utilisation"], *losses))
    made = [
        Pair(of[0][0], mean(x[1] for x in of), (mean(x[2] for x in of), mean(x[3] for x in of)), len(of))
        for of in found.values()
    ]  # fmt: skip
    return sorted(made, key=lambda pair: pair.utilisation)


def verdict(results: Mapping[Cell, Measured], like: Cell, seeds: Sequence[int]) -> str:
    """Whether overlap has the lower loss at equal seconds, in a sentence; "" without both."""
    pair = best(results, like)
    if len(pair) < 2:
        return ""
    losses = []
    for cell in pair:
        of_seeds = [cell._replace(seed=seed) for seed in seeds]
        losses.append(mean(final(x, results) for x in of_seeds if x in results))
    count = sum(pair[0]._replace(seed=seed) in results for seed in seeds)
    difference = losses[1] - losses[0]
    side = "at or below" if difference <= 0 else "above"
    return (
        f"After {like.seconds:g} s the best run with overlap has {losses[1]:.3f} nats, the best "
        f"without {losses[0]:.3f} ({count} {'seed' if count == 1 else 'seeds'}): overlap ends "
        f"{side} no overlap, by {abs(difference):.3f}."
    )
