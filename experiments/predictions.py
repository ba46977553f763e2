"""`python -m experiments predictions`: errors of the predictions of `jgc advise` against runs of `bench network`.

A link fitted to one place, a rate and a number of hosts, predicts all others. Times of computing come from steps
without a network: of the fitted place, or for a different number of hosts from a place with that number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from jgc.lab.advise.advice import CONTROL, UNCOMPRESSED, name
from jgc.lab.advise.model import Link, communication, rate_of
from jgc.lab.advise.page import finite, write
from jgc.lab.advise.results import (
    TWENTY,
    Place,
    SentOf,
    calibrated,
    methods_at,
    place_of,
    places,
    processors,
    read,
    seconds,
    sent_in,
    sharing,
)
from jgc.lab.bench.network.figures import Interval, median
from jgc.lab.bench.network.results import Results, key
from jgc.lab.shared.tables import table
from jgc.training.errors import UserError

GOAL_ERROR, GOAL_WINNERS = 0.25, 0.80


@dataclass(frozen=True)
class Predictions:
    """Errors of the predictions of `jgc advise` against a run of `jgc bench network`.

    A link is fitted to one place and predicts all others.

        python -m experiments predictions docs/results/network/results.json --output DIR

        Median error 5.0 % over 65 cells (goal: at most 25 %: met); 78 % of them are within 25 %, ...
    """

    results: tyro.conf.Positional[Path]
    """results.json of bench network, or its folder"""
    calibrate_on: str = "4/100mbit"
    """hosts and rate of that run to fit to"""
    output: Path | None = None
    """folder of advise.md and advise.json"""

    def run(self, line: str) -> None:
        """Print the errors, and write every cell into a folder."""
        measured = read(self.results)
        outcome = check(measured, place_of(self.calibrate_on), sent_in(measured))
        text = markdown(outcome, measured)
        print(text)
        if self.output is not None:
            write(self.output, "Advice against measurement", line, text, as_json(outcome))


class Cell(NamedTuple):
    """A method in a place.

    Attributes:
      at: hosts and rate.
      method: its name.
      measured: seconds of a step, the median and its 90 % interval.
      predicted: seconds of a step.
    """

    at: Place
    method: str
    measured: Interval
    predicted: float

    @property
    def error(self) -> float:
        """In shares of the measured time, with its sign."""
        return self.predicted / self.measured.middle - 1


class Winner(NamedTuple):
    """The fastest method of a place.

    Attributes:
      at: hosts and rate.
      measured, predicted: cells of the fastest method and of the predicted one.
      pays: whether the fastest of all compresses; pays_predicted: whether that was predicted.
    """

    at: Place
    measured: Cell
    predicted: Cell
    pays: bool
    pays_predicted: bool

    @property
    def right(self) -> bool:
        """The same method."""
        return self.measured.method == self.predicted.method

    @property
    def tied(self) -> bool:
        """The same, or one whose measured step is within the interval of the fastest one's."""
        return self.predicted.measured.middle <= self.measured.measured.high


class Check(NamedTuple):
    """The outcome.

    Attributes:
      on: where the link was fitted.
      link: that was fitted.
      cells: all others.
      winners: a place each.
      skipped: methods that are not predicted.
    """

    on: Place
    link: Link
    cells: tuple[Cell, ...]
    winners: tuple[Winner, ...]
    skipped: tuple[str, ...]

    @property
    def error(self) -> float:
        """The median of the errors' sizes."""
        return float(np.median([abs(cell.error) for cell in self.cells]))


def check(measured: Results, on: Place, sent_of: SentOf) -> Check:
    """Predict all cells except one place's.

    Args:
      measured: a run of `bench network`; cells may be missing.
      on: the place to fit the link to.
      sent_of: see `results.sent_in`.

    Raises:
      UserError: nothing has been measured there, or nothing else.
    """
    link = calibrated(measured, on, sent_of)
    cells, skipped = [], []
    for at in places(measured):
        if at == on:
            continue
        here = link._replace(rate=rate_of(at.rate), contention=sharing(measured, at.hosts))
        for method in methods_at(measured, at):
            computing, sent = seconds(measured, at.hosts, method, "alone", on.rate), sent_of(method, at.hosts)
            if computing is None or sent is None:
                skipped.append(method)
                continue
            step = median(measured["cells"][key(at.hosts, at.rate, method)]["full"])
            cells.append(Cell(at, method, step, computing + communication(sent, at.hosts, here)))
    if not cells:
        raise UserError(f"nothing has been measured but {on}, which the link is fitted to: there is nothing to test")
    return Check(on, link, tuple(cells), winners(cells), tuple(dict.fromkeys(skipped)))


def winners(cells: Sequence[Cell]) -> tuple[Winner, ...]:
    """The fastest method of each place, measured and predicted; places with one method are left out."""
    out = []
    for at in dict.fromkeys(cell.at for cell in cells):
        candidates = [cell for cell in cells if cell.at == at and cell.method not in (CONTROL, TWENTY)]
        if len(candidates) < 2:
            continue
        measured, predicted = (
            min(candidates, key=lambda c: c.measured.middle),
            min(candidates, key=lambda c: c.predicted),
        )
        pays, foretold = (cell.method not in UNCOMPRESSED for cell in (measured, predicted))
        out.append(Winner(at, measured, predicted, pays, foretold))
    return tuple(out)


# --- the page -------------------------------------------------------------------------------------------------------


def summary(outcome: Check) -> list[str]:
    """The main figures, in sentences."""
    errors = [abs(cell.error) for cell in outcome.cells]
    within = np.mean([error <= GOAL_ERROR for error in errors])
    count = len(outcome.winners)
    right, tied, pays = _counts(outcome.winners)
    plain = [cell.error for cell in outcome.cells if cell.method in UNCOMPRESSED]
    return [
        f"Median error {100 * outcome.error:.1f} % over {len(errors)} cells (goal: at most {100 * GOAL_ERROR:.0f} %: "
        f"{_met(outcome.error <= GOAL_ERROR)}); {100 * within:.0f} % of them are within {100 * GOAL_ERROR:.0f} %, the "
        f"largest error is {100 * max(errors):.0f} %."
        + (f" Of the {len(plain)} cells without compression the median is {100 * np.median(np.abs(plain)):.0f} %, "
           f"from {100 * min(plain):+.0f} to {100 * max(plain):+.0f} %." if plain else ""),
        f"The fastest method is right in {right} of {count} places"
        + (f" ({100 * right / count:.0f} %; goal: at least {100 * GOAL_WINNERS:.0f} %: "
           f"{_met(right >= GOAL_WINNERS * count)})" if count else "")
        + f"; in {tied} it is right or its measured step lies within the 90 % interval of the fastest one's. Whether "
        f"compression pays is right in {pays} of {count}; it does in {sum(w.pays for w in outcome.winners)} of them.",
    ]  # fmt: skip


def _counts(cells: Sequence[Winner]) -> tuple[int, int, int]:
    return (sum(w.right for w in cells), sum(w.tied for w in cells), sum(w.pays == w.pays_predicted for w in cells))


def _met(holds: bool) -> str:
    return "met" if holds else "not met"


def markdown(outcome: Check, measured: Results) -> str:
    """The outcome as a page."""
    link, cores = outcome.link, processors(measured)
    limit = "none found" if link.limit == float("inf") else f"{link.limit / 1e6:.4g} MB/s"
    how = (
        f"Fitted only to {outcome.on} (hosts/rate): efficiency {link.efficiency:.3f}, overhead {link.overhead:.3g} s "
        f"a collective, latency {link.latency:.3g} s a message, what a processor can send {limit}. Computation and "
        f"compression were measured at {outcome.on}, for other numbers of hosts without a network and with as "
        f"many. The hosts share {cores:g} processors."
    )
    times = [[str(c.at.hosts), c.at.rate, name(c.method), f"{c.measured.middle:.4f}",
              f"{c.measured.low:.4f} to {c.measured.high:.4f}", f"{c.predicted:.4f}", f"{100 * c.error:+.0f} %"]
             for c in outcome.cells]  # fmt: skip
    firsts = [[str(w.at.hosts), w.at.rate, name(w.measured.method), f"{w.measured.measured.middle:.4f}",
               name(w.predicted.method), f"{w.predicted.measured.middle:.4f}",
               "yes" if w.right else "within its interval" if w.tied else "no",
               "yes" if w.pays == w.pays_predicted else "no"] for w in outcome.winners]  # fmt: skip
    parts = [*summary(outcome), how]
    if outcome.skipped:
        parts.append(f"Measured but not predicted, PyTorch's rows and local steps: {', '.join(outcome.skipped)}.")
    parts += [
        "## The fastest method",
        table(["hosts", "rate", "fastest", "its step, s", "predicted fastest", "its measured step, s", "right",
               "whether it pays: right"], firsts),
        "## Every cell",
        table(["hosts", "rate", "method", "measured step, s", "90 % interval", "predicted, s", "error"], times),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def as_json(outcome: Check) -> dict[str, Any]:
    """The outcome as plain data."""
    right, tied, pays = _counts(outcome.winners)
    cells = [{"hosts": c.at.hosts, "rate": c.at.rate, "method": c.method, "measured": c.measured.middle,
              "predicted": c.predicted, "error": c.error} for c in outcome.cells]  # fmt: skip
    firsts = [{"hosts": w.at.hosts, "rate": w.at.rate, "measured": w.measured.method, "predicted": w.predicted.method}
              for w in outcome.winners]  # fmt: skip
    return {"calibrated_on": str(outcome.on), "link": finite(outcome.link._asdict()), "median_error": outcome.error,
            "winners_right": right, "winners_right_or_tied": tied, "pays_right": pays, "places": len(firsts),
            "winners": firsts, "cells": cells, "skipped": list(outcome.skipped)}  # fmt: skip
