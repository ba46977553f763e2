"""A process's side of the meeting point (`hub`): say something and hear what all have said; end when one is gone.

This is apart from JAX's own coordination service on purpose. It is there before JAX starts, so that processes of
other versions or configs are told apart before anything can hang; a dead process shows at once, because its connection
closes, and a stopped one after a time that the user sets; and what is said is one line instead of a dump of C++.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jgc.training.errors import FAILED, UserError
from jgc.training.hub import GRACE, HELLO, beat_seconds, silent
from jgc.training.link import Link, pass_on

RETRY = 0.2  # seconds between two attempts to reach process 0
JOINED = "joined"
STRANGER = "what answers at --distributed.coordinator is no process 0 of jgc"


class Meeting:
    """A process that has come to the meeting point.

    Args:
      link: the connection to it.
      process: which one this is.
      processes: how many there are.
      timeout: seconds for which the hub may be silent.
      end: what to do, in another thread than the main one, when the run has to end: told why in one line.
    """

    def __init__(self, link: Link, process: int, processes: int, timeout: float, end: Callable[[str], None]):
        self.process, self.processes = process, processes
        self._link, self._timeout, self._end = link, timeout, end
        self._heard, self._joined, self._over = time.monotonic(), False, False
        self._said: dict[str, list[Any]] = {}
        self._news, self._ending = threading.Condition(), threading.Lock()
        self._ended = threading.Event()
        link.send(jgc="join", process=process, of=processes)
        for target in (self._receive, self._beat):
            threading.Thread(target=target, daemon=True).start()
        self.wait(JOINED)

    def post(self, tag: str, value: Any, patient: bool = True) -> None:
        """Say something on a subject, without waiting. A process that is late with what is not `patient` is ended."""
        self._link.send(post=tag, value=value, patient=patient)

    def wait(self, tag: str, seconds: float | None = None) -> list[Any]:
        """What all processes have said on a subject, by process; waits for the last one, or some seconds ([] then)."""
        with self._news:
            self._news.wait_for(lambda: tag in self._said, seconds)
            return self._said.pop(tag, [])

    def gather(self, tag: str, value: Any = None) -> list[Any]:
        """Both."""
        self.post(tag, value)
        return self.wait(tag)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Go, all together, each after a call of `last`; nobody takes it for a death that another one is gone."""
        self._finish()
        last()
        self.post("closed", None)
        self.wait("closed", self._timeout)
        self._link.send(left=True)

    def stop_all(self, why: str) -> None:
        """Go, and end the others because of `why`."""
        self._finish()
        self._link.send(stopped=why)
        self._ended.wait(GRACE)  # by then they know, also where the hub is in this process

    def _finish(self) -> None:
        """From here on this process ends as it likes; where another thread is about to end it, wait for that."""
        with self._ending:
            self._over = True

    def failed(self, what: str) -> None:
        """Something failed, perhaps because another process is gone: returns when nobody says which."""
        self._link.send(failed=what)
        time.sleep(self._timeout + HELLO)

    def _receive(self) -> None:
        for message in self._link:
            self._heard, self._joined = time.monotonic(), True
            if "all" in message:
                with self._news:
                    self._said[message["all"]] = message["values"]
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
            if now - before > 2 * interval + 1:  # this process itself has stood still
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
    """A connection to the meeting point, waiting until there is one.

    Raises:
      UserError: nobody answers within `seconds`.
    """
    deadline, problem = time.monotonic() + seconds, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=left)
            connection.settimeout(None)
            if connection.getsockname() != connection.getpeername():
                return Link(connection)
            connection.close()  # TCP lets a port be connected to itself where nobody listens at it
            time.sleep(min(RETRY, left))
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(min(RETRY, max(0.0, deadline - time.monotonic())))
    raise UserError(
        f"no coordinator at {host}:{port} within {seconds:g} s ({problem}): is process 0 running there, and is "
        "--distributed.coordinator the same for all processes?",
        FAILED,
    )


def relay(host: str, port: int) -> int:
    """A port of this host that leads through the meeting point to JAX's coordination service."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = listener.accept()
                outer = Link(socket.create_connection((host, port)))
                outer.send(jgc="relay")
                pass_on(inner, outer.socket)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def die(text: str) -> None:
    """Print one line and end the process at once: its main thread may be in a collective that never returns."""
    stream = sys.stderr
    cursor = "\x1b[?25h" if stream.isatty() else ""  # a progress bar hides it
    print(f"{cursor}error: {text}", file=stream, flush=True)
    os._exit(FAILED)
