"""The list of a round: who counts. It is made once, by whoever is first, and is the only
authority."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from statistics import median
from typing import Any, NamedTuple

from jgc.rounds.messages import BadObject, Message, check_header, opened, sealed

DISSENT = "dissent"  # why a message does not count that comes from another theta
OUTLIER = "outlier"  # how the reason begins for which a message does not go back into the residual


class Entry(NamedTuple):
    """A message that counts."""

    node: str
    incarnation: str
    sha256: str
    size: int
    tokens: int
    attempt: int


class RoundList(NamedTuple):
    """What `rounds/<r>/close` holds.

    Attributes:
      round: its number.
      theta: digest of the shared state that its members started from.
      members: the messages that count, by node in order.
      left_out: why the other messages do not count, by node. "dissent" is another digest of theta.
      writer: the member that writes the next checkpoint if one is due.
      by: the node that made the list.
      full: whether all came that were expected.
      waited: seconds that `by` waited.
    """

    round: int
    theta: str
    members: tuple[Entry, ...]
    left_out: Mapping[str, str]
    writer: str
    by: str
    full: bool
    waited: float

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the members."""
        return tuple(entry.node for entry in self.members)

    def counts(self, node: str, sha256: str | None = None) -> bool:
        """Whether a message of a node counts; with a checksum, whether that one does."""
        return any(x.node == node and sha256 in (None, x.sha256) for x in self.members)

    @property
    def dissent(self) -> bool:
        """Whether a node started from another theta."""
        return DISSENT in self.left_out.values()


def make_list(
    number: int, messages: Mapping[str, Message], norms: Mapping[str, float], broken: Mapping[str, str],
    multiple: float, by: str, before: Collection[str], full: bool, waited: float,
) -> RoundList:  # fmt: skip
    """The list of the messages that came.

    Args:
      number: the round.
      messages: the valid messages by node, at least one.
      norms: of what each of them decodes to.
      broken: why the others are not valid, by node.
      multiple: a message whose norm exceeds this multiple of the median does not count; 0 for all.
      by: the node that makes the list.
      before: the members of the last list; the first of them writes checkpoints.
      full, waited: see `RoundList`.
    """
    votes = defaultdict(list)
    for node, message in messages.items():
        votes[message.theta].append((node not in before, node))
    # Of equally many, those with the writer of checkpoints, or the first name. Nobody can say who
    # is right; but every closer must say the same, or two nodes correct each other in turns.
    chosen = min(votes, key=lambda digest: (-len(votes[digest]), min(votes[digest])))
    alike = {node: x for node, x in sorted(messages.items()) if x.theta == chosen}
    left_out = dict(broken) | {node: DISSENT for node in messages if node not in alike}
    middle = median(norms[node] for node in alike)
    if multiple and len(alike) > 2 and middle > 0:
        for node in [node for node in alike if norms[node] > multiple * middle]:
            left_out[node] = (
                f"{OUTLIER}: norm {norms[node]:.3g}, {norms[node] / middle:.3g} times the median"
            )
            del alike[node]
    members = tuple(
        Entry(x.node, x.incarnation, x.sha256, x.size, x.tokens, x.attempt) for x in alike.values()
    )
    return RoundList(number, chosen, members, left_out, members[0].node, by, full, round(waited, 3))


def pack_list(run: str, closed: RoundList, secret: bytes | None) -> bytes:
    """The bytes of a list."""
    members = [entry._asdict() for entry in closed.members]
    return sealed({"kind": "list", "run": run, **closed._asdict(), "members": members}, {}, secret)


def read_list(data: bytes, run: str, number: int, secret: bytes | None) -> RoundList:
    """The list of a round.

    Raises:
      BadObject: not a list of this run and round.
    """
    header: dict[str, Any] = opened(data, secret)[0]
    check_header(header, "list", run)
    if header["round"] != number:
        raise BadObject(f"the list of round {header['round']}")
    try:
        members = tuple(Entry(**entry) for entry in header["members"])
        return RoundList(
            **{name: header[name] for name in RoundList._fields} | {"members": members}
        )
    except (KeyError, TypeError) as error:
        raise BadObject(f"a list that cannot be read ({error})") from None
