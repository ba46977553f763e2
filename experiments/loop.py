"""`python -m experiments loop`: how much longer a step of train.py takes than its compiled program.

In turn, round after round: a run of train.py with its loader, metrics, progress and checkpoint, and the same compiled
program on one batch that lies on the devices. The run's milliseconds come from metrics.jsonl, which leaves out
evaluations, checkpoints and compiling.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jgc import compress
from jgc.lab.bench.costs import shown
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import check_repeats, publish
from jgc.lab.shared.progress import each
from jgc.lab.shared.random_data import parts_of, random_source
from jgc.lab.shared.tables import table
from jgc.training.data import MissingDataError, Source
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.output.metrics import read
from jgc.training.run.folder import METRICS
from jgc.training.run.loop import run
from jgc.training.run.setup import data_of
from jgc.training.settings.config import Config, DataConfig, check, resolve
from jgc.training.steps.step import make_steps

FIRST = 3  # steps of a run that do not count: caches and threads start


@dataclass(frozen=True)
class Loop:
    """Milliseconds of a step of train.py over its compiled program's.

    Without --data-dir a run reads random images in memory, which are not augmented.

        python -m experiments loop --workload cifar10_resnet20 --method topk --steps 30

        | | ms a step |
        | train.py | 412 ± 3 |
        | its compiled program | 409 ± 2 |
        | ratio | 1.008 ± 0.004 |
    """

    workload: str = "cifar10_resnet20"
    """model, batch and settings"""
    method: str = "dense"
    """a method with one phase"""
    nodes: int | None = None
    """data-parallel nodes; the workload's if not given"""
    batch_size: int | None = None
    """examples of all nodes together; the workload's if not given"""
    steps: int = 30
    """steps of a round that count"""
    repeats: int = 3
    """rounds; medians and their spread are shown"""
    data_dir: str | None = None
    """folder of prepared data sets; random images if not given"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Measure, and print the page."""
        check_repeats(self.repeats)
        if self.steps < 1:
            raise UserError(f"--steps must be at least 1, got {self.steps}")
        with values_of_the_user():
            config = self._config()
            ratios = measure(config, self.data_dir is None, self.repeats)
        publish("train.py over its compiled program", markdown(config, ratios, describe()), self.output, line)

    def _config(self) -> Config:
        """The config of the runs.

        Raises:
          UserError: an unknown method, or a method with several phases.
        """
        if self.method not in compress.METHODS:
            raise UserError(f"unknown method {self.method!r}: one of {', '.join(compress.METHODS)}")
        settings = compress.METHODS[self.method].settings()
        if len(compress.build(settings).schedule) > 1:
            raise UserError(f"--method {self.method} has several phases; take a method with one, such as topk")
        options = {name: value for name in ("nodes", "batch_size") if (value := getattr(self, name)) is not None}
        data = DataConfig(dir=self.data_dir)
        config = resolve(Config(settings, workload=self.workload, steps=FIRST + self.steps, data=data, evaluate_every=0,
                                checkpoint_every=0, diagnose_every=0, schedule="constant", **options))  # fmt: skip
        check(config)
        return config


class Seconds(NamedTuple):
    """Seconds a step in each round, f64[repeats]: of train.py, and of its compiled program."""

    loop: np.ndarray
    programs: np.ndarray


def measure(config: Config, random: bool, repeats: int) -> Seconds:
    """Time both in turn.

    Args:
      config: of the runs.
      random: whether they read random images.
      repeats: rounds.

    Raises:
      UserError: the data set is missing.
    """
    try:
        source = random_source(config) if random else data_of(config)
    except MissingDataError as error:
        raise UserError(f"{error}; without --data-dir random images are read") from error
    programs = compiled(config)

    def of_round(number: int) -> tuple[float, float]:
        if number % 2:  # a machine that gets slower or faster harms both alike
            bare = programs()
            return of_run(config, source), bare
        return of_run(config, source), programs()

    loop, bare = zip(*each(range(repeats), of_round, lambda _: "round"), strict=True)
    return Seconds(np.array(loop), np.array(bare))


def of_run(config: Config, source: Source) -> float:
    """Mean seconds a step of a run of train.py."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        if run(dataclasses.replace(config, run_dir=str(run_dir)), console=Console(quiet=True), source=source):
            raise KeyboardInterrupt  # which train.py ends with a code and a saved checkpoint
        return float(np.mean([line["seconds"] for line in read(run_dir / METRICS)[FIRST:]]))


def compiled(config: Config) -> Callable[[], float]:
    """A function that runs the compiled program of a run on one batch, and returns mean seconds a step."""
    parts, state, batch = parts_of(config)
    step_of: Any = make_steps(parts, bool(state.model_state))
    program, (arrays, key, _, *data) = step_of.program(state, batch)

    def seconds() -> float:
        nonlocal arrays
        for step in range(config.steps):
            if step == FIRST:
                jax.block_until_ready(arrays)
                started = time.perf_counter()
            arrays, _ = program(arrays, key, np.int32(step), *data)
        jax.block_until_ready(arrays)
        return (time.perf_counter() - started) / (config.steps - FIRST)

    return seconds


def markdown(config: Config, seconds: Seconds, machine: str) -> str:
    """The page."""
    method = compress.method_of(config.compressor).name
    rows = [
        ["train.py", shown(1e3 * seconds.loop, 2)],
        ["its compiled program", shown(1e3 * seconds.programs, 2)],
        ["ratio", shown(seconds.loop / seconds.programs, 3)],
    ]
    return (
        f"`{config.workload}` with `{method}`, {config.nodes} nodes, batch {config.batch_size}, rounds of "
        f"{config.steps - FIRST} steps; {machine}.\n\n{table(['', 'ms a step'], rows)}\n"
    )
