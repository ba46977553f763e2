"""Checkpoints, and theta of any round from a checkpoint and the lists that follow it."""

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from jgc.rounds.arithmetic import Shared, shared_state, stepped, usable
from jgc.rounds.bucket import BucketError
from jgc.rounds.context import Context, Forgotten, Pauses, RoundsError, persistently
from jgc.rounds.lists import RoundList, read_list
from jgc.rounds.messages import BadObject, check_header, opened, read_message, sealed, sha256_of
from jgc.rounds.names import (
    CHECKPOINTS,
    CLOSE,
    ROUNDS,
    before_round,
    by_round,
    checkpoint_name,
    checkpoints_in,
    close_name,
    message_name,
    number_of,
)
from jgc.rounds.requests import Create, Delete, Get, List, Requests

TRIES = 5  # reads of objects that other nodes may be writing or deleting

Newest = tuple[Shared, list[RoundList]]  # a shared state, and the lists since its checkpoint


class Diverged(Exception):
    """This node's shared state is not the one that a list names."""


def pack_checkpoint(run: str, shared: Shared, secret: bytes | None) -> bytes:
    """The bytes of a checkpoint."""
    header = {"kind": "checkpoint", "run": run, "round": shared.number, "digest": shared.digest}
    outer = {f"outer/{name}": x for name, x in shared.outer.items()}
    return sealed(header, {"theta": shared.theta, **outer}, secret)


def read_checkpoint(data: bytes, run: str, secret: bytes | None) -> Shared:
    """The shared state of a checkpoint."""
    header, arrays = opened(data, secret)
    check_header(header, "checkpoint", run)
    try:
        theta = np.array(arrays.pop("theta"))  # a copy: the bytes are freed
        outer = {name.removeprefix("outer/"): np.array(x) for name, x in arrays.items()}
        shared = shared_state(header["round"], theta, outer)
    except (KeyError, TypeError, ValueError) as error:
        raise BadObject(f"a checkpoint that cannot be read ({error})") from None
    if shared.digest != header.get("digest"):
        raise BadObject("its arrays do not have the digest of its header")
    return shared


def newest_checkpoint(context: Context, least: int = 0) -> Requests[Shared | None]:
    """The newest readable checkpoint after at least `least` rounds; else None."""
    for _ in range(TRIES):
        names = yield from persistently(context, List(CHECKPOINTS))
        for number in reversed([x for x in checkpoints_in(names) if x >= least]):
            (data,) = yield from persistently(context, Get((checkpoint_name(number),)))
            if data is None:
                break  # deleted since it was listed: a newer one exists
            try:
                return read_checkpoint(data, context.run, context.secret)
            except BadObject as error:
                context.say(f"{checkpoint_name(number)} is left aside: {error}")
        else:
            return None
    return None


def write_checkpoint(context: Context, shared: Shared) -> Requests[None]:
    """Write a checkpoint and delete messages that are older than `retained` rounds.

    Lists stay: they are small, and a node that was suspended must not close a round again. Gives up
    if the bucket fails, because a later checkpoint serves as well.
    """
    name = checkpoint_name(shared.number)
    try:
        checkpoints = yield List(CHECKPOINTS)
        if name not in checkpoints:  # a refused create would have sent all its bytes
            yield Create(name, pack_checkpoint(context.run, shared, context.secret))
        limit, retained = shared.number - context.rules.retained, context.rules.retained
        # not from the first round on: that listing would grow with the run
        rounds = yield List(ROUNDS, before_round(max(0, limit - 4 * retained)))
        names = [x for x in (*checkpoints, *rounds) if not x.endswith(f"/{CLOSE}")]
        old = [x for x in names if (i := number_of(x.split("/")[1])) is not None and i < limit]
        if old:
            yield Delete(tuple(old))
    except BucketError as error:
        context.say(f"checkpoint {shared.number} is not written: {error}")


def list_of(context: Context, number: int) -> Requests[RoundList | None]:
    """The list of a round, or None. RoundsError if it cannot be read: it is never replaced."""
    (data,) = yield from persistently(context, Get((close_name(number),)))
    if data is None:
        return None
    try:
        return read_list(data, context.run, number, context.secret)
    except BadObject as error:
        raise RoundsError(f"{close_name(number)} is no list of this run: {error}") from None


def check_last(
    context: Context, number: int, rounds: Mapping[int, Mapping[str, int]]
) -> Requests[None]:
    """Raise Forgotten if a later round than `number` has a list, and not a foreign object."""
    for later in sorted(r for r, inside in rounds.items() if r > number and CLOSE in inside):
        (data,) = yield from persistently(context, Get((close_name(later),)))
        try:
            read_list(data or b"", context.run, later, context.secret)
        except BadObject:
            continue
        raise Forgotten(f"round {number} has no list, and later rounds exist")


def advanced(
    context: Context, shared: Shared, closed: RoundList, known: Mapping[str, bytes]
) -> Requests[tuple[Shared, dict[str, str]]]:
    """The shared state after a closed round, and why all nodes skip messages, by member.

    `known` are messages that this node has. Raises Diverged if `shared` is not the state that the
    list names, Forgotten if messages were deleted, RoundsError if one was overwritten.
    """
    if closed.theta != shared.digest:
        raise Diverged
    data = yield from _messages(context, closed, known)
    shapes = context.coder.shapes(closed.round)
    skipped: dict[str, str] = {}

    def vectors():
        for entry in closed.members:
            sender = context.run, entry.node, closed.round
            message = read_message(data[entry.node], *sender, shapes, context.secret)
            vector = context.coder.decode(closed.round, message.fields)
            if usable(vector):  # the same bytes everywhere, so all nodes decide alike
                yield entry.tokens, vector
            else:
                skipped[entry.node] = "not finite, or as large as 1e15"

    try:
        most = max((entry.tokens for entry in closed.members), default=0)
        return stepped(context.outer, shared, vectors(), most), skipped
    except BadObject as error:
        raise RoundsError(f"round {closed.round}: a message of its list: {error}") from None


def _messages(
    context: Context, closed: RoundList, known: Mapping[str, bytes]
) -> Requests[dict[str, bytes]]:
    """The messages of a list's members, with the checksums that it names."""
    members = {x.node: x for x in closed.members}
    data = {n: x for n, x in known.items() if n in members and sha256_of(x) == members[n].sha256}
    missing = [x for x in closed.members if x.node not in data]
    if not missing:
        return data
    names = tuple(message_name(closed.round, x.node, x.attempt) for x in missing)
    pauses, tries = Pauses(context), 1
    while None in (objects := (yield from persistently(context, Get(names)))):
        if tries == TRIES:
            raise Forgotten(f"messages that the list of round {closed.round} names are gone")
        yield from pauses.next(f"messages of round {closed.round}")
        tries += 1
    for entry, name, content in zip(missing, names, objects, strict=True):
        if sha256_of(content) != entry.sha256:
            raise RoundsError(
                f"{name} differs from the list of its round: it was overwritten, so nodes cannot "
                "agree"
            )
        data[entry.node] = content
    return data


def lists_from(context: Context, number: int) -> Requests[list[RoundList]]:
    """The lists from round `number` on. Raises Forgotten if one is gone and later ones exist."""
    names = yield from persistently(context, List(ROUNDS, before_round(number)))
    rounds = by_round(names)
    lists: list[RoundList] = []
    # a later list shows that this one was made, even if the listing began before; other objects do
    # not, as anybody may have written them
    last = max((r for r, inside in rounds.items() if CLOSE in inside), default=-1)
    while number <= last:
        closed = yield from list_of(context, number)
        if closed is None:
            yield from check_last(context, number, rounds)
            break
        lists.append(closed)
        number += 1
    return lists


def _replayed(context: Context, shared: Shared) -> Requests[Newest]:
    """The newest shared state from an older one."""
    lists: list[RoundList] = []
    while more := (yield from lists_from(context, shared.number)):
        for closed in more:
            shared, _ = yield from advanced(context, shared, closed, {})
        lists += more
    return shared, lists


def _loaded(context: Context, least: int = 0) -> Requests[Newest | None]:
    """The newest shared state, from a checkpoint after at least `least` rounds; None without one.

    Raises Diverged if checkpoint and lists give a different state than a list names.
    """
    pauses = Pauses(context)
    for _ in range(TRIES):
        shared = yield from newest_checkpoint(context, least)
        if shared is None:
            return None
        try:
            return (yield from _replayed(context, shared))
        except Forgotten as error:  # deleted meanwhile, as a newer checkpoint was made
            text = str(error)
        yield from pauses.next(text)
    raise RoundsError(f"the bucket forgets: {text}, and there is no newer checkpoint")


def resumed(context: Context) -> Requests[Newest]:
    """The newest shared state of the bucket. Raises RoundsError if it is wrong, or not there."""
    try:
        newest = yield from _loaded(context)
    except Diverged:
        raise RoundsError(
            "the checkpoint and the lists give other parameters than the other nodes have: does "
            "this machine compute differently (see jgc.rounds.arithmetic), or have a different "
            "version of jgc?"
        ) from None
    if newest is None:
        raise RoundsError("the bucket forgets: it has run.json, and no checkpoint")
    return newest


def healed(context: Context, closed: RoundList) -> Requests[Newest]:
    """The shared state after a list that names a different digest than this node's.

    First from the newest checkpoint, which mends a flipped bit; if that gives a wrong digest
    again, from the checkpoint after this round, which the list's writer makes.
    """
    node, number = context.node, closed.round + 1
    context.say(
        f"round {closed.round}: {node} has other parameters than the list; it takes a checkpoint"
    )
    pauses, least = Pauses(context), 0
    while True:
        with suppress(Diverged):
            newest = yield from _loaded(context, least)
            if newest is not None and newest[0].number >= number:
                return newest
        least = number
        if pauses.waited > context.rules.timeout:
            raise RoundsError(
                f"no checkpoint gives the parameters that the list of round {closed.round} names"
            )
        yield from pauses.next(f"checkpoint {number}, by {closed.writer}")
