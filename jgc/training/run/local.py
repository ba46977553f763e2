"""The training loop with local steps. It differs from `loop.train` in what happens after each node's step."""

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

import jax

from jgc.loops.local_loop import LocalMetrics, LocalState
from jgc.loops.outer import Parts as LocalParts
from jgc.method import phases
from jgc.training.errors import FAILED, NonFinite, UserError
from jgc.training.output.announce import describe
from jgc.training.run.periodic import batches, check_and_save, evaluate, validate
from jgc.training.run.record import Run, add_phase, compile_once
from jgc.training.settings.config import Config
from jgc.training.steps.diagnose import host_figures, is_due
from jgc.training.steps.local_costs import cost_of_exchange
from jgc.training.steps.step import make_rate_of, outputs_of
from jgc.types import Array, Phase

NOTHING = {"bytes": 0.0, "bytes_up_leader": 0.0, "bytes_up_worker": 0.0}  # of a step without an exchange


def train(run: Run, state: LocalState, start: int) -> tuple[LocalState, int]:
    """Train from step `start` to the end or to a signal; return the state and the number of updates.

    Processes agree on signals only at exchanges, so a timeout covers a round.
    """
    try:
        return _train(run, state, start)
    except NonFinite as error:
        if run.team.count == 1:
            raise
        raise UserError(str(error), FAILED) from error  # one process found it out: it ends the others


def _train(run: Run, state: LocalState, start: int) -> tuple[LocalState, int]:
    config, setup, team, local = run.config, run.setup, run.team, parts_of(run)
    first, rate_of = exchanges_by(local, start), make_rate_of(setup.parts)
    with closing(batches(setup, start)) as arriving:
        for step, batch in zip(range(start, config.steps), arriving, strict=True):
            if "inner" not in run.compiled:
                with run.recorder.untimed():
                    lower = partial(setup.step.lower, state, batch)
                    compile_once(run, "inner", "inner step", lower)
            rate = rate_of(state)
            state, metrics = setup.step.inner(state, batch)
            done, stop = step + 1, 0
            due = local.due(done)
            if due.exchange is None:
                outputs = {**outputs_of(metrics), "learning_rate": rate}
                run.recorder.push(step, run.entered[-1], outputs, **NOTHING)
                state, _ = setup.step.exchange(state, metrics)  # an outer step may be due
            else:
                state = exchange(run, due.exchange, state, metrics, rate)
            if due.exchange is not None or team.meeting is None:
                count = exchanges_by(local, done) - 1
                stop = team.agreed_signal(count, first, run.interrupts.received, "exchange")
            state = validate(run, done, state)
            evaluate(run, done, run.entered[-1] if due.exchange is None else coming(run, state), state)
            check_and_save(run, done, state, bool(stop) or done == config.steps)
            if stop:
                run.interrupts.received = stop  # perhaps by a different process
                return state, done
    return state, max(start, config.steps)


def parts_of(run: Run) -> LocalParts:
    """The settings of a run's local steps."""
    local = run.setup.parts.local
    assert local is not None
    return local


def coming(run: Run, state: LocalState) -> Phase:
    """The phase of the next exchange."""
    due = ((step, parts_of(run).due(step).exchange) for step in count(state.step + 1))
    return next(phase_of(run, fragment, step, state) for step, fragment in due if fragment is not None)


def phase_of(run: Run, fragment: int, done: int, state: LocalState) -> Phase:
    """The phase of a fragment's exchange after `done` steps."""
    local, before = parts_of(run), state.phases[fragment]
    number, nodes = local.round_of(fragment, done), run.setup.parts.nodes
    return phases.phase_after(local.method(), before, number, state.compressor[fragment], nodes)


def exchanges_by(local: LocalParts, done: int) -> int:
    """Number of exchanges, of all fragments, in `done` steps."""
    return sum(max(0, local.round_of(i, done) + 1) for i in range(local.fragments))


def exchange(run: Run, fragment: int, state: LocalState, metrics: LocalMetrics, rate: Array) -> LocalState:
    """Exchange a fragment, in the phase that its round belongs to, and record the step with its bytes."""
    step, number = run.setup.step, parts_of(run).round_of(fragment, state.step)
    phase = enter(run, fragment, state)
    figures = look(run, number, phase, state)
    cost = run.compiled["cost", fragment, phase.value]
    state, metrics = step.exchange(state, metrics)
    outputs = {**outputs_of(metrics), "learning_rate": rate}
    up = cost.up + (cost.once if number == phase.start else 0.0)
    sent = {"bytes": up, "bytes_up_leader": cost.leader, "bytes_up_worker": cost.worker}
    run.recorder.push(state.step - 1, phase, outputs, **sent, **figures)
    return state


def enter(run: Run, fragment: int, state: LocalState) -> Phase:
    """The phase of a fragment's exchange; where it is new, after its transition and with its exchange compiled."""
    setup, before = run.setup, state.phases[fragment]
    phase = phase_of(run, fragment, state.step, state)
    name = fragment, phase.value
    if phase.value == before.value and name in run.compiled:
        return phase
    with run.recorder.untimed(state.params):
        run.recorder.write()
        add_phase(run, phase)
        setup.step.upcoming(state)  # the transition
        seconds = compile_once(run, name, "exchange", lambda: setup.step.lower_exchange(state))
        if ("cost", *name) not in run.compiled:
            run.compiled["cost", *name] = cost_of_exchange(setup.parts, fragment, phase, state)
        if fragment == 0 and seconds:
            run.recorder.display.say(describe(run.costs[phase.value], seconds, run.config.local.every))
    return phase


def look(run: Run, number: int, phase: Phase, state: LocalState) -> dict[str, float]:
    """Record the pseudo-gradients of the coming exchange, and compare their aggregate with the true mean, where asked.

    --record.every counts exchanges, --diagnose-every steps. Neither looks at fragments.
    """
    if parts_of(run).fragments > 1:
        return {}
    records = run.recording.is_due(number)
    diagnoses = is_due(run.config, number, run.costs[phase.value])
    if not (records or diagnoses):
        return {}
    step = run.setup.step
    with run.recorder.untimed(state.params):
        if records:
            local = step.upcoming(state)[1].local
            run.recording.run(state.step - 1, phase, local, step.pseudo_gradients(state))
            run.team.wait()  # for process 0, which writes
        return host_figures(jax.device_get(step.diagnose(state))) if diagnoses else {}


class Divergence:
    """Says which setting makes a run with local steps diverge: the outer or the inner learning rate.

    A run diverges if its loss is not finite, or above twice its first value for a whole round and for ten steps. A
    node of rounds may join a trained model, whose first loss may be low by chance: it compares with the largest loss
    of its first round and ten steps.

    The changes of the loss's logarithm are added up, separately across outer and inner steps; the larger sum names
    the culprit. Without the logarithm the last change of a loss that grows tenfold in every step would decide.
    """

    LEAST, MOST = 1e-6, 3e38  # of a loss; NaN counts as the most
    PATIENCE = 10  # steps

    def __init__(self, config: Config, local: LocalParts, first: float | None):
        self._config, self._local = config, local
        self._first = self._before = None if first is None else max(first, self.LEAST)
        self._rises = {"outer": 0.0, "inner": 0.0}
        self._above, self._seen = 0, 0
        self._long = max(local.every, self.PATIENCE)

    def __call__(self, step: int, loss: float, finite: bool) -> str:
        """Why the run diverges, or "". `step` counts from 1."""
        bad = not (finite and math.isfinite(loss))
        loss = self.MOST if bad else max(loss, self.LEAST)
        if self._first is None or self._before is None:
            self._first, self._before = loss, loss
        if self._config.rounds.bucket and self._seen < self._long and not bad:
            self._first = max(self._first, loss)
        self._seen += 1
        by = "inner" if self._local.due(step - 1).apply is None else "outer"  # what changed the parameters last
        self._rises[by] += math.log(loss / self._before)
        self._before = loss
        self._above = self._above + 1 if loss > 2 * self._first else 0
        if not bad and self._above < self._long:
            return ""
        if self._rises["outer"] <= self._rises["inner"]:
            return f"the local steps make it rise, lower --learning-rate ({self._config.learning_rate:g})"
        rate, momentum = self._config.local.outer_learning_rate, self._config.local.outer_momentum
        less = f" or --local.outer-momentum ({momentum:g})" if momentum else ""
        return f"the outer steps make it rise, lower --local.outer-learning-rate ({rate:g}){less}"


def watch(run_config: Config, local: LocalParts | None, lines: Any) -> Callable[[int, float, bool], str]:
    """The function that a recorder calls after every step. `lines`: of the run so far."""
    if local is None:
        return lambda step, loss, finite: ""
    divergence = Divergence(run_config, local, next((line["loss"] for line in lines), None))
    for line in lines:
        divergence(line["step"], math.nan if line["loss"] is None else line["loss"], True)
    return divergence
