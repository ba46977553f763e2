"""The hub of a run's processes: threads of process 0 that gather values and watch over the processes.

Every process, process 0 too, has one connection to it (`meeting`). The hub notices a process that is gone (its
connection closes), silent (no heartbeat) or late (the others have finished a step). It then ends all processes with one
line that names the culprit.
"""

import contextlib
import hmac
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from jgc.training.processes.link import Link, Message, forward

BEATS = 5  # heartbeats within the timeout, at least one a second
GRACE = 2.0  # seconds to find the cause after a process has failed: perhaps a different one died first
HELLO = 10.0  # seconds in which a new connection must identify itself
WAITING = 64  # connections that have not done so yet; a further one replaces the oldest
RELAYS = 8  # connections of each process to JAX's coordination service, at most


def beat_seconds(timeout: float) -> float:
    """Seconds between heartbeats for a timeout in seconds."""
    return min(1.0, timeout / BEATS)


@dataclass
class Member:
    """A connected process."""

    link: Link
    heard: float  # when it last sent anything
    left: bool = False  # on purpose


@dataclass
class Round:
    """The values posted so far under one tag."""

    begun: float
    patient: bool  # whether it has no timeout
    values: dict[int, Any] = field(default_factory=dict)


class Hub:
    """Serves a run's processes in daemon threads."""

    def __init__(
        self, listener: socket.socket, processes: int, timeout: float, connect_timeout: float, token: str = ""
    ):
        self.jax_port = 0  # of JAX's coordination service on localhost
        self.relays_left = RELAYS * processes  # 0 once JAX has started everywhere
        self._token, self._unknown = token.encode(), list[socket.socket]()
        self._processes, self._timeout = processes, timeout
        self._deadline, self._connect_timeout = time.monotonic() + connect_timeout, connect_timeout
        self._members: dict[int, Member] = {}
        self._rounds: dict[str, Round] = {}
        self._failed: tuple[float, int, str] | None = None
        self._lock = threading.RLock()
        self._over = ""  # why the run ended; "" while it runs
        for target, args in ((self._accept, (listener,)), (self._watch, ())):
            threading.Thread(target=target, args=args, daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptors or threads left: some will come back
                time.sleep(0.1)

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._unknown.append(connection)
            oldest = self._unknown.pop(0) if len(self._unknown) > WAITING else None
        if oldest:
            Link(oldest).close()
        link = Link(connection)
        hello = link.first(HELLO)
        with self._lock, contextlib.suppress(ValueError):
            self._unknown.remove(connection)
        if not self._is_of_this_run(hello):
            link.close()
        elif hello["jgc"] == "relay":
            self._to_jax(link)
        elif self._admit(hello["process"], hello["of"], link):
            for message in link:
                self._take(hello["process"], message)
            self._gone(hello["process"])
        else:
            link.close()

    def _is_of_this_run(self, hello: Message) -> bool:
        """Whether a first line has the run's token, compared in constant time, and is well formed."""
        kind, process, of = (hello.get(name) for name in ("jgc", "process", "of"))
        if not hmac.compare_digest(str(hello.get("token", "")).encode(), self._token):
            return False
        if kind == "join":
            return type(process) is int and type(of) is int and 0 <= process < of
        with self._lock:  # none before all have come, and none after JAX has started everywhere
            allowed = kind == "relay" and self.relays_left > 0 and len(self._members) == self._processes
            self.relays_left -= allowed
        return allowed

    def _to_jax(self, link: Link) -> None:
        """Forward a connection to JAX's coordination service, which may not have started yet."""
        while not self._over:
            try:
                service = socket.create_connection(("127.0.0.1", self.jax_port))
            except OSError:
                time.sleep(0.05)
                continue
            service.sendall(link.rest)
            forward(link.socket, service)
            return

    def _admit(self, process: int, of: int, link: Link) -> bool:
        with self._lock:
            complete = len(self._members) == self._processes
            if complete or self._over:
                link.send(end=self._over or f"the run here has all its {self._processes} processes already")
                return False
            if of != self._processes or process in self._members:
                wrong = f"two processes were started as process {process}"
                if of != self._processes:
                    both = f"--distributed.num-processes {of}, process 0 with {self._processes}"
                    wrong = f"process {process} was started with {both}"
                link.send(end=wrong)
                self._end(wrong)
                return False
            self._members[process] = Member(link, time.monotonic())
            if len(self._members) == self._processes:
                self._send_all(all="joined", values=[])
            return True

    def _take(self, process: int, message: Message) -> None:
        with self._lock:
            self._members[process].heard = time.monotonic()
            if "post" in message:
                self._collect(process, message["post"], message["value"], message["patient"])
            elif "failed" in message and self._failed is None:
                self._failed = (time.monotonic(), process, message["failed"])
            elif "stopped" in message:
                self._end(f"process {process} stopped: {message['stopped']}")
                self._members[process].left = True
            elif "left" in message:
                self._members[process].left = True

    def _collect(self, process: int, tag: str, value: Any, patient: bool) -> None:
        answers = self._rounds.setdefault(tag, Round(time.monotonic(), patient))
        answers.values[process] = value
        if len(answers.values) == self._processes:
            del self._rounds[tag]
            self._send_all(all=tag, values=[answers.values[i] for i in range(self._processes)])

    def _gone(self, process: int) -> None:
        with self._lock:
            if not self._members[process].left:
                self._end(f"process {process} died")

    def _watch(self) -> None:
        interval, before = beat_seconds(self._timeout), time.monotonic()
        while not self._over:
            time.sleep(interval)
            now = time.monotonic()
            with self._lock:
                if now - before > 2 * interval + 1:  # this process itself was suspended: restart all timers
                    for member in self._members.values():
                        member.heard = now
                    for answers in self._rounds.values():
                        answers.begun = now
                if verdict := self._verdict(now):
                    self._end(verdict)
                self._send_all(beat=True)
            before = now

    def _verdict(self, now: float) -> str:
        """Why the run must end, or ""."""
        if len(self._members) < self._processes:
            if now < self._deadline:
                return ""
            missing = [f"process {i}" for i in range(self._processes) if i not in self._members]
            return (
                f"{len(self._members)} of {self._processes} processes came in {self._connect_timeout:g} s; missing: "
                f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}"
            )
        present = {i: member for i, member in self._members.items() if not member.left}
        for i, member in present.items():
            if now - member.heard > self._timeout:
                return silent(i, now - member.heard)
        for tag, answers in self._rounds.items():
            late = [i for i in present if i not in answers.values]
            if late and not answers.patient and (wait := now - answers.begun) > self._timeout:
                return f"process {late[0]} has not come to the end of {tag}, {wait:.0f} s after the others"
        if self._failed and now - self._failed[0] > GRACE:
            _, process, text = self._failed
            worst = min(present, key=lambda i: present[i].heard, default=process)
            if now - present[worst].heard > 2 * GRACE:
                return silent(worst, now - present[worst].heard)
            return f"process {process} failed: {text}"
        return ""

    def _end(self, text: str) -> None:
        """End all processes, process 0 last: the hub runs in it."""
        if not self._over:
            self._over = text
            self._send_all(end=text)

    def _send_all(self, **message: Any) -> None:
        for process in sorted(self._members, reverse=True):
            if not self._members[process].left:
                self._members[process].link.send(**message)


def silent(process: int, seconds: float) -> str:
    """The message for a process without heartbeat."""
    return f"process {process} has been silent for {seconds:.0f} s: it is stopped, or its host or network is down"


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address of `host`; on all interfaces where that is no address of this host that others can reach.

    /etc/hosts may have 127.0.1.1 for the host's name. Raises OSError: the port is taken.
    """
    if host == "localhost" or host.startswith("127."):
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not str(address[0]).startswith("127.") and address[0] != "::1":
            return socket.create_server(address[:2], family=family, backlog=1024)  # type: ignore[arg-type]
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def address_of(listener: socket.socket) -> str:
    """Where process 0 itself reaches the hub."""
    address = listener.getsockname()[0]
    return "127.0.0.1" if address in ("0.0.0.0", "::") else address
