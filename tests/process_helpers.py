"""train.py with a tiny model in processes of their own, forked from one that has imported everything but used nothing.

Environment of a process: JGC_TEST_DUMP, a folder, gets the parameters as each of its devices holds them in the end;
JGC_TEST_JAX: it says that its jax is of that version; JGC_TEST_PROGRAM: it compiles other programs than the rest;
JGC_TEST_RANDOM: it draws other random numbers than the others;
JGC_TEST_HANG: its main thread stops for good after that step; JGC_TEST_SLOW: after its first step it sleeps so many
seconds. `jgc.lab.chaos.child` has further ones.
"""

import functools
import threading
import time
from pathlib import Path

import jax
import numpy as np
import tiny

from jgc.lab.chaos import child as children, processes
from jgc.lab.chaos.child import QUICK as QUICK
from jgc.lab.chaos.processes import free_port, place
from jgc.training.output.recorder import Recorder
from jgc.training.processes import distributed
from jgc.training.run import loop, setup
from jgc.training.steps import step

LIMIT = 900  # seconds after which a process counts as hanging


class Running(processes.Running):
    """A process and what it prints."""

    def end(self) -> tuple[int, str]:
        """Its exit code and output; 999 where it had to be killed."""
        code, output = super().end(LIMIT)
        return (999, f"it hung, after: {output}") if code is None else (code, output)

    def error(self) -> str:
        """The one line of an error that it has ended with."""
        code, output = self.end()
        lines = [line for line in output.splitlines() if line.startswith("error: ")]
        assert code not in (0, 999) and len(lines) == 1 and "Traceback" not in output and "***" not in output, output
        return lines[0]


def start(folder: Path, name: str, options: str, **environment: str) -> Running:
    """`train.py OPTIONS` in a new process, with a file in `folder` for what it prints."""
    # Some are killed while they write programs: those of this session, not the kept ones.
    environment = {"JGC_CHAOS_PROGRAMS": str(folder.parent / "programs"), **environment}
    begun = processes.start(folder / f"{name}.txt", options.split(), environment, child, __name__)
    return Running(begun.process, begun.output)


def start_all(folder: Path, name: str, count: int, options: str, own: dict[int, str] | None = None, **environment):
    """`count` processes of one run; `own` has more options for some of them, `environment` is for all."""
    port = free_port()
    return [
        start(folder, f"{name}-{i}", " ".join([options, *place(port, count, i), (own or {}).get(i, "")]), **environment)
        for i in range(count)
    ]


def wait_for_step(run_dir: Path, step: int, running: list[Running]) -> None:
    """Until a run has written a step's line."""
    assert processes.wait_for_step(run_dir, step, running, LIMIT), [r.output.read_text() for r in running]


def child(argv: list[str], output: str, environment: dict[str, str]) -> None:
    """What a process does: train.py, with its output in a file."""
    children.child(argv, output, environment, functools.partial(_change, environment))


def _change(environment: dict[str, str]) -> None:
    """What the module's docstring says; runs of text get a tiny model, too."""
    if setup.make_model is tiny.tiny.tiny_model:
        setup.make_model = tiny.tiny_model
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
    hangs, sleeps = (environment.get(f"JGC_TEST_{name}", "") for name in ("HANG", "SLOW"))
    if hangs or sleeps:
        push = Recorder.push

        def push_and_wait(self, number, *args, **extra):
            push(self, number, *args, **extra)
            if hangs and number + 1 == int(hangs):
                threading.Event().wait()
            if sleeps and number == 0:
                time.sleep(float(sleeps))

        Recorder.push = push_and_wait
