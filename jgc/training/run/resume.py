"""The beginning of a run: its first state, or its newest checkpoint."""

from typing import Any, NamedTuple

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
    """The beginning of a run."""

    state: TrainState  # the train state, placed on the devices
    step: int  # updates made so far
    entered: list[Phase]  # the phases so far; the state belongs to the last of them


def resume_or_start(setup: Setup, found: checkpoint.Restored | None, console: Console) -> Beginning:
    """The newest checkpoint, or the first state where there is none."""
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
    fields: dict[str, Any] = {"phase": entered[-1]}
    if not isinstance(state, LoopState):
        fields = {"phases": tuple(phases.from_json(phase) for phase in found.host["fragments"])}
    return Beginning(state._replace(step=found.step, **fields), found.step, entered)


def check_restored(setup: Setup, found: checkpoint.Restored) -> None:
    """Raise UserError if a checkpoint has a different config or other data, or does not fit this run."""
    config, facts = setup.parts.config, setup.source.facts
    compare_configs(found.host["config"], config, f"checkpoint {found.step}")
    before = found.host.get("data")  # None in checkpoints of early versions
    if before not in (None, facts):
        raise UserError(f"checkpoint {found.step} was made with other data: {before}; these are {facts}")
    checkpoint.fit(setup.state, found, config.nodes)
