"""Lines of JSON over a TCP connection, and bytes passed on between two connections."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
LONGEST = 1 << 24  # bytes of a line; a stranger who sends more is no process of a run


class Link:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.rest = b""  # received, and not yet part of a whole line
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message; into a connection that is gone it gets lost: whoever receives notices."""
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError), self._sending:
            self.socket.sendall(line)

    def receive(self) -> Message | None:
        """The next message, or None where the connection has ended or carries something else.

        Raises:
          TimeoutError: the socket has a timeout, and it is over.
        """
        while b"\n" not in self.rest:
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                raise
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
        """End the connection in both directions, also under a thread that is receiving."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def pass_on(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways, in two threads, for as long as both ends stand.

    Where one end is closed the other is left open on purpose: JAX aborts a process, with a dump of its stack, as soon
    as the connection to its coordinator closes. So it hears nothing, and the run ends as `meeting` says.
    """

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    for ends in ((one, other), (other, one)):
        threading.Thread(target=pump, args=ends, daemon=True).start()
