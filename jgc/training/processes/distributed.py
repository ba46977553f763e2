"""Runs of several processes: start, agreement and end. A run of one process skips all of it.

Process 0 opens a hub (`hub`) at --distributed.coordinator, and every process connects to it (`meeting`). They start
`jax.distributed` only after versions and configs have been compared, so a mismatch is an error, not a hang. Data sets,
first steps and programs are compared later, before the first collective that needs them to be equal.

A dead process is noticed immediately, a stopped one after --distributed.timeout seconds. Each of the others then prints
one line that names it and exits, even from a collective that never returns. A process whose main thread hangs outside
the steps (while it compiles, evaluates or saves) is not noticed.
"""

import logging
import os
import re
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

from jgc.checks.misuse import is_key
from jgc.training.errors import FAILED, Drift, NonFinite, UserError
from jgc.training.output.summary import versions
from jgc.training.processes.hub import Hub, address_of, listen
from jgc.training.processes.meeting import Meeting, connect, die, relay
from jgc.training.processes.process import Place, place_of
from jgc.training.settings.config import Config, DistributedConfig, as_json
from jgc.types import PyTree

T = TypeVar("T")
TOKEN = "JGC_RUN_TOKEN"  # environment variable: a secret of the run, the same in all processes
LAG = 2  # steps from a signal to the stop: the processes agree while these steps run
NEVER = 10**6  # seconds until JAX's own heartbeat ends the run: it prints a stack dump, the hub one line
LOST = re.compile(r"Gloo context initialization failed.*remote=\[(127\.|::1)")  # an address that means each host itself
OWN_NAME = "each host's name must resolve to its network address, not to 127.0.1.1 (/etc/hosts)"
# settings that may differ between processes
OF_PROCESS = frozenset(("distributed", "run_dir", "compile_cache", "data.dir", "data.threads", "log_every"))


class Disagreement(UserError):
    """A value differs between processes."""


class Team:
    """The processes of a run, seen from one of them.

    Attributes:
      process: index of this process.
      count: number of processes.
      meeting: the connection to the others; None in a run of one process.
      resume: the command that resumes the run after a failure; "" before there is a run folder.
    """

    def __init__(self, process: int = 0, count: int = 1):
        self.process, self.count = process, count
        self.meeting: Meeting | None = None
        self.resume = ""
        self._gathered = 0

    @property
    def leads(self) -> bool:
        """Whether this is process 0, the only process that prints and writes."""
        return self.process == 0

    def console(self, console: Console) -> Console:
        """The given console in process 0, elsewhere one that prints nothing."""
        return console if self.leads else Console(quiet=True, force_terminal=False)

    def require_equal(self, values: dict[str, Any], hint: str = "") -> None:
        """Check that named values are equal in all processes."""
        differs = difference(self._gather(values))
        if differs:
            raise Disagreement(f"{differs}: {hint}" if hint else differs)

    def checksum(self, tree: PyTree) -> int:
        """CRC-32 of a tree's replicated arrays; 0 in a run of one process."""
        if self.meeting is None:
            return 0
        crc = 0
        for x in jax.tree.leaves(tree):
            if x.is_fully_replicated:
                held = x.addressable_data(0)
                crc = zlib.crc32(np.asarray(jax.random.key_data(held) if is_key(held) else held).tobytes(), crc)
        return crc

    def lead(self, action: Callable[[], T]) -> T:
        """Call `action` in process 0 and return its result, plain data, in all processes."""
        return cast(T, self._gather(action() if self.leads else None)[0])

    def wait(self) -> None:
        """A barrier over all processes, without a timeout: process 0 may have much to write."""
        self._gather(None)

    def meet(self) -> None:
        """A barrier before a collective. A process that is late with it ends the run.

        At the first collective of a group of devices XLA waits 30 s for all processes, not --distributed.timeout.
        """
        self._gather(None, patient=False)

    @contextmanager
    def process_0_first(self) -> Iterator[None]:
        """The other processes enter the block after process 0 has left it."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()

    def agreed_signal(self, step: int, first: int, signal: int, unit: str = "step") -> int:
        """The signal on which all processes stop after this step, or 0. A process that is late with it ends the run.

        All stop `LAG` steps after one process reports a `signal`. `first` is the first step of this start of the run;
        with local steps the `unit` is an exchange, since processes agree on nothing in between.
        """
        if self.meeting is None:
            return signal
        self.meeting.post(f"{unit} {step + 1}", signal, patient=False)
        return max(self.meeting.wait(f"{unit} {step + 1 - LAG}")) if step - LAG >= first else 0

    def end(self, why: str) -> None:
        """Print one line and exit."""
        also = "" if self.leads else f"process {self.process} ends: "
        go_on = f"; go on, with all processes, by: {self.resume}" if self.resume else ""
        if self.leads:
            time.sleep(0.2)  # its hub still has to tell the others
        die(f"{also}{why}{go_on}")

    def _gather(self, value: Any, patient: bool = True) -> list[Any]:
        if self.meeting is None:
            return [value]
        self._gathered += 1
        return self.meeting.gather(f"{self._gathered}", value, patient)

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.meeting is None:
            return
        if error is None:
            self.wait()
            self.meeting.close(jax.distributed.shutdown)
        elif isinstance(error, (Disagreement, NonFinite, Drift)):
            self.meeting.close()  # every process has raised the same error
        elif isinstance(error, jax.errors.JaxRuntimeError):
            # perhaps a collective failed because a different process died: the hub finds out, and ends this process
            self.meeting.failed(_line(error))
        else:
            self.meeting.stop_all("interrupted" if isinstance(error, KeyboardInterrupt) else _line(error))


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UserError):
        return text
    hint = f": if there are several hosts, {OWN_NAME}" if LOST.search(text) else ""
    return f"{type(error).__name__}: {text[:300]}{hint}"


def difference(everybody: list[dict[str, Any]]) -> str:
    """The first value in which a process differs from process 0, in one line; "" if all are equal.

    Example:
      >>> difference([{"jax": "0.10.2"}, {"jax": "0.12.0"}])
      'process 1 has jax 0.12.0, process 0 has 0.10.2'
    """
    first = everybody[0]
    for process, others in enumerate(everybody):
        for name in [*first, *(name for name in others if name not in first)]:
            a, b = first.get(name, "absent"), others.get(name, "absent")
            if a != b:
                return f"process {process} has {name} {b}, process 0 has {a}"
    return ""


@contextmanager
def join(config: Config) -> Iterator[Team]:
    """Connect to the other processes and start JAX with them; a team of one if the config names none.

    Enter it before anything uses a device. An error inside the block ends the other processes too.
    """
    settings = config.distributed
    place = place_of(settings)
    if place is None:
        yield Team()
        return
    hub, token = None, os.environ.get(TOKEN, "")
    if place.process == 0:
        listener = _listener(place)
        hub = Hub(listener, place.processes, settings.timeout, settings.connect_timeout, token)
        place = place._replace(host=address_of(listener))
    team = Team(place.process, place.processes)
    link = connect(place.host, place.port, settings.connect_timeout)
    team.meeting = Meeting(link, place.process, place.processes, settings.timeout, team.end, token)
    with team:
        team.require_equal(facts(config))
        _start_jax(place, hub, settings, token)
        team.wait()  # JAX has started everywhere, and needs no further connection
        if hub:
            hub.relays_left = 0
        yield team


def _listener(place: Place) -> socket.socket:
    try:
        return listen(place.host, place.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"process 0 cannot open port {place.port} on this host ({reason}): give all processes a different "
            "--distributed.coordinator HOST:PORT", FAILED,
        ) from error  # fmt: skip


def facts(config: Config) -> dict[str, Any]:
    """Versions and settings that must be equal in all processes, by name."""
    names = {name: text for name, text in versions().items() if name not in ("python", "orbax")}

    def add(values: dict[str, Any], prefix: str) -> None:
        for name, value in values.items():
            path = f"{prefix}{name}"
            if isinstance(value, dict) and path not in OF_PROCESS:
                add(value, f"{path}.")
            elif path not in OF_PROCESS:
                names["the method" if path == "method" else f"--{path.replace('_', '-')}"] = str(value)

    add(as_json(config), "")
    return names


def _start_jax(place: Place, hub: Hub | None, settings: DistributedConfig, token: str) -> None:
    """`jax.distributed.initialize`, with a coordination service that listens on localhost only (see `relay`)."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)
    os.environ.setdefault("no_grpc_proxy", "127.0.0.1")
    _quiet_gloo()
    if hub:
        with socket.create_server(("127.0.0.1", 0)) as server:  # a free port
            hub.jax_port = server.getsockname()[1]
    address = f"127.0.0.1:{hub.jax_port if hub else relay(place.host, place.port, token)}"
    jax.distributed.initialize(
        address, place.processes, place.process, local_device_ids=place.local_devices,
        cluster_detection_method="deactivate", initialization_timeout=int(settings.connect_timeout) + 1,
        heartbeat_timeout_seconds=NEVER, shutdown_timeout_seconds=int(settings.timeout) + 1,
        coordinator_bind_address=address,
    )  # fmt: skip


def _quiet_gloo() -> None:
    """Keep Gloo's C++ code, which prints its connections, from standard output."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
