"""One process of a run: train.py with a tiny network, forked from a process that has imported all and used nothing.

Environment of a process: JGC_CHAOS_MODEL=conv: the network has a convolution; JGC_CHAOS_MUTE: its standard error is a
closed pipe; JGC_CHAOS_FLIP="STEP DEVICE BIT ARRAY": before that step of the start a bit of a local device's copy flips;
JGC_CHAOS_KEEP: no checkpoint is deleted; JGC_CHAOS_PROGRAMS: a folder in which compiled programs are kept.
"""

import multiprocessing.connection
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

SERVER = "JGC_CHAOS_SERVER"  # set in the process that the others are forked from

if os.environ.get(SERVER):
    sys.modules["torch"] = None  # type: ignore[assignment]  # tensorboardX takes it where it is: half the time to start
    import tensorboardX  # noqa: F401

    del sys.modules["torch"]
    import sklearn.datasets  # noqa: F401  # which has the digits

    sys.modules["jgc.training.output.curves"] = types.SimpleNamespace(draw=lambda *args: None)  # type: ignore[assignment]

import jax  # noqa: E402

from jgc.lab.chaos.tiny import XLA_FLAGS, flipped, narrow, tiny_conv_model, tiny_model  # noqa: E402
from jgc.training.run import checkpoint, loop, setup  # noqa: E402
from jgc.training.run.record import Run  # noqa: E402
from jgc.training.settings import cli  # noqa: E402

QUICK = " ".join(f"{name}={value}" for name, value in XLA_FLAGS.items())


def child(argv: list[str], output: str, environment: dict[str, str], change: Callable[[], None] | None = None) -> None:
    """Run train.py with its output in a file, after `change` has patched it."""
    prepare(output, environment)
    if change:
        change()
    sys.exit(cli.main(argv))


def prepare(output: str, environment: dict[str, str]) -> None:
    """Set up the process as the module's docstring says, for `cli.main` or any other program of a run."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(_closed_pipe() if environment.get("JGC_CHAOS_MUTE") else file, 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(stream), "w", buffering=1) for stream in (1, 2))
    os.environ.update({**environment, "XLA_FLAGS": f"{QUICK} {environment.get('XLA_FLAGS', '')}"})
    warnings.simplefilter("ignore")
    jax.config.update("jax_platforms", "cpu")
    if programs := environment.get("JGC_CHAOS_PROGRAMS"):
        jax.config.update("jax_compilation_cache_dir", programs)
    else:  # tries are short: compiling again costs less than checking a killed process's leftovers
        jax.config.update("jax_enable_compilation_cache", False)
    narrow()
    setup.make_model = tiny_conv_model if environment.get("JGC_CHAOS_MODEL") == "conv" else tiny_model
    if environment.get("JGC_CHAOS_KEEP"):
        checkpoint.KEEP = 10**6
    if flip := environment.get("JGC_CHAOS_FLIP"):
        step, device, bit, name = flip.split()
        _flip_later(int(step), int(device), int(bit), name)


def end_with_parent() -> None:
    """End this process once the one that started it is gone, also by SIGKILL: nobody would stop it.

    Not PR_SET_PDEATHSIG, as in `bench network`: this process is forked from a server, which outlives that process.
    """

    def wait(sentinel: Any) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    if parent := multiprocessing.parent_process():
        threading.Thread(target=wait, args=(parent.sentinel,), daemon=True).start()


def _closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def _flip_later(step: int, device: int, bit: int, name: str) -> None:
    """Flip a bit before the step of that number, from 1, of this start of the run."""
    train = loop.train

    class Flipping:
        """The step function, whose state has the flipped bit in that step."""

        def __init__(self, plain: Any):
            self.plain, self.count = plain, 0

        def __getattr__(self, other: str) -> Any:
            return getattr(self.plain, other)

        def __call__(self, state: Any, batch: Any) -> Any:
            self.count += 1
            here = self.count == step
            return self.plain(flipped(state, name, jax.local_devices()[device], bit) if here else state, batch)

    def train_and_flip(run: Run, state: Any, start: int) -> tuple[Any, int]:
        return train(run._replace(setup=run.setup._replace(step=Flipping(run.setup.step))), state, start)

    loop.train = train_and_flip
