"""A round from the message to the list: put, wait for the others, close."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jgc.rounds.arithmetic import usable
from jgc.rounds.bucket import BucketError
from jgc.rounds.context import Context, Forgotten, Pauses
from jgc.rounds.lists import RoundList, make_list, pack_list
from jgc.rounds.messages import BadObject, Message, check_header, opened, read_message
from jgc.rounds.names import ROUNDS, before_round, by_round, close_name, node_name, nodes_with
from jgc.rounds.replay import list_of
from jgc.rounds.requests import Create, Get, List, Requests


class Foreign(Exception):
    """Something else is under the name of this node's message.

    Attributes:
      twin: whether it is a message of another process of this run.
    """

    def __init__(self, twin: bool):
        self.twin = twin


class Arrivals:
    """What has come into a round so far, as one node sees it."""

    def __init__(self, context: Context, number: int, expected: frozenset[str]):
        self.context, self.number, self.before = context, number, expected
        self.data: dict[str, bytes] = {}  # messages, also this node's
        self.messages: dict[str, Message] = {}  # the valid ones
        self.broken: dict[str, str] = {}  # why the others are not
        self.notices: dict[
            str, bool
        ] = {}  # names of valid .here and .left objects; False: not valid
        self.norms: dict[str, float] = {}

    @property
    def came(self) -> set[str]:
        """The nodes that have a message, valid or not: nobody waits for them any longer."""
        return self.messages.keys() | self.broken.keys()

    @property
    def expected(self) -> set[str]:
        """Members of the last list and who has announced itself, without those that have left."""
        here, left = (
            {
                name.rpartition(".")[0]
                for name, valid in self.notices.items()
                if valid and name.endswith(end)
            }
            for end in (".here", ".left")
        )
        return (set(self.before) | here) - left

    @property
    def missing(self) -> list[str]:
        """The nodes that are waited for."""
        return sorted(self.expected - self.came)

    def fetch(self, names: Mapping[str, int]) -> Requests[None]:
        """Read what is new among the names of the round's folder."""
        messages = [node for node in nodes_with(names, "msg") if node not in self.came]
        notices = [
            f"{node}.{kind}" for kind in ("here", "left") for node in nodes_with(names, kind)
            if f"{node}.{kind}" not in self.notices
        ]  # fmt: skip
        wanted = [node_name(self.number, node, "msg") for node in messages if node not in self.data]
        wanted += [node_name(self.number, *name.split(".")) for name in notices]
        objects = dict(zip(wanted, (yield Get(tuple(wanted))) if wanted else (), strict=True))
        for node in messages:
            self._add(node, self.data.get(node) or objects[node_name(self.number, node, "msg")])
        for name in notices:
            self.notices[name] = self._valid(objects[node_name(self.number, *name.split("."))])

    def _add(self, node: str, data: bytes | None) -> None:
        context = self.context
        if data is None:
            return  # a bucket that lists more than it has: asked again at the next look
        shapes = context.coder.shapes(self.number)
        try:
            message = read_message(data, context.run, node, self.number, shapes, context.secret)
            vector = context.coder.decode(self.number, message.fields)
            if not usable(vector):
                raise BadObject("outlier: not finite, or as large as 1e15")
        except BadObject as error:
            self.broken[node] = str(error)
            context.say(f"round {self.number}: the message of {node} is left out: {error}")
            return
        self.data[node], self.messages[node] = data, message
        self.norms[node] = float(np.linalg.norm(vector.astype(np.float64)))  # for the closer alone

    def _valid(self, data: bytes | None) -> bool:
        try:
            check_header(opened(data or b"", self.context.secret)[0], "notice", self.context.run)
        except BadObject:
            return False
        return True

    def ready(self, waited: float) -> str:
        """Why the round can be closed, "full" or "grace"; "" if it cannot."""
        rules = self.context.rules
        if len(self.messages) < rules.quorum:
            return ""
        if self.number == 0:  # every node of the start is needed, however long its compiling takes
            return "full" if len(self.came) >= rules.start and not self.missing else ""
        return "full" if not self.missing else "grace" if waited >= rules.grace else ""

    def waiting_for(self) -> str:
        """What the round waits for, in words."""
        rules, came = self.context.rules, sorted(self.messages)
        wanted = max(rules.quorum, rules.start if self.number == 0 else 0)
        names = ", ".join(self.missing) or "nodes that nobody has announced"
        return (
            f"round {self.number} has {len(came)} of {wanted} messages ({', '.join(came) or 'none'}); "
            f"missing: {names}"
        )


class Closed(NamedTuple):
    """A closed round, as one node sees it.

    Attributes:
      list: its list.
      data: the messages that this node has read or sent, by node.
      waited: seconds.
      foreign: whether something else was under the name of this node's message.
      twin: whether that was a message of another process of this run.
      sent: whether this node's message came into the bucket, as far as it knows.
    """

    list: RoundList
    data: Mapping[str, bytes]
    waited: float
    foreign: bool
    twin: bool
    sent: bool


def closed_round(
    context: Context, number: int, data: bytes | None, expected: frozenset[str], theta: str
) -> Requests[Closed]:
    """Take part in a round until its list exists; make the list if nobody else does.

    Args:
      context: this node's.
      number: the round.
      data: this node's message; None if it has none.
      expected: the members of the last list.
      theta: digest of this node's shared state.

    Raises:
      Forgotten: the round was deleted long ago.
      Timeout: see `Rules.end`.
      RoundsError: a list that cannot be read.
    """
    pauses, arrivals = Pauses(context), Arrivals(context, number, expected)
    sent, foreign, twin, turn = False, False, False, None
    while True:
        try:
            if data is not None and not (sent or foreign):
                try:
                    sent = yield from _put(context, number, data)
                    arrivals.data[context.node] = data
                except Foreign as other:
                    foreign, twin = True, other.twin
            found = yield from _look(context, number, arrivals, only_list=turn is not None)
            reason = arrivals.ready(pauses.waited)
            if found is None and reason:
                if turn is None:
                    turn = context.clock() + context.rules.patience * _rank(context.node, arrivals)
                if context.clock() >= turn:
                    closer = theta, reason == "full", pauses.waited
                    found = yield from _close(context, arrivals, *closer)
            if found is not None:
                return Closed(found, arrivals.data, pauses.waited, foreign, twin, sent)
            what = arrivals.waiting_for()
        except BucketError as error:
            pauses.failed(error)
            what = str(error)
        # no longer than until this node may close: by its turn, or by the grace
        until = (turn or pauses.began + context.rules.grace) - context.clock()
        yield from pauses.next(what, until if until > 0 else float("inf"))


def _put(context: Context, number: int, data: bytes) -> Requests[bool]:
    """Send this node's message. Raises Foreign if the name has another content."""
    name = node_name(number, context.node, "msg")
    if (yield Create(name, data)):
        return True
    (there,) = yield Get((name,))  # a PUT whose answer was lost has succeeded all the same
    if there is None:
        raise BucketError(f"{name} exists and is not there")
    if there != data:
        try:
            shapes = context.coder.shapes(number)
            read_message(there, context.run, context.node, number, shapes, context.secret)
        except BadObject:
            raise Foreign(twin=False) from None
        raise Foreign(twin=True)
    return True


def _look(
    context: Context, number: int, arrivals: Arrivals, only_list: bool
) -> Requests[RoundList | None]:
    """The round's list if it exists; otherwise read what is new."""
    if only_list:  # a GET costs a twelfth of a LIST
        return (yield from list_of(context, number))
    rounds = by_round((yield List(ROUNDS, before_round(number))))
    here = rounds.get(number, {})
    if "close" in here:
        return (yield from list_of(context, number))
    if any(later > number for later in rounds):
        found = yield from list_of(context, number)  # the listing may have begun before it was made
        if found is None:
            raise Forgotten(f"round {number} has no list, and later rounds exist")
        return found
    yield from arrivals.fetch(here)
    return None


def _rank(node: str, arrivals: Arrivals) -> int:
    """How many others make the list before this node does."""
    senders = sorted(arrivals.messages)
    return senders.index(node) if node in senders else len(senders)


def _close(
    context: Context, arrivals: Arrivals, theta: str, full: bool, waited: float
) -> Requests[RoundList | None]:
    """Make the round's list, or read the one that another node has made."""
    number = arrivals.number
    made = make_list(
        number, arrivals.messages, arrivals.norms, arrivals.broken, context.rules.outliers, context.node, theta,
        full, waited,
    )  # fmt: skip
    created = yield Create(close_name(number), pack_list(context.run, made, context.secret))
    if not created:
        return (yield from list_of(context, number))
    return made
