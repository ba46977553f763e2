"""results.json: all measurements, written after each block of steps. A run resumes from it."""

import json
from pathlib import Path
from typing import Any

from jgc.training.errors import UserError
from jgc.training.run.folder import write_whole

NAME = "results.json"
BLOCK = 4  # consecutive steps of a method
COMPUTATION = "computation"
Results = dict[str, Any]


def key(hosts: int, rate: str, method: str) -> str:
    """The key of a cell.

    Example:
      >>> key(4, "1gbit", "topk")
      '4/1gbit/topk'
    """
    return f"{hosts}/{rate}/{method}"


def load(folder: Path, settings: dict[str, Any]) -> Results:
    """The results in a folder, or empty ones.

    Args:
      folder: of the run.
      settings: common to all cells: model, batch, offloads and the like.

    Raises:
      UserError: the folder was measured with other settings.
    """
    path = folder / NAME
    if not path.is_file():
        return {"settings": settings, "cells": {}, "methods": {}, "versions": {}, "session": 0}
    results = parsed(path)
    results["session"] = results.get("session", 0) + 1
    before = results["settings"]
    for name, value in settings.items():
        if before.get(name) != value:
            raise UserError(
                f"{path} was measured with {name} {before.get(name)}, not {value}: give that, or a new --run-dir"
            )
    return results


def parsed(path: Path) -> Results:
    """A file of results.

    Raises:
      UserError: it is no such file.
    """
    try:
        measured: Results = json.loads(path.read_text())
        for part in ("settings", "cells", "methods", "versions"):
            if not isinstance(measured[part], dict):
                raise TypeError(f"{part} is a {type(measured[part]).__name__}")
        for name, of_cell in measured["cells"].items():
            if missing := [x for x in ("hosts", "rate", "method") if x not in of_cell]:
                raise KeyError(f"{missing[0]!r} of the cell {name!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of bench network: {error}") from error
    return measured


def save(folder: Path, results: Results) -> None:
    """Write the file in one go."""
    write_whole(folder / NAME, json.dumps(results, indent=1).encode())


def cell(results: Results, hosts: int, rate: str, method: str) -> dict[str, Any]:
    """A cell; a new empty one if there is none.

    Its lists hold an entry a step: "full", "alone" and "computation" seconds, "cpu_full" and so on processor seconds of
    a host, "session_full" and so on in which session. With local steps an entry is a whole round, and its seconds are
    the round's divided by its H steps. "steps_counted" steps made a host's interface count "tx_bytes",
    "tx_packets", "rx_bytes", "rx_packets".
    """
    return results["cells"].setdefault(key(hosts, rate, method), {"hosts": hosts, "rate": rate, "method": method})


def add_step(cell: dict[str, Any], part: str, seconds: dict[str, float], session: int = 0) -> None:
    """Add a step and its session: a resumed run is a new session, when the machine may be faster or slower."""
    cell.setdefault(f"session_{part}", sessions(cell, part)).append(session)
    cell.setdefault(part, []).append(round(seconds["seconds"], 6))
    cell.setdefault(f"cpu_{part}", []).append(round(seconds["cpu"], 6))


def sessions(cell: dict[str, Any], part: str) -> list[int]:
    """The session of each step of a part; 0 if the file has none.

    Example:
      >>> sessions({"full": [0.1, 0.2]}, "full")
      [0, 0]
    """
    return list(cell.get(f"session_{part}", [0] * len(cell.get(part, []))))


def add_counts(cell: dict[str, Any], steps: int, before: list[dict[str, int]], after: list[dict[str, int]]) -> None:
    """Add the counters of the hosts' interfaces over a block of steps, their mean over hosts.

    Example:
      >>> cell = {}
      >>> add_counts(cell, 2, [{"tx_bytes": 5}, {"tx_bytes": 0}], [{"tx_bytes": 9}, {"tx_bytes": 8}])
      >>> cell
      {'steps_counted': 2, 'tx_bytes': 6.0}
    """
    cell["steps_counted"] = cell.get("steps_counted", 0) + steps
    for name in before[0]:
        counted = sum(b[name] - a[name] for a, b in zip(before, after, strict=True)) / len(before)
        cell[name] = cell.get(name, 0.0) + counted


def missing(results: Results, hosts: int, rate: str, method: str, steps: int, part: str = "full") -> int:
    """Number of steps that a cell lacks.

    Example:
      >>> missing({"cells": {"2/1gbit/topk": {"full": [0.1]}}}, 2, "1gbit", "topk", 4)
      3
    """
    return max(0, steps - len(results["cells"].get(key(hosts, rate, method), {}).get(part, [])))
