"""Many flipped bits in one group of processes: real steps follow each flip, then the check that every run makes."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jgc.checks.misuse import leaves_by_path
from jgc.lab.chaos.child import prepare
from jgc.lab.chaos.lab import Lab
from jgc.lab.chaos.tiny import flipped
from jgc.lab.chaos.verdict import SAID, SILENT, Outcome, judge
from jgc.nodes.placing import place_parts
from jgc.training.processes.distributed import join
from jgc.training.processes.drift import Replicas
from jgc.training.run.record import check_equal
from jgc.training.run.setup import Setup, build
from jgc.training.settings import cli
from jgc.training.steps.step import TrainState, arrays_by_name, with_arrays
from jgc.types import PyTree

FIRST = 4  # steps in each phase before the flips, so that there are residuals
MOST = 3  # steps between a flip and the check
EVERY = 100  # steps between two checks of a run, if --check-replicas-every is not given


class Flip(NamedTuple):
    """A flipped bit, and what became of it.

    Attributes:
      array: its name.
      device: that held the copy.
      bit: which.
      at_once: the line of a check that follows the flip, "" if it found nothing.
      found: that of a check one to three steps later.
      healed: whether these steps overwrote it: all devices then hold the values of a run without it.
    """

    array: str
    device: int
    bit: int
    at_once: str
    found: str
    healed: bool


def flips(lab: Lab, count: int, seed: int) -> tuple[list[Outcome], str]:
    """Bits of one device's copy of parameters and residuals flip in turn in one run.

    Returns:
      The outcome of each, and a paragraph with the cost of a check.
    """
    lab.whole = lab.of(lab.whole.recipe._replace(copies=2))
    report = lab.folder / "flips.json"
    environment = {"JGC_CHAOS_FLIPS": json.dumps([count, seed, str(report)])}
    ended = lab.ends(lab.start(environment=environment, target=_child), lab.patience + count)
    if not report.exists():
        return [judge(ended, lab.folder / "run", lab.whole.run_dir)], ""
    told = json.loads(report.read_text())
    results = [Flip(*values) for values in told["flips"]]
    return [_outcome(flip) for flip in results], _remark(results, told["check"], told["step"])


def _outcome(flip: Flip) -> Outcome:
    """Found by the next check, and by later ones unless the steps overwrote it."""
    kind = SAID if flip.at_once and (flip.found or flip.healed) else SILENT
    what = f"bit {flip.bit} of {flip.array} on device {flip.device}"
    return Outcome(kind, f"{what}: at once {flip.at_once or 'not found'}; later {flip.found or 'not found'}")


def _remark(flips: list[Flip], check: float, step: float) -> str:
    """The flips in a paragraph, and the seconds of a check and of a step."""
    at_once, later = sum(bool(flip.at_once) for flip in flips), sum(bool(flip.found) for flip in flips)
    gone = sum(flip.healed and not flip.found for flip in flips)
    named = sum(flip.array in flip.at_once and f"device {flip.device}" in flip.at_once for flip in flips)
    return (
        f"A check that followed the flip found {at_once} of {len(flips)}, and named array and device in {named}; one "
        f"after 1 to {MOST} further steps found {later}, and {gone} others had been overwritten: all devices were "
        f"equal again, to the state without the flip. A check took {1e3 * check:.2f} ms and a step {1e3 * step:.2f} ms "
        f"(medians): with a check every {EVERY} steps, {100 * check / EVERY / step:.2f} % of a step."
    )


def _child(argv: list[str], output: str, environment: dict[str, str]) -> None:
    """One of the processes."""
    prepare(output, environment)
    count, seed, report = json.loads(environment["JGC_CHAOS_FLIPS"])
    sys.exit(cli.in_company(lambda: _train_and_flip(argv, count, seed, Path(report))))


def _train_and_flip(argv: list[str], count: int, seed: int, report: Path) -> int:
    config = cli.parse(argv)
    with join(config) as team:
        setup, dice = build(config), Random(seed)
        take, state = _first_steps(setup, team)
        replicas = Replicas(setup.parts.nodes)
        replicas.difference(arrays_by_name(state))  # compiles
        outcomes, checks, steps = [], [], []
        for number in range(count):
            array, place, bit = _draw(state, dice, "params." if number % 2 else "compressor.local.")
            device, copy = jax.devices()[place], _copied(state)
            state = flipped(state, array, device, bit) if device in jax.local_devices() else state
            at_once = replicas.difference(arrays_by_name(state))
            for _ in range(dice.randint(1, MOST)):
                begun = time.perf_counter()
                state = jax.block_until_ready(take(state))
                steps.append(time.perf_counter() - begun)
                copy = jax.block_until_ready(take(copy))
            begun = time.perf_counter()
            line = replicas.difference(arrays_by_name(state))
            checks.append(time.perf_counter() - begun)
            outcomes.append(Flip(array, device.id, bit, at_once, line, _same(state, copy)))
            state = copy
        if team.leads:
            figures = {"check": float(np.median(checks)), "step": float(np.median(steps))}
            report.write_text(json.dumps({"flips": outcomes, **figures}))
    return 0


def _first_steps(setup: Setup, team: Any) -> tuple[Callable[[PyTree], PyTree], PyTree]:
    """One step of the last phase, as a function, and a state of that phase that has residuals."""
    config, parts, phases = setup.parts.config, setup.parts, setup.parts.compressor.schedule
    batch = place_parts(partial(setup.source.batch, config.seed, 0, config.nodes, config.batch_size), parts.nodes)
    state = setup.state
    step, last, state = setup.step, phases[-1].start, setup.state
    for phase in phases:
        state = state._replace(step=phase.start)
        check_equal(team, "step", step.lower(state, batch))
        for _ in range(FIRST):
            state = step(state._replace(step=phase.start), batch)[0]
    return lambda state: step(state._replace(step=last), batch)[0], state


def _copied(state: TrainState) -> TrainState:
    return with_arrays(state, jax.tree.map(jnp.copy, arrays_by_name(state)))


def _draw(state: PyTree, dice: Random, prefix: str) -> tuple[str, int, int]:
    """An array whose name begins so, a device by its place, and a bit of the part that lies there."""
    named = leaves_by_path(state, ".")
    array = dice.choice(sorted(name for name, x in named.items() if name.startswith(prefix) and x.size))
    return array, dice.randrange(jax.device_count()), dice.randrange(8 * named[array].addressable_data(0).nbytes)


def _same(first: TrainState, other: TrainState) -> bool:
    """Whether all devices of all processes hold the same bits in two states."""
    pairs = zip(*(jax.tree.leaves(arrays_by_name(state)) for state in (first, other)), strict=True)
    equal = all(
        np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        for x, y in pairs
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
    )
    return bool(np.all(multihost_utils.process_allgather(np.array(equal))))
