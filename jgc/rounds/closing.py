"""A round from the message to the list: put, wait for the others, close."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jgc.rounds.arithmetic import usable
from jgc.rounds.bucket import BucketError
from jgc.rounds.context import Context, Pauses
from jgc.rounds.lists import OUTLIER, RoundList, make_list, pack_list
from jgc.rounds.messages import BadObject, Message, check_header, opened, read_message
from jgc.rounds.names import (
    ATTEMPTS,
    CLOSE,
    ROUNDS,
    before_round,
    by_round,
    close_name,
    message_name,
    messages_in,
    node_name,
    nodes_with,
)
from jgc.rounds.replay import check_last, list_of
from jgc.rounds.requests import Create, Get, List, Requests


class Foreign(Exception):
    """A different process of this run has sent under this node's name."""


class Arrivals:
    """The objects of a round so far, as one node sees them."""

    def __init__(self, context: Context, number: int, expected: frozenset[str], seconds: float):
        self.context, self.number, self.before = context, number, expected
        self.seconds = 0.0 if number else seconds  # that local steps take
        self.data: dict[str, bytes] = {}  # the valid messages, by node, as bytes
        self.messages: dict[str, Message] = {}  # the same, read
        self.broken: dict[str, str] = {}  # why messages of nodes cannot count
        # Why other objects under the name of a message are ignored, by node and attempt: the node
        # takes its next name, so it is still waited for.
        self.rubbish: dict[tuple[str, int], str] = {}
        self.notices: dict[tuple[str, str], bool] = {}  # by node, "here" or "left": whether valid
        self.norms: dict[str, float] = {}  # of the decoded messages
        self.gathered = context.clock() if number else None  # when the grace began

    @property
    def came(self) -> set[str]:
        """The nodes that have sent: nobody waits for them any longer."""
        return self.messages.keys() | self.broken.keys()

    @property
    def left_out(self) -> dict[str, str]:
        """Why objects that are no valid messages do not count, by node."""
        rubbish = {node: why for (node, _), why in self.rubbish.items() if node not in self.came}
        return rubbish | self.broken

    @property
    def expected(self) -> frozenset[str]:
        """Members of the last list and announced nodes, without those that have left."""
        notices = [notice for notice, valid in self.notices.items() if valid]
        here, left = ({node for node, end in notices if end == x} for x in ("here", "left"))
        return (self.before | here) - left

    @property
    def missing(self) -> list[str]:
        """The nodes that are waited for."""
        return sorted(self.expected - self.came)

    @property
    def grace_ends(self) -> float:
        """When a quorum no longer waits; in round 0 local steps come on top."""
        if self.gathered is None:
            return float("inf")
        return self.gathered + self.seconds + self.context.rules.grace

    def fetch(self, names: Mapping[str, int]) -> Requests[None]:
        """Read the new objects among the names of the round's folder."""
        messages = [
            (node, attempt) for node, attempt in messages_in(names)
            if node not in self.came and (node, attempt) not in self.rubbish
        ]  # fmt: skip
        notices = [
            (node, end) for end in ("here", "left") for node in nodes_with(names, end)
            if (node, end) not in self.notices
        ]  # fmt: skip
        wanted = [message_name(self.number, *message) for message in messages]
        wanted += [node_name(self.number, *notice) for notice in notices]
        objects = iter((yield Get(tuple(wanted))) if wanted else ())
        for message in messages:
            self.add(*message, next(objects))
        for notice in notices:
            self.notices[notice] = self._valid(next(objects))
        known = len(self.expected | self.came)
        if self.gathered is None and known >= self.context.rules.start:
            self.gathered = self.context.clock()

    def add(self, node: str, attempt: int, data: bytes | None) -> None:
        """Check and decode the object under a name of a node's message."""
        context, number = self.context, self.number
        if data is None or node in self.came or (node, attempt) in self.rubbish:
            return  # a bucket that lists more than it has: read again at the next look
        shapes = context.coder.shapes(number)
        try:
            message = read_message(data, context.run, node, number, shapes, context.secret)
        except BadObject as error:
            self.rubbish[node, attempt] = str(error)
            context.say(f"{message_name(number, node, attempt)} is left out: {error}")
            return
        vector = context.coder.decode(number, message.fields)
        if not usable(vector):
            self.broken[node] = f"{OUTLIER}: not finite, or as large as 1e15"
            context.say(f"round {number}: the message of {node} is left out: {self.broken[node]}")
            return
        self.data[node], self.messages[node] = data, message._replace(attempt=attempt)
        self.norms[node] = float(np.linalg.norm(vector.astype(np.float64)))  # only for the closer

    def _valid(self, data: bytes | None) -> bool:
        try:
            check_header(opened(data or b"", self.context.secret)[0], "notice", self.context.run)
        except BadObject:
            return False
        return True

    def ready(self) -> str:
        """Why the round can be closed, "full" or "grace"; "" if it cannot."""
        if len(self.messages) < self.context.rules.quorum or self.gathered is None:
            return ""
        if not self.missing:
            return "full"
        return "grace" if self.context.clock() >= self.grace_ends else ""

    def waiting_for(self) -> str:
        """The messages that the round waits for, in words."""
        rules, came = self.context.rules, sorted(self.messages)
        wanted = max(rules.quorum, rules.start if self.number == 0 else 0)
        have = f"{len(came)} of {wanted} messages ({', '.join(came) or 'none'})"
        names = ", ".join(self.missing) or "nodes that nobody has announced"
        return f"round {self.number} has {have}; missing: {names}"


class Closed(NamedTuple):
    """A closed round, as one node sees it."""

    list: RoundList  # its list
    data: Mapping[str, bytes]  # the messages that this node has read or sent, by node
    waited: float  # seconds
    twin: bool  # whether a different process had sent under this node's name
    sent: bool  # whether this node's message came into the bucket, as far as it knows


def closed_round(
    context: Context, number: int, data: bytes | None, expected: frozenset[str], seconds: float,
    unless_left: bool = False,
) -> Requests[Closed | None]:  # fmt: skip
    """Take part in a round, with this node's message, until its list exists; make it if needed.

    Returns None once nobody else is expected, `unless_left`. `seconds` is the time of this node's
    local steps. Raises Forgotten: the round was deleted long ago.
    """
    pauses, arrivals = Pauses(context), Arrivals(context, number, expected, seconds)
    sent, twin, turn = False, False, None
    while True:
        what = ""
        if data is not None and not (sent or twin):
            try:
                yield from _put(arrivals, data)
                sent = True
            except Foreign:
                twin = True
            except BucketError as error:  # others may close the round without this node
                pauses.failed(error)
                what = str(error)
        try:
            closed = yield from _look(arrivals, only_list=turn is not None)
            reason = arrivals.ready()
            if closed is None and reason:
                if turn is None:
                    turn = context.clock() + context.rules.patience * _rank(arrivals)
                if context.clock() >= turn:
                    closed = yield from _close(arrivals, reason == "full", pauses.waited)
            if closed is not None:
                return Closed(closed, arrivals.data, pauses.waited, twin, sent)
            if unless_left and not reason and not arrivals.expected - {context.node}:
                return None
            what = what or arrivals.waiting_for()
        except BucketError as error:
            pauses.failed(error)
            what = str(error)
        # no longer than until this node may close: by its turn, or by the grace
        until = (turn or arrivals.grace_ends) - context.clock()
        yield from pauses.next(what, until if until > 0 else float("inf"))


def _put(arrivals: Arrivals, data: bytes) -> Requests[None]:
    """Send this node's message under its first free name. Raises Foreign: it has a valid one."""
    context, number, node = arrivals.context, arrivals.number, arrivals.context.node
    shapes = context.coder.shapes(number)
    for attempt in range(ATTEMPTS):
        name = message_name(number, node, attempt)
        there = data if (yield Create(name, data)) else (yield Get((name,)))[0]
        if there is None:
            raise BucketError(f"{name} exists and is not there")
        if there != data:  # equal if a PUT has succeeded whose answer was lost
            try:
                read_message(there, context.run, node, number, shapes, context.secret)
            except BadObject:
                arrivals.add(node, attempt, there)
                continue
            raise Foreign
        return arrivals.add(node, attempt, data)
    raise BucketError(
        f"other objects have all {ATTEMPTS} names of this node's message, {name} the last"
    )


def _look(arrivals: Arrivals, only_list: bool) -> Requests[RoundList | None]:
    """The round's list if it exists; otherwise read new objects."""
    context, number = arrivals.context, arrivals.number
    if only_list:  # a GET costs a twelfth of a LIST
        return (yield from list_of(context, number))
    rounds = by_round((yield List(ROUNDS, before_round(number))))
    here = rounds.get(number, {})
    if CLOSE in here:
        return (yield from list_of(context, number))
    if any(later > number and CLOSE in names for later, names in rounds.items()):
        # the listing may have begun before the list was made
        closed = yield from list_of(context, number)
        if closed is not None:
            return closed
        yield from check_last(context, number, rounds)
    yield from arrivals.fetch(here)
    return None


def _rank(arrivals: Arrivals) -> int:
    """The number of nodes that make the list before this node does."""
    node, senders = arrivals.context.node, sorted(arrivals.messages)
    return senders.index(node) if node in senders else len(senders)


def _close(arrivals: Arrivals, full: bool, waited: float) -> Requests[RoundList | None]:
    """Make the round's list, or read that of a faster node."""
    context, number = arrivals.context, arrivals.number
    made = make_list(
        number, arrivals.messages, arrivals.norms, arrivals.left_out, context.rules.outliers,
        context.node, arrivals.before, full, waited,
    )  # fmt: skip
    created = yield Create(close_name(number), pack_list(context.run, made, context.secret))
    return made if created else (yield from list_of(context, number))
