"""The processes of nodes: start, stop, and judge how they ended."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jgc.lab.chaos.processes import Ended, Running, start
from jgc.lab.chaos.rounds import node as nodes
from jgc.lab.chaos.rounds.links import Relay, Switch
from jgc.lab.chaos.rounds.node import Files, Settings
from jgc.lab.chaos.verdict import DUMPS, HANG, SAID, SILENT, TRACEBACK, Outcome, named
from jgc.lab.shared.seaweed import BUCKET, Seaweed
from jgc.rounds import open_bucket
from jgc.rounds.bucket import ObjectStore

NAMES = ("paris", "oslo", "lima", "cairo", "quito", "seoul", "accra", "delhi")


class Place(NamedTuple):
    """Where a run meets: a folder of this machine, or a server.

    Attributes:
      folder: of a bucket without a server.
      server: the server, or None.
      prefix: the run's, in the folder or in the server's bucket.
    """

    folder: Path
    server: Seaweed | None = None
    prefix: str = "run"

    @property
    def url(self) -> str:
        """The bucket's URL or folder."""
        if self.server is None:
            return str(self.folder / self.prefix)
        return f"s3://{BUCKET}/{self.prefix}"

    def open(self) -> ObjectStore:
        """The bucket, without any fault between."""
        if self.server is None:
            return open_bucket(self.url)
        names = {
            "endpoint": "AWS_ENDPOINT_URL", "access_key_id": "AWS_ACCESS_KEY_ID",
            "region": "AWS_REGION", "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        }  # fmt: skip
        values = self.server.environment()
        options = {key: values[name] for key, name in names.items()}
        return open_bucket(self.url, seconds=20, **options)


class Node:
    """A node and its process.

    Attributes:
      settings: of the next start.
      label: its name in a report.
      running: its newest process, None before the first.
      wanted: whether the process should be running now.
      starts: number of starts.
    """

    def __init__(self, place: Place, settings: Settings, secret: str, label: str = ""):
        self.place, self.settings, self.label = place, settings, label or settings.node
        self.files = Files(Path(settings.folder))
        self.files.folder.mkdir(parents=True, exist_ok=True)
        self.switch = Switch(self.files.switch)
        self.environment = {"JGC_ROUNDS_SECRET": secret, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        self.relay = Relay(place.server.port, self.switch) if place.server else None
        if place.server and self.relay:
            self.environment |= place.server.environment(self.relay.port)
        self.running: Running | None = None
        self.wanted, self.starts = False, 0
        self._judged = set[Path]()  # outputs that `verdict` has judged

    @property
    def name(self) -> str:
        """The name under which it sends."""
        return self.settings.node

    @property
    def alive(self) -> bool:
        """Whether its process exists; it may be stopped."""
        return self.running is not None and self.running.alive

    def start(self, clock: float = 0.0) -> None:
        """Start a process whose wall clock is off by some seconds."""
        self.wanted, self.starts = True, self.starts + 1
        argv = [json.dumps(self.settings._replace(clock=clock)._asdict())]
        output = self.files.folder / f"output-{self.starts}.txt"
        self.running = start(output, argv, self.environment, nodes.child, nodes.__name__)

    def kill(self) -> None:
        """SIGKILL."""
        self.wanted = False
        if self.running is not None:
            self.running.process.kill()
            self.running.process.join()

    def pause(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def leave(self, number: int = 0) -> None:
        """Ask it to leave before its local steps of a round, or after those under way."""
        self.wanted = False
        new = self.files.stop.with_suffix(".new")
        new.write_text(str(number))
        os.replace(new, self.files.stop)

    def end(self, seconds: float) -> Ended | None:
        """How its process ended, killed after some seconds; None before the first start."""
        return self.running.end(seconds) if self.running is not None else None

    def verdict(self, ended: Ended, asked: bool = False) -> Outcome | None:
        """The outcome of an end of its process; None if the node was asked to end, and did."""
        if self.running is not None:
            self._judged.add(self.running.output)
        how = f"{self.label} ended with code {ended.code}"
        if ended.code is None:
            return Outcome(HANG, f"{self.label} does not end: {ended.output[-500:]}")
        if ended.code < 0 or _has_dump(ended.output):
            code = named(ended.code)
            what = f"{self.label} ended with code {code}: {ended.output[-1500:]}"
            return Outcome(TRACEBACK, what)
        if ended.code and len(ended.errors) != 1:
            lines = f"{len(ended.errors)} lines of errors: {ended.output[-800:]}"
            return Outcome(TRACEBACK, f"{how} and {lines}")
        if ended.code:
            return Outcome(SAID, f"{self.label}: {ended.errors[0]}")
        return None if asked else Outcome(SILENT, f"{how}, unasked and without a line of error")

    def dumps(self) -> Iterator[Outcome]:
        """Tracebacks of processes that nobody has judged, such as killed ones."""
        for path in sorted(self.files.folder.glob("output-*.txt")):
            output = path.read_text(errors="replace")
            if path not in self._judged and _has_dump(output):
                yield Outcome(TRACEBACK, f"{self.label} printed in {path.name}: {output[-1500:]}")

    def _signal(self, number: int) -> None:
        if self.running is not None and self.running.alive:
            os.kill(self.running.process.pid, number)


def _has_dump(output: str) -> bool:
    return any(dump in output for dump in DUMPS)
