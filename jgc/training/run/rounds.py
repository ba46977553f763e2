"""The training loop of one node of rounds through a bucket (`jgc.rounds`).

The inner steps are those of `jgc.local_steps` with one node; the exchange goes through the bucket. The number of nodes
is unknown, and a node may miss rounds, so two counts differ: `done` counts this node's local steps, which number the
lines of metrics.jsonl; the learning rate's schedule and --steps count H steps for every round of all nodes.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jgc.rounds
from jgc.loops.local_loop import LocalState
from jgc.method.phases import phase_at
from jgc.training.output.metrics import truncate
from jgc.training.output.table import size
from jgc.training.run.folder import ROUNDS
from jgc.training.run.local import NOTHING
from jgc.training.run.periodic import check_and_save, passed, save, steps_between_validations
from jgc.training.run.record import Run, compile_once, cost_of
from jgc.training.run.rounds_file import append, exchange_line, join_line, round_text
from jgc.training.run.rounds_setup import FOREVER, arguments_of, batches_of_node, one_line
from jgc.training.run.signals import Interrupts
from jgc.training.steps.evaluate import LOSS
from jgc.training.steps.step import Batch, make_rate_of, outputs_of
from jgc.types import Array, Phase, PyTree


class Stopped(Exception):
    """A signal came while the node waited."""


class Seconds(NamedTuple):
    """Seconds of a round: in local steps, in the exchange, and in total without evaluations."""

    local: float
    exchange: float
    wall: float


class Stretch(NamedTuple):
    """The local steps of a round."""

    state: LocalState  # after them
    steps: int  # how many
    tokens: int  # labels in them
    seconds: float  # from the first to the end of the last
    whole: bool  # False if a signal cut them short


def train(run: Run, state: LocalState, start: int) -> tuple[LocalState, int]:
    """Take part from the newest shared parameters on, until all rounds are closed or a signal comes.

    Returns the state and the number of steps: at least --steps if all rounds are closed, and fewer otherwise.
    """
    setup, steps = run.setup, run.config.steps
    with closing(batches_of_node(setup, start)) as arriving, events(run), one_line():
        batch = next(arriving)
        lower = partial(setup.step.lower, state, batch)
        compile_once(run, "inner", "inner step", lower)  # before joining: from then on others wait
        try:
            truncate(run.folder / ROUNDS, FOREVER)  # a line that a kill left half-written
            rounds = join(run, state.params, start)
        except Stopped:
            return state, min(start, steps - 1)
        try:
            return _train(run, rounds, state._replace(step=start), chain([batch], arriving))
        except jgc.rounds.Twin:
            raise
        except Exception:
            with suppress(Exception):
                rounds.leave()  # so that the others need not wait
            raise


def _train(run: Run, rounds: jgc.rounds.Rounds, state: LocalState, arriving: Iterator[Batch]) -> tuple[LocalState, int]:
    every = run.config.local.every or 1
    total, params, unsent, start = run.config.steps // every, rounds.params, False, state.step
    rate_of = make_rate_of(run.setup.parts)
    while rounds.coming < total and not run.interrupts.received:
        run.recorder.write()
        began, number, counts = time.perf_counter(), rounds.coming, rounds.bucket.counts
        enter(run, number)
        state = placed(state, rounds.params, params, number * every)
        stretch = local_steps(run, state, number, arriving, rate_of)
        state, unsent = stretch.state, True
        if not stretch.whole:
            break
        try:
            with run.recorder.untimed(state.own):
                exchanging = time.perf_counter()
                params, outcome = rounds.exchange(node_params(state), stretch.tokens)
                exchanging = time.perf_counter() - exchanging
        except Stopped:
            break
        state, unsent = placed(state, rounds.params, params, rounds.coming * every), False
        sent = rounds.bucket.counts.since(counts)
        payload = float(rounds.payload_bytes(number))
        run.recorder.add(bytes=float(sent.up), bytes_up_leader=payload, bytes_up_worker=payload, round=number)
        looking = look(run, number, rounds.coming, total, state)
        if rounds.coming < total:  # else at the end
            check_and_save(run, state.step, state, steps=stretch.steps)
        seconds = Seconds(stretch.seconds, exchanging, time.perf_counter() - began - looking)
        record(run, exchange_line(rounds, state.step, stretch.steps, stretch.tokens, outcome, seconds, sent))
    return end(run, rounds, state, total, unsent, start)


def end(
    run: Run, rounds: jgc.rounds.Rounds, state: LocalState, total: int, unsent: bool, start: int
) -> tuple[LocalState, int]:
    """Leave the run of `total` rounds, evaluate the shared parameters if it is over, save the node's inner state."""
    every, counts, began = run.config.local.every or 1, rounds.bucket.counts, time.perf_counter()
    before = rounds.last
    try:
        rounds.leave(node_params(state) if unsent else None)
    except Stopped:  # the exchange that is under way stays open
        with suppress(Stopped):
            rounds.leave()
    if rounds.last is not before:  # with overlap
        seconds, sent = Seconds(0.0, 0.0, time.perf_counter() - began), rounds.bucket.counts.since(counts)
        record(run, exchange_line(rounds, state.step, 0, 0, rounds.last, seconds, sent))
    state = placed(state, rounds.params, rounds.params, rounds.number * every)
    over = rounds.number >= total
    if over and state.step > start:
        with run.recorder.untimed():
            run.recorder.add(**run.evaluate(state))
    save(run, state.step, state)
    return state, max(state.step, run.config.steps) if over else min(state.step, run.config.steps - 1)


def local_steps(
    run: Run, state: LocalState, number: int, arriving: Iterator[Batch], rate_of: Callable[[LocalState], Array]
) -> Stretch:
    """The local steps of round `number`: H of them, or as many as fit into --rounds.seconds."""
    config, step, began, tokens = run.config, run.setup.step, time.perf_counter(), 0
    every, limit, phase = config.local.every or 1, config.rounds.seconds, run.entered[-1]
    for i in count(1):
        batch = next(arriving)
        rate = rate_of(state._replace(step=number * every + i - 1))  # as `placed` sets the schedule
        state, metrics = step.inner(state, batch)
        outputs = {**outputs_of(metrics), "learning_rate": rate}
        run.recorder.push(state.step - 1, phase, outputs, **NOTHING)  # waits for the step before
        tokens += batch[1].size
        elapsed = time.perf_counter() - began
        whole = elapsed * (i + 1) / i > limit if limit else i >= every
        if whole or run.interrupts.received:
            break
    jax.block_until_ready(state.own)
    return Stretch(state, i, tokens, time.perf_counter() - began, whole)


def placed(state: LocalState, shared: PyTree, params: PyTree, step: int) -> LocalState:
    """The state with other parameters, shared and the node's, and the learning rate's schedule at a step."""

    def like(x, old):
        return jax.device_put(x, old.sharding)

    def at_step(x):
        return x._replace(count=like(jnp.full_like(x.count, step), x.count)) if _scheduled(x) else x

    return state._replace(
        params=jax.tree.map(like, shared, state.params),
        own=jax.tree.map(lambda x, old: like(x[None], old), params, state.own),
        inner=jax.tree.map(at_step, state.inner, is_leaf=_scheduled),
    )


def _scheduled(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)


def node_params(state: LocalState) -> PyTree:
    """The node's parameters after its local steps."""
    return jax.tree.map(lambda x: x[0], state.own)


def enter(run: Run, number: int) -> Phase:
    """The phase of a round; prints a line for a new one."""
    phase = phase_at(run.setup.parts.compressor.schedule, number)
    if phase.value not in run.costs:
        run.costs[phase.value] = cost_of(run.setup, phase)
    if phase != run.entered[-1]:
        run.entered.append(phase)
        cost = run.costs[phase.value]
        run.recorder.display.say(f"phase {phase.name} from round {number}: {size(cost.worker)} from a node in a round")
    return phase


def look(run: Run, before: int, number: int, total: int, state: LocalState) -> float:
    """Validate and score the shared parameters if a round has passed their intervals, and score them before each new
    phase; seconds that it took."""
    config, began = run.config, time.perf_counter()
    upcoming = phase_at(run.setup.parts.compressor.schedule, number)
    new_kind = all(upcoming.name != phase.name for phase in run.entered)
    every = config.local.every or 1
    is_due = partial(passed, before=before * every, after=number * every)
    with run.recorder.untimed():
        if run.validate is not None and is_due(steps_between_validations(config, run.setup)):
            run.recorder.add(**{LOSS: run.validate(state)})
        if number < total and (new_kind or is_due(config.evaluate_every)):
            run.recorder.add(**run.evaluate(state))
    return time.perf_counter() - began


def join(run: Run, params: PyTree, start: int) -> jgc.rounds.Rounds:
    """Take part in the bucket's run from now on. Raises Stopped if a signal comes meanwhile."""
    how, began = run.config.rounds, time.perf_counter()
    rounds = jgc.rounds.join(
        **arguments_of(run.setup, params), overlap=int(how.overlap), merge=how.merge, folder=run.folder / "node",
        pause=partial(pause, run.interrupts),
    )  # fmt: skip
    append(run.folder, join_line(rounds, start, time.perf_counter() - began))
    run.recorder.display.say(f"joined {how.bucket} as {how.node} after {rounds.number} rounds")
    return rounds


def record(run: Run, line: dict[str, Any]) -> None:
    """Write a line of rounds.jsonl; print it every --log-every steps, if a message does not count, and at the end."""
    append(run.folder, line)
    config, steps, done = run.config, line["steps"], line["step"]
    unusual = line.get("left_out") or not line.get("counted", True)
    over = line.get("number", 0) >= config.steps // (config.local.every or 1)
    due = unusual or over or passed(config.log_every, done - steps, done)
    if due and (text := round_text(line)):
        run.recorder.display.say(text)


def pause(interrupts: Interrupts, seconds: float) -> None:
    """Wait. Raises Stopped once a signal has come."""
    time.sleep(seconds)
    if interrupts.received:
        raise Stopped


@contextmanager
def events(run: Run) -> Iterator[None]:
    """Print the log of `jgc.rounds`, such as the names of missing nodes."""
    handler, log = logging.Handler(), logging.getLogger("jgc.rounds")

    def emit(record: logging.LogRecord) -> None:
        run.recorder.display.say(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    log.addHandler(handler)
    before, log.propagate = log.propagate, False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before
