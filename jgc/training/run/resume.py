"""Where a run begins: before its first step, or at its newest checkpoint."""

from typing import NamedTuple

from rich.console import Console

from jgc.loops.buffers import copied
from jgc.loops.step_loop import LoopState
from jgc.method import phases
from jgc.nodes.placing import place
from jgc.training.errors import UserError
from jgc.training.run import checkpoint
from jgc.training.run.folder import compare_configs
from jgc.training.run.setup import Setup
from jgc.training.steps.step import TrainState, arrays_by_name, placements_by_name, with_arrays
from jgc.types import Phase


class Beginning(NamedTuple):
    """Where a run begins.

    Attributes:
      state: the train state, placed on the devices.
      step: updates made so far.
      entered: the phases so far; the state belongs to the last of them.
    """

    state: TrainState
    step: int
    entered: list[Phase]


def resume_or_start(setup: Setup, found: checkpoint.Restored | None, console: Console) -> Beginning:
    """The newest checkpoint, or the first state where there is none.

    Raises:
      UserError: the checkpoint has had more steps than the run is to have.
    """
    config = setup.parts.config
    if found is None:
        if config.resume:
            console.print("no checkpoint yet: starting from the beginning")
        first = setup.parts.compressor.schedule[0]
        return Beginning(setup.state, 0, [first])
    for problem in found.damaged:
        console.print(f"{problem}; using that of step {found.step}", highlight=False, soft_wrap=True)
    if found.step > config.steps:
        raise UserError(f"the run has had {found.step} steps already, more than --steps {config.steps}")
    restored = checkpoint.fit(setup.state, found, config.nodes)
    arrays = place(copied(arrays_by_name(restored)), placements_by_name(setup.state), setup.parts.nodes)
    state, entered = with_arrays(restored, arrays), [phases.from_json(phase) for phase in found.host["phases"]]
    if isinstance(state, LoopState):
        return Beginning(state._replace(step=found.step, phase=entered[-1]), found.step, entered)
    fragments = tuple(phases.from_json(phase) for phase in found.host["fragments"])
    return Beginning(state._replace(step=found.step, phases=fragments), found.step, entered)


def check_own(setup: Setup, found: checkpoint.Restored) -> None:
    """Raise UserError if a checkpoint is of another config, or does not fit this run."""
    config = setup.parts.config
    compare_configs(found.host["config"], config, f"checkpoint {found.step}")
    own, before = setup.source.facts, found.host.get("data")  # checkpoints of early versions do not say
    if before not in (None, own):
        raise UserError(f"checkpoint {found.step} was made with other data: {before}; these are {own}")
    checkpoint.fit(setup.state, found, config.nodes)
