"""train.py with a tiny model in processes of their own, forked from one that has imported everything but used nothing.

Environment of a process: JGC_TEST_DUMP, a folder, gets the parameters as each of its devices holds them in the end;
JGC_TEST_JAX: it says that its jax is of that version; JGC_TEST_PROGRAM: it compiles another program than the others;
JGC_TEST_RANDOM: it draws other random numbers than the others;
JGC_TEST_HANG: its main thread stops for good after that step; JGC_TEST_MUTE: its standard error is a closed pipe;
JGC_TEST_FLIP: before that step of the start a bit of its copy of a parameter flips.
"""

import multiprocessing
import os
import socket
import sys
import threading
import time
import types
import warnings
from pathlib import Path

if os.environ.get("JGC_TEST_SERVER"):  # in the process that the others are forked from
    sys.modules["torch"] = None  # tensorboardX takes it where it is, and half the time to start
    import tensorboardX  # noqa: F401

    del sys.modules["torch"]
    sys.modules["jgc.training.curves"] = types.SimpleNamespace(draw=lambda *args: None)

import jax
import numpy as np
from quick import XLA_FLAGS
from training_helpers import tiny_model, with_flipped_bit

from jgc.training import cli, distributed, loop, setup, step
from jgc.training.metrics import read
from jgc.training.recorder import Recorder

QUICK = " ".join(f"{name}={value}" for name, value in XLA_FLAGS.items())
LIMIT = 900  # seconds after which a process counts as hanging


class Running:
    """A process and what it prints."""

    def __init__(self, process, output: Path):
        self.process, self.output = process, output

    def end(self) -> tuple[int, str]:
        """Its exit code and output; killed where it does not end by itself."""
        self.process.join(LIMIT)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            return 999, f"it hung, after: {self.output.read_text()}"
        return self.process.exitcode, self.output.read_text()

    def error(self) -> str:
        """The one line of an error that it has ended with."""
        code, output = self.end()
        lines = [line for line in output.splitlines() if line.startswith("error: ")]
        assert code not in (0, 999) and len(lines) == 1 and "Traceback" not in output and "***" not in output, output
        return lines[0]


def start(folder: Path, name: str, options: str, **environment: str) -> Running:
    """`train.py OPTIONS` in a new process, with a file in `folder` for what it prints."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["process_helpers"])
    os.environ["JGC_TEST_SERVER"] = "1"
    output = folder / f"{name}.txt"
    output.touch()
    process = context.Process(target=child, args=(options.split(), str(output), environment), daemon=True)
    process.start()
    return Running(process, output)


def start_all(folder: Path, name: str, count: int, options: str, own: dict[int, str] | None = None, **environment):
    """`count` processes of one run; `own` has more options for some of them, `environment` is for all."""
    port = free_port()
    return [
        start(
            folder,
            f"{name}-{i}",
            f"{options} --distributed.coordinator 127.0.0.1:{port} --distributed.num-processes {count} "
            f"--distributed.process-id {i} {(own or {}).get(i, '')}",
            **environment,
        )
        for i in range(count)
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_for_step(run_dir: Path, step: int, running: list[Running]) -> None:
    """Until a run has written a step's line."""
    deadline = time.monotonic() + LIMIT
    while not (lines := read(run_dir / "metrics.jsonl")) or lines[-1]["step"] < step:
        assert all(r.process.exitcode is None for r in running), [r.output.read_text() for r in running]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def child(argv: list[str], output: str, environment: dict[str, str]) -> None:
    """What a process does: train.py, with its output in a file."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(file), "w", buffering=1) for _ in range(2))
    os.environ.update({**environment, "XLA_FLAGS": f"{QUICK} {environment.get('XLA_FLAGS', '')}"})
    warnings.simplefilter("ignore")
    jax.config.update("jax_platforms", "cpu")
    # Some are killed while they write programs: those of this session, not the kept ones.
    jax.config.update("jax_compilation_cache_dir", str(Path(output).parents[1] / "programs"))
    setup.make_model = tiny_model
    _change(environment)
    sys.exit(cli.main(argv))


def _change(environment: dict[str, str]) -> None:
    """What the module's docstring says."""
    if environment.get("JGC_TEST_MUTE"):
        reading, writing = os.pipe()
        os.close(reading)
        sys.stderr = os.fdopen(writing, "w", buffering=1)
    if folder := environment.get("JGC_TEST_DUMP"):
        train = loop.train

        def train_and_dump(*args):
            state, done = train(*args)
            for device in jax.local_devices():
                shards = [s.data for x in jax.tree.leaves(state.params) for s in x.addressable_shards]
                held = {str(i): np.asarray(x) for i, x in enumerate(x for x in shards if x.devices() == {device})}
                np.savez(Path(folder) / f"{jax.process_index()}-{device.id}.npz", **held)
            return state, done

        loop.train = train_and_dump
    if version := environment.get("JGC_TEST_JAX"):
        versions = distributed.versions
        distributed.versions = lambda: {**versions(), "jax": version}
    if environment.get("JGC_TEST_RANDOM"):
        jax.config.update("jax_threefry_partitionable", False)
    if environment.get("JGC_TEST_PROGRAM"):
        decay = step.add_coupled_decay
        step.add_coupled_decay = lambda grads, *rest: jax.tree.map(lambda g: 2 * g, decay(grads, *rest))
    if flip := environment.get("JGC_TEST_FLIP"):
        enter, steps = loop.enter, []

        def enter_and_flip(*args):
            state = enter(*args)
            steps.append(state)
            if len(steps) != int(flip):
                return state
            kernel = with_flipped_bit(state.params["middle"]["kernel"], jax.local_devices()[0], 1)
            return state._replace(params={**state.params, "middle": {**state.params["middle"], "kernel": kernel}})

        loop.enter = enter_and_flip
    if last := environment.get("JGC_TEST_HANG"):
        push = Recorder.push

        def push_or_hang(self, number, *args, **extra):
            push(self, number, *args, **extra)
            if number + 1 == int(last):
                threading.Event().wait()

        Recorder.push = push_or_hang
