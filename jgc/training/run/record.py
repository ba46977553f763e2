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
    """A run in progress. The train state is not in it, because a step donates its buffers."""

    team: Team  # the processes
    setup: Setup  # data, model, compressor, optimiser
    folder: Path  # the run folder
    console: Console  # of process 0
    manager: ocp.CheckpointManager  # of the checkpoints
    interrupts: Interrupts  # Ctrl-C and SIGTERM
    recorder: Recorder  # metrics of each step
    recording: Recording  # gradients of the steps that --record names
    evaluate: Callable[[TrainState], dict[str, float]]  # the scores of a state
    validate: Callable[[TrainState], float] | None  # the validation loss of a state; None where the run has none
    entered: list[Phase]  # the phases so far, the newest last; grows
    costs: Costs  # bytes by the phase's value; grows
    compiled: dict[Any, Any]  # programs by name, such as a phase's value; grows
    proof: Proof  # which checkpoint is good
    replicas: Replicas  # whether devices hold the same

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.setup.parts.config


def compile_once(run: Run, name: Any, what: str, lower: Callable[[], Lowered]) -> float:
    """Compile a program before its first call, if all processes have lowered the same; seconds that it took, or 0."""
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
    """The planned cost of a phase; computed again if the phase has sizes that were not planned."""
    planned = [cost._replace(phase=phase) for cost in setup.costs if cost.phase.value == phase.value]
    return planned[0] if planned else cost_of_phase(setup.parts, phase, setup.state)


def add_phase(run: Run, phase: Phase) -> None:
    """Add a new phase and its cost to the record."""
    if phase not in run.entered:
        run.entered.append(phase)
    if phase.value not in run.costs:
        run.costs[phase.value] = cost_of(run.setup, phase)
