"""What all nodes' processes have in common, however they meet: rounds, notes and losses."""

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.rounds.cells import Cell, Outer
from experiments.rounds.record import Ending, Round, Snapshots, padded
from jgc.lab.bench.network import channel
from jgc.lab.bench.network.namespaces import INTERFACE


class Node(ABC):
    """A node of a cell's run.

    Attributes:
      cell: settings.
      host: its number; node 0 notes shared parameters and ends the run.
      folder: that all nodes of the run see.
      done: exchanges of this node.
    """

    def __init__(self, options: dict[str, Any]):
        settings = options["cell"]
        self.cell = Cell(**settings | {"outer": Outer(*settings["outer"])})
        self.host, self.folder, self.done = options["host"], Path(options["folder"]), 0
        self._snapshots, self._lines = Snapshots(), list[Round]()

    @abstractmethod
    def join(self) -> dict[str, Any]:
        """Compile and meet the others; returns facts."""

    @abstractmethod
    def inner(self, step: int) -> None:
        """A local step."""

    @abstractmethod
    def exchange(self) -> float | None:
        """The exchange after H steps; returns seconds from the message to the list, if known."""

    @abstractmethod
    def shared(self) -> Any:
        """The shared parameters now, not changed by later steps."""

    @abstractmethod
    def validation_loss(self) -> Callable[[Any], float]:
        """`shared parameters -> loss`, on the validation text."""

    @abstractmethod
    def digest(self) -> str:
        """Equal on all nodes if their shared parameters are."""

    @property
    def coming(self) -> int:
        """The round of the next local steps; with collectives every exchange closes one."""
        return self.done

    @property
    def closed(self) -> int:
        """Rounds that the shared parameters come after."""
        return self.done

    def counts(self) -> tuple[int, ...]:
        """Of the bucket, if there is one."""
        return ()

    def requests(self) -> list[Any]:
        """To the bucket, if there is one."""
        return []

    def leave(self) -> None:
        """After the last round."""
        return None

    def run(self, at: float) -> dict[str, Any]:
        """All rounds, from a moment of the monotonic clock on."""
        every, pace = self.cell.every, self.cell.step_seconds
        ending = Ending(self.folder, self.cell.rounds, self.cell.seconds, self.host == 0)
        link = channel.counters(INTERFACE)
        time.sleep(max(0.0, at - time.monotonic()))
        self._keep(at)
        while not ending.over(number := self.coming):
            began = time.monotonic()
            for i in range(every):
                padded(partial(self.inner, number * every + i), pace)
            exchanging = time.monotonic()
            waited = self.exchange()
            ended, local = time.monotonic(), exchanging - began
            self._lines.append(Round(number, began, local, ended, waited, self.counts()))
            ending.note(self.coming, ended - at, 1 + self.cell.overlap)
            self._keep(at)
        self.leave()
        self._keep(at, last=True)
        sent = {name: x - link[name] for name, x in settled(INTERFACE).items()}
        return {
            "rounds": self._lines, "requests": self.requests(), "digest": self.digest(),
            "closed": self.closed, "link": sent,
        }  # fmt: skip

    def losses(self) -> list[list[float]]:
        """Seconds, rounds and validation loss, on node 0."""
        loss = self.validation_loss()
        return [[t, number, loss(params)] for t, number, params in self._snapshots.items]

    def _keep(self, at: float, last: bool = False) -> None:
        if self.host == 0:
            self._snapshots.add(time.monotonic() - at, self.closed, self.shared, last)


def settled(interface: str, seconds: float = 0.2) -> dict[str, int]:
    """The counters of an interface once they stand still: messages that a process has sent may
    still wait in its sockets and in the queue of `tbf`."""
    before, now = None, channel.counters(interface)
    while now != before:
        time.sleep(seconds)
        before, now = now, channel.counters(interface)
    return now


def serve(node_type: type[Node], before: Any = None) -> None:
    """Make the node of the command line, and serve the parent.

    Args:
      node_type: its class.
      before: called with the options first.
    """
    answers, options = channel.open_channel(), json.loads(sys.argv[1])
    if before is not None:
        before(options)
    node = node_type(options)
    channel.serve(answers, {"join": node.join, "run": node.run, "losses": node.losses})
