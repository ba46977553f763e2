"""The record of a run: what its steps, validations, evaluations and checkpoints share."""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from jax.stages import Lowered
from rich.console import Console

from jgc.training.output.recorder import Recorder
from jgc.training.output.recording import Recording
from jgc.training.processes.distributed import Team
from jgc.training.processes.drift import Replicas
from jgc.training.run.sane import Proof
from jgc.training.run.setup import Setup
from jgc.training.run.signals import Interrupts
from jgc.training.settings.config import Config
from jgc.training.steps.costs import Costs, PhaseCost
from jgc.training.steps.local_costs import cost_of_phase
from jgc.training.steps.step import TrainState
from jgc.types import Phase


class Run(NamedTuple):
    """A run in progress. The train state is not in it: a step gives its buffers up.

    Attributes:
      team: the processes.
      setup: data, model, compressor, optimiser.
      folder: the run folder.
      console: of process 0.
      manager: of the checkpoints.
      interrupts: Ctrl-C and SIGTERM.
      recorder: metrics of each step.
      recording: gradients of the steps that --record names.
      evaluate: the scores of a state.
      validate: the validation loss of a state; None where the run has none.
      entered: the phases so far, the newest last; grows.
      costs: bytes by the phase's value; grows.
      compiled: programs by name, such as a phase's value; grows.
      proof: which checkpoint is good.
      replicas: whether devices hold the same.
    """

    team: Team
    setup: Setup
    folder: Path
    console: Console
    manager: ocp.CheckpointManager
    interrupts: Interrupts
    recorder: Recorder
    recording: Recording
    evaluate: Callable[[TrainState], dict[str, float]]
    validate: Callable[[TrainState], float] | None
    entered: list[Phase]
    costs: Costs
    compiled: dict[Any, Any]
    proof: Proof
    replicas: Replicas

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.setup.parts.config


def compile_once(run: Run, name: Any, what: str, lower: Callable[[], Lowered]) -> float:
    """Compile a program before its first call; seconds that it took, 0 if it is compiled.

    Processes must have lowered the same text; all wait until all have compiled.
    """
    if name in run.compiled:
        return 0.0
    started = time.perf_counter()
    lowered = lower()
    check_equal(run.team, what, lowered)
    run.compiled[name] = lowered.compile()
    run.team.wait()
    return time.perf_counter() - started


def check_equal(team: Team, what: str, lowered: Lowered) -> None:
    """Raise UserError unless all processes have lowered the same program."""
    if team.count > 1:
        text = f"{zlib.crc32(lowered.as_text().encode()):08x}"
        team.require_equal({f"a program of the {what}, StableHLO of checksum": text})


def cost_of(setup: Setup, phase: Phase) -> PhaseCost:
    """The planned cost of a phase; computed anew where the phase has sizes that were not planned."""
    planned = [cost._replace(phase=phase) for cost in setup.costs if cost.phase.value == phase.value]
    return planned[0] if planned else cost_of_phase(setup.parts, phase, setup.state)
