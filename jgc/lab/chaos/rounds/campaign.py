"""Faults against one long run, in an order that the seed decides, and what became of each."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from jgc.lab.chaos.rounds.audit import goodput
from jgc.lab.chaos.rounds.node import TOKENS, Settings
from jgc.lab.chaos.rounds.nodes import Place
from jgc.lab.chaos.rounds.run import TICK, Hit, NoneFree, Plan, Run
from jgc.lab.chaos.verdict import HANG, SAID, SILENT, SURVIVED, Outcome
from jgc.lab.shared.stopping import go_on
from jgc.training.errors import FAILED, UserError

RUN = "the run"  # the name under which outcomes stand that belong to no fault
FIRST = 4  # rounds left out of all figures: nodes start one by one
DELAY = 15.0  # longest time before the first fault, in seconds
SHORTEST, LONGEST = 30.0, 120.0  # seconds without faults, measured first


@dataclass
class Results:
    """The results of a campaign.

    Attributes:
      outcomes: by fault.
      recoveries: seconds from a fault's end until its nodes count again, by fault.
      seconds: how long the run with faults took.
      rounds: that it closed.
      digests: of nodes, compared with those that the lists give.
      balances: errors of all accounts, relative to their largest value.
      undisturbed, spared, everyone: see `goodput`: of all nodes without faults, of nodes that are
        not hit, of all nodes with faults.
      begun: number of faults.
    """

    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    rounds: int = 0
    digests: int = 0
    balances: list[float] = field(default_factory=list)
    undisturbed: tuple[float, float] = (0.0, 0.0)
    spared: tuple[float, float] = (0.0, 0.0)
    everyone: tuple[float, float] = (0.0, 0.0)
    begun: int = 0

    def add(self, fault: str, outcome: Outcome) -> None:
        """Add an outcome."""
        self.outcomes.setdefault(fault, []).append(outcome)


def order(plan: Plan) -> Iterator[str]:
    """All faults, shuffled, again and again.

    Example:
      >>> plan = Plan(("kill", "stop"), 60.0, 15.0, 4, 0, 60.0, Settings("", "", ""))
      >>> it = order(plan)
      >>> sorted([next(it), next(it)])
      ['kill', 'stop']
    """
    dice = Random(plan.seed)
    while True:
        deck = list(plan.faults)
        dice.shuffle(deck)
        yield from deck


def run(
    plan: Plan, place: Place, folder: Path, results: Results, tell: Callable[[str], None]
) -> None:
    """Run without faults for a while, then with faults."""
    calm = min(LONGEST, max(SHORTEST, plan.seconds / 5))
    most = most_tokens(plan.settings)
    tell(f"{calm:.0f} s without faults")
    quiet = Run(plan, place._replace(prefix="undisturbed"), folder / "undisturbed-nodes", tell)
    try:
        quiet.begin()
        _wait_for_rounds(quiet, FIRST)
        time.sleep(calm)
        rounds = quiet.audit.rounds[FIRST - 1 :]
        results.undisturbed = goodput(rounds, quiet.names, lambda *_: False, most)
        _end(quiet, results)
    finally:
        quiet.stop()
    faulty = Run(plan, place, folder / "nodes", tell)
    begun = time.monotonic()
    try:
        faulty.begin()
        _wait_for_rounds(faulty, FIRST)
        faulty.deadline = time.monotonic() + plan.seconds
        try:
            _faults(faulty, results, tell)
        except BaseException:
            for wrong in faulty.audit.wrong:
                results.add(RUN, Outcome(SILENT, wrong))
            raise
        finally:  # after Ctrl-C, too
            results.seconds, results.rounds = time.monotonic() - begun, faulty.number
            rounds = faulty.audit.rounds[FIRST - 1 :]
            results.spared = goodput(rounds, faulty.names, faulty.was_hit, most)
            results.everyone = goodput(rounds, faulty.names, lambda *_: False, most)
        _end(faulty, results)
    finally:
        faulty.stop()


def most_tokens(settings: Settings) -> float:
    """The most tokens a second that a node's step time allows."""
    return TOKENS / settings.seconds


def _end(run: Run, results: Results) -> None:
    """End a run, and add what its end shows."""
    for outcome in run.end():
        results.add(RUN, outcome)
    results.digests += run.digests
    results.balances += run.balances


def _wait_for_rounds(run: Run, count: int) -> None:
    deadline = time.monotonic() + max(120.0, run.plan.limit)
    while run.number < count:
        if time.monotonic() > deadline or run.audit.wrong:
            wrong = "; ".join(run.audit.wrong) or "nothing is wrong in the bucket"
            text = f"{run.number} of {count} rounds closed: {wrong}; see {run.folder}"
            raise UserError(text, FAILED)
        go_on()
        time.sleep(TICK)


def _faults(run: Run, results: Results, tell: Callable[[str], None]) -> None:
    """Begin faults until the deadline, and wait until all are over."""
    plan = run.plan
    upcoming, dice, deck = order(plan), Random(f"{plan.seed} moments"), list[str]()
    due = time.monotonic() + min(DELAY, plan.between)
    count, begun = 0, time.monotonic()
    while time.monotonic() < run.deadline or run.hits:
        go_on()
        now = time.monotonic()
        if due <= now < run.deadline:
            due = now + dice.uniform(0.2, 1.8) * plan.between
            while len(deck) < len(plan.faults):
                deck.append(next(upcoming))
            count += 1
            results.begun += begin_fault(run, deck, Random(f"{plan.seed} {count}"))
        for hit in list(run.hits):
            continue_fault(run, hit, results, tell)
        watch(run, results, tell)
        closed = max(begun, run.audit.rounds[-1].seen) if run.audit.rounds else begun
        if now - closed > 3 * plan.limit:
            what = f"no round closed for {3 * plan.limit:.0f} s after round {run.number}"
            results.add(RUN, Outcome(HANG, what))
            return
        if run.audit.wrong:
            return
        time.sleep(TICK)


def begin_fault(run: Run, deck: list[str], dice: Random) -> bool:
    """Begin the first fault of the deck for which enough nodes are free; False if there is none."""
    for fault in dict.fromkeys(deck):
        hit = Hit(run, fault, dice)
        try:
            hit.wake = time.monotonic() + next(hit.steps)
        except NoneFree:
            continue
        deck.remove(fault)
        run.hits.append(hit)
        return True
    return False


def continue_fault(run: Run, hit: Hit, results: Results, tell: Callable[[str], None]) -> None:
    """Take the next step of a fault; once it has ended, check whether its nodes count again."""
    now = time.monotonic()
    if now < hit.wake:
        return
    if not hit.ended:
        try:
            hit.wake = now + next(hit.steps)
            return
        except StopIteration:
            hit.ended = now
    behind = hit.behind()
    if behind and now < hit.ended + run.plan.limit and not hit.outcome:
        return
    if behind and not hit.outcome:
        late = ", ".join(node.name for node in behind)
        hit.hang(f"{late} did not count again within {run.plan.limit:.0f} s")
    names = ", ".join(node.name for node in hit.nodes)
    well = f"{names} counted again after {now - hit.ended:.1f} s" if names else "no effect"
    outcome = hit.outcome or Outcome(SURVIVED, well)
    results.add(hit.fault, outcome)
    results.recoveries.setdefault(hit.fault, []).append(now - hit.ended if hit.nodes else 0.0)
    run.hits.remove(hit)
    run.past.append((frozenset(node.name for node in hit.nodes), hit.began, now))
    left = f"[{run.seconds_left():.0f} s left]"
    tell(f"{left} round {run.number}  {hit.fault}: {outcome.kind}: {outcome.what}")


def watch(run: Run, results: Results, tell: Callable[[str], None]) -> None:
    """Judge processes that ended though nobody asked them to, and start the run's nodes again.

    The fault "twin" judges and starts its nodes itself: one of its two processes has to stop.
    """
    twins = {node.name for hit in run.hits if hit.fault == "twin" for node in hit.nodes}
    for node in (*run.nodes, *run.others):
        if not node.wanted or node.alive or node.running is None:
            continue
        ended = node.end(0.0)
        assert ended is not None
        node.wanted = False
        outcome = node.verdict(ended)
        assert outcome is not None  # nobody asked
        if node.name not in twins or outcome.kind != SAID:
            fault = next((hit.fault for hit in reversed(run.hits) if node in hit.nodes), RUN)
            results.add(fault, outcome)
            tell(f"  {outcome.what}")
        if node.name not in twins and node in run.nodes:
            node.start()
