"""The bucket as one more node reads it that sends nothing: every list and every message, and what
they add up to."""

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jgc.lab.chaos.rounds.accounts import Balance, read_balance
from jgc.lab.chaos.rounds.node import Settings, compressor, first_params, outer, rules
from jgc.rounds.arithmetic import Shared, Vector
from jgc.rounds.bucket import Bucket, BucketError
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.context import Context, Forgotten, RoundsError, Rules
from jgc.rounds.lists import RoundList
from jgc.rounds.messages import BadObject, opened, read_message
from jgc.rounds.names import RUN, message_name
from jgc.rounds.replay import Diverged, advanced, list_of, lists_from, newest_checkpoint
from jgc.rounds.requests import perform

CONSERVED = 1e-6  # largest error of an account, relative to its largest value
GAPS = 2.0  # seconds between two listings: a GET of the next list costs less, and sees no gap


class Round(NamedTuple):
    """A list, and when the audit read it: at most `run.LOOK` after it was made, or little more."""

    list: RoundList
    seen: float


class Audit:
    """Reads a run's bucket from its first round on.

    Attributes:
      rounds: all lists, in order.
      digests: of the shared state, by the number of rounds before it.
      wrong: broken invariants, in words.
      sent: f32[n], decoded messages that count, by incarnation and round.
      recent: the last messages that count, as they lie in the bucket.
    """

    def __init__(self, bucket: Bucket, settings: Settings, secret: str):
        self.bucket = bucket
        coder = CompressorCoder(compressor(), first_params(), 0)
        chosen, key = Rules(**rules(settings)), secret.encode()
        self.context = Context("audit", coder, outer(), chosen, key, say=lambda text: None)
        self.shared: Shared | None = None
        self.rounds: list[Round] = []
        self.digests: dict[int, str] = {}
        self.wrong: list[str] = []
        self.sent: dict[tuple[str, int], Vector] = {}
        self.recent: list[bytes] = []
        self._checksums: set[str] = set()
        self._listed = 0.0

    def look(self, gaps: bool = False) -> int:
        """Read what is new, and return the number of closed rounds.

        A bucket that does not answer has nothing new.

        Args:
          gaps: also look for a missing list before later ones, as every 2 s in any case.
        """
        try:
            if self.shared is None and not self._begin():
                return 0
            self._read_lists(gaps or time.monotonic() - self._listed > GAPS)
        except BucketError:
            pass
        except (RoundsError, BadObject, Forgotten, Diverged) as error:
            what = str(error) or "the lists give other parameters than they name"
            self.wrong.append(f"the audit stops after {len(self.rounds)} rounds: {what}")
        return len(self.rounds)

    def _begin(self) -> bool:
        (data,) = self.bucket.get([RUN])
        if data is None:
            return False
        self.context.run = opened(data, self.context.secret)[0]["run"]
        self.shared = perform(newest_checkpoint(self.context), self.bucket)
        if self.shared is not None:
            self.digests[0] = self.shared.digest
            if self.shared.number:
                self.wrong.append("the audit began too late")
        return self.shared is not None

    def _read_lists(self, gaps: bool) -> None:
        assert self.shared is not None
        while closed := perform(list_of(self.context, self.shared.number), self.bucket):
            self._add(closed)
        if gaps:
            self._listed = time.monotonic()
            for closed in perform(lists_from(self.context, self.shared.number), self.bucket):
                self._add(closed)

    def _add(self, closed: RoundList) -> None:
        assert self.shared is not None
        number, context = closed.round, self.context
        names = [message_name(number, x.node, x.attempt) for x in closed.members]
        objects = dict(zip(closed.nodes, self.bucket.get(names), strict=True))
        once = list(closed.nodes) == sorted(set(closed.nodes))
        if number != len(self.rounds) or not once or not closed.members:
            members = ", ".join(closed.nodes) or "none"
            self.wrong.append(f"list {number} after {len(self.rounds)} lists; members: {members}")
        for entry in closed.members:
            data = objects[entry.node] or b""
            if entry.sha256 in self._checksums:
                self.wrong.append(f"round {number}: {entry.node}'s message counts a second time")
            self._checksums.add(entry.sha256)
            shapes = context.coder.shapes(number)
            message = read_message(data, context.run, entry.node, number, shapes, context.secret)
            self.sent[entry.incarnation, number] = context.coder.decode(number, message.fields)
        known = {node: data for node, data in objects.items() if data is not None}
        self.shared, _ = perform(advanced(context, self.shared, closed, known), self.bucket)
        self.recent = [*self.recent, *known.values()][-20:]
        self.digests[self.shared.number] = self.shared.digest
        self.rounds.append(Round(closed, time.monotonic()))

    def check_log(self, path: Path, label: str) -> int:
        """Compare a node's digests with the lists; returns how many are equal."""
        lines = path.read_text().splitlines() if path.exists() else []
        outcomes = [x for x in map(json.loads, lines) if "digest" in x]
        equal = 0
        for outcome in outcomes:
            number = outcome["number"]
            if outcome["digest"] == self.digests.get(number, outcome["digest"]):
                equal += 1
            else:
                what = f"{label}: other digest after {number} rounds than the lists give"
                self.wrong.append(what)
        last = max((x["number"] for x in outcomes), default=0)
        if last > len(self.rounds) and not self.wrong:
            self.wrong.append(f"{label} knows of {last} rounds, the bucket of {len(self.rounds)}")
        return equal

    def check_balance(self, path: Path, label: str) -> float:
        """The error of an account, relative to its largest value."""
        balance = read_balance(path)
        error, scale = self._error(balance)
        if not error <= CONSERVED * scale:  # NaN, too
            rounds = f"rounds {balance.opened} to {balance.number}"
            self.wrong.append(f"{label}, {rounds}: {error:.3g} of {scale:.3g} are not conserved")
        return error / scale if scale else 0.0

    def _error(self, balance: Balance) -> tuple[float, float]:
        counted = np.zeros_like(balance.moved)
        for incarnation in balance.incarnations:
            for number in range(balance.opened, min(balance.number, len(self.rounds))):
                counted += self.sent.get((incarnation, number), 0.0)
        moved = balance.opening + balance.moved
        return float(np.abs(moved - counted - balance.left).max()), float(np.abs(moved).max())


def goodput(
    rounds: list[Round], nodes: list[str], hit: Callable[[str, float, float], bool], most: float
) -> tuple[float, float]:
    """Counted tokens of nodes that are not hit, and the seconds for which they were not.

    Time is divided by rounds: from the moment when a list was read to that of the next. While a
    node is hit, neither its tokens nor the time count for it.

    Lists come up to a grace early or late, so a few rounds may seem faster than steps can be: a
    node has at most `most` tokens a second over all its time.

    Args:
      rounds: all lists; the first only says when time begins.
      nodes: that take part from the beginning.
      hit: whether a node is hit between two moments.
      most: tokens a node and second that step times allow.
    """
    total, total_seconds = 0.0, 0.0
    for node in nodes:
        tokens = seconds = 0.0
        for (_, begins), (closed, ends) in pairwise(rounds):
            if not hit(node, begins, ends):
                tokens += sum(x.tokens for x in closed.members if x.node == node)
                seconds += ends - begins
        total += min(tokens, most * seconds)
        total_seconds += seconds
    return total, total_seconds
