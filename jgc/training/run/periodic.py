"""The work between two steps, in training with and without local steps: validation, scores, checks, checkpoints."""

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
    """Once an epoch, the validation loss and the resulting learning rate."""
    if run.validate is None or not passed(steps_between_validations(run.config, run.setup), done - 1, done):
        return state
    with run.recorder.untimed():
        run.team.meet()
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
    if new_kind or done == run.config.steps or passed(run.config.evaluate_every, done - 1, done):
        with run.recorder.untimed():
            run.team.meet()
            run.recorder.add(**run.evaluate(state))


def check_and_save(run: Run, done: int, state: TrainState, last: bool = False, steps: int = 1) -> None:
    """Compare replicas, and write a checkpoint, if the last `steps` steps have passed their intervals, or if `last`."""
    checkpoint.check(run.manager, run.proof)
    saves = last or passed(run.config.checkpoint_every, done - steps, done)
    if saves or passed(run.config.check_replicas_every, done - steps, done):
        check_replicas(run, done, state)
    if saves:
        save(run, done, state)


def check_replicas(run: Run, done: int, state: TrainState) -> None:
    """Raise Drift if devices hold different values where they should agree, so that no checkpoint has these."""
    with run.recorder.untimed():
        run.team.meet()
        different = run.replicas.difference(arrays_by_name(state))
    if different:
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
        run.recorder.metrics.sync()
        checkpoint.save(run.manager, done, state, host, run.proof)
        run.team.wait()  # for process 0, which may have waited for the checkpoint before


def passed(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of the interval, 0 for none, lies in (before, after].

    Example:
      >>> passed(100, 90, 120), passed(100, 100, 130), passed(0, 0, 9)
      (True, False, False)
    """
    return interval > 0 and after // interval > before // interval


def steps_between_validations(config: Config, setup: Setup) -> int:
    """--correction.every, or an epoch."""
    return config.correction.every or steps_of_epoch(config, setup.source)


def batches(
    setup: Setup, start: int = 0, stop: int | None = None, seed: int | None = None, offset: int = 0
) -> Generator[Batch]:
    """The batches from a step on, made ahead in a thread: a function of seed and step + offset."""
    config = setup.parts.config
    seed = config.seed if seed is None else seed

    def batch_of(step: int) -> Batch:
        make = partial(setup.source.batch, seed, offset + step, config.nodes, config.batch_size)
        return place_parts(make, setup.parts.nodes)

    yield from prefetch(batch_of, start, config.steps if stop is None else stop)
