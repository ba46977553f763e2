"""The parent's side of the workers: one process of a framework on each host."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NamedTuple

from jgc.lab.bench.network.channel import die_with_parent
from jgc.lab.bench.network.namespaces import Network, address, alive
from jgc.lab.shared.stopping import go_on
from jgc.training.errors import FAILED, UserError

PATIENCE = 1200.0  # seconds to wait for an answer; compiling LGC's last phase on a shared core takes longest
AHEAD = 0.004  # seconds between a request for a step and its start
SCRATCH = "jgc-network-"  # followed by the pid
PORTS = {"jax": 29400, "torch": 29500}
# one thread for the numbers in both frameworks: hosts share the machine's cores
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


class Workers(NamedTuple):
    """Processes that answer.

    Attributes:
      framework: "jax" or "torch".
      processes: by host.
      logs: the standard error of each.
      delay: seconds that a packet waits at the switch.
    """

    framework: str
    processes: tuple[subprocess.Popen, ...]
    logs: tuple[Path, ...]
    delay: float = 0.0


@contextmanager
def workers(
    framework: str, net: Network, options: dict[str, Any], module: str = ""
) -> Iterator[Workers]:
    """Start a process on each host; they are killed after the block, however it ends.

    Args:
      framework: "jax" or "torch".
      net: the hosts.
      options: of each worker: model and batch.
      module: the program; if not given, the one of `bench network`.
    """
    cache = {"JAX_COMPILATION_CACHE_DIR": str(net.folder / "compiled"),
             "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    environment = {**os.environ, **ONE_THREAD, **cache, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS,
                   "GLOO_SOCKET_IFNAME": "eth0", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}  # fmt: skip
    root = str(Path(__file__).resolve().parents[4])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    processes: list[subprocess.Popen] = []
    logs = tuple(net.folder / f"{framework}-{host}.log" for host in range(net.hosts))
    try:
        for host in range(net.hosts):
            settings = {**options, "host": host, "hosts": net.hosts, "coordinator": f"{address(0)}:{PORTS[framework]}"}
            program = module or f"jgc.lab.bench.network.worker_{framework}"
            argv = [sys.executable, "-m", program, json.dumps(settings)]
            with logs[host].open("w") as log:
                processes.append(subprocess.Popen(
                    net.command(host, argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                    env=environment, start_new_session=True, preexec_fn=die_with_parent,
                ))  # fmt: skip
        yield Workers(framework, tuple(processes), logs, net.delay)
    finally:
        _end(processes)


def ask(team: Workers, do: str, **arguments: Any) -> list[Any]:
    """Send all hosts the same request, and return their answers.

    Raises:
      UserError: a host is gone, does not answer, or failed.
    """
    return _asked(team, range(len(team.processes)), do, arguments)


def ask_in_turn(team: Workers, do: str, **arguments: Any) -> list[Any]:
    """As `ask`, but with JAX the first host goes first: the others find its programs in the cache."""
    if team.framework != "jax":  # DDP models communicate when they are made
        return ask(team, do, **arguments)
    first = _asked(team, range(1), do, arguments)
    return first + _asked(team, range(1, len(team.processes)), do, arguments)


def _asked(team: Workers, hosts: Sequence[int], do: str, arguments: dict[str, Any]) -> list[Any]:
    go_on()
    line = (json.dumps({"do": do, **arguments}) + "\n").encode()
    for host in hosts:
        try:
            team.processes[host].stdin.write(line)  # type: ignore[union-attr]
        except BrokenPipeError:
            raise _gone(team, host, do) from None
    answers = _answers(team, hosts, do)
    for host, answer in answers.items():
        if "error" in answer:
            what = f"{do} {arguments.get('method', '')}".strip()
            raise UserError(f"{team.framework} on host {host} cannot {what}: {answer['error']}", FAILED)
    return [answers[host]["ok"] for host in hosts]


def step(team: Workers, method: str, part: str) -> dict[str, float]:
    """Take one step on all hosts, begun at the same moment.

    Returns:
      seconds: until the slowest host was done; cpu: processor seconds, mean over hosts.
    """
    answers = ask(team, "step", method=method, part=part, at=time.monotonic() + AHEAD)
    return {"seconds": max(t["seconds"] for t in answers), "cpu": sum(t["cpu"] for t in answers) / len(answers)}


def _answers(team: Workers, hosts: Sequence[int], do: str) -> dict[int, dict[str, Any]]:
    """One line from each of these hosts."""
    answers: dict[int, dict[str, Any]] = {}
    until = time.monotonic() + PATIENCE
    with DefaultSelector() as selector:
        for host in hosts:
            selector.register(team.processes[host].stdout, EVENT_READ, host)  # type: ignore[arg-type]
        while len(answers) < len(hosts):
            ready = selector.select(timeout=max(0.0, until - time.monotonic()))
            if not ready:
                silent = ", ".join(str(host) for host in hosts if host not in answers)
                raise UserError(f"{team.framework} on host {silent} did not answer {do!r} in {PATIENCE:g} s", FAILED)
            for key, _ in ready:
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    raise _gone(team, key.data, do)
                answers[key.data] = json.loads(line)
    return answers


def _gone(team: Workers, host: int, do: str) -> UserError:
    """The error for a process that ended, with its last line of output."""
    lines = [line for line in team.logs[host].read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "nothing in its log"
    return UserError(f"{team.framework} on host {host} ended during {do!r}: {last}", FAILED)


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for logs and /etc/hosts files, removed after the block. Leftovers of dead runs are removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        pid = left.name.removeprefix(SCRATCH).partition("-")[0]
        if pid.isdecimal() and not alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
