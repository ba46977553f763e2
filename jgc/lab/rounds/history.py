"""The contents of a bucket: the newest rounds of a run, its checkpoints, and the open round."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc.rounds.bucket import Bucket
from jgc.rounds.context import RoundsError
from jgc.rounds.lists import RoundList, read_list
from jgc.rounds.messages import BadObject, opened
from jgc.rounds.names import (
    CHECKPOINTS,
    CLOSE,
    ROUNDS,
    RUN,
    before_round,
    by_round,
    checkpoint_name,
    checkpoints_in,
    close_name,
    message_name,
    messages_in,
    nodes_with,
)
from jgc.rounds.replay import read_checkpoint


class Run(NamedTuple):
    """`run.json`.

    Attributes:
      token: the run's name, in all of its objects.
      settings: what its nodes have alike.
    """

    token: str
    settings: Mapping[str, Any]

    def shapes(self, number: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of the fields of a message of round `number`."""
        starts = [start for _, start in self.settings["phases"]]
        phase = max(i for i, start in enumerate(starts) if start <= number)
        return {"words": jax.ShapeDtypeStruct((self.settings["words"][phase],), jnp.uint32)}


class History(NamedTuple):
    """The newest part of a run.

    Attributes:
      run: the run.
      number: closed rounds, so that this is the number of the open one.
      lists: of the newest closed rounds, in order.
      objects: names and sizes in the folders of these rounds and of the open one, by round.
      checkpoints: rounds that a checkpoint comes after, in order.
      lost: rounds among the newest without a list, although later ones have theirs.
    """

    run: Run
    number: int
    lists: tuple[RoundList, ...]
    objects: Mapping[int, Mapping[str, int]]
    checkpoints: tuple[int, ...]
    lost: tuple[int, ...] = ()

    @property
    def senders(self) -> list[str]:
        """The nodes with a message in the open round."""
        return senders_in(self.objects.get(self.number, {}))

    @property
    def missing(self) -> list[str]:
        """The nodes that the open round waits for: members of the last list, and newly announced nodes."""
        names = self.objects.get(self.number, {})
        expected = {*(self.lists[-1].nodes if self.lists else ()), *nodes_with(names, "here")}
        return sorted(expected - {*nodes_with(names, "left"), *self.senders})


def senders_in(names: Iterable[str]) -> list[str]:
    """The nodes with a message among the names of a round, sorted."""
    return sorted({node for node, _ in messages_in(names)})


def read_run(bucket: Bucket, secret: bytes | None) -> Run:
    """The run of a bucket.

    Raises:
      RoundsError: there is none, or it cannot be read.
    """
    (data,) = bucket.get([RUN])
    if data is None:
        raise RoundsError(f"there is no run: the bucket has no {RUN}")
    try:
        header = opened(data, secret)[0]
        return Run(header["run"], header["settings"])
    except (BadObject, KeyError) as error:
        raise RoundsError(f"{RUN}: {error}") from None


def read_history(bucket: Bucket, secret: bytes | None, last: int) -> History:
    """The newest `last` closed rounds and the open one.

    Raises:
      RoundsError: no run, or a list that cannot be read.
      BucketError: the bucket does not answer.
    """
    run = read_run(bucket, secret)
    checkpoints = checkpoints_in(bucket.list(CHECKPOINTS))
    closed: list[int] = []
    for newest in reversed([0, *checkpoints]):  # all rounds before it are closed, unless it is foreign
        objects = by_round(bucket.list(ROUNDS, before_round(max(0, newest - last))))
        closed = sorted(number for number, inside in objects.items() if CLOSE in inside)
        while closed and not _is_list(bucket, run, secret, closed[-1]):
            closed.pop()  # nodes, too, go on as if it were not there
        if closed:
            break
    number = closed[-1] + 1 if closed else 0
    later = (x for x in reversed(checkpoints) if x > number and is_good_checkpoint(bucket, run, secret, x))
    number = next(later, number)  # the last lists are gone
    wanted = [i for i in closed if number - last <= i]
    lists = []
    for i, data in zip(wanted, bucket.get([close_name(i) for i in wanted]), strict=True):
        try:
            lists.append(read_list(data or b"", run.token, i, secret))
        except BadObject as error:
            raise RoundsError(f"{close_name(i)} is no list of this run: {error}") from None
    inside = {i: x for i, x in objects.items() if number - last <= i <= number}
    lost = sorted({*range(max(0, number - last), number)} - {*wanted})
    return History(run, number, tuple(lists), inside, tuple(checkpoints), tuple(lost))


def is_good_checkpoint(bucket: Bucket, run: Run, secret: bytes | None, number: int) -> bool:
    """Whether a checkpoint can be read."""
    try:
        shared = read_checkpoint(bucket.get([checkpoint_name(number)])[0] or b"", run.token, secret)
    except BadObject:
        return False
    return shared.number == number


def _is_list(bucket: Bucket, run: Run, secret: bytes | None, number: int) -> bool:
    try:
        read_list(bucket.get([close_name(number)])[0] or b"", run.token, number, secret)
    except BadObject:
        return False
    return True


def tokens_sent(bucket: Bucket, secret: bytes | None, history: History) -> tuple[int, int]:
    """Tokens of the messages of closed rounds that are still in the bucket: (counted, not counted)."""
    counted, others = 0, []
    for closed in history.lists:
        there = messages_in(history.objects[closed.round])
        counted += sum(entry.tokens for entry in closed.members if (entry.node, entry.attempt) in there)
        others += [message_name(closed.round, *message) for message in there if not closed.counts(message[0])]
    lost = 0
    for data in bucket.get(others):
        try:
            lost += int(opened(data or b"", secret)[0].get("tokens", 0))
        except (BadObject, TypeError, ValueError):
            continue  # nobody knows how many it had
    return counted, lost
