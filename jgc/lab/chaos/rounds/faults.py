"""The faults. Each is a generator of pauses in seconds; its docstring says what it does.

A fault names the nodes that it hits before its first pause. It is over when it returns; then each of these nodes must
count again.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np

from jgc.lab.chaos.rounds.links import MODES
from jgc.rounds.messages import packed_message
from jgc.rounds.names import message_name, node_name

SHORTEST, LONGEST = 5.0, 150.0  # seconds of a stop
HOUR = 3600.0
Steps = Iterator[float]


def kill(run: Any, hit: Any, dice: Random) -> Steps:
    """SIGKILL of a node at a random moment; up to 20 s later it comes back with its disk"""
    (node,) = hit.choose(dice)
    node.kill()
    yield dice.uniform(0, 20)
    node.start()


def lost_disk(run: Any, hit: Any, dice: Random) -> Steps:
    """SIGKILL of a node, and its disk is gone: it comes back without its residual"""
    (node,) = hit.choose(dice)
    node.kill()
    (node.files.folder / f"{node.name}.rounds").unlink(missing_ok=True)
    yield dice.uniform(0, 10)
    node.start()


def power_cut(run: Any, hit: Any, dice: Random) -> Steps:
    """SIGKILL of all nodes at one moment; they come back within 5 s of each other"""
    nodes = hit.choose_all()
    for node in nodes:
        node.kill()
    for node in nodes:
        yield dice.uniform(0, 5 / len(nodes))
        node.start()


def stop(run: Any, hit: Any, dice: Random) -> Steps:
    """SIGSTOP of a node, for 5 to 150 s"""
    seconds = dice.choice((dice.uniform(SHORTEST, 20), dice.uniform(SHORTEST, LONGEST)))
    (node,) = hit.choose(dice)
    node.stand_still()
    yield min(seconds, run.seconds_left())
    node.go_on()


def clock(run: Any, hit: Any, dice: Random) -> Steps:
    """A node starts again with a wall clock that is an hour fast or slow"""
    (node,) = hit.choose(dice)
    node.kill()
    yield dice.uniform(0, 3)
    node.start(clock=dice.choice((-HOUR, HOUR)))


def late(run: Any, hit: Any, dice: Random) -> Steps:
    """A newcomer joins, takes part in some rounds, and leaves or is killed"""
    node = run.newcomer()
    node.start()
    yield from run.until(lambda: run.counted(node.name) >= 3, hit, f"{node.name} does not count")
    if dice.random() < 0.5:
        node.kill()
        return
    node.leave()
    yield from run.until(lambda: not node.alive, hit, f"{node.name} does not leave")


def _link(mode: str, shortest: float, longest: float) -> Callable[[Any, Any, Random], Steps]:
    def fault(run: Any, hit: Any, dice: Random) -> Steps:
        (node,) = hit.choose(dice)
        seconds = dice.uniform(shortest, longest)
        node.switch.set(mode, seconds)
        yield seconds

    assert mode in MODES
    return fault


def server(run: Any, hit: Any, dice: Random) -> Steps:
    """The server stops and starts again; a folder cannot be reached for up to 10 s"""
    nodes = hit.choose_all()
    if run.place.server is not None:
        yield from run.in_thread(run.place.server.stop)
        yield dice.uniform(0, 5)
        yield from run.in_thread(run.place.server.start)
        return
    seconds = dice.uniform(2, 10)
    for node in nodes:
        node.switch.set("unreachable", seconds)
    yield seconds


def _objects(make: Callable[[Any, Random, str, int], bytes]) -> Callable[[Any, Any, Random], Steps]:
    """Put an object under a node's next message, for which nothing may be lost: nobody counts as hit."""

    def fault(run: Any, hit: Any, dice: Random) -> Steps:
        node, number = dice.choice(run.names), run.number
        for later in (number, number + 1, number + 2):  # one of them comes before the node's message
            run.put(message_name(later, node), make(run, dice, node, later))
        run.put(node_name(number + 1, f"stranger-{number}", "here"), b"rubbish")
        yield 1.0

    return fault


def _truncated(run: Any, dice: Random, node: str, number: int) -> bytes:
    data = run.a_message(dice)
    return data[: dice.randrange(len(data))] if data else b""


def _repeated(run: Any, dice: Random, node: str, number: int) -> bytes:
    return run.a_message(dice)


def _foreign(run: Any, dice: Random, node: str, number: int) -> bytes:
    fields = {"words": np.zeros(dice.randrange(1, 9), np.uint32)}
    unsigned = packed_message(run.token, node, "stranger", number, 10**9, "digest", fields, None)
    other = packed_message("other run", node, "stranger", number, 10**9, "digest", fields, run.secret)
    size = packed_message(run.token, node, "stranger", number, 10**9, "digest", fields, run.secret)
    return dice.choice((unsigned, other, size, dice.randbytes(1000), b""))


def nan(run: Any, hit: Any, dice: Random) -> Steps:
    """A node's parameters become NaN, and a stranger who has the secret sends a message that decodes to NaN"""
    (node,) = hit.choose(dice)
    node.files.nan.touch()
    yield from run.until(lambda: not node.files.nan.exists(), hit, f"{node.name} does not go on")
    number, words = run.number, np.full(run.words, 0xFFFFFFFF, np.uint32)
    data = packed_message(run.token, "stranger", "stranger", number, 1, run.digest, {"words": words}, run.secret)
    run.put(message_name(number, "stranger"), data)
    yield 1.0


def twin(run: Any, hit: Any, dice: Random) -> Steps:
    """A second process with the name of a node, on another disk: exactly one of the two stops, and says so"""
    (node,) = hit.choose(dice)
    other = run.twin_of(node)
    other.start()
    yield from run.until(lambda: not (node.alive and other.alive), hit, f"two processes go on as {node.name}")
    yield 4 * node.settings.seconds  # the other has time to do wrong, too
    both = [x for x in (node, other) if not x.alive]
    if len(both) > 1:
        hit.silent(f"both processes that ran as {node.name} have ended")
    for gone in both:
        if "another process sends as" not in run.last_words(gone):
            hit.silent(f"{gone.label} ended with: {run.last_words(gone)}")
    other.kill()
    if not node.alive:
        node.start()


FAULTS: dict[str, Callable[[Any, Any, Random], Steps]] = {
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
    "slow": _link("slow", 5, 30),
    "half": _link("half", 5, 20),
    "server": server,
}
WHAT = {
    "truncated": "Parts of a message, or nothing, under the names of a node's next messages",
    "repeated": "An older message under the names of a node's next messages",
    "foreign": "Unsigned messages, those of another run or size, and random bytes under the names of the next messages",
    "unreachable": "The bucket refuses a node's connections for 2 to 25 s",
    "silent": "The bucket takes a node's requests, and answers up to 15 s later",
    "full": "The bucket is full for a node, for 5 to 20 s",
    "slow": "Every request of a node takes 0.7 s longer, for 5 to 30 s",
    "half": "Every other PUT of a node is cut, or carried out and not answered, for 5 to 20 s",
}
"""What the faults do that have no docstring."""


def what(name: str) -> str:
    """What a fault does, in a line."""
    return WHAT.get(name) or (FAULTS[name].__doc__ or "")


