"""One process's connection to the hub (`hub`): post values, wait for all values, exit when the run must end.

docs/results/coordination.md shows why JAX's coordination service does not suffice.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jgc.training.errors import FAILED, UserError, say
from jgc.training.processes.hub import GRACE, HELLO, beat_seconds, silent
from jgc.training.processes.link import Link, forward

RETRY = 0.2  # seconds between two attempts to reach process 0
JOINED = "joined"
STRANGER = "the server at --distributed.coordinator is not process 0 of jgc, or has a different JGC_RUN_TOKEN"


class Meeting:
    """A process's connection to the hub."""

    def __init__(
        self, link: Link, process: int, processes: int, timeout: float, end: Callable[[str], None], token: str = ""
    ):
        self.process, self.processes = process, processes
        self._link, self._timeout, self._end = link, timeout, end
        self._heard, self._joined, self._over = time.monotonic(), False, False
        self._answers: dict[str, list[Any]] = {}
        self._news, self._ending = threading.Condition(), threading.Lock()
        self._ended = threading.Event()
        link.send(jgc="join", process=process, of=processes, token=token)
        for target in (self._receive, self._beat):
            threading.Thread(target=target, daemon=True).start()
        self.wait(JOINED)

    def post(self, tag: str, value: Any, patient: bool = True) -> None:
        """Post a value under a tag, without waiting. Unless `patient`, a process that is late with it ends the run."""
        self._link.send(post=tag, value=value, patient=patient)

    def wait(self, tag: str, seconds: float | None = None) -> list[Any]:
        """The values of all processes under a tag, once all are there; [] after `seconds`."""
        with self._news:
            self._news.wait_for(lambda: tag in self._answers, seconds)
            return self._answers.pop(tag, [])

    def gather(self, tag: str, value: Any = None, patient: bool = True) -> list[Any]:
        """Post a value, and wait for the values of all processes."""
        self.post(tag, value, patient)
        return self.wait(tag)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Leave together with all processes, after a call of `last` in each."""
        self._finish()
        last()
        self.post("closed", None)
        self.wait("closed", self._timeout)
        self._link.send(left=True)

    def stop_all(self, why: str) -> None:
        """Leave, and end the other processes because of `why`."""
        self._finish()
        self._link.send(stopped=why)
        self._ended.wait(GRACE)  # process 0 must not exit before its hub has told the others

    def _finish(self) -> None:
        """Ignore the hub from here on."""
        with self._ending:  # waits for a thread that is just ending this process
            self._over = True

    def failed(self, what: str) -> None:
        """Report a failure whose cause may be a different process; returns only if the hub finds no cause."""
        self._link.send(failed=what)
        time.sleep(self._timeout + HELLO)

    def _receive(self) -> None:
        for message in self._link:
            self._heard, self._joined = time.monotonic(), True
            if "all" in message:
                with self._news:
                    self._answers[message["all"]] = message["values"]
                    self._news.notify_all()
            elif "end" in message:
                self._ended.set()
                self._stop(message["end"])
        self._stop("process 0, the coordinator, died" if self._joined else STRANGER)

    def _beat(self) -> None:
        interval, before = beat_seconds(self._timeout), time.monotonic()
        while not self._over:
            time.sleep(interval)
            now = time.monotonic()
            if now - before > 2 * interval + 1:  # this process itself was suspended
                self._heard = now
            if now - self._heard > self._timeout:
                self._stop(silent(0, now - self._heard) if self._joined else STRANGER)
            self._link.send(beat=True)
            before = now

    def _stop(self, why: str) -> None:
        with self._ending:
            if not self._over:
                self._over = True
                self._end(why)


def connect(host: str, port: int, seconds: float) -> Link:
    """A connection to the hub, tried again until it succeeds."""
    deadline, problem = time.monotonic() + seconds, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=left)
            connection.settimeout(None)
            if connection.getsockname() != connection.getpeername():
                return Link(connection)
            connection.close()  # TCP can connect a port to itself if nobody listens on it
            time.sleep(min(RETRY, left))
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(min(RETRY, max(0.0, deadline - time.monotonic())))
    raise UserError(
        f"no coordinator at {host}:{port} within {seconds:g} s ({problem}): is process 0 running there, and is "
        "--distributed.coordinator the same for all processes?", FAILED,
    )  # fmt: skip


def relay(host: str, port: int, token: str = "") -> int:
    """A local port that is forwarded through the hub to JAX's coordination service."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = listener.accept()
                outer = Link(socket.create_connection((host, port)))
                outer.send(jgc="relay", token=token)
                forward(inner, outer.socket)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def die(text: str) -> None:
    """Print one line and exit, even if printing fails: the main thread may be in a collective forever."""
    try:
        cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
        say(f"{cursor}error: {text}")
    finally:
        os._exit(FAILED)
