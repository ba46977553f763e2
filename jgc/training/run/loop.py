"""The training loop. Read `run_in` for the set-up, `train` for the steps, then the parts of a step."""

import shlex
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from jgc.loops.buffers import copied
from jgc.method import phases
from jgc.nodes.placement import place, placements_of
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
from jgc.training.run import checkpoint, local
from jgc.training.run.finish import finish
from jgc.training.run.folder import CONFIG, METRICS, SUMMARY, check_run_dir, choose_run_dir, mark_run_dir
from jgc.training.run.lock import sole_writer
from jgc.training.run.periodic import batches, check_and_save, evaluate, validate
from jgc.training.run.record import Run, cost_of
from jgc.training.run.resume import check_own, resume_or_start
from jgc.training.run.setup import Setup, build
from jgc.training.run.signals import Interrupts
from jgc.training.settings.config import Config, check
from jgc.training.steps.compile_cache import kept_programs
from jgc.training.steps.diagnose import Diagnosis
from jgc.training.steps.evaluate import make_evaluate, make_validate, show
from jgc.training.steps.local_step import as_exchanged, exchange_parts
from jgc.training.steps.program import compile_gradients, compile_update
from jgc.training.steps.step import Gradients, TrainState
from jgc.types import Phase

WIDTH = 120  # of the table, where the output is not a terminal


def run(
    config: Config, resume_command: str = "", console: Console | None = None, source: Source | None = None
) -> int:
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
    check(config)
    with join(config) as team:
        console = console or Output(width=None if sys.stdout.isatty() else WIDTH, markup=False)
        return run_in(team, config, resume_command, team.console(console), source)


def run_in(
    team: Team, config: Config, resume_command: str, console: Console, source: Source | None = None
) -> int:
    """`run` in one process of a team; process 0 alone prints, and writes the run folder."""
    folder = Path(team.lead(lambda: str(choose_run_dir(config))))
    programs = kept_programs(config.compile_cache, folder, team.leads)
    if not team.leads:
        with programs:
            return run_in_folder(team, config, folder, resume_command, console, source)
    tell = partial(console.print, highlight=False, soft_wrap=True)
    with sole_writer(folder, tell, team.end), programs:
        check_run_dir(folder, config)  # again, for another process may have begun a run here meanwhile
        return run_in_folder(team, config, folder, resume_command, console, source)


def run_in_folder(
    team: Team, config: Config, folder: Path, resume_command: str, console: Console, source: Source | None
) -> int:
    """`run` in a folder that no other run uses."""
    # --- set-up: data, model, compressor, optimiser
    setup = build(config, source)
    recording = Recording(exchange_parts(setup.parts), as_exchanged(setup.state), folder)
    team.require_equal({"data": setup.source.facts})
    first = {"a first state of checksum": team.checksum(setup.state)}
    team.require_equal(first, "JAX_ variables, XLA_FLAGS or processors differ")
    if team.leads and not (folder / CONFIG).exists():
        mark_run_dir(folder, config)
    team.resume = resume_command.replace("{run_dir}", shlex.quote(str(folder)))

    # --- checkpoint: a new run, or where an old one stopped
    with team.process_0_first():
        manager = checkpoint.open_manager(folder)
        found = checkpoint.restore(manager, partial(check_own, setup)) if config.resume else None
    state, start, entered, fragments = resume_or_start(setup, found, console)
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

    # --- the loop
    display = Display(console, config.steps, start, config.log_every, setup.source.score)
    costs = {phase.value: cost_of(setup, phase) for phase in entered}
    with Metrics(folder, start) if team.leads else NoMetrics() as metrics, Interrupts() as interrupts, display:
        proof = checkpoint.proof_of(manager, found)
        before = [line for line in read(folder / METRICS) if line["step"] <= start]
        diverges = local.watch(config, setup.parts.local, before)
        kept = partial(checkpoint.kept, manager, proof)
        recorder = Recorder(metrics, display, costs, config.nodes, proof, kept, diverges)
        every = -(-config.diagnose_every // (config.local.every or 1))  # of exchanges
        diagnosis = Diagnosis(exchange_parts(setup.parts), costs, every)
        evaluate, validate = make_evaluate(setup.parts, setup.source), make_validate(setup.parts, setup.source)
        run = Run(
            team, setup, folder, console, manager, interrupts, recorder, recording, diagnosis, evaluate, validate,
            entered, costs, updates={}, fragments=fragments, proof=proof, replicas=Replicas(setup.parts.nodes),
        )  # fmt: skip
        try:
            with checkpoint.completed(manager, proof):
                state, done = (local.train if setup.parts.local else train)(run, state, start)
        except MissingDataError as error:  # an image turns out to be broken, in a thread that reads ahead of the steps
            recorder.write()
            raise UserError(f"{error}; {kept()}", FAILED) from error
    if done < config.steps:
        console.print(f"{interrupts.name}: saved after step {done} of {config.steps}. Go on with", highlight=False)
        console.print(f"  {team.resume}", highlight=False, soft_wrap=True)
        return interrupts.exit_code

    # --- summary, pictures, closing table
    shown, sample = show(setup.parts, setup.source, state), sample_of(setup, state)  # all processes take part
    if team.leads:
        finish(run, state, shown, sample)
    return 0


def train(run: Run, state: TrainState, start: int) -> tuple[TrainState, int]:
    """Train from step `start` to the end or to a signal.

    Returns:
      The state, and the number of updates made.
    """
    config, setup, team = run.config, run.setup, run.team
    phase = next_phase(setup, run.entered[-1], start, state)
    with closing(batches(config, setup, start)) as arriving:
        for step, batch in zip(range(start, config.steps), arriving, strict=True):
            if step == start:
                with run.recorder.untimed():
                    compute_gradients = compile_gradients(setup.parts, state, batch, team)
            gradients = compute_gradients(state.trained, state.own, batch)
            state = enter(run, phase, state, gradients)
            record(run, step, phase, state, gradients)
            figures = diagnose(run, step, phase, state, gradients)
            state, outputs = run.updates[phase.value].run(state, gradients, np.int32(step))
            del gradients  # they would stay in memory beside those of the next step
            run.recorder.push(step, phase, outputs, **figures)

            done = step + 1
            stop = team.agreed_signal(step, start, run.interrupts.received)
            phase = next_phase(setup, phase, done, state)
            state = validate(run, done, state)
            evaluate(run, done, phase, state)
            check_and_save(run, done, state, bool(stop))
            if stop:
                run.interrupts.received = stop  # perhaps by another process
                return state, done
    return state, max(start, config.steps)


def enter(run: Run, phase: Phase, state: TrainState, gradients: Gradients) -> TrainState:
    """The state in a phase; where the phase is new, after its transition and with its update compiled."""
    old = run.entered[-1]
    if phase.value == old.value and phase.value in run.updates:
        return state
    with run.recorder.untimed(gradients):
        run.recorder.write()
        if phase != old:
            run.entered.append(phase)
        if phase.value not in run.costs:
            run.costs[phase.value] = cost_of(run.setup, phase)
        state = change_phase(run.setup, old, phase, state)
        if phase.value not in run.updates:
            update = compile_update(run.setup.parts, phase.value, state, gradients, run.team)
            run.updates[phase.value] = update
            run.recorder.display.say(describe(run.costs[phase.value], update))
    return state


def change_phase(setup: Setup, old: Phase, new: Phase, state: TrainState) -> TrainState:
    """The state after the compressor's transition. A checkpoint holds the old phase's, so each runs once."""
    if old.value == new.value:
        return state
    nodes = setup.parts.nodes
    inner = setup.parts.compressor.transition(old.value, new.value, state.compressor, nodes)
    return state._replace(compressor=place(copied(inner), placements_of(inner), nodes))


def record(run: Run, step: int, phase: Phase, state: TrainState, gradients: Gradients) -> None:
    """Write the gradients of a step that --record names."""
    if run.recording.is_due(step):
        with run.recorder.untimed(gradients):
            run.recording.run(step, phase, state, gradients)
            run.team.wait()  # for process 0, which writes


def diagnose(run: Run, step: int, phase: Phase, state: TrainState, gradients: Gradients) -> dict[str, float]:
    """Compare the aggregate of the coming update with the true mean, every --diagnose-every steps."""
    if not run.diagnosis.is_due(step, phase):
        return {}
    with run.recorder.untimed(gradients):
        return run.diagnosis.run(step, phase, state, gradients)


def next_phase(setup: Setup, phase: Phase, step: int, state: TrainState) -> Phase:
    """The phase of `step`, from the phase of the step before and the state after that step."""
    return phases.phase_after(setup.parts.compressor, phase, step, state.compressor, setup.parts.nodes)
