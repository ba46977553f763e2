"""JSON lines over a TCP connection, and forwarding between two connections."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
LONGEST = 1 << 24  # bytes of a line; no process of a run sends more
FIRST = 1 << 12  # bytes of a connection's first line, which identifies it


class Link:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket):
        with contextlib.suppress(OSError):  # the other end may be gone already; `receive` notices
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.rest = b""  # received after the last whole line
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message; it is lost if the connection is closed, which `receive` notices."""
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError), self._sending:
            self.socket.sendall(line)

    def first(self, seconds: float) -> Message:
        """The first message, or {} if it is invalid, longer than `FIRST`, or not complete within `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            while b"\n" not in self.rest and len(self.rest) <= FIRST:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                if time.monotonic() > deadline or not (data := self.socket.recv(FIRST)):
                    return {}
                self.rest += data
            self.socket.settimeout(None)
            return (self.receive() or {}) if b"\n" in self.rest else {}
        except (OSError, RecursionError):  # of JSON that is nested thousands of times
            return {}

    def receive(self) -> Message | None:
        """The next message, or None if the connection has ended or sends no JSON object."""
        while b"\n" not in self.rest:
            try:
                data = self.socket.recv(1 << 16)
            except OSError:
                return None
            if not data or len(self.rest) > LONGEST:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def __iter__(self) -> Iterator[Message]:
        while (message := self.receive()) is not None:
            yield message

    def close(self) -> None:
        """Close both directions; a thread inside `receive` then returns."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def forward(first: socket.socket, other: socket.socket) -> None:
    """Forward bytes both ways between two connections, in two daemon threads.

    If one is closed the other stays open on purpose: JAX aborts a process with a stack dump as soon as the connection
    to its coordinator closes. `meeting` ends the run in one line instead.
    """

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    for ends in ((first, other), (other, first)):
        threading.Thread(target=pump, args=ends, daemon=True).start()
