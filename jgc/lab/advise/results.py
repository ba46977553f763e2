"""From a run of `bench network` to `jgc advise`: times of computing, and a link fitted to one of its cells.

The hosts of such a run share one machine's processors: its seconds are of `contention` hosts on a processor.
Its processor seconds are of a host with one processor, because each host computes on one thread.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc import compress
from jgc.comm.ledger import bytes_sent
from jgc.lab.advise.measure import BASELINES, baseline_sent
from jgc.lab.advise.model import UNLIMITED, Example, Link, Row, contention, fit, rate_of
from jgc.lab.bench.network import models
from jgc.lab.bench.network.methods import PLAIN_TORCH, SHARE, phase_of, settings as settings_of, split
from jgc.lab.bench.network.results import COMPUTATION, NAME, Results, key, parsed
from jgc.nodes.layouts import as_one_per_device
from jgc.training.errors import UserError
from jgc.types import Nodes, PyTree, Sent

OWN = f"{COMPUTATION}_jax"
TWENTY = "twenty_lines"
SentOf = Callable[[str, int], tuple[Sent, ...] | None]


class Place(NamedTuple):
    """A number of hosts and a rate, as results.json names them."""

    hosts: int
    rate: str

    def __str__(self) -> str:
        return f"{self.hosts}/{self.rate}"


def read(path: Path) -> Results:
    """The results of a run.

    Args:
      path: results.json or its folder.

    Raises:
      UserError: there is no such file, or it is not one of these.
    """
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no results of bench network at {file}")
    return parsed(file)


def place_of(text: str) -> Place:
    """A place from the command line.

    Raises:
      UserError: it is not written as 4/100mbit.

    Example:
      >>> place_of("4/100Mbit")
      Place(hosts=4, rate='100mbit')
    """
    hosts, slash, rate = text.strip().lower().partition("/")
    try:
        if not slash or not hosts.isdigit() or int(hosts) < 2:
            raise ValueError
        rate_of(rate)
    except ValueError:
        raise UserError(f"--calibrate-on must be hosts/rate such as 4/100mbit, got {text!r}") from None
    return Place(int(hosts), rate)


def places(cells: Results) -> list[Place]:
    """Places with measured steps, the slowest rate first."""
    measured = {Place(c["hosts"], c["rate"]) for c in cells["cells"].values() if c.get("full")}
    return sorted(measured, key=lambda at: (at.hosts, rate_of(at.rate)))


def processors(measured: Results) -> float:
    """Number of processors of the machine that all hosts shared; infinite if the file does not say."""
    match = re.match(r"(\d+) CPU core", str(measured["settings"].get("machine", "")))
    return int(match[1]) if match else math.inf


def sharing(measured: Results, hosts: int) -> float:
    """Hosts that shared a processor."""
    return contention(hosts, processors(measured))


def seconds(
    measured: Results, hosts: int, method: str, part: str, prefer: str, processor: bool = False
) -> float | None:
    """Median seconds of a part of a step that does not use the network.

    The cell of the preferred rate comes first, then a cell with as many hosts, then the one with the nearest number
    of hosts, scaled by the hosts that share a processor.

    Args:
      measured: the results.
      hosts: K.
      method: its name, or `OWN`.
      part: "alone" or "computation".
      prefer: a rate.
      processor: return processor seconds of a host instead, which do not depend on sharing.
    """
    column = f"cpu_{part}" if processor else part
    cells = [c for c in measured["cells"].values() if c["method"] == method and c.get(column)]
    nearest = min(cells, key=lambda c: (abs(c["hosts"] - hosts), c["rate"] != prefer), default=None)
    if nearest is None:
        return None
    factor = 1.0 if processor else sharing(measured, hosts) / sharing(measured, nearest["hosts"])
    return float(np.median(nearest[column])) * factor


def shapes_of(measured: Results) -> PyTree:
    """The shapes of the model's parameters.

    Raises:
      UserError: a model that jgc does not have.
    """
    return models.shapes_of(models.task_named(str(measured["settings"].get("model"))))


def sent_in(measured: Results) -> SentOf:
    """Collectives of a step by row and number of hosts; None for rows not predicted: PyTorch's, and local steps."""
    shapes = shapes_of(measured)

    @cache
    def sent_of(name: str, hosts: int) -> tuple[Sent, ...] | None:
        if name in PLAIN_TORCH or split(name)[1] is not None:
            return None
        if name in BASELINES:
            return baseline_sent(name, shapes, hosts)
        if name == TWENTY:
            values = sum(max(1, round(SHARE * x.size)) for x in jax.tree.leaves(shapes))
            return (Sent("all-gather", "values", bytes_sent("all-gather", 8 * values, hosts)),)
        try:
            compressor = compress.build(settings_of(name))
            phase = phase_of(name, compressor).value
            return compressor.wire(phase, shapes, as_one_per_device(Nodes(hosts, 1))).physical
        except (UserError, ValueError):  # a method of a different version of jgc
            return None

    return sent_of


def methods_at(measured: Results, at: Place) -> list[str]:
    """The rows with measured steps in a place."""
    return [c["method"] for c in measured["cells"].values() if (c["hosts"], c["rate"]) == at and c.get("full")]


def calibrated(measured: Results, at: Place, sent_of: SentOf) -> Link:
    """Fit a link to one place.

    Raises:
      UserError: nothing was measured there, or too little.
    """
    if at not in places(measured):
        there = ", ".join(map(str, places(measured))) or "nothing"
        raise UserError(f"nothing has been measured at {at} to calibrate on; there is {there}")
    examples = [e for name in methods_at(measured, at) if (e := _example(measured, at, name, sent_of)) is not None]
    try:
        return fit(examples, at.hosts, rate_of(at.rate), sharing(measured, at.hosts))
    except ValueError as error:
        raise UserError(f"{at}: {error}") from error


def limit(measured: Results, hosts: int, sent_of: SentOf) -> float:
    """Bytes a second that a processor can send, from steps at an unlimited rate; infinite if there are none.

    At a low rate bytes come a few at a time, and cost a processor several times as much.
    """
    free = Place(hosts, UNLIMITED)
    return calibrated(measured, free, sent_of).limit if free in places(measured) else math.inf


def _example(measured: Results, at: Place, name: str, sent_of: SentOf) -> Example | None:
    cell, sent = measured["cells"][key(at.hosts, at.rate, name)], sent_of(name, at.hosts)
    if sent is None or not cell.get("alone"):
        return None
    step = _median(cell, "full")
    busy = [cell.get(f"cpu_{part}") for part in ("full", "alone")]
    processor = _median(cell, "cpu_full") - _median(cell, "cpu_alone") if all(busy) else None
    return Example(sent, step - _median(cell, "alone"), step, processor)


def _median(cell: dict[str, Any], part: str) -> float:
    return float(np.median(cell[part]))


def rows_from(
    measured: Results, hosts: int, sent_of: SentOf, prefer: str, names: list[str]
) -> tuple[list[Row], dict[str, str]]:
    """Rows for hosts with a processor each, from the processor times of a run.

    Args:
      measured: the results.
      hosts: K; if the run does not have it, the nearest number counts.
      sent_of: see `sent_in`.
      prefer: rate of the cells to take first.
      names: methods, and baselines.

    Returns:
      The rows, and by method why it has none.

    Raises:
      UserError: the run has no computation.
    """
    computation = seconds(measured, hosts, OWN, COMPUTATION, prefer, processor=True)
    if computation is None:
        raise UserError("the run of bench network has measured no computation of JAX yet")
    rows, failed = [], {}
    for name in names:
        processor_seconds, sent = seconds(measured, hosts, name, "alone", prefer, processor=True), sent_of(name, hosts)
        if processor_seconds is None or sent is None:
            failed[name] = "not measured in that run"
        else:
            rows.append(Row(name, computation, max(0.0, processor_seconds - computation), sent))
    return rows, failed
