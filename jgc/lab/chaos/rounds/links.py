"""Faults between a node and its bucket: a wrapper of a folder, or a relay in front of a server.

Modes, each until a moment of the machine's monotonic clock:

    unreachable   no request is answered
    silent        requests are taken, and answered when it is over
    full          nothing can be written
    slow          every request takes longer
    half          every other PUT is cut after half of its body, or carried out and not answered
"""

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from jgc.rounds import BucketError
from jgc.rounds.bucket import Counts

MODES = ("unreachable", "silent", "full", "slow", "half")
SLOW = 0.7  # seconds a request
ANSWERED = 20.0  # seconds that a PUT may take whose answer the relay drops
CHUNK = 1 << 16
_FULL = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_HEAD = b"\r\n\r\n"  # ends the headers of a request


class Switch:
    """A node's mode in a file, so that its process reads it; one writer."""

    def __init__(self, path: Path):
        self.path = path

    def set(self, mode: str, seconds: float) -> None:
        """Begin a mode, for some seconds."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([mode, time.monotonic() + seconds]))
        os.replace(new, self.path)

    def get(self) -> tuple[str, float]:
        """The mode, "" for none, and when it ends."""
        try:
            mode, until = json.loads(self.path.read_text())
        except FileNotFoundError:
            return "", 0.0
        return (mode, until) if time.monotonic() < until else ("", 0.0)


class FaultyBucket:
    """A bucket with the modes of a switch."""

    def __init__(self, bucket: Any, switch: Switch):
        self.bucket, self.switch, self._puts = bucket, switch, count()

    @property
    def counts(self) -> Counts:
        """Requests and bytes of the bucket behind it."""
        return self.bucket.counts

    def create(self, name: str, data: bytes) -> bool:
        """See `Bucket`."""
        mode = self._mode()
        if mode == "full":
            raise BucketError("the bucket is full; delete old rounds or make room")
        if mode == "half" and (number := next(self._puts)) % 2:
            if number % 4 == 3:
                self.bucket.create(name, data)
            raise BucketError("connection reset in the middle of a PUT")
        return self.bucket.create(name, data)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See `Bucket`."""
        self._mode()
        return self.bucket.get(names)

    def list(self, folder: str, after: str = "") -> dict[str, int]:
        """See `Bucket`."""
        self._mode()
        return self.bucket.list(folder, after)

    def delete(self, names: Iterable[str]) -> None:
        """See `Bucket`."""
        self._mode()
        self.bucket.delete(names)

    def _mode(self) -> str:
        mode, until = self.switch.get()
        if mode == "unreachable":
            raise BucketError("connection refused")
        if mode == "silent":
            time.sleep(max(0.0, until - time.monotonic()))
        if mode == "slow":
            time.sleep(SLOW)
        return mode


class Relay:
    """A port of this machine that passes connections on to another port, with the modes of a switch.

    It knows of HTTP where a PUT begins and how long its body is. Requests pass unchanged, because a
    signature covers the address that the client called.
    """

    def __init__(self, target: int, switch: Switch):
        self.target, self.switch, self._puts = target, switch, count()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self.switch.get()[0] == "unreachable":
                return
            with socket.create_connection(("127.0.0.1", self.target), timeout=10) as server:
                server.settimeout(None)
                threading.Thread(target=_copy, args=(server, client), daemon=True).start()
                try:
                    while data := client.recv(CHUNK):
                        if not self._pass(data, client, server):
                            return
                finally:  # a close would wait until `_copy` has read to the end
                    server.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        finally:
            client.close()

    def _pass(self, data: bytes, client: socket.socket, server: socket.socket) -> bool:
        """Pass on what a client sends; False to end the connection."""
        mode, until = self.switch.get()
        put = data.startswith(b"PUT ")
        if mode == "unreachable":
            return False
        if mode == "silent":
            time.sleep(max(0.0, until - time.monotonic()))
        if mode == "slow":
            time.sleep(SLOW)
        if mode == "full" and put:
            client.sendall(_FULL)
            return False
        if mode == "half" and put and (number := next(self._puts)) % 2:
            self._half(_whole_put(data, client), number % 4 == 3, server)
            return False
        server.sendall(data)
        return True

    def _half(self, data: bytes, carried_out: bool, passed_to: socket.socket) -> None:
        """Cut a PUT in the middle of its body, or carry it out and drop the answer."""
        if not carried_out:
            head = data.find(_HEAD) + len(_HEAD)
            passed_to.sendall(data[: (head + len(data)) // 2])
            return
        # by a separate connection, whose answer nobody copies to the client
        with socket.create_connection(("127.0.0.1", self.target), timeout=ANSWERED) as server:
            server.sendall(data)
            server.recv(CHUNK)


def _whole_put(data: bytes, client: socket.socket) -> bytes:
    """A PUT with its body, read to its end; `data` has its beginning."""
    while _HEAD not in data and (more := client.recv(CHUNK)):
        data += more
    head, _, body = data.partition(_HEAD)
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    missing = int(length[1]) - len(body) if length else 0
    while missing > 0 and (more := client.recv(CHUNK)):
        data, missing = data + more, missing - len(more)
    return data


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
