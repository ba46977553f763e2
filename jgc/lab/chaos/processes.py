"""Start the processes of a run, wait for its steps, and for its end."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jgc.lab.chaos import child as children
from jgc.training.errors import UserError
from jgc.training.output.metrics import read
from jgc.training.run.folder import METRICS


class Ended(NamedTuple):
    """The end of a process: its exit code, None if it hung and was killed, and its output."""

    code: int | None
    output: str

    @property
    def errors(self) -> list[str]:
        """Its lines of an error."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


class Running:
    """A process and its output."""

    def __init__(self, process: Any, output: Path):
        self.process, self.output = process, output

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.exitcode is None

    def end(self, seconds: float) -> Ended:
        """Wait for its end; killed where it does not end by itself."""
        self.process.join(max(0.0, seconds))
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        return Ended(code, self.output.read_text(errors="replace"))


def start(
    output: Path,
    options: Sequence[str],
    environment: dict[str, str],
    target: Callable[..., None] = children.child,
    preload: str = children.__name__,
) -> Running:
    """Call `target(options, output, environment)` in a new process.

    Args:
      output: the file for its output.
      options: of train.py.
      environment: see `child`.
      target: the function that the process runs.
      preload: the module that the server, which it is forked from, imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    os.environ[children.SERVER] = "1"
    output.touch()
    process = context.Process(target=target, args=(list(options), str(output), environment), daemon=True)
    process.start()
    return Running(process, output)


def place(port: int, count: int, process: int) -> list[str]:
    """The options that tell a process its place."""
    return ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.num-processes", str(count),
            "--distributed.process-id", str(process)]  # fmt: skip


def free_port() -> int:
    """A port of this host that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def newest_step(run_dir: Path) -> int:
    """The last step that a run has written, 0 before the first."""
    try:
        lines = read(run_dir / METRICS)
    except (OSError, UserError):  # it is being written
        return 0
    return lines[-1]["step"] if lines else 0


def wait_for_step(run_dir: Path, step: int, running: Sequence[Running], seconds: float) -> bool:
    """Wait until a run has written a step; False if a process ends before, or `seconds` pass."""
    deadline = time.monotonic() + seconds
    while newest_step(run_dir) < step:
        if not all(r.alive for r in running) or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
