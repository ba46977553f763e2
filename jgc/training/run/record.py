"""The record of a run: what its steps, validations, evaluations and checkpoints share."""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

import orbax.checkpoint as ocp
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
from jgc.training.steps.diagnose import Diagnosis
from jgc.training.steps.local_costs import cost_of_phase
from jgc.training.steps.program import Program
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
      diagnosis: comparisons with the true mean.
      evaluate: the scores of a state.
      validate: the validation loss of a state; None where the run has none.
      entered: the phases so far, the newest last; grows.
      costs: bytes by the phase's value; grows.
      updates: compiled updates by the phase's value; grows.
      fragments: with local steps, the phase of each fragment's last exchange; changes.
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
    diagnosis: Diagnosis
    evaluate: Callable[[TrainState], dict[str, float]]
    validate: Callable[[TrainState], float] | None
    entered: list[Phase]
    costs: Costs
    updates: dict[Hashable, Program]
    fragments: list[Phase]
    proof: Proof
    replicas: Replicas

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.setup.parts.config


def cost_of(setup: Setup, phase: Phase) -> PhaseCost:
    """The planned cost of a phase; computed anew where the phase has sizes that were not planned."""
    planned = [cost._replace(phase=phase) for cost in setup.costs if cost.phase.value == phase.value]
    return planned[0] if planned else cost_of_phase(setup.parts, phase, setup.state)
