"""A node's notes on its rounds: moments, bytes, requests, and some of the shared parameters."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MOST_SNAPSHOTS = 12


class Round(NamedTuple):
    """A round of one node. Moments are seconds of the machine's monotonic clock.

    Attributes:
      number: from 0.
      began: its first local step.
      local: seconds in local steps.
      ended: the node goes on with the next round.
      waited: seconds from its message to the list; None without a list.
      counts: creates, gets, lists, deletes, bytes up and down, since the node began.
    """

    number: int
    began: float
    local: float
    ended: float
    waited: float | None
    counts: tuple[int, ...]


class Snapshots:
    """Shared parameters with the seconds and the rounds after which they were reached, at most a
    dozen: then every other one goes, and half as many come."""

    def __init__(self, most: int = MOST_SNAPSHOTS):
        self.most, self.items = most, list[tuple[float, int, Any]]()
        self._between, self._skipped = 1, 0

    def add(
        self, seconds: float, rounds: int, params: Callable[[], Any], last: bool = False
    ) -> None:
        """Keep the parameters, if it is their turn or they are the last."""
        self._skipped += 1
        if not last and self._skipped < self._between:
            return
        self._skipped = 0
        if last and self.items and self.items[-1][1] == rounds:
            return
        self.items.append((seconds, rounds, params()))
        if len(self.items) > self.most and not last:
            self.items, self._between = self.items[::2], 2 * self._between


class Ending:
    """When a run ends: after its rounds, or once its seconds are over on node 0.

    Node 0 then writes the number of the last round into a file that all nodes see.
    """

    def __init__(self, folder: Path, rounds: int, seconds: float, leads: bool):
        self.path, self.rounds, self.seconds, self.leads = folder / "last", rounds, seconds, leads

    def over(self, number: int) -> bool:
        """Whether there is no round `number`."""
        if number >= self.rounds:
            return True
        return self.path.exists() and number >= int(self.path.read_text() or self.rounds)

    def note(self, number: int, elapsed: float, ahead: int) -> None:
        """After a round: if the time is over, the last round is `ahead` rounds after the next."""
        if self.leads and self.seconds and elapsed >= self.seconds and not self.path.exists():
            self.path.write_text(str(number + ahead))


def padded(step: Callable[[], Any], least: float) -> Any:
    """Do a step, which lasts at least some seconds."""
    until = time.monotonic() + least
    result = step()
    time.sleep(max(0.0, until - time.monotonic()))
    return result
