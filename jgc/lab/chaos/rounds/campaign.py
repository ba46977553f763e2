"""One long run of rounds, faults in an order that the seed decides, and what became of each."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from jgc.lab.chaos.rounds.audit import Audit, goodput
from jgc.lab.chaos.rounds.faults import FAULTS, Steps
from jgc.lab.chaos.rounds.node import Settings
from jgc.lab.chaos.rounds.nodes import NAMES, Node, Place
from jgc.lab.chaos.verdict import HANG, SAID, SILENT, SURVIVED, TRACEBACK, Outcome
from jgc.rounds import BucketError
from jgc.rounds.coder import CompressorCoder

RUN = "the run"  # where an outcome belongs to no fault
TICK, LOOK = 0.1, 0.3  # seconds between two turns of the campaign, and between two looks of the audit
AGAIN = 2  # lists in which a node must count after a fault: the first may count what it sent before
CALM = 15.0  # seconds before the first fault
FIRST = 4  # rounds that no figure has: nodes start one after another, and the lists after that catch up


class Plan(NamedTuple):
    """What is asked for.

    Attributes:
      faults: names.
      seconds: how long faults are begun.
      between: seconds from one fault to the next, on average.
      nodes: of the run.
      seed: decides order and details of all faults.
      limit: seconds after a fault in which its nodes must count again.
      settings: of every node; name, folder, bucket and seed are filled in.
    """

    faults: tuple[str, ...]
    seconds: float
    between: float
    nodes: int
    seed: int
    limit: float
    settings: Settings


@dataclass
class Found:
    """What a campaign has found: outcomes by fault, figures of the run, tokens of nodes that are not hit."""

    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    rounds: int = 0
    digests: int = 0
    balances: list[float] = field(default_factory=list)
    undisturbed: tuple[float, float] = (0.0, 0.0)
    spared: tuple[float, float] = (0.0, 0.0)
    everyone: tuple[float, float] = (0.0, 0.0)

    def add(self, fault: str, outcome: Outcome) -> None:
        """Add an outcome."""
        self.outcomes.setdefault(fault, []).append(outcome)


class NoneFree(Exception):
    """Too many nodes are hit by other faults."""


class Hit:
    """A fault that is under way, or whose nodes do not count again yet."""

    def __init__(self, run: "Run", fault: str, dice: Random):
        self.run, self.fault, self.nodes = run, fault, list[Node]()
        self.began, self.ended, self.wake = time.monotonic(), 0.0, 0.0
        self.outcome: Outcome | None = None
        self.steps: Steps = FAULTS[fault](run, self, dice)

    def choose(self, dice: Random) -> list[Node]:
        """One node that no other fault hits."""
        run = self.run
        free = [node for node in run.nodes if not run.is_hit(node)]
        if len(free) <= run.plan.settings.quorum:
            raise NoneFree
        self.nodes = [dice.choice(free)]
        return self.nodes

    def choose_all(self) -> list[Node]:
        """All nodes, if no other fault hits one."""
        if any(self.run.is_hit(node) for node in self.run.nodes):
            raise NoneFree
        self.nodes = list(self.run.nodes)
        return self.nodes

    def silent(self, what: str) -> None:
        """Something went wrong without a word."""
        self.outcome = Outcome(SILENT, what)

    def hang(self, what: str) -> None:
        """Something did not come to its end."""
        self.outcome = Outcome(HANG, what)


class Run:
    """A run of some nodes in one bucket, and its audit in a thread."""

    def __init__(self, plan: Plan, place: Place, folder: Path, tell: Callable[[str], None]):
        self.plan, self.place, self.folder, self.tell = plan, place, folder, tell
        self.key = secrets.token_hex(8)
        self.bucket = place.open()
        settings = plan.settings._replace(bucket=place.url, start=plan.nodes, faulty=place.server is None)
        self.settings = settings
        self.nodes = [self._node(name, i) for i, name in enumerate(NAMES[: plan.nodes])]
        self.names = [node.name for node in self.nodes]
        self.others: list[Node] = []
        self.audit = Audit(place.open(), settings, self.key)
        self.hits: list[Hit] = []
        self.past: list[tuple[frozenset[str], float, float]] = []  # nodes, from, to
        self.deadline = float("inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._audit, daemon=True)

    # --- what faults use ---

    @property
    def number(self) -> int:
        """Closed rounds."""
        return len(self.audit.rounds)

    @property
    def token(self) -> str:
        """The run's."""
        return self.audit.context.run

    @property
    def secret(self) -> bytes:
        """The run's."""
        return self.key.encode()

    @property
    def digest(self) -> str:
        """Of the shared state."""
        return self.audit.shared.digest if self.audit.shared else ""

    @property
    def words(self) -> int:
        """Length of a message."""
        coder = self.audit.context.coder
        assert isinstance(coder, CompressorCoder)
        return coder.lengths[-1]

    def seconds_left(self) -> float:
        """Until no more faults are begun."""
        return max(0.0, self.deadline - time.monotonic())

    def a_message(self, dice: Random) -> bytes:
        """One of the last messages that count."""
        return dice.choice(self.audit.recent) if self.audit.recent else b""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, if the bucket takes it."""
        try:
            self.bucket.create(name, data)
        except BucketError as error:
            self.tell(f"  {name} is not written: {error}")

    def counted(self, name: str, since: float = 0.0) -> int:
        """In how many lists a node counts that were seen after a moment."""
        return sum(x.list.counts(name) for x in self.audit.rounds[-200:] if x.seen > since)

    def until(self, condition: Callable[[], bool], hit: Hit, what: str) -> Steps:
        """Wait for something; it hangs if it takes longer than the limit."""
        deadline = time.monotonic() + self.plan.limit
        while not condition():
            if time.monotonic() > deadline:
                hit.hang(what)
                return
            yield 2 * TICK

    def in_thread(self, work: Callable[[], object]) -> Steps:
        """Do something that takes long while the campaign goes on."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            yield 2 * TICK

    def newcomer(self) -> Node:
        """A node with a new name."""
        node = self._node(f"guest-{len(self.others)}", 100 + len(self.others))
        self.others.append(node)
        return node

    def twin_of(self, node: Node) -> Node:
        """A node with the same name on another disk."""
        folder = self.folder / f"{node.name}-twin-{len(self.others)}"
        settings = node.settings._replace(folder=str(folder), seed=200 + len(self.others))
        other = Node(self.place, settings, self.key, f"{node.name}, the second")
        self.others.append(other)
        return other

    def last_words(self, node: Node) -> str:
        """The line with which a process has ended."""
        ended = node.end(0.0)
        return ended.errors[-1] if ended and ended.errors else ""

    # --- a run's life ---

    def begin(self) -> None:
        """Start all nodes and the audit."""
        for node in self.nodes:
            node.start()
        self._thread.start()

    def is_hit(self, node: Node) -> bool:
        """Whether a fault that is not over hits a node."""
        return any(node in hit.nodes for hit in self.hits)

    def was_hit(self, name: str, begins: float, ends: float) -> bool:
        """Whether a fault hit a node between two moments."""
        return any(name in names and a < ends and begins < b for names, a, b in self.past)

    def end(self, found: Found) -> None:
        """Let all nodes leave, and compare what they say with what the bucket has."""
        for node in self.nodes:
            node.go_on()
            node.leave()
        deadline = time.monotonic() + self.plan.limit
        for node in self.nodes:
            ended = node.end(deadline - time.monotonic())
            if ended and ended.code is None:
                found.add(RUN, Outcome(HANG, f"{node.label} does not leave: {ended.output[-500:]}"))
            elif ended and (trouble := node.trouble(ended)):
                found.add(RUN, Outcome(TRACEBACK, trouble))
        self.stop()
        self.audit.look()
        for node in (*self.nodes, *self.others):
            lines = self.audit.check_log(node.files.log, node.label)
            found.digests += sum("digest" in line for line in lines)
            for path in sorted(node.files.account.glob("balance-*.npz")):
                found.balances.append(self.audit.check_balance(path, f"{node.label}, {path.stem}"))
        found.rounds = self.number
        for wrong in self.audit.wrong:
            found.add(RUN, Outcome(SILENT, wrong))

    def stop(self) -> None:
        """End everything."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(60)
        for node in (*self.nodes, *self.others):
            node.kill()
            if node.relay:
                node.relay.close()

    def _audit(self) -> None:
        while not self._over.wait(LOOK):
            self.audit.look()
            if self.audit.wrong:
                return

    def _node(self, name: str, seed: int) -> Node:
        folder = str(self.folder / name)
        return Node(self.place, self.settings._replace(node=name, folder=folder, seed=seed), self.key)


def order(plan: Plan) -> Iterator[str]:
    """Faults, shuffled, again and again.

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


def run(plan: Plan, place: Place, folder: Path, found: Found, tell: Callable[[str], None]) -> None:
    """An undisturbed run, then one with faults."""
    calm = min(120.0, max(30.0, plan.seconds / 10))
    tell(f"{calm:.0f} s without faults")
    quiet = Run(plan, place._replace(prefix="undisturbed"), folder / "undisturbed-nodes", tell)
    try:
        quiet.begin()
        _wait_for_rounds(quiet, FIRST)
        time.sleep(calm)
        found.undisturbed = goodput(quiet.audit.rounds[FIRST - 1 :], quiet.names, lambda *_: False)
        quiet.end(Found())
    finally:
        quiet.stop()
    faulty = Run(plan, place, folder / "nodes", tell)
    begun = time.monotonic()
    try:
        faulty.begin()
        _wait_for_rounds(faulty, FIRST)
        faulty.deadline = time.monotonic() + plan.seconds
        _faults(faulty, found, tell)
        found.seconds = time.monotonic() - begun
        rounds = faulty.audit.rounds[FIRST - 1 :]
        found.spared = goodput(rounds, faulty.names, faulty.was_hit)
        found.everyone = goodput(rounds, faulty.names, lambda *_: False)
        faulty.end(found)
    finally:
        faulty.stop()


def _wait_for_rounds(run: Run, count: int) -> None:
    deadline = time.monotonic() + max(120.0, run.plan.limit)
    while run.number < count:
        if time.monotonic() > deadline or run.audit.wrong:
            raise RuntimeError(f"no {count} rounds are closed without faults: {run.audit.wrong}; see {run.folder}")
        time.sleep(TICK)


def _faults(run: Run, found: Found, tell: Callable[[str], None]) -> None:
    """Begin faults until the time is over, and wait until each is over."""
    plan = run.plan
    upcoming, dice, deck = order(plan), Random(f"{plan.seed} moments"), list[str]()
    after = time.monotonic() + min(CALM, plan.between)
    count, last = 0, time.monotonic()
    while time.monotonic() < run.deadline or run.hits:
        now = time.monotonic()
        if after <= now < run.deadline:
            after = now + dice.uniform(0.2, 1.8) * plan.between
            while len(deck) < len(plan.faults):
                deck.append(next(upcoming))
            count += 1
            _begin(run, deck, Random(f"{plan.seed} {count}"))
        for hit in list(run.hits):
            _go_on(run, hit, found, tell)
        _watch(run, found, tell)
        if run.audit.rounds and now - max(last, run.audit.rounds[-1].seen) > 3 * plan.limit:
            found.add(RUN, Outcome(HANG, f"no round was closed for {3 * plan.limit:.0f} s after round {run.number}"))
            return
        if run.audit.wrong:
            return
        time.sleep(TICK)


def _begin(run: Run, deck: list[str], dice: Random) -> None:
    """Begin the first fault of the deck for which nodes are free."""
    for fault in dict.fromkeys(deck):
        hit = Hit(run, fault, dice)
        try:
            hit.wake = time.monotonic() + next(hit.steps)
        except NoneFree:
            continue
        deck.remove(fault)
        run.hits.append(hit)
        return


def _go_on(run: Run, hit: Hit, found: Found, tell: Callable[[str], None]) -> None:
    """The next step of a fault, or a look whether its nodes count again."""
    now = time.monotonic()
    if now < hit.wake:
        return
    if not hit.ended:
        try:
            hit.wake = now + next(hit.steps)
            return
        except StopIteration:
            hit.ended = now
    behind = [node for node in hit.nodes if run.counted(node.name, since=hit.ended) < AGAIN]
    if behind and now < hit.ended + run.plan.limit and not hit.outcome:
        return
    names = ", ".join(node.name for node in hit.nodes)
    if behind and not hit.outcome:
        hit.hang(f"{', '.join(node.name for node in behind)} did not count again within {run.plan.limit:.0f} s")
    well = f"{names} counted again {now - hit.ended:.1f} s after" if names else "no effect"
    outcome = hit.outcome or Outcome(SURVIVED, well)
    found.add(hit.fault, outcome)
    found.recoveries.setdefault(hit.fault, []).append(now - hit.ended if hit.nodes else 0.0)
    run.hits.remove(hit)
    run.past.append((frozenset(node.name for node in hit.nodes), hit.began, now))
    tell(f"[{clock_left(run)}] round {run.number}  {hit.fault}: {outcome.kind}: {outcome.what}")


def _watch(run: Run, found: Found, tell: Callable[[str], None]) -> None:
    """Processes that ended without being asked to: what they said; nodes start again."""
    twins = {node.name for hit in run.hits if hit.fault == "twin" for node in hit.nodes}
    for node in (*run.nodes, *run.others):
        if not node.wanted or node.alive or node.running is None:
            continue
        ended = node.end(0.0)
        assert ended is not None
        trouble = node.trouble(ended)
        fault = next((hit.fault for hit in reversed(run.hits) if node in hit.nodes), RUN)
        node.wanted = False
        if trouble:
            found.add(fault, Outcome(TRACEBACK, trouble))
        elif node.name not in twins:
            found.add(fault, Outcome(SAID, f"{node.label}: {run.last_words(node)}"))
        if node.name not in twins:
            tell(f"  {node.label} ended: {trouble or run.last_words(node)}")
            if node in run.nodes:
                node.start()


def clock_left(run: Run) -> str:
    """Seconds left, for a line of progress."""
    return f"{run.seconds_left():.0f} s left"
