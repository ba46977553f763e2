"""The outcome of an exchange."""

from collections.abc import Mapping
from typing import NamedTuple

from jgc.rounds.arithmetic import Shared

LATE = "late"  # the reason why a message does not count: the list was made before it came


class Outcome(NamedTuple):
    """The outcome of an exchange for this node.

    Attributes:
      round: the number of the round.
      members: the nodes whose messages count.
      counted: whether this node's message counts.
      reason: why this node's message does not count; "" if it counts.
      left_out: why other messages do not count, by node.
      waited: seconds from the message to the list.
      closed_by: the node that made the list.
      digest: of the shared state after this exchange.
      number: closed rounds in the shared state; more than round + 1 if this node was behind.
      discarded: whether a part of this node's work is lost: an outlier, not finite, or unknown.
    """

    round: int
    members: tuple[str, ...]
    counted: bool
    reason: str
    left_out: Mapping[str, str]
    waited: float
    closed_by: str
    digest: str
    number: int
    discarded: bool = False


def without_a_list(number: int, reason: str, shared: Shared, discarded: bool) -> Outcome:
    """The outcome of round `number` where the node knows no list of it."""
    return Outcome(
        number, (), False, reason, {}, 0.0, "", shared.digest, shared.number, discarded
    )
