"""The campaign: faults in an order that depends only on the seed, and the outcome of each."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

from jgc.lab.chaos.flips import flips
from jgc.lab.chaos.lab import Lab, Recipe, Whole, undisturbed
from jgc.lab.chaos.table import FAULTS, FLIPS
from jgc.lab.chaos.verdict import GOOD, TRACEBACK, CannotTest, Outcome
from jgc.lab.shared.progress import clock, left


class Plan(NamedTuple):
    """The options of a campaign.

    Attributes:
      faults: names.
      methods: names; each fault is tried with each in turn.
      processes: of a run.
      seed: decides order and details of all faults.
      minutes: how long; None where `times` says how often.
      times: how often each fault is tried with each method.
      limit: seconds after which what should have ended counts as hanging.
      timeout: --distributed.timeout of the runs.
    """

    faults: Sequence[str]
    methods: Sequence[str]
    processes: int
    seed: int
    minutes: float | None
    times: int | None
    limit: float
    timeout: float


@dataclass
class Found:
    """Findings so far: outcomes by fault and method, reasons for faults left out, and remarks."""

    outcomes: dict[tuple[str, str], list[Outcome]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def bad(self) -> list[tuple[str, Outcome]]:
        """The tries that were neither survived nor said."""
        return [(name, o) for (name, _), of in self.outcomes.items() for o in of if o.kind not in GOOD]

    @property
    def tried(self) -> int:
        """The number of tries."""
        return sum(map(len, self.outcomes.values()))


def order(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Fault, method and number of the try: each fault once with each method, shuffled, then again.

    Example:
      >>> plan = Plan(("kill", "resume"), ("topk",), 2, 0, None, 1, 60.0, 20.0)
      >>> sorted(order(plan))
      [('kill', 'topk', 0), ('resume', 'topk', 0)]
    """
    dice, times = Random(plan.seed), 1 if FLIPS in plan.faults else plan.times  # all flips are one try
    for number in count() if times is None else range(times):
        pairs = [(fault, method) for fault in plan.faults for method in plan.methods]
        dice.shuffle(pairs)
        yield from ((fault, method, number) for fault, method in pairs)


def run(plan: Plan, folder: Path, findings: Found, tell: Callable[[str], None]) -> None:
    """Try faults until the time is over, and add to `found`. Folders of tries that went badly are kept."""
    begun = time.monotonic()
    deadline = begun + 60 * plan.minutes if plan.minutes is not None else float("inf")
    wholes: dict[Recipe, Whole] = {}

    def of(recipe: Recipe) -> Whole:
        if recipe not in wholes:
            wholes[recipe] = undisturbed(recipe, folder, plan.limit, plan.timeout)
        return wholes[recipe]

    for number, (fault, method, turn) in enumerate(order(plan), 1):
        findings.seconds = time.monotonic() - begun
        if time.monotonic() > deadline or len(findings.skipped) == len(plan.faults):
            break
        if fault in findings.skipped:
            continue
        place = folder / f"{number}-{fault}"
        place.mkdir(parents=True)
        lab = Lab(place, of(Recipe(method, plan.processes)), plan.limit, plan.timeout, deadline, turn, of)
        with contextlib.ExitStack() as stack:
            stack.callback(lab.kill)
            try:
                outcomes = _try(lab, fault, Random(f"{plan.seed} {number}"), plan, findings)
            except CannotTest as error:
                findings.skipped[fault] = str(error)
                tell(f"{fault}: left out, {error}")
                continue
        findings.outcomes.setdefault((fault, method), []).extend(outcomes)
        findings.seconds = time.monotonic() - begun
        bad = [o for o in outcomes if o.kind not in GOOD]
        for outcome in outcomes if len(outcomes) == 1 else bad:
            tell(f"{progress(plan, number, findings)}  {fault} ({method}): {outcome.kind}: {outcome.what}")
        if bad:
            tell(f"  kept in {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)


def _try(lab: Lab, fault: str, dice: Random, plan: Plan, findings: Found) -> list[Outcome]:
    if fault == FLIPS:
        outcomes, remark = flips(lab, plan.times or 1, plan.seed)
        findings.remarks.append(remark)
        return outcomes
    try:
        return [FAULTS[fault](lab, dice)]
    except CannotTest:
        raise
    except Exception as error:
        return [Outcome(TRACEBACK, f"the fault itself failed: {type(error).__name__}: {error}")]


def progress(plan: Plan, number: int, findings: Found) -> str:
    """Progress: the try's number, and time or tries left."""
    if plan.minutes is not None:
        rest = max(0.0, 60 * plan.minutes - findings.seconds)
        return f"[{number}, {clock(findings.seconds)}, {clock(rest)} left]"
    tries = (1 if FLIPS in plan.faults else plan.times or 1) * len(plan.faults) * len(plan.methods)
    return f"[{number}/{tries}, {clock(findings.seconds)}{left(number, tries, findings.seconds)}]"
