"""What every part of the protocol of one node knows."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jgc.rounds.arithmetic import Arrays, Outer, Vector
from jgc.rounds.bucket import BucketError, NoBucket
from jgc.rounds.requests import Request, Requests, Wait


class RoundsError(Exception):
    """Why a node cannot take part any longer, in one line."""


class Timeout(RoundsError):
    """A round lasted longer than the limit; names what is missing."""


class Twin(RoundsError):
    """Another process sends under this node's name."""


class Forgotten(Exception):
    """The history that this node needs was deleted: it has to begin from a checkpoint."""


class Coder(Protocol):
    """How differences become messages. `memory` is a node's state, a dict of arrays."""

    size: int

    def first(self) -> Arrays:
        """The memory before the first message."""

    def encode(
        self, number: int, memory: Arrays, difference: Vector, noise: int
    ) -> tuple[Arrays, Arrays]:
        """The message's fields and the memory after it. The same arguments give the same bits."""

    def decode(self, number: int, fields: Arrays) -> Vector:
        """f32[n]: what a message says. The same bits on every machine."""

    def shapes(self, number: int) -> Mapping[str, Any]:
        """Shape and dtype of the fields of a message of round `number`."""


class Rules(NamedTuple):
    """When a round is closed, and what is written when.

    Attributes:
      quorum: fewest messages that close a round.
      grace: seconds that a quorum waits for nodes that are expected and do not come.
      start: nodes that must have announced themselves before the grace of round 0 begins.
      timeout: seconds after which a node says who is missing.
      end: whether it then also stops with `Timeout`.
      outliers: see `make_list`; 0 for no such rule.
      checkpoint_every: rounds between checkpoints.
      retained: rounds whose objects are kept for nodes that are behind.
      poll: shortest and longest pause between two looks at the bucket, in seconds.
      patience: seconds that the second node leaves to the first to make the list; the third
        twice that.
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


def check_rules(rules: Rules) -> None:
    """Raise ValueError for rules that no run can keep."""
    for name in ("quorum", "start", "checkpoint_every", "retained"):
        value = getattr(rules, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    for name in ("grace", "timeout"):
        if not getattr(rules, name) > 0:
            raise ValueError(
                f"{name} must be positive, got {getattr(rules, name)!r}"
                + (": nobody would ever be waited for" if name == "grace" else "")
            )
    if rules.start < rules.quorum:
        raise ValueError(
            f"start={rules.start} is below quorum={rules.quorum}: round 0 could not close"
        )
    if rules.retained < rules.checkpoint_every:
        raise ValueError(
            f"retained={rules.retained} is below checkpoint_every={rules.checkpoint_every}: a newcomer "
            "would have nothing to begin from if the newest checkpoint cannot be read"
        )
    if rules.outliers and rules.outliers <= 1:
        raise ValueError(f"outliers must be above 1, or 0 for no such rule, got {rules.outliers}")


@dataclasses.dataclass
class Context:
    """One node's view of a run.

    Attributes:
      node: its name.
      coder, outer, rules: see there.
      secret: the run's, or None.
      seed: of the noise that methods round with.
      run: the run's token, known after joining.
      joined: before it a bucket that does not answer is an error, later it is waited for.
      clock: seconds that only ever grow; differences alone are used.
      say: takes events, one line each.
      spawn: runs requests beside the rounds, in the background.
    """

    node: str
    coder: Coder
    outer: Outer
    rules: Rules
    secret: bytes | None = None
    seed: int = 0
    run: str = ""
    joined: bool = False
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], Any] = print
    spawn: Callable[[Requests[None]], Any] = lambda requests: None


class Pauses:
    """Growing pauses between looks at a bucket; says, once a `timeout`, what is waited for."""

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
        """Note a request that failed; a kind of error is said once."""
        if isinstance(error, NoBucket) and not self.context.joined:
            raise error
        self.seconds = max(self.seconds, self.context.rules.poll[1])
        if str(error) != self.error:
            self.error = str(error)
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
