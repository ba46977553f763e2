"""Strangers at the coordinator's port: a thousand attempts of twelve kinds, without and with a wrong token."""

import contextlib
import json
import os
import socket
import threading
import time
from random import Random

from jgc.lab.chaos.lab import Lab
from jgc.lab.chaos.verdict import SILENT, SURVIVED, CannotTest, Outcome
from jgc.training.processes.distributed import TOKEN
from jgc.training.processes.link import FIRST

ATTEMPTS, HELD = 1000, 100  # in all; connections that stay open, mute or with a byte now and then
AT_ONCE = 20  # attempts without a pause
DESCRIPTORS = 200  # by which process 0 may grow meanwhile: 64 strangers may wait at a time, and JAX opens some

LINES = {
    "relay": b'{"jgc": "relay"}\n',
    "relay, wrong token": b'{"jgc": "relay", "token": "a secret of the"}\n',
    "join": b'{"jgc": "join", "process": 1, "of": 2}\n',
    "join, token no text": b'{"jgc": "join", "process": 1, "of": 2, "token": [1]}\n',
    "wrong of": b'{"jgc": "join", "process": 1, "of": 3, "token": "x"}\n',
    "no number": b'{"jgc": "join", "process": "zero", "of": null}\n',
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "nested": b"[" * 4000 + b"\n",
    "long": b"x" * (20 * FIRST),
    "bytes": bytes(range(256)) * 8 + b"\n",
}
BAD_IDS = [(-5, 2), (77, 2), (True, 2), (1.0, 2), ("1", 2), (0, None), (2, 2)]


def joining(process: object, of: object, token: str) -> bytes:
    """The first line of a process that wants to join."""
    return json.dumps({"jgc": "join", "process": process, "of": of, "token": token}).encode() + b"\n"


def shout(port: int, line: bytes) -> None:
    """Send a first line, and wait until the hub closes."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(line)
        connection.settimeout(20)
        while connection.recv(1 << 12):
            pass


def strangers(lab: Lab, dice: Random) -> Outcome:
    """A thousand attempts of strangers, before all have come and during the run: it must be bit-equal."""
    if lab.processes == 1:
        raise CannotTest("needs several processes")
    token = f"{dice.getrandbits(128):032x}"
    first = lab.start(environment={TOKEN: token}, only=[0])
    held = _when_it_listens(first.port, lab.patience)
    before = _descriptors(first.running[0].process.pid)
    lines = [*LINES.values(), *(joining(i, of, dice.choice(("", "x", token[:-1]))) for i, of in BAD_IDS)]
    lines += [joining(i, lab.processes, wrong) for i in range(lab.processes) for wrong in ("", token[:-1] + "x")]
    held += [socket.create_connection(("127.0.0.1", first.port)) for _ in range(HELD)]
    over = threading.Event()
    threading.Thread(target=_drip, args=(held[: HELD // 2], over), daemon=True).start()
    _all_at(first.port, [dice.choice(lines) for _ in range(ATTEMPTS // 2)])
    rest = lab.start(first.run_dir, {TOKEN: token}, port=first.port, only=range(1, lab.processes))
    _all_at(first.port, [dice.choice(lines) for _ in range(ATTEMPTS // 2)])
    after = _descriptors(first.running[0].process.pid)
    outcome = lab.verdict(first._replace(running=[*first.running, *rest.running]))
    over.set()
    for connection in held:
        connection.close()
    if before and outcome.kind == SURVIVED and after - before > DESCRIPTORS:
        return Outcome(SILENT, f"process 0 grew from {before} to {after} descriptors")
    return outcome


def missing(lab: Lab, dice: Random) -> Outcome:
    """One process never comes, often the coordinator: all others end within the time for connecting."""
    if lab.processes == 1:
        raise CannotTest("needs several processes")
    absent = dice.choice((0, lab.another(dice)))
    came = [i for i in range(lab.processes) if i != absent]
    outcome = lab.verdict(lab.start(only=came, options=["--distributed.connect-timeout", "10"]), seconds=lab.limit)
    return outcome._replace(what=f"without process {absent}: {outcome.what}")


def no_descriptors(lab: Lab, dice: Random) -> Outcome:
    """Process 0 can open nothing for 3 s while the others come."""
    if lab.processes == 1:
        raise CannotTest("needs several processes")
    import resource

    first = lab.start(only=[0])
    knocking = _when_it_listens(first.port, lab.patience)
    process = first.running[0].process.pid
    size = _descriptors(process)
    if not hasattr(resource, "prlimit") or not size:
        raise CannotTest("needs Linux")
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (size, hard))
    rest = lab.start(first.run_dir, port=first.port, only=range(1, lab.processes))
    time.sleep(3)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process, resource.RLIMIT_NOFILE, (soft, hard))
    outcome = lab.verdict(first._replace(running=[*first.running, *rest.running]))
    for connection in knocking:
        connection.close()
    return outcome


def _when_it_listens(port: int, seconds: float) -> list[socket.socket]:
    """A mute connection, as soon as there is a coordinator."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return [socket.create_connection(("127.0.0.1", port))]
        time.sleep(0.05)
    return []


def _all_at(port: int, lines: list[bytes]) -> None:
    """Many attempts, `AT_ONCE` at a time."""
    for i in range(0, len(lines), AT_ONCE):
        threads = [threading.Thread(target=shout, args=(port, line), daemon=True) for line in lines[i : i + AT_ONCE]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _drip(connections: list[socket.socket], over: threading.Event) -> None:
    """A byte to each connection every second."""
    while not over.wait(1):
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(b"x")


def _descriptors(process: int) -> int:
    """Open descriptors of a process; 0 where nothing tells."""
    try:
        return len(os.listdir(f"/proc/{process}/fd"))
    except OSError:
        return 0
