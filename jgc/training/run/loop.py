"""The training loop. Read `run_in` for the set-up, `train` for the steps, then the parts of a step."""

import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from jgc.method import phases
from jgc.training.data import MissingDataError, Source
from jgc.training.errors import FAILED, UserError
from jgc.training.output.announce import describe, heading, notes
from jgc.training.output.console import Output
from jgc.training.output.metrics import Metrics, NoMetrics, read
from jgc.training.output.progress import Display
from jgc.training.output.recorder import Recorder
from jgc.training.output.recording import Recording
from jgc.training.output.sample import sample_of
from jgc.training.processes.distributed import Team, join
from jgc.training.processes.drift import Replicas
from jgc.training.run import checkpoint, local, rounds, rounds_setup
from jgc.training.run.finish import finish
from jgc.training.run.folder import CONFIG, METRICS, SUMMARY, check_run_dir, choose_run_dir, mark_run_dir
from jgc.training.run.lock import sole_writer
from jgc.training.run.periodic import batches, check_and_save, evaluate, validate
from jgc.training.run.record import Run, add_phase, compile_once, cost_of
from jgc.training.run.resume import check_restored, resume_or_start
from jgc.training.run.setup import Setup, build
from jgc.training.run.signals import Interrupts
from jgc.training.settings.config import Config, check
from jgc.training.steps.compile_cache import kept_programs
from jgc.training.steps.diagnose import host_figures, is_due
from jgc.training.steps.evaluate import make_evaluate, make_validate, show
from jgc.training.steps.step import Batch, TrainState, arrays_by_name, make_rate_of, outputs_of
from jgc.types import Phase

WIDTH = 120  # of the table, where the output is not a terminal


def run(config: Config, resume_command: str = "", console: Console | None = None, source: Source | None = None) -> int:
    """Train as a resolved config says and leave a run folder behind.

    Args:
      config: from `jgc.training.settings.config.resolve`.
      resume_command: what to tell a user whose run was stopped; `{run_dir}` stands for the folder.
      console: where to print; standard output by default.
      source: data instead of the data set that the config names.

    Returns:
      The exit code: 0, or 128 and the signal's number where a signal stopped the run.

    Raises:
      UserError: one line on why the run cannot start or continue.
    """
    if config.rounds.bucket:
        config = rounds_setup.begun(config)
    check(config)
    if config.rounds.bucket:
        rounds_setup.check_bucket(config)
    with join(config) as team:
        console = console or Output(width=None if sys.stdout.isatty() else WIDTH, markup=False)
        return run_in(team, config, resume_command, team.console(console), source)


def run_in(team: Team, config: Config, resume_command: str, console: Console, source: Source | None = None) -> int:
    """`run` in one process of a team; only process 0 prints and writes the run folder."""
    folder = Path(team.lead(lambda: str(choose_run_dir(config))))
    programs = kept_programs(config.compile_cache, folder, team.leads)
    if not team.leads:
        with programs:
            return run_in_folder(team, config, folder, resume_command, console, source)
    tell = partial(console.print, highlight=False, soft_wrap=True)
    with sole_writer(folder, tell, team.end), programs:
        check_run_dir(folder, config)  # again, because a different process may have begun a run here meanwhile
        return run_in_folder(team, config, folder, resume_command, console, source)


def run_in_folder(
    team: Team, config: Config, folder: Path, resume_command: str, console: Console, source: Source | None
) -> int:
    """`run` in a folder that no other run uses."""
    setup = build(config, source)
    compressor = setup.state.compressor if setup.parts.local is None else setup.state.compressor[0]
    recording = Recording(setup.parts, setup.state.params, compressor.local, folder)
    team.require_equal({"data": setup.source.facts})
    first = {"a first state of checksum": team.checksum(arrays_by_name(setup.state))}
    team.require_equal(first, "JAX_ variables, XLA_FLAGS or processors differ")
    if config.rounds.bucket:
        rounds_setup.check(setup, folder)
    if team.leads and not (folder / CONFIG).exists():
        mark_run_dir(folder, config)
    team.resume = resume_command.replace("{run_dir}", shlex.quote(str(folder)))

    with team.process_0_first():  # a new run, or where an old one stopped
        manager = checkpoint.open_manager(folder)
        found = checkpoint.restore(manager, partial(check_restored, setup)) if config.resume else None
    state, start, entered = resume_or_start(setup, found, console)
    if config.rounds.bucket:
        start = rounds_setup.steps_so_far(folder, start)
    so_far = {"first step": start, "phases so far": [phase.name for phase in entered]}
    team.require_equal(so_far, f"all processes must see the same folder {folder}")
    if team.leads:
        if start < config.steps:  # the summary of a shorter run, by which this one would count as finished
            (folder / SUMMARY).unlink(missing_ok=True)
        mark_run_dir(folder, config)
    recording.begin(start)
    console.print(heading(setup, folder, start), highlight=False)
    for note in notes(setup):
        console.print(note, highlight=False, soft_wrap=True)

    lines = not config.rounds.bucket  # which has a line a round
    display = Display(console, config.steps, start, config.log_every, setup.source.score, lines)
    costs = {phase.value: cost_of(setup, phase) for phase in entered}
    with Metrics(folder, start) if team.leads else NoMetrics() as metrics, Interrupts() as interrupts, display:
        proof = checkpoint.proof_of(manager, found)
        before = [line for line in read(folder / METRICS) if line["step"] <= start]
        diverges = local.watch(config, setup.parts.local, before)
        last_good = partial(checkpoint.kept, manager, proof)
        recorder = Recorder(metrics, display, costs, config.nodes, proof, last_good, diverges)
        evaluate, validate = make_evaluate(setup.parts, setup.source), make_validate(setup.parts, setup.source)
        run = Run(
            team, setup, folder, console, manager, interrupts, recorder, recording, evaluate, validate,
            entered, costs, compiled={}, proof=proof, replicas=Replicas(setup.parts.nodes),
        )  # fmt: skip
        try:
            with checkpoint.completed(manager, proof):
                state, done = trainer(config)(run, state, start)
        except MissingDataError as error:  # an image turns out to be broken, in a thread that reads ahead of the steps
            recorder.write()
            raise UserError(f"{error}; {last_good()}", FAILED) from error
    if done < config.steps:
        console.print(f"{interrupts.name}: saved after step {done} of {config.steps}. Go on with", highlight=False)
        console.print(f"  {team.resume}", highlight=False, soft_wrap=True)
        return interrupts.exit_code

    # all processes take part; without a step here no line has the score
    scores = evaluate(state) if state.step == start else {}
    shown, sample = show(setup.parts, setup.source, state), sample_of(setup, state)
    if team.leads:
        finish(run, state, scores, shown, sample)
    return 0


def trainer(config: Config) -> Callable[[Run, TrainState, int], tuple[TrainState, int]]:
    """The training loop of a config."""
    if config.rounds.bucket:
        return rounds.train
    return train if config.local.every is None else local.train


def train(run: Run, state: TrainState, start: int) -> tuple[TrainState, int]:
    """Train from step `start` to the end or to a signal."""
    config, setup, team = run.config, run.setup, run.team
    rate_of = make_rate_of(setup.parts)
    with closing(batches(setup, start)) as arriving:
        for step, batch in zip(range(start, config.steps), arriving, strict=True):
            phase = next_phase(setup, state)
            enter(run, phase, state, batch)
            record(run, phase, state, batch)
            figures, rate = diagnose(run, phase, state, batch), rate_of(state)
            state, metrics = setup.step(state, batch)
            outputs = {**outputs_of(metrics), "learning_rate": rate}
            run.recorder.push(step, phase, outputs, **figures)

            done = step + 1
            stop = team.agreed_signal(step, start, run.interrupts.received)
            state = validate(run, done, state)
            evaluate(run, done, next_phase(setup, state), state)
            check_and_save(run, done, state, bool(stop) or done == config.steps)
            if stop:
                run.interrupts.received = stop  # perhaps by a different process
                return state, done
    return state, max(start, config.steps)


def enter(run: Run, phase: Phase, state: TrainState, batch: Batch) -> None:
    """Run a new phase's transition, count its bytes and compile its program, outside of the step's time."""
    if phase in run.entered and phase.value in run.compiled:  # the newest, or one of two in turn
        return
    with run.recorder.untimed(state.params):
        run.recorder.write()
        add_phase(run, phase)
        run.setup.step.upcoming(state)  # a checkpoint holds the old phase's state, so each transition runs once
        seconds = compile_once(run, phase.value, "step", lambda: run.setup.step.lower(state, batch))
        if seconds:
            run.recorder.display.say(describe(run.costs[phase.value], seconds))


def record(run: Run, phase: Phase, state: TrainState, batch: Batch) -> None:
    """Write the gradients of a step that --record names."""
    if run.recording.is_due(state.step):
        with run.recorder.untimed(state.params):
            local = run.setup.step.upcoming(state)[1].local
            run.recording.run(state.step, phase, local, run.setup.step.gradients(state, batch))
            run.team.wait()  # for process 0, which writes


def diagnose(run: Run, phase: Phase, state: TrainState, batch: Batch) -> dict[str, float]:
    """Compare the aggregate of the coming update with the true mean, every --diagnose-every steps."""
    if not is_due(run.config, state.step, run.costs[phase.value]):
        return {}
    with run.recorder.untimed(state.params):
        return host_figures(jax.device_get(run.setup.step.diagnose(state, batch)))


def next_phase(setup: Setup, state: TrainState) -> Phase:
    """The phase of the coming step."""
    return phases.phase_after(setup.parts.compressor, state.phase, state.step, state.compressor, setup.parts.nodes)
