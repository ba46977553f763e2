"""The cells of `python -m experiments rounds`: settings of a run, and a file with a line of JSON for each."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jgc import compress
from jgc.lab.bench.network.methods import LOCAL
from jgc.lab.shared.choices import settings_from
from jgc.rounds.loop import EAGER
from jgc.training.errors import UserError
from jgc.types import Compressor

BUCKET, GLOO, TORCH, TORCHFT = VIAS = ("bucket", "gloo", "torch", "torchft")
FILE = "cells.jsonl"
WARM_UP = 1  # rounds that no figure has
GOAL = 0.97  # utilisation
Measured = dict[str, Any]


class Outer(NamedTuple):
    """SGD with Nesterov momentum outside, and with overlap what a node keeps of its movement."""

    rate: float
    momentum: float
    merge: float | str | None = None


class Message(NamedTuple):
    """A method.

    Attributes:
      name: for people.
      settings: of `jgc.compress`, with changes after colons.
      outer: without overlap.
      overlapped: with it.
    """

    name: str
    settings: str
    outer: Outer
    overlapped: Outer

    @property
    def compressor(self) -> Compressor:
        """The method, for all layers."""
        return compress.build(settings_from(self.settings))


LEARNED = "learned"
_LEARNED = "learned_topk:alpha=0.015625:candidates=16:value_code=2bit-codebook:residual_decay=0.95"
MESSAGES: Mapping[str, Message] = {
    "dense": Message("dense, 32 bits", "dense", Outer(1.0, 0.6), Outer(0.7, 0.0, 1 / 3)),
    "qsgd": Message("QSGD, 4 bits", "qsgd:bits=4", Outer(1.0, 0.6), Outer(0.7, 0.0, 1 / 3)),
    "sparseloco": Message(
        "SparseLoCo's message", LOCAL["sparseloco"], Outer(1.0, 0.0), Outer(1.0, 0.0, 1 / 3)
    ),
    LEARNED: Message("learned top-k", _LEARNED, Outer(1.0, 0.0), Outer(1.0, 0.0, 1 / 3)),
}
"""By the name of --methods. Without overlap, dense and QSGD have the best outer steps of
docs/results/local_steps, sparse methods SparseLoCo's; with it, none has momentum."""


class Cell(NamedTuple):
    """Settings of a run; two runs with equal settings are the same cell.

    Attributes:
      via: how nodes meet: "bucket" (`jgc.rounds`), "gloo" (`jgc.local_steps`), "torch" or
        "torchft".
      method: a key of `MESSAGES`.
      rate: of each node's link in both directions, such as "10mbit".
      delay_ms: from a node to the server; with collectives half of it in each direction.
      every: H, local steps of a round.
      overlap: 0 or 1 round.
      outer: see `Outer`.
      steps: local steps of a node.
      seconds: after which a run ends before that; 0 for never.
      step_seconds: that a local step lasts at least.
      seed: of the parameters, batches and random rounding.
      nodes: K.
      workload: a GPT of `jgc.training.settings.workloads`.
    """

    via: str
    method: str
    rate: str
    delay_ms: float
    every: int
    overlap: int
    outer: Outer
    steps: int
    seconds: float
    step_seconds: float
    seed: int
    nodes: int
    workload: str

    @property
    def rounds(self) -> int:
        """Rounds of the run, if its seconds suffice."""
        return max(1, self.steps // self.every)

    @property
    def label(self) -> str:
        """For a line of progress."""
        overlap = f", overlap (merge {shown(self.outer.merge)})" if self.overlap else ""
        outer = f"outer {self.outer.rate:g}, {self.outer.momentum:g}"
        return (
            f"{self.via} {self.method}, {self.rate}, {self.delay_ms:g} ms, H = {self.every}"
            f"{overlap}, {outer}, seed {self.seed}"
        )


def shown(merge: float | str | None) -> str:
    """A merge for people.

    Example:
      >>> shown(1 / 3), shown("eager"), shown(None)
      ('0.33', 'eager', '-')
    """
    return "-" if merge is None else merge if isinstance(merge, str) else f"{merge:.2g}"


def merge_of(text: str) -> float | str | None:
    """A merge from the command line; None for "".

    Raises:
      UserError: neither a number in [0, 1] nor "eager".

    Example:
      >>> merge_of("0.5"), merge_of("eager"), merge_of("")
      (0.5, 'eager', None)
    """
    if text in ("", EAGER):
        return text or None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UserError(f"--merge must be in [0, 1] or eager, got {text!r}")
    return value


def outer_of(method: str, overlap: int, changes: Mapping[str, Any]) -> Outer:
    """The outer step of a method; `changes` that are not None replace its defaults.

    Example:
      >>> outer_of("sparseloco", 1, {}), outer_of("qsgd", 0, {"rate": 0.7, "merge": "eager"})
      (Outer(rate=1.0, momentum=0.0, merge=0.3333333333333333),
       Outer(rate=0.7, momentum=0.6, merge=None))
    """
    message = MESSAGES[method]
    outer = message.overlapped if overlap else message.outer
    new = {k: x for k, x in changes.items() if x is not None}
    return outer._replace(**(new if overlap else {k: x for k, x in new.items() if k != "merge"}))


def read_lines(folder: Path, name: str = FILE) -> list[dict[str, Any]]:
    """The lines of a file of results; none without a file.

    Raises:
      UserError: it is no such file.
    """
    path = folder / name
    if not path.is_file():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if not all(isinstance(line, dict) for line in lines):
            raise TypeError("a line is no object")
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} was not written by python -m experiments rounds: {error}") from error
    return lines


def add_line(folder: Path, line: dict[str, Any], name: str = FILE) -> None:
    """Append a line to a file of results."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_cells(folder: Path) -> dict[Cell, Measured]:
    """The results of a folder, in the order in which they came.

    Raises:
      UserError: a line has not the settings of a cell.
    """
    results = {}
    for line in read_lines(folder):
        try:
            settings, measured = dict(line["cell"]), line["measured"]
            results[Cell(**settings | {"outer": Outer(*settings["outer"])})] = measured
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / FILE} was not written by python -m experiments rounds: {error}") from error
    return results


def add_cell(folder: Path, cell: Cell, measured: Measured) -> None:
    """Append the result of a cell."""
    add_line(folder, {"cell": cell._asdict(), "measured": measured})


def lacking(cells: Iterable[Cell], results: Mapping[Cell, Measured]) -> list[Cell]:
    """The cells that have no result yet, each once."""
    return [cell for cell in dict.fromkeys(cells) if cell not in results]
