"""The bucket read by one more node, which sends nothing: every list and message, and what they add up to."""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jgc.lab.chaos.rounds.accounts import Balance, read_balance
from jgc.lab.chaos.rounds.node import Settings, compressor, first_params, rules
from jgc.rounds.arithmetic import Sgd, Shared, Vector
from jgc.rounds.bucket import Bucket, BucketError
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.context import Context, Forgotten, RoundsError, Rules
from jgc.rounds.lists import RoundList
from jgc.rounds.messages import opened, read_message
from jgc.rounds.names import RUN, message_name
from jgc.rounds.replay import Diverged, advanced, lists_from, newest_checkpoint
from jgc.rounds.requests import perform

CONSERVED = 1e-6  # largest error of an account, relative to its largest value


class Round(NamedTuple):
    """A list, and when it was seen: between two looks, which are a fraction of a second apart."""

    list: RoundList
    seen: float


class Audit:
    """Reads a run's bucket from its first round on.

    Attributes:
      rounds: all lists, in order.
      digests: of the shared state, by how many rounds it comes after.
      wrong: what should never be, in words.
    """

    def __init__(self, bucket: Bucket, settings: Settings, secret: str):
        self.bucket = bucket
        chosen = Rules(**rules(settings))
        coder = CompressorCoder(compressor(), first_params(), 0)
        outer = Sgd(0.7, momentum=0.5)
        self.context = Context("audit", coder, outer, chosen, secret.encode(), say=lambda text: None)
        self.shared: Shared | None = None
        self.rounds: list[Round] = []
        self.digests: dict[int, str] = {}
        self.wrong: list[str] = []
        self.sent: dict[tuple[str, int], Vector] = {}  # decoded messages that count, by incarnation and round
        self.recent: list[bytes] = []  # messages as they lie in the bucket
        self._checksums: set[str] = set()

    def look(self) -> int:
        """Read what is new, and return how many rounds are closed. A bucket that does not answer has nothing new."""
        try:
            if self.shared is None and not self._begin():
                return 0
            assert self.shared is not None
            for closed in perform(lists_from(self.context, self.shared.number), self.bucket):
                self._add(closed)
        except BucketError:
            pass
        except (RoundsError, Forgotten, Diverged) as error:
            what = str(error) or type(error).__name__
            self.wrong.append(f"the audit cannot go on after {len(self.rounds)} rounds: {what}")
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

    def _add(self, closed: RoundList) -> None:
        assert self.shared is not None
        number, context = closed.round, self.context
        names = [message_name(number, x.node, x.attempt) for x in closed.members]
        objects = dict(zip(closed.nodes, self.bucket.get(names), strict=True))
        once = list(closed.nodes) == sorted(set(closed.nodes))
        if number != len(self.rounds) or not once or not closed.members:
            self.wrong.append(f"list {number} has the members {closed.nodes}, after {len(self.rounds)} lists")
        for entry in closed.members:
            data = objects[entry.node] or b""
            if entry.sha256 in self._checksums:
                self.wrong.append(f"round {number}: the message of {entry.node} counts a second time")
            self._checksums.add(entry.sha256)
            shapes = context.coder.shapes(number)
            message = read_message(data, context.run, entry.node, number, shapes, context.secret)
            self.sent[entry.incarnation, number] = context.coder.decode(number, message.fields)
        known = {node: data for node, data in objects.items() if data is not None}
        self.recent = [*self.recent, *known.values()][-20:]
        self.shared, _ = perform(advanced(context, self.shared, closed, known), self.bucket)
        self.digests[self.shared.number] = self.shared.digest
        self.rounds.append(Round(closed, time.monotonic()))

    def check_log(self, path: Path, label: str) -> list[dict]:
        """The lines of a node's log; digests that are not those of the lists are wrong."""
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            number = line.get("number")
            if number in self.digests and line["digest"] != self.digests[number]:
                self.wrong.append(f"{label} has another digest after {number} rounds than the lists give")
        return lines

    def check_balance(self, path: Path, label: str) -> float:
        """The error of an account, relative to its largest value."""
        balance = read_balance(path)
        error, scale = self._error(balance)
        if error > CONSERVED * scale:
            self.wrong.append(
                f"{label}, rounds {balance.opened} to {balance.number}: {error:.3g} of {scale:.3g} are not conserved"
            )
        return error / scale if scale else 0.0

    def _error(self, balance: Balance) -> tuple[float, float]:
        counted = np.zeros_like(balance.moved)
        for incarnation in balance.incarnations:
            for number in range(balance.opened, min(balance.number, len(self.rounds))):
                counted += self.sent.get((incarnation, number), 0.0)
        moved = balance.opening + balance.moved
        return float(np.abs(moved - counted - balance.left).max()), float(np.abs(moved).max())


def goodput(rounds: list[Round], nodes: list[str], hit: Callable[[str, float, float], bool]) -> tuple[float, float]:
    """Tokens that count of nodes that are not hit, and the seconds in which they were not.

    Time is divided by rounds: from the moment that a list was seen to that of the next. In a round in which a node is
    hit, neither its tokens nor the time count for it.

    Args:
      rounds: all lists; the first only says when time begins.
      nodes: that take part from the beginning.
      hit: whether a node is hit between two moments.
    """
    tokens = seconds = 0.0
    for (_, begins), (closed, ends) in pairwise(rounds):
        of = defaultdict(int, {entry.node: entry.tokens for entry in closed.members})
        for node in nodes:
            if not hit(node, begins, ends):
                tokens += of[node]
                seconds += ends - begins
    return tokens, seconds
