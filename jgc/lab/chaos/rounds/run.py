"""A run of rounds that faults hit: its nodes, its audit, and what the faults use of both."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from jgc.lab.chaos.rounds.audit import Audit
from jgc.lab.chaos.rounds.faults import FAULTS, Steps
from jgc.lab.chaos.rounds.node import Settings
from jgc.lab.chaos.rounds.nodes import NAMES, Node, Place
from jgc.lab.chaos.verdict import HANG, SILENT, Outcome
from jgc.rounds import BucketError
from jgc.rounds.coder import CompressorCoder

TICK, LOOK = 0.1, 0.1  # seconds between turns of the campaign, and between looks of the audit
RECOVERED = 2  # lists that count a node after a fault: the first may count an older message
LAST = 3  # rounds to the end: with overlap, nodes may be up to two rounds ahead of the lists


class Plan(NamedTuple):
    """The options of a campaign.

    Attributes:
      faults: names.
      seconds: for how long new faults begin.
      between: seconds from one fault to the next, on average.
      nodes: number of nodes.
      seed: decides order and details of all faults.
      limit: seconds after a fault within which its nodes must count again.
      settings: of every node; name, folder, bucket and seed are filled in.
    """

    faults: tuple[str, ...]
    seconds: float
    between: float
    nodes: int
    seed: int
    limit: float
    settings: Settings


class NoneFree(Exception):
    """Too many nodes are hit by other faults."""


class Hit:
    """A fault that is under way, or whose nodes do not count again yet.

    Attributes:
      nodes: the nodes that it hits.
      began, ended: when; `ended` is 0 while it is under way.
      wake: when its next step is due.
      outcome: what went wrong, None for nothing so far.
    """

    def __init__(self, run: "Run", fault: str, dice: Random):
        self.run, self.fault, self.nodes = run, fault, list[Node]()
        self.began, self.ended, self.wake = time.monotonic(), 0.0, 0.0
        self.outcome: Outcome | None = None
        self.steps: Steps = FAULTS[fault](run, self, dice)

    def choose(self, dice: Random) -> list[Node]:
        """One node that no other fault hits; a quorum of such nodes remains."""
        run = self.run
        free = [node for node in run.nodes if not run.is_hit(node)]
        if len(free) <= run.plan.settings.quorum:
            raise NoneFree
        self.nodes = [dice.choice(free)]
        return self.nodes

    def choose_all(self) -> list[Node]:
        """All nodes, if no other fault hits one of them."""
        if any(self.run.is_hit(node) for node in self.run.nodes):
            raise NoneFree
        self.nodes = list(self.run.nodes)
        return self.nodes

    def behind(self) -> list[Node]:
        """The nodes that do not count again yet."""
        counted = self.run.counted
        return [x for x in self.nodes if counted(x.name, since=self.ended) < RECOVERED]

    def silent(self, what: str) -> None:
        """Note that something went wrong without a word."""
        self.outcome = Outcome(SILENT, what)

    def hang(self, what: str) -> None:
        """Note that something did not end."""
        self.outcome = Outcome(HANG, what)


class Run:
    """Nodes in one bucket, and their audit in a thread.

    Attributes:
      nodes: the run's nodes.
      others: newcomers, and second processes under a node's name.
      hits: faults under way.
      past: faults that are over: names of their nodes, begin and end.
      deadline: when no more faults begin.
      balances, digests: of `end`: errors of all accounts, and how many digests are equal.
    """

    def __init__(self, plan: Plan, place: Place, folder: Path, tell: Callable[[str], None]):
        self.plan, self.place, self.folder, self.tell = plan, place, folder, tell
        self.key = secrets.token_hex(8)
        self.bucket = place.open()
        self.settings = plan.settings._replace(
            bucket=place.url, start=plan.nodes, faulty=place.server is None
        )
        self.nodes = [self._node(name, i) for i, name in enumerate(NAMES[: plan.nodes])]
        self.names = [node.name for node in self.nodes]
        self.others: list[Node] = []
        self.audit = Audit(place.open(), self.settings, self.key)
        self.hits: list[Hit] = []
        self.past: list[tuple[frozenset[str], float, float]] = []
        self.deadline = float("inf")
        self.balances: list[float] = []
        self.digests = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._audit, daemon=True)

    # --- for faults ---

    @property
    def number(self) -> int:
        """Number of closed rounds."""
        return len(self.audit.rounds)

    @property
    def token(self) -> str:
        """The run's token, in run.json."""
        return self.audit.context.run

    @property
    def secret(self) -> bytes:
        """The run's secret, which signs its objects."""
        return self.key.encode()

    @property
    def digest(self) -> str:
        """Digest of the shared state."""
        return self.audit.shared.digest if self.audit.shared else ""

    @property
    def words(self) -> int:
        """Words of a message's payload."""
        coder = self.audit.context.coder
        assert isinstance(coder, CompressorCoder)
        return coder.lengths[-1]

    def seconds_left(self) -> float:
        """Seconds until no more faults begin."""
        return max(0.0, self.deadline - time.monotonic())

    def recent_message(self, dice: Random) -> bytes:
        """One of the last messages that count."""
        return dice.choice(self.audit.recent) if self.audit.recent else b""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, if the bucket lets us."""
        try:
            self.bucket.create(name, data)
        except BucketError as error:
            self.tell(f"  {name} is not written: {error}")

    def counted(self, name: str, since: float = 0.0) -> int:
        """Number of lists after a moment that count a node."""
        return sum(x.list.counts(name) for x in self.audit.rounds[-200:] if x.seen > since)

    def until(self, condition: Callable[[], bool], hit: Hit, what: str) -> Steps:
        """Wait for a condition; longer than the limit is a hang."""
        deadline = time.monotonic() + self.plan.limit
        while not condition():
            if time.monotonic() > deadline:
                hit.hang(what)
                return
            yield 2 * TICK

    def in_thread(self, work: Callable[[], object]) -> Steps:
        """Do something slow while the campaign goes on."""
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
        """A second node with a node's name, on a different disk."""
        folder = self.folder / f"{node.name}-twin-{len(self.others)}"
        settings = node.settings._replace(folder=str(folder), seed=200 + len(self.others))
        other = Node(self.place, settings, self.key, f"{node.name}, the second")
        self.others.append(other)
        return other

    def last_words(self, node: Node) -> str:
        """The error line with which a process ended."""
        ended = node.end(0.0)
        return ended.errors[-1] if ended and ended.errors else ""

    # --- the life of a run ---

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

    def end(self) -> Iterator[Outcome]:
        """Let all nodes leave, compare logs and accounts with the bucket, and yield errors."""
        # all in the same round: fewer than a quorum could not close one more
        last = self.number + LAST
        for node in self.nodes:
            node.go_on()
            node.leave(last)
        deadline = time.monotonic() + self.plan.limit
        for node in self.nodes:
            ended = node.end(deadline - time.monotonic())
            outcome = node.verdict(ended, asked=True) if ended else None
            if outcome is not None:
                yield outcome
        self.stop()
        self.audit.look(gaps=True)
        for node in (*self.nodes, *self.others):
            yield from node.dumps()
            self.digests += self.audit.check_log(node.files.log, node.label)
            for path in sorted(node.files.account.glob("balance-*.npz")):
                self.balances.append(self.audit.check_balance(path, f"{node.label}, {path.stem}"))
        for wrong in self.audit.wrong:
            yield Outcome(SILENT, wrong)

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
        while not self._over.wait(LOOK) and not self.audit.wrong:
            try:
                self.audit.look()
            except Exception as error:  # a thread that ends would look like a run that hangs
                self.audit.wrong.append(f"the audit failed: {type(error).__name__}: {error}")

    def _node(self, name: str, seed: int) -> Node:
        folder = str(self.folder / name)
        settings = self.settings._replace(node=name, folder=folder, seed=seed)
        return Node(self.place, settings, self.key)
