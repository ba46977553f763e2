"""The context of a node's protocol: its rules, its clock, its errors, and pauses."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jgc.checks.argument_types import fits
from jgc.rounds.arithmetic import Arrays, Outer, Vector
from jgc.rounds.bucket import BucketError, NoBucket
from jgc.rounds.requests import Request, Requests, Wait


class RoundsError(Exception):
    """Raised when a node can no longer take part, with the reason in one line."""


class Timeout(RoundsError):
    """A round lasted longer than the limit; names the missing messages."""


class Twin(RoundsError):
    """A different process sends under this node's name."""


class Forgotten(Exception):
    """The history that this node needs was deleted: it has to begin from a checkpoint."""


class Coder(Protocol):
    """The coder of messages. `memory` is a node's state, a dict of arrays."""

    size: int

    def first(self) -> Arrays:
        """The memory before the first message."""

    def encode(
        self, number: int, memory: Arrays, difference: Vector, noise: int
    ) -> tuple[Arrays, Arrays]:
        """The message's fields and the memory after it. The same arguments give the same bits."""

    def decode(self, number: int, fields: Arrays) -> Vector:
        """The decoded message, f32[n], with the same bits on every machine."""

    def shapes(self, number: int) -> Mapping[str, Any]:
        """Shape and dtype of the fields of a message of round `number`."""


class Rules(NamedTuple):
    """The rules for closing rounds and for checkpoints.

    Attributes:
      quorum: fewest messages that close a round.
      grace: seconds that a quorum waits for missing nodes.
      start: nodes that must have announced themselves before the grace of round 0 begins.
      timeout: seconds after which a node names the missing nodes.
      end: whether it then also stops with `Timeout`.
      outliers: messages whose norm exceeds this multiple of the median do not count; 0: no limit.
      checkpoint_every: rounds between checkpoints.
      retained: rounds whose objects are kept for nodes that are behind.
      poll: shortest and longest polling interval, in seconds.
      patience: extra delay of each successive node before it makes the list, in seconds.
      total: rounds of the run, after which a node sends nothing; None if that is not known. Without
        it, a node that is late in the last round may close one more.
    """

    quorum: int = 1
    grace: float = 60.0
    start: int = 1
    timeout: float = 3600.0
    end: bool = False
    outliers: float = 10.0
    checkpoint_every: int = 20
    retained: int = 50
    poll: tuple[float, float] = (0.05, 1.0)
    patience: float = 0.5
    total: int | None = None

    def over(self, number: int) -> bool:
        """Whether the run is over after `number` rounds."""
        return self.total is not None and number >= self.total


def check_rules(rules: Rules) -> None:
    """Raise ValueError for rules that no run can keep."""
    for name in ("quorum", "start", "checkpoint_every", "retained"):
        value = getattr(rules, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    total = rules.total
    if total is not None and (type(total) is not int or total < 1):
        raise ValueError(f"total must be a whole number of at least 1, or None, got {total!r}")
    for name in ("grace", "timeout"):
        if not (fits(float, x := getattr(rules, name)) and x > 0):
            raise ValueError(f"{name} must be positive, got {x!r}")
    if not (fits(float, x := rules.patience) and 0 <= x < math.inf):
        raise ValueError(f"patience must be seconds, at least 0, got {x!r}")
    poll = rules.poll
    pair = isinstance(poll, tuple) and fits(tuple[float, float], poll) and len(poll) == 2
    if not (pair and 0 < poll[0] <= poll[1] < math.inf):
        raise ValueError(f"poll must be two numbers of seconds, shortest and longest, got {poll!r}")
    if rules.start < rules.quorum:
        raise ValueError(
            f"start={rules.start} is below quorum={rules.quorum}: round 0 could not close"
        )
    if rules.retained < rules.checkpoint_every:
        raise ValueError(
            f"retained={rules.retained} is below checkpoint_every={rules.checkpoint_every}: the "
            "checkpoint before the newest would be useless"
        )
    if not (fits(float, x := rules.outliers) and (x == 0 or x > 1)):
        raise ValueError(f"outliers must be above 1, or 0 for no such rule, got {x!r}")


@dataclasses.dataclass
class Context:
    """One node's view of a run."""

    node: str  # its name
    coder: Coder
    outer: Outer
    rules: Rules
    secret: bytes | None = None  # the run's, or None
    seed: int = 0  # of the noise that methods round with
    run: str = ""  # the run's token, known after joining
    joined: bool = False  # if not, `NoBucket` ends the process; if so, it waits
    clock: Callable[[], float] = time.monotonic  # in seconds; only differences are used
    say: Callable[[str], Any] = print  # takes events, one line each
    spawn: Callable[[Requests[None]], Any] = lambda requests: None  # runs them in the background


class Pauses:
    """Growing pauses between looks at a bucket; once a `timeout`, says what it waits for."""

    def __init__(self, context: Context):
        self.context, self.began, self.warned = context, context.clock(), context.clock()
        self.seconds = context.rules.poll[0]
        self.error = ""

    @property
    def waited(self) -> float:
        """Seconds since the first."""
        return self.context.clock() - self.began

    def next(self, what: str, most: float = float("inf")) -> Requests[None]:
        """One pause of at most `most` seconds. Raises `Timeout` if the rules say so."""
        rules = self.context.rules
        if self.context.clock() - self.warned >= rules.timeout:
            self.warned = self.context.clock()
            text = f"{self.context.node} has waited {self.waited:.0f} s: {what}"
            if rules.end:
                raise Timeout(text)
            self.context.say(text)
        yield Wait(max(min(self.seconds, most), rules.poll[0] / 10))
        self.seconds = min(1.5 * self.seconds, rules.poll[1])

    def failed(self, error: BucketError) -> None:
        """Record a failed request; says each error once."""
        if isinstance(error, NoBucket) and not self.context.joined:
            raise error
        self.seconds = max(self.seconds, self.context.rules.poll[1])
        text = re.sub(r"[0-9.]+[mµn]?s?", "", str(error))  # obstore's have the seconds that passed
        if text != self.error:
            self.error = text
            self.context.say(f"{self.context.node}: {error}; trying again")


def persistently(context: Context, request: Request) -> Requests[Any]:
    """The answer to a request, which is repeated while the bucket fails."""
    pauses = Pauses(context)
    while True:
        try:
            return (yield request)
        except BucketError as error:
            pauses.failed(error)
            yield from pauses.next(str(error))
