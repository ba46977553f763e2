"""The training loop, to be read from top to bottom."""

import shlex
import sys
from collections.abc import Generator, Hashable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console

from jgc.method import phases
from jgc.nodes import SHARED, place, place_parts
from jgc.training import checkpoint, curves, learning_rate, masks, summary, table
from jgc.training.config import Config, as_json, check
from jgc.training.costs import Costs, PhaseCost, phase_cost
from jgc.training.data import MissingDataError, prefetch
from jgc.training.diagnose import Diagnosis
from jgc.training.distributed import Team, join
from jgc.training.errors import FAILED, UserError
from jgc.training.evaluate import LOSS, Shown, make_evaluate, make_validate, show
from jgc.training.metrics import Metrics, NoMetrics, read
from jgc.training.other import other_bytes
from jgc.training.program import Program, compile_gradients, compile_update
from jgc.training.progress import Display
from jgc.training.recorder import Recorder
from jgc.training.recording import Recording
from jgc.training.rundir import (
    CONFIG,
    CURVES,
    MASKS,
    METRICS,
    SUMMARY,
    choose_run_dir,
    compare_configs,
    mark_run_dir,
    write_json,
)
from jgc.training.setup import Setup, build, steps_of_epoch
from jgc.training.signals import Interrupts
from jgc.training.step import Batch, TrainState, place_state
from jgc.types import Phase

WIDTH = 120  # of the table, where the output is not a terminal


def run(config: Config, resume_command: str = "", console: Console | None = None) -> int:
    """Train as a resolved config says and leave a run folder behind.

    Args:
      config: from `jgc.training.config.resolve`.
      resume_command: what to tell a user whose run was stopped; `{run_dir}` stands for the folder.
      console: where to print; standard output by default.

    Returns:
      The exit code: 0, or 128 and the signal's number where a signal stopped the run.

    Raises:
      UserError: one line on why the run cannot start or go on.
    """
    check(config)
    with join(config) as team:
        console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
        return run_in(team, config, resume_command, team.console(console))


def run_in(team: Team, config: Config, resume_command: str, console: Console) -> int:
    """What `run` does, as one process of a team; process 0 alone prints, and writes the run folder."""
    # --- set-up: data, model, compressor, optimiser, compiled steps
    run_dir = Path(team.lead(lambda: str(choose_run_dir(config))))
    setup = build(config)
    recording = Recording(setup.parts, setup.state, run_dir)
    team.same({"data": setup.source.facts})
    begin = {"a first state of checksum": team.checksum(setup.state)}
    team.same(begin, "JAX_ variables, XLA_FLAGS or processors differ")
    if team.leads and not (run_dir / CONFIG).exists():
        mark_run_dir(run_dir, config)
    team.resume = resume_command.replace("{run_dir}", shlex.quote(str(run_dir)))

    # --- checkpoint: a new run, or where an old one stopped
    with team.process_0_first():
        manager = checkpoint.open_manager(run_dir)
        found = checkpoint.restore(manager) if config.resume else None
    state, start, entered = resume_or_start(config, setup, found, console)
    so_far = {"first step": start, "phases so far": [phase.name for phase in entered]}
    team.same(so_far, f"all processes must see the same folder {run_dir}")
    if team.leads:
        mark_run_dir(run_dir, config)
    recording.begin(start)
    console.print(heading(config, setup, run_dir, start), highlight=False)

    # --- the loop
    display = Display(console, config.steps, start, config.log_every, setup.source.score)
    with Metrics(run_dir, start) if team.leads else NoMetrics() as metrics, Interrupts() as interrupts, display:
        costs = {phase.value: cost_of(setup, phase) for phase in entered}
        recorder = Recorder(metrics, display, costs, config.nodes, config.log_every, lambda: checkpoint.kept(manager))
        try:
            state, done = train(
                team, config, setup, state, start, entered, manager, recorder, recording, costs, interrupts
            )
        except MissingDataError as error:  # an image turns out to be broken, in a thread that reads ahead of the steps
            recorder.write()
            raise UserError(f"{error}; {checkpoint.kept(manager)}", FAILED) from error
    manager.close()
    if done < config.steps:
        console.print(f"{interrupts.name}: saved after step {done} of {config.steps}. Go on with", highlight=False)
        console.print(f"  {team.resume}", highlight=False, soft_wrap=True)
        return interrupts.exit_code

    # --- what is left behind
    shown = show(setup.parts, setup.source, state)
    if not team.leads:
        return 0
    newest = {phase.name: costs[phase.value]._replace(phase=phase) for phase in entered}  # of each kind
    finish(config, setup, state, run_dir, tuple(newest.values()), shown, console)
    return 0


def train(
    team: Team,
    config: Config,
    setup: Setup,
    state: TrainState,
    start: int,
    entered: list[Phase],
    manager: ocp.CheckpointManager,
    recorder: Recorder,
    recording: Recording,
    costs: Costs,
    interrupts: Interrupts,
) -> tuple[TrainState, int]:
    """Steps from `start` to `config.steps`, or until a signal. Returns the state and how many steps it has had.

    `entered` are the phases so far, the last of which the state belongs to; they and `costs` are added to.
    """
    host = {"config": as_json(config), "versions": summary.versions()}
    evaluate = make_evaluate(setup.parts, setup.source)
    validate, epoch = make_validate(setup.parts, setup.source), steps_between_validations(config, setup)
    diagnosis = Diagnosis(setup.parts, costs, config.diagnose_every)
    updates: dict[Hashable, Program] = {}
    phase, upcoming = entered[-1], next_phase(setup, entered[-1], start, state)
    with closing(batches(config, setup, start)) as arriving:
        for step, batch in zip(range(start, config.steps), arriving, strict=True):
            # the nodes' gradients
            if step == start:
                compute_gradients = compile_gradients(setup.parts, state, batch, team)
            gradients = compute_gradients(state.params, state.own, batch)
            # a new phase: what it changes in the state, and an update compiled for it
            old, phase = phase, upcoming
            if phase.value != old.value or phase.value not in updates:
                with recorder.aside(gradients):
                    recorder.write()
                    if phase != old:
                        entered.append(phase)
                    if phase.value not in costs:
                        costs[phase.value] = cost_of(setup, phase)
                    state = change_phase(setup, old, phase, state)
                    if phase.value not in updates:
                        updates[phase.value] = compile_update(setup.parts, phase.value, state, gradients, team)
                        recorder.display.say(describe(costs[phase.value], updates[phase.value]))
            # record and diagnose, then update
            figures: dict[str, float] = {}
            if recording.is_due(step):
                with recorder.aside(gradients):
                    recording.run(step, phase, state, gradients)
                    team.wait()  # for process 0, which writes
            if diagnosis.is_due(step, phase):
                with recorder.aside(gradients):
                    figures = diagnosis.run(step, phase, state, gradients)
            state, outputs = updates[phase.value].run(state, gradients, np.int32(step))
            del gradients  # or they would be there beside those of the next step
            recorder.push(step, phase, outputs, **figures)
            # validation, evaluation and checkpoint
            done, stop = step + 1, team.agreed_signal(step, start, interrupts.received)
            last = done == config.steps
            upcoming = next_phase(setup, phase, done, state)
            new_kind = all(upcoming.name != before.name for before in entered)
            if validate and is_every(epoch, done):
                with recorder.aside():
                    loss = validate(state)
                    recorder.add(**{LOSS: loss})
                    corrected = learning_rate.corrected(state.opt_state, loss)  # as it is without --schedule validation
                    state = state._replace(opt_state=place(corrected, SHARED, setup.parts.nodes))
            if last or is_every(config.evaluate_every, done) or new_kind:
                with recorder.aside():
                    recorder.add(**evaluate(state))
            if last or stop or is_every(config.checkpoint_every, done):
                with recorder.aside():
                    recorder.write()
                    checkpoint.save(manager, done, state, {**host, "phases": [phases.as_json(p) for p in entered]})
                    team.wait()
            if stop:
                interrupts.received = stop  # perhaps by another process
                return state, done
    return state, max(start, config.steps)


def is_every(interval: int, done: int) -> bool:
    """Whether something that happens every `interval` steps, 0 for never, happens after step `done`."""
    return interval > 0 and done % interval == 0


def steps_between_validations(config: Config, setup: Setup) -> int:
    """As the config says, or an epoch."""
    return config.correction.every or steps_of_epoch(config, setup.source)


def batches(config: Config, setup: Setup, start: int) -> Generator[Batch]:
    """The batch of every step from `start` on: a pure function of seed and step, made ahead in a thread."""

    def batch_of(step: int) -> Batch:
        make = partial(setup.source.batch, config.seed, step, config.nodes, config.batch_size)
        return place_parts(make, setup.parts.nodes)

    yield from prefetch(batch_of, start, config.steps)


def next_phase(setup: Setup, phase: Phase, step: int, state: TrainState) -> Phase:
    """The phase of `step`, from that of the step before it and the state after that."""
    return phases.phase_after(setup.parts.compressor, phase, step, state.compressor, setup.parts.nodes)


def cost_of(setup: Setup, phase: Phase) -> PhaseCost:
    """What a phase costs, as planned or anew where its sizes are others."""
    planned = [cost._replace(phase=phase) for cost in setup.costs if cost.phase.value == phase.value]
    return planned[0] if planned else phase_cost(setup.parts.compressor, phase, setup.state.params, setup.parts.nodes)


def change_phase(setup: Setup, old: Phase, new: Phase, state: TrainState) -> TrainState:
    """The state for the new phase. A checkpoint holds the old phase's, so this runs once, however often one resumes."""
    if old.value == new.value:
        return state
    nodes = setup.parts.nodes
    compressor = setup.parts.compressor.transition(old.value, new.value, state.compressor, nodes)
    return place_state(state._replace(compressor=compressor), nodes)


def resume_or_start(
    config: Config, setup: Setup, found: checkpoint.Restored | None, console: Console
) -> tuple[TrainState, int, list[Phase]]:
    """The state to begin with, the number of steps that it has had, and the phases entered so far, the newest last.

    Raises:
      UserError: the checkpoint is of another config, has had more steps than the run is to have, or does not fit.
    """
    if found is None:
        if config.resume:
            console.print("no checkpoint yet: starting from the beginning")
        return setup.state, 0, [setup.parts.compressor.schedule[0]]
    for problem in found.damaged:
        console.print(f"{problem}; using that of step {found.step}", highlight=False, soft_wrap=True)
    compare_configs(found.host["config"], config, f"checkpoint {found.step}")
    if found.step > config.steps:
        raise UserError(f"the run has had {found.step} steps already, more than --steps {config.steps}")
    state = checkpoint.fit(setup.state, found, config.nodes)
    return place_state(state, setup.parts.nodes), found.step, entered_before(setup, found)


def entered_before(setup: Setup, found: checkpoint.Restored) -> list[Phase]:
    """The phases that a checkpoint's run has entered, the newest last; of a version that did not say, by schedule."""
    if "phases" in found.host:
        return [phases.from_json(phase) for phase in found.host["phases"]]
    return [phase for phase in setup.parts.compressor.schedule if phase.start < max(found.step, 1)]


def heading(config: Config, setup: Setup, run_dir: Path, start: int) -> str:
    """What is about to run, in two lines."""
    nodes = setup.parts.nodes
    where = "emulated on one device" if nodes.mesh is None else f"{nodes.layout}, {nodes.mesh.size} devices"
    if jax.process_count() > 1:
        where += f" of {jax.process_count()} processes"
    begin = f", from step {start}" if start else ""
    epochs = config.steps / setup.source.epoch_steps(config.batch_size)
    return (
        f"{summary.method_name(config.compressor)} on {config.workload}: {setup.values:,} parameters, {config.nodes} "
        f"nodes ({where}), batch {config.batch_size}, {config.steps} steps ({epochs:.3g} epochs){begin}\n"
        f"run folder {run_dir}"
    )


def describe(cost: PhaseCost, program: Program) -> str:
    """A phase as it begins."""
    leader = f"{table.size(cost.leader)} from the leader, " if cost.leader != cost.worker else ""
    return (
        f"phase {cost.phase.name} from step {cost.phase.start + 1}: {leader}{table.size(cost.worker)} from each "
        f"{'other ' if leader else ''}node in a step (uncompressed {table.size(cost.dense)}); "
        f"compiled in {program.seconds:.0f} s"
    )


def finish(
    config: Config,
    setup: Setup,
    state: TrainState,
    run_dir: Path,
    costs: Sequence[PhaseCost],
    shown: Shown | None,
    console: Console,
) -> None:
    """summary.json, curves.png and the closing table, from metrics.jsonl, and masks.png where labels can be seen."""
    lines, nodes = read(run_dir / METRICS), setup.parts.nodes
    score, further = setup.source.score, setup.source.further
    other = other_bytes(setup.parts, state, costs, lines, score, shown is not None)
    result: dict[str, Any] = summary.summarise(config, lines, costs, nodes, setup.values, score, other, further)
    write_json(run_dir / SUMMARY, result)
    title = f"{result['method']} on {config.workload}, {config.nodes} nodes, seed {config.seed}"
    curves.draw(run_dir, title, lines, costs, score, *further)
    files = [SUMMARY, CURVES, METRICS]
    if shown is not None:
        masks.draw(run_dir, f"{title}, after {result['steps']} steps", shown.pictures, shown.labels)
        files.insert(2, MASKS)
    table.show(result, console)
    console.print(f"{', '.join(files[:-1])} and {files[-1]} are in {run_dir}", highlight=False, soft_wrap=True)
