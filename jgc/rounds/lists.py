"""The list of a round's members, made once, by the fastest node; the only authority."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from statistics import median
from typing import Any, NamedTuple

from jgc.rounds.messages import BadObject, Message, check_header, opened, sealed

# Reasons why a message does not count:
DISSENT = "dissent"  # its sender started from a different theta
OUTLIER = "outlier"  # begins the reason of one that does not go back into the residual, either


class Entry(NamedTuple):
    """A message that counts."""

    node: str
    incarnation: str
    sha256: str
    size: int
    tokens: int
    attempt: int


class RoundList(NamedTuple):
    """The content of `rounds/<r>/close`."""

    round: int  # its number
    theta: str  # digest of the shared state that its members started from
    members: tuple[Entry, ...]  # the messages that count, by node in order
    left_out: Mapping[str, str]  # why the other messages do not count, by node
    writer: str  # the member that writes the next checkpoint if one is due
    by: str  # the node that made the list
    full: bool  # whether all came that were expected
    waited: float  # seconds that `by` waited

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the members."""
        return tuple(entry.node for entry in self.members)

    def counts(self, node: str, sha256: str | None = None) -> bool:
        """Whether a message of a node counts; with a checksum, whether that one does."""
        return any(x.node == node and sha256 in (None, x.sha256) for x in self.members)

    def weighs(self, node: str, sha256: str) -> bool:
        """Whether a message has a part in the mean: not without tokens, unless none has any."""
        none = not any(x.tokens for x in self.members)
        ours = [x for x in self.members if (x.node, x.sha256) == (node, sha256)]
        return any(none or x.tokens for x in ours)

    @property
    def dissent(self) -> bool:
        """Whether a node started from a different theta."""
        return DISSENT in self.left_out.values()


def make_list(
    number: int, messages: Mapping[str, Message], norms: Mapping[str, float],
    broken: Mapping[str, str], multiple: float, by: str, before: Collection[str], full: bool,
    waited: float,
) -> RoundList:  # fmt: skip
    """The list of round `number`, made `by` a node, from valid messages by node, at least one.

    `norms` are norms of the decoded messages, `broken` why others are not valid, `before` the last
    list's members, the first of which writes checkpoints. A message whose norm exceeds `multiple`
    times the median of those with tokens does not count; 0 for all.
    """
    votes = defaultdict(list)
    for node, message in messages.items():
        votes[message.theta].append((node not in before, node))
    # Of equally many, those with the writer of checkpoints, or the first name. Nobody can say who
    # is right; but every closer must say the same, or two nodes correct each other in turns.
    chosen = min(votes, key=lambda digest: (-len(votes[digest]), min(votes[digest])))
    alike = {node: x for node, x in sorted(messages.items()) if x.theta == chosen}
    left_out = dict(broken) | {node: DISSENT for node in messages if node not in alike}
    weighing = [norms[node] for node, message in alike.items() if message.tokens]
    middle = median(weighing or [0.0])
    if multiple and len(alike) > 2 and middle > 0:
        for node in [node for node in alike if norms[node] > multiple * middle]:
            times = f"{norms[node] / middle:.3g} times the median"
            left_out[node] = f"{OUTLIER}: norm {norms[node]:.3g}, {times}"
            del alike[node]
    members = tuple(Entry(*(getattr(x, name) for name in Entry._fields)) for x in alike.values())
    return RoundList(number, chosen, members, left_out, members[0].node, by, full, round(waited, 3))


def pack_list(run: str, closed: RoundList, secret: bytes | None) -> bytes:
    """The bytes of a list."""
    members = [entry._asdict() for entry in closed.members]
    return sealed({"kind": "list", "run": run, **closed._asdict(), "members": members}, {}, secret)


def read_list(data: bytes, run: str, number: int, secret: bytes | None) -> RoundList:
    """The list of a round."""
    header: dict[str, Any] = opened(data, secret)[0]
    check_header(header, "list", run)
    if header.get("round") != number:
        raise BadObject(f"the list of round {header.get('round')}")
    try:
        members = tuple(Entry(**entry) for entry in header["members"])
        fields = {name: header[name] for name in RoundList._fields}
        return RoundList(**fields | {"members": members})
    except (KeyError, TypeError) as error:
        raise BadObject(f"a list that cannot be read ({error})") from None
