"""Start, stop and watch the processes of nodes."""

import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

from jgc.lab.chaos.processes import Ended, Running, start
from jgc.lab.chaos.rounds import node as nodes
from jgc.lab.chaos.rounds.links import Relay, Switch
from jgc.lab.chaos.rounds.node import Files, Settings
from jgc.lab.chaos.verdict import DUMPS, named
from jgc.lab.shared.seaweed import BUCKET, Seaweed
from jgc.rounds import open_bucket
from jgc.rounds.bucket import ObjectStore

NAMES = ("paris", "oslo", "lima", "cairo", "quito", "seoul", "accra", "delhi")


class Place(NamedTuple):
    """Where a run meets: a folder of this machine, or a server."""

    folder: Path
    server: Seaweed | None = None
    prefix: str = "run"

    @property
    def url(self) -> str:
        """The bucket's URL or folder."""
        return str(self.folder / self.prefix) if self.server is None else f"s3://{BUCKET}/{self.prefix}"

    def open(self) -> ObjectStore:
        """The bucket without any fault."""
        if self.server is None:
            return open_bucket(self.url)
        names = {
            "endpoint": "AWS_ENDPOINT_URL", "access_key_id": "AWS_ACCESS_KEY_ID", "region": "AWS_REGION",
            "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        }  # fmt: skip
        values = self.server.environment()
        return open_bucket(self.url, seconds=20, **{key: values[name] for key, name in names.items()})


class Node:
    """A node and its process.

    Attributes:
      settings: of the next start.
      ended: how its last process ended, None while it runs.
      wanted: whether it should run now.
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

    @property
    def name(self) -> str:
        """The name under which it sends."""
        return self.settings.node

    @property
    def alive(self) -> bool:
        """Whether its process runs, or is stopped."""
        return self.running is not None and self.running.alive

    def start(self, clock: float = 0.0) -> None:
        """Start a process, with a wall clock that is off by some seconds."""
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

    def stand_still(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def leave(self) -> None:
        """Let it leave after its round."""
        self.wanted = False
        self.files.stop.touch()

    def end(self, seconds: float) -> Ended | None:
        """How its process ended; killed after some seconds."""
        return self.running.end(seconds) if self.running is not None else None

    def trouble(self, ended: Ended) -> str:
        """What is wrong with an end: a traceback or a signal, "" if neither."""
        if ended.code is None:
            return ""
        if ended.code < 0 or any(dump in ended.output for dump in DUMPS):
            return f"{self.label} ended with code {named(ended.code)}: {ended.output[-1500:]}"
        if ended.code > 0 and len(ended.errors) != 1:
            lines = f"{len(ended.errors)} lines of errors: {ended.output[-800:]}"
            return f"{self.label} ended with code {ended.code} and {lines}"
        return ""

    def _signal(self, number: int) -> None:
        if self.running is not None and self.running.alive:
            os.kill(self.running.process.pid, number)
