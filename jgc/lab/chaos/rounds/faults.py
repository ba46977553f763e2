"""The faults. Each is a generator of pauses in seconds; its docstring is its line in the table.

A fault chooses the nodes that it hits before its first pause. It is over when it returns; then each
of these nodes must count again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from jgc.lab.chaos.rounds.links import MODES
from jgc.rounds.messages import packed_message
from jgc.rounds.names import message_name, node_name

if TYPE_CHECKING:
    from jgc.lab.chaos.rounds.run import Hit, Run

SHORTEST, LONGEST = 5.0, 150.0  # seconds of a stop
HOUR = 3600.0
Steps = Iterator[float]
Fault = Callable[["Run", "Hit", Random], Steps]


def kill(run: Run, hit: Hit, dice: Random) -> Steps:
    """SIGKILL of a node at a random moment; up to 20 s later it comes back with its disk"""
    (node,) = hit.choose(dice)
    node.kill()
    yield dice.uniform(0, 20)
    node.start()


def lost_disk(run: Run, hit: Hit, dice: Random) -> Steps:
    """SIGKILL of a node, and its disk is lost: it comes back without its residual"""
    (node,) = hit.choose(dice)
    node.kill()
    (node.files.folder / f"{node.name}.rounds").unlink(missing_ok=True)
    yield dice.uniform(0, 10)
    node.start()


def power_cut(run: Run, hit: Hit, dice: Random) -> Steps:
    """SIGKILL of all nodes together; they come back within 5 s of each other"""
    nodes = hit.choose_all()
    for node in nodes:
        node.kill()
    for node in nodes:
        yield dice.uniform(0, 5 / len(nodes))
        node.start()


def stop(run: Run, hit: Hit, dice: Random) -> Steps:
    """SIGSTOP of a node, for 5 to 150 s"""
    seconds = dice.choice((dice.uniform(SHORTEST, 20), dice.uniform(SHORTEST, LONGEST)))
    (node,) = hit.choose(dice)
    node.pause()
    yield min(seconds, run.seconds_left())
    node.go_on()


def clock(run: Run, hit: Hit, dice: Random) -> Steps:
    """A node starts again with a Python whose wall clock is an hour fast or slow"""
    (node,) = hit.choose(dice)
    node.kill()
    yield dice.uniform(0, 3)
    node.start(clock=dice.choice((-HOUR, HOUR)))


def late(run: Run, hit: Hit, dice: Random) -> Steps:
    """A newcomer joins, takes part in some rounds, and leaves or is killed"""
    node = run.newcomer()
    node.start()
    yield from run.until(lambda: run.counted(node.name) >= 3, hit, f"{node.name} does not count")
    if dice.random() < 0.5:
        node.kill()
        return
    node.leave()
    yield from run.until(lambda: not node.alive, hit, f"{node.name} does not leave")
    ended = node.end(0.0)
    if ended is not None and not hit.outcome:
        hit.outcome = node.verdict(ended, asked=True)


def _link(mode: str, shortest: float, longest: float, everyone: bool = False) -> Fault:
    def fault(run: Run, hit: Hit, dice: Random) -> Steps:
        nodes = hit.choose_all() if everyone else hit.choose(dice)
        seconds = dice.uniform(shortest, longest)
        for node in nodes:
            node.switch.set(mode, seconds)
        yield seconds

    assert mode in MODES
    return fault


def server(run: Run, hit: Hit, dice: Random) -> Steps:
    """The server stops, and starts again up to 5 s later; a folder is unreachable for 2 to 10 s"""
    if run.place.server is None:
        yield from _link("unreachable", 2, 10, everyone=True)(run, hit, dice)
        return
    hit.choose_all()
    yield from run.in_thread(run.place.server.stop)
    yield dice.uniform(0, 5)
    yield from run.in_thread(run.place.server.start)


def _objects(make: Callable[[Run, Random, str, int], bytes]) -> Fault:
    """Put objects under the names of a node's next messages. No node may lose anything by it, so
    none counts as hit."""

    def fault(run: Run, hit: Hit, dice: Random) -> Steps:
        node, number = dice.choice(run.names), run.number
        for later in (number, number + 1, number + 2):  # one of them precedes the node's message
            run.put(message_name(later, node), make(run, dice, node, later))
        run.put(node_name(number + 1, f"stranger-{number}", "here"), b"rubbish")
        yield 1.0

    return fault


def _truncated(run: Run, dice: Random, node: str, number: int) -> bytes:
    data = run.recent_message(dice)
    return data[: dice.randrange(len(data))] if data else b""


def _repeated(run: Run, dice: Random, node: str, number: int) -> bytes:
    return run.recent_message(dice)


def _foreign(run: Run, dice: Random, node: str, number: int) -> bytes:
    fields = {"words": np.zeros(dice.randrange(1, 9), np.uint32)}  # fewer than a message has
    message = ("stranger", number, 10**9, "digest", fields)
    unsigned = packed_message(run.token, node, *message, None)
    other_run = packed_message("other run", node, *message, run.secret)
    other_size = packed_message(run.token, node, *message, run.secret)
    return dice.choice((unsigned, other_run, other_size, dice.randbytes(1000), b""))


def nan(run: Run, hit: Hit, dice: Random) -> Steps:
    """A node's parameters become NaN, and a stranger with the secret sends a message of NaN"""
    (node,) = hit.choose(dice)
    node.files.nan.touch()
    yield from run.until(lambda: not node.files.nan.exists(), hit, f"{node.name} does not go on")
    run.put(message_name(run.number, "stranger"), nan_message(run))
    yield 1.0


def nan_message(run: Run) -> bytes:
    """A signed message of the open round that decodes to NaN."""
    words = np.full(run.words, 0xFFFFFFFF, np.uint32)
    sender = (run.token, "stranger", "stranger", run.number, 1, run.digest)
    return packed_message(*sender, {"words": words}, run.secret)


def twin(run: Run, hit: Hit, dice: Random) -> Steps:
    """A second process with a node's name, on a different disk: exactly one of the two stops"""
    (node,) = hit.choose(dice)
    other = run.twin_of(node)
    other.start()
    both = f"two processes go on as {node.name}"
    yield from run.until(lambda: not (node.alive and other.alive), hit, both)
    yield 4 * node.settings.seconds  # the other has time to go wrong, too
    ended = [x for x in (node, other) if not x.alive]
    if len(ended) > 1:
        hit.silent(f"both processes that ran as {node.name} have ended")
    for gone in ended:
        if "a different process sends as" not in run.last_words(gone):
            hit.silent(f"{gone.label} ended with: {run.last_words(gone)}")
    other.kill()
    if not node.alive:
        node.start()


FAULTS: dict[str, Fault] = {
    "kill": kill,
    "lost-disk": lost_disk,
    "power-cut": power_cut,
    "stop": stop,
    "clock": clock,
    "late": late,
    "twin": twin,
    "nan": nan,
    "truncated": _objects(_truncated),
    "repeated": _objects(_repeated),
    "foreign": _objects(_foreign),
    "unreachable": _link("unreachable", 2, 25),
    "silent": _link("silent", 2, 15),
    "full": _link("full", 5, 20),
    "full-server": _link("full", 2, 10, everyone=True),
    "slow": _link("slow", 5, 30),
    "half": _link("half", 5, 20),
    "server": server,
}
WHAT = {
    "truncated": "Parts of a message, or nothing, under the names of a node's next messages",
    "repeated": "An older message under the names of a node's next messages",
    "foreign": (
        "Unsigned messages, messages of a different run or size, and random bytes under the names of a "
        "node's next messages"
    ),
    "unreachable": "The bucket refuses a node's connections for 2 to 25 s",
    "silent": "The bucket takes a node's requests, and answers up to 15 s later",
    "full": "The bucket is full for a node, for 5 to 20 s",
    "full-server": "The bucket is full for all nodes, for 2 to 10 s",
    "slow": "Every request of a node takes 0.7 s longer, for 5 to 30 s",
    "half": "Every other PUT of a node is cut, or carried out and not answered, for 5 to 20 s",
}
"""The lines of the faults without a docstring."""


def line_of(name: str) -> str:
    """A fault's line in the table."""
    return WHAT.get(name) or (FAULTS[name].__doc__ or "")
