"""A run of several processes: how it starts, agrees, keeps in step and ends. A run of one does none of it.

Process 0 opens the meeting point (`hub`) at --distributed.coordinator, all come there (`meeting`), and only when they
have found that versions and configs are the same do they start JAX's own engine, `jax.distributed`: a process that
does not fit is refused before anything can hang. What is compared later, data set, first step and programs, are
those things on which collectives would otherwise wait forever or mix up numbers.

A process that dies is noticed at once and one that is stopped after --distributed.timeout seconds; each of the others
then prints one line that names it and ends, also out of a collective that never returns. What is not noticed: a
process whose main thread hangs outside of steps (while it compiles, evaluates or saves) and whose host is well.
"""

import logging
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import jax
import numpy as np
from rich.console import Console

from jgc.training.checkpoint import is_key
from jgc.training.config import Config, DistributedConfig, as_json
from jgc.training.errors import FAILED, NonFinite, UserError
from jgc.training.hub import Hub, listen
from jgc.training.meeting import Meeting, connect, die, relay
from jgc.training.place import Place, place_of
from jgc.training.summary import versions
from jgc.types import PyTree

T = TypeVar("T")
LAG = 2  # steps between a signal and the stop: news of it travel while the steps go on
NEVER = 10**6  # seconds until JAX's own heartbeat would end the run, with a dump instead of a line
OWN = frozenset(("distributed", "run_dir", "data.dir", "log_every"))  # settings that a process may have for itself


class Disagreement(UserError):
    """Something is not the same in all processes."""


class Team:
    """The processes of a run, as one of them sees it.

    Attributes:
      process: which this is.
      count: how many there are.
      meeting: the connection to the others; None in a run of one.
      resume: how to go on with the run after a failure, once there is a run folder.
    """

    def __init__(self, process: int = 0, count: int = 1):
        self.process, self.count = process, count
        self.meeting: Meeting | None = None
        self.resume = ""
        self._gathered = 0

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.process == 0

    def console(self, console: Console) -> Console:
        """The one given where this process prints, else one that prints nothing."""
        return console if self.leads else Console(quiet=True, force_terminal=False)

    def same(self, what: dict[str, Any], hint: str = "") -> None:
        """Compare values, by name, with those of the others.

        Raises:
          Disagreement: one differs; every process raises the same, with the hint.
        """
        differs = difference(self._gather(what))
        if differs:
            raise Disagreement(f"{differs}: {hint}" if hint else differs)

    def checksum(self, tree: PyTree) -> int:
        """CRC-32 of what every device holds alike of a tree, 0 in a run of one process."""
        if self.meeting is None:
            return 0
        crc = 0
        for x in jax.tree.leaves(tree):
            if x.is_fully_replicated:
                held = x.addressable_data(0)
                crc = zlib.crc32(np.asarray(jax.random.key_data(held) if is_key(held) else held).tobytes(), crc)
        return crc

    def lead(self, action: Callable[[], T]) -> T:
        """What `action` returns in process 0, which alone calls it; plain data."""
        return cast(T, self._gather(action() if self.leads else None)[0])

    def wait(self) -> None:
        """Until all processes are here; without limit, for process 0 may have much to write."""
        self._gather(None)

    @contextmanager
    def process_0_first(self) -> Iterator[None]:
        """The others go through the block when process 0 has."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()

    def agreed_signal(self, step: int, first: int, signal: int) -> int:
        """The signal for which all processes stop after this step, or 0.

        Args:
          step: that has just been started.
          first: the run's first.
          signal: that this process has received, or 0; all stop `LAG` steps after the one that says so.
        """
        if self.meeting is None:
            return signal
        self.meeting.post(f"step {step + 1}", signal, patient=False)
        return max(self.meeting.wait(f"step {step + 1 - LAG}")) if step - LAG >= first else 0

    def end(self, why: str) -> None:
        """End this process at once, in one line."""
        also = "" if self.leads else f"process {self.process} ends: "
        go_on = f"; go on, with all processes, by: {self.resume}" if self.resume else ""
        if self.leads:
            time.sleep(0.2)  # the others hear of it through this process
        die(f"{also}{why}{go_on}")

    def _gather(self, value: Any) -> list[Any]:
        if self.meeting is None:
            return [value]
        self._gathered += 1
        return self.meeting.gather(f"{self._gathered}", value)

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.meeting is None:
            return
        if error is None:
            self.wait()
            self.meeting.close(jax.distributed.shutdown)
        elif isinstance(error, (Disagreement, NonFinite)):
            self.meeting.close()  # all of them say it
        elif isinstance(error, jax.errors.JaxRuntimeError):
            self.meeting.failed(_line(error))  # whoever is to blame shows soon, which ends this process
        else:
            self.meeting.stop_all("interrupted" if isinstance(error, KeyboardInterrupt) else _line(error))


ALONE = Team()


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text[:300]}"


def difference(everybody: list[dict[str, Any]]) -> str:
    """The first value in which a process differs from process 0, in one line; "" where none does.

    Example:
      >>> difference([{"jax": "0.10.2"}, {"jax": "0.12.0"}])
      'process 1 has jax 0.12.0, process 0 has 0.10.2'
    """
    first = everybody[0]
    for process, theirs in enumerate(everybody):
        for name in [*first, *(name for name in theirs if name not in first)]:
            a, b = first.get(name, "absent"), theirs.get(name, "absent")
            if a != b:
                return f"process {process} has {name} {b}, process 0 has {a}"
    return ""


@contextmanager
def join(config: Config) -> Iterator[Team]:
    """Meet the other processes and start JAX with them; a team of one where the config names none.

    To be entered before anything uses a device. Whatever ends the block ends the other processes too.

    Raises:
      UserError: one line on what is wrong, here or in another process.
    """
    settings = config.distributed
    place = place_of(settings)
    if place is None:
        yield Team()
        return
    hub = None
    if place.process == 0:
        hub = Hub(_listener(place), place.processes, settings.timeout, settings.connect_timeout)
        place = place._replace(host="127.0.0.1")
    team = Team(place.process, place.processes)
    link = connect(place.host, place.port, settings.connect_timeout)
    team.meeting = Meeting(link, place.process, place.processes, settings.timeout, team.end)
    with team:
        team.same(facts(config))
        _start_jax(place, hub, settings)
        yield team


def _listener(place: Place) -> socket.socket:
    try:
        return listen(place.host, place.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"process 0 cannot open port {place.port} on this host ({reason}): give all processes another "
            "--distributed.coordinator HOST:PORT",
            FAILED,
        ) from error


def facts(config: Config) -> dict[str, Any]:
    """What has to be the same in all processes before they start: versions and settings, by name."""
    found = {name: text for name, text in versions().items() if name not in ("python", "orbax")}

    def add(values: dict[str, Any], prefix: str) -> None:
        for name, value in values.items():
            path = f"{prefix}{name}"
            if isinstance(value, dict) and path not in OWN:
                add(value, f"{path}.")
            elif path not in OWN:
                found["the method" if path == "method" else f"--{path.replace('_', '-')}"] = str(value)

    add(as_json(config), "")
    return found


def _start_jax(place: Place, hub: Hub | None, settings: DistributedConfig) -> None:
    """`jax.distributed.initialize`, its coordination service within reach of this host's processes alone."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)
    os.environ.setdefault("no_grpc_proxy", "127.0.0.1")
    _quiet_gloo()
    if hub:
        hub.jax_port = _free_port()
    address = f"127.0.0.1:{hub.jax_port if hub else relay(place.host, place.port)}"
    jax.distributed.initialize(
        address,
        place.processes,
        place.process,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(settings.connect_timeout) + 1,
        heartbeat_timeout_seconds=NEVER,
        shutdown_timeout_seconds=int(settings.timeout) + 1,
        coordinator_bind_address=address,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _quiet_gloo() -> None:
    """Give standard output to Python alone: Gloo prints there whom it has connected to, from C++."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
