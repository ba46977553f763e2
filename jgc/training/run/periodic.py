"""What a run does between two steps, in training with and without local steps."""

from collections.abc import Generator
from functools import partial

from jgc.loops.buffers import device_of, put_arrays
from jgc.loops.step_loop import LoopState
from jgc.method import phases
from jgc.nodes.placement import placements_of
from jgc.nodes.placing import place_parts
from jgc.training.data import prefetch
from jgc.training.errors import Drift
from jgc.training.output import summary
from jgc.training.run import checkpoint
from jgc.training.run.record import Run
from jgc.training.run.setup import Setup, steps_of_epoch
from jgc.training.settings.config import Config, as_json
from jgc.training.steps import learning_rate
from jgc.training.steps.evaluate import LOSS
from jgc.training.steps.step import Batch, TrainState, arrays_by_name
from jgc.types import Phase


def validate(run: Run, done: int, state: TrainState) -> TrainState:
    """Once an epoch, the validation loss and the learning rate that follows from it; same state without validation."""
    if run.validate is None or not is_every(steps_between_validations(run.config, run.setup), done):
        return state
    with run.recorder.untimed():
        loss = run.validate(state)
        run.recorder.add(**{LOSS: loss})
        if not isinstance(state, LoopState) or learning_rate.current(state.opt_state) is None:
            return state  # no --schedule validation
        corrected, placements = learning_rate.corrected(state.opt_state, loss), placements_of(state.opt_state)
        device = device_of(state.params)
        return state._replace(opt_state=put_arrays(corrected, run.setup.parts.nodes, device, placements))


def evaluate(run: Run, done: int, upcoming: Phase, state: TrainState) -> None:
    """Score the model every --evaluate-every steps, before each new kind of phase, and at the end."""
    new_kind = all(upcoming.name != before.name for before in run.entered)
    if new_kind or done == run.config.steps or is_every(run.config.evaluate_every, done):
        with run.recorder.untimed():
            run.recorder.add(**run.evaluate(state))


def check_and_save(run: Run, done: int, state: TrainState, stop: bool) -> None:
    """Compare what devices should hold alike, and write a checkpoint, where one of them is due; both before a stop."""
    config = run.config
    checkpoint.check(run.manager, run.proof)
    saves = stop or done == config.steps or is_every(config.checkpoint_every, done)
    if saves or is_every(config.check_replicas_every, done):
        check_replicas(run, done, state)
    if saves:
        save(run, done, state)


def check_replicas(run: Run, done: int, state: TrainState) -> None:
    """Raise Drift if devices hold different values where they should hold the same, so that no checkpoint has these."""
    if different := run.replicas.difference(arrays_by_name(state)):
        run.recorder.write()
        newest = "no checkpoint had been made yet"
        if run.proof.newest is not None:
            newest = f"all agreed at the checkpoint of step {run.proof.newest} in {run.manager.directory}"
        raise Drift(done, different, newest)


def save(run: Run, done: int, state: TrainState) -> None:
    """Begin to write a checkpoint, after the metrics of all steps before it."""
    host = {
        "config": as_json(run.config),
        "versions": summary.versions(),
        "data": run.setup.source.facts,
        "phases": [phases.as_json(phase) for phase in run.entered],
        "fragments": [phases.as_json(phase) for phase in getattr(state, "phases", ())],
    }
    with run.recorder.untimed():
        run.recorder.write()
        checkpoint.save(run.manager, done, state, host, run.proof)
        run.team.wait()  # for process 0, which may have waited for the checkpoint before


def is_every(interval: int, done: int) -> bool:
    """Whether something that happens every `interval` steps, 0 for never, happens after step `done`."""
    return interval > 0 and done % interval == 0


def steps_between_validations(config: Config, setup: Setup) -> int:
    """--correction.every, or an epoch."""
    return config.correction.every or steps_of_epoch(config, setup.source)


def batches(config: Config, setup: Setup, start: int) -> Generator[Batch]:
    """The batch of every step from `start` on: a pure function of seed and step, made ahead in a thread."""

    def batch_of(step: int) -> Batch:
        make = partial(setup.source.batch, config.seed, step, config.nodes, config.batch_size)
        return place_parts(make, setup.parts.nodes)

    yield from prefetch(batch_of, start, config.steps)
