"""The training loop with local steps. It differs from `loop.train` in what happens after each node's own step."""

import math
from collections.abc import Callable
from contextlib import closing
from itertools import count
from typing import Any

import numpy as np

from jgc.loops.buffers import copied
from jgc.loops.outer import Parts as LocalParts
from jgc.method import phases
from jgc.nodes.placement import place, placements_of
from jgc.training.errors import FAILED, NonFinite, UserError
from jgc.training.output.announce import describe
from jgc.training.run.periodic import batches, check_and_save, evaluate, validate
from jgc.training.run.record import Run, cost_of
from jgc.training.settings.config import Config
from jgc.training.steps.local_costs import cost_of_exchange
from jgc.training.steps.local_step import (
    Programs,
    as_exchanged,
    compile_exchange,
    compile_programs,
    make_pseudo_gradients,
)
from jgc.training.steps.program import compile_gradients
from jgc.training.steps.step import TrainState
from jgc.types import Array, Phase

NOTHING = {"bytes": 0.0, "bytes_up_leader": 0.0, "bytes_up_worker": 0.0}  # of a step without an exchange


def train(run: Run, state: TrainState, start: int) -> tuple[TrainState, int]:
    """Train from step `start` to the end or to a signal.

    Processes agree on signals at exchanges alone, so a timeout is that of a round.

    Returns:
      The state, and the number of updates made.

    Raises:
      UserError: the run diverges.
    """
    try:
        return _train(run, state, start)
    except NonFinite as error:
        if run.team.count == 1:
            raise
        raise UserError(str(error), FAILED) from error  # one process found it out: it ends the others


def _train(run: Run, state: TrainState, start: int) -> tuple[TrainState, int]:
    config, setup, team, local = run.config, run.setup, run.team, parts_of(run)
    first = exchanges_by(local, start)
    programs: Programs | None = None
    with closing(batches(config, setup, start)) as arriving:
        for step, batch in zip(range(start, config.steps), arriving, strict=True):
            if programs is None:
                with run.recorder.untimed():
                    compute_gradients = compile_gradients(setup.parts, state, batch, team)
            gradients = compute_gradients(state.trained, state.own, batch)
            if programs is None:
                with run.recorder.untimed(gradients):
                    programs = compile_programs(setup.parts, state, gradients, team)
            state, outputs = programs.inner.run(state, gradients, np.int32(step))
            del gradients  # they would stay in memory beside those of the next step

            done, stop = step + 1, 0
            due = local.due(done)
            if due.exchange is None:
                run.recorder.push(step, run.entered[-1], outputs, **NOTHING)
            else:
                state = exchange(run, programs, due.exchange, step, state, outputs)
            if local.overlap and due.apply is not None:
                state, _ = programs.applies[due.apply].run(state)
            if due.exchange is not None or team.meeting is None:
                stop = team.agreed_signal(exchanges_by(local, done) - 1, first, run.interrupts.received, "exchange")
            state = validate(run, done, state)
            evaluate(run, done, run.entered[-1] if due.exchange is None else coming(run, done, state), state)
            check_and_save(run, done, state, bool(stop))
            if stop:
                run.interrupts.received = stop  # perhaps by another process
                return state, done
    return state, max(start, config.steps)


def parts_of(run: Run) -> LocalParts:
    """The settings of a run's local steps."""
    local = run.setup.parts.local
    assert local is not None
    return local


def coming(run: Run, done: int, state: TrainState) -> Phase:
    """The phase of the next exchange after step `done`."""
    local = parts_of(run)
    due = ((step, local.due(step).exchange) for step in count(done + 1))
    step, fragment = next((step, fragment) for step, fragment in due if fragment is not None)
    before, number = run.fragments[fragment], local.round_of(fragment, step)
    return phases.phase_after(local.method(), before, number, state.compressor[fragment], run.setup.parts.nodes)


def exchanges_by(local: LocalParts, done: int) -> int:
    """Number of exchanges, of all fragments, in `done` steps."""
    return sum(max(0, local.round_of(i, done) + 1) for i in range(local.fragments))


def exchange(
    run: Run, programs: Programs, fragment: int, step: int, state: TrainState, outputs: dict[str, Array]
) -> TrainState:
    """Exchange a fragment, in the phase that its round belongs to, and record the step with its bytes."""
    local, setup = parts_of(run), run.setup
    number, before = local.round_of(fragment, step + 1), run.fragments[fragment]
    phase = phases.phase_after(local.method(), before, number, state.compressor[fragment], setup.parts.nodes)
    state = enter(run, programs, fragment, phase, state)
    figures = look(run, step, number, phase, state)
    program, cost = programs.exchanges[fragment, phase.value]
    state, info = program.run(state, np.int32(step))
    both = {**outputs, **info, "finite": outputs["finite"] & info["finite"]}
    sent = cost.up + (cost.once if number == phase.start else 0.0)
    own = {"bytes": sent, "bytes_up_leader": cost.leader, "bytes_up_worker": cost.worker}
    run.recorder.push(step, phase, both, **own, **figures)
    return state


def enter(run: Run, programs: Programs, fragment: int, phase: Phase, state: TrainState) -> TrainState:
    """The state in a fragment's phase; where the phase is new, after its transition and with its exchange compiled."""
    old, parts = run.fragments[fragment], run.setup.parts
    name = fragment, phase.value
    if phase.value == old.value and name in programs.exchanges:
        return state
    with run.recorder.untimed(state):
        run.recorder.write()
        if phase != run.entered[-1] and phase not in run.entered:
            run.entered.append(phase)
        if phase.value not in run.costs:
            run.costs[phase.value] = cost_of(run.setup, phase)
        run.fragments[fragment] = phase
        state = change_phase(run, fragment, old, phase, state)
        if name not in programs.exchanges:
            program = compile_exchange(parts, fragment, phase.value, state, run.team)
            programs.exchanges[name] = program, cost_of_exchange(parts, fragment, phase, state)
            if fragment == 0:
                run.recorder.display.say(describe(run.costs[phase.value], program, run.config.local.every))
    return state


def change_phase(run: Run, fragment: int, old: Phase, new: Phase, state: TrainState) -> TrainState:
    """The state after the compressor's transition for one fragment."""
    if old.value == new.value:
        return state
    nodes, states = run.setup.parts.nodes, list(state.compressor)
    inner = parts_of(run).method().transition(old.value, new.value, states[fragment], nodes)
    states[fragment] = place(copied(inner), placements_of(inner), nodes)
    return state._replace(compressor=tuple(states))


def look(run: Run, step: int, number: int, phase: Phase, state: TrainState) -> dict[str, float]:
    """Record the pseudo-gradients of the coming exchange, and compare their aggregate with the true mean, where asked.

    --record.every counts exchanges, --diagnose-every steps. Neither looks at fragments.
    """
    if parts_of(run).fragments > 1:
        return {}
    records, diagnoses = run.recording.is_due(number), run.diagnosis.is_due(number, phase)
    if not (records or diagnoses):
        return {}
    with run.recorder.untimed(state):
        gradients, seen = make_pseudo_gradients(run.setup.parts, state)(state), as_exchanged(state)
        if records:
            run.recording.run(step, phase, seen, gradients)
            run.team.wait()  # for process 0, which writes
        return run.diagnosis.run(step, phase, seen, gradients) if diagnoses else {}


class Divergence:
    """Says which setting makes a run with local steps diverge: that of the outer steps, or that of the inner ones.

    A run diverges if its loss is not finite, or above twice its first value for a whole round and for ten steps. All
    changes of the logarithm of the loss are added up, those across an outer step apart from the others; the larger sum
    names the culprit. Without the logarithm it would be the last change of a loss that grows tenfold in every step.
    """

    LEAST, MOST = 1e-6, 3e38  # of a loss; NaN counts as the most
    PATIENCE = 10  # steps

    def __init__(self, config: Config, local: LocalParts, first: float | None):
        self._config, self._local = config, local
        self._first = self._before = None if first is None else max(first, self.LEAST)
        self._rises = {"outer": 0.0, "inner": 0.0}
        self._above = 0

    def __call__(self, step: int, loss: float, finite: bool) -> str:
        """Why the run diverges, or "". `step` counts from 1."""
        bad = not (finite and math.isfinite(loss))
        loss = self.MOST if bad else max(loss, self.LEAST)
        if self._first is None or self._before is None:
            self._first, self._before = loss, loss
        by = "inner" if self._local.due(step - 1).apply is None else "outer"  # what changed the parameters last
        self._rises[by] += math.log(loss / self._before)
        self._before = loss
        self._above = self._above + 1 if loss > 2 * self._first else 0
        if not bad and self._above < max(self._local.every, self.PATIENCE):
            return ""
        return self._outer() if self._rises["outer"] > self._rises["inner"] else self._inner()

    def _outer(self) -> str:
        local = self._config.local
        less = f"lower --local.outer-learning-rate ({local.outer_learning_rate:g})"
        if local.outer_momentum:
            less += f" or --local.outer-momentum ({local.outer_momentum:g})"
        return f"the outer steps make it rise, {less}"

    def _inner(self) -> str:
        return f"the local steps make it rise, lower --learning-rate ({self._config.learning_rate:g})"


def watch(run_config: Config, local: LocalParts | None, lines: Any) -> Callable[[int, float, bool], str]:
    """What a recorder asks after every step. `lines` are those of the run so far."""
    if local is None:
        return lambda step, loss, finite: ""
    found = Divergence(run_config, local, next((line["loss"] for line in lines), None))
    for line in lines:
        found(line["step"], math.nan if line["loss"] is None else line["loss"], True)
    return found
