"""What a newcomer reads, and requests and bytes as nodes are added. Nodes are threads."""

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.rounds.trace import TracedBucket, serial_latencies
from jgc import compress
from jgc.rounds.arithmetic import Sgd
from jgc.rounds.bucket import Bucket, Counts, ObjectStore, open_bucket
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.context import Context, Rules
from jgc.rounds.protocol import Member
from jgc.rounds.requests import perform

NEWCOMERS, SCALING = "newcomers.jsonl", "scaling.jsonl"
MEMORY = "memory"
SETTINGS = {"benchmark": "rounds"}
TOKENS = 1000
WARM_UP = 2  # rounds
EXTRA = 4  # rounds of a newcomer


class Team:
    """Nodes as threads that share a coder and a store.

    Args:
      count: K.
      values: n, floats of the parameters.
      url: of an empty bucket.
      pace: seconds of a round's local steps.
      checkpoint_every: rounds between checkpoints.
    """

    def __init__(self, count: int, values: int, url: str, pace: float, checkpoint_every: int = 20):
        self.store, self.url, self.pace, self.values = open_bucket(url).store, url, pace, values
        self.coder = CompressorCoder(compress.qsgd(bits=4), {"w": jnp.zeros(values)}, 0)
        self.coder.compile()
        self.rules = Rules(start=count, grace=3600.0, checkpoint_every=checkpoint_every)
        self.names = [f"n{i:02d}" for i in range(count)]
        self.stop, self.closed = threading.Event(), 0

    def open(self) -> ObjectStore:
        """The bucket with separate counts."""
        return ObjectStore(self.store, self.url)

    def member(self, node: str, bucket: Bucket) -> Member:
        """A node that has joined."""
        context = Context(
            node, self.coder, Sgd(), self.rules, say=lambda text: None,
            spawn=lambda steps: perform(steps, bucket),
        )  # fmt: skip
        member = Member(context)
        perform(member.join(np.zeros(self.values, np.float32), SETTINGS), bucket)
        return member

    def exchange(self, member: Member, bucket: Bucket, draw: np.random.Generator) -> Any:
        """A round of a node."""
        time.sleep(self.pace)
        moved = draw.standard_normal(self.values, np.float32)
        outcome = perform(member.exchange(moved, TOKENS), bucket)
        self.closed = max(self.closed, outcome.number)
        return outcome

    def live(self, index: int, rounds: int) -> tuple[Counts, list[Any]]:
        """All rounds of a node: what it has asked for after the first ones, and its requests."""
        bucket: Any = TracedBucket(self.open())
        draw = np.random.default_rng(index)
        member, before = self.member(self.names[index], bucket), Counts()
        while member.shared.number < rounds and not self.stop.is_set():
            self.exchange(member, bucket, draw)
            if member.shared.number == WARM_UP:
                before = bucket.counts
        perform(member.leave(), bucket)
        return bucket.counts.since(before), bucket.requests


def scaling(count: int, values: int, url: str, pace: float, rounds: int) -> dict[str, Any]:
    """Requests and bytes a node and round with `count` nodes, and latencies in series."""
    team = Team(count, values, url, pace, checkpoint_every=50)
    with ThreadPoolExecutor(count) as pool:
        lives = list(pool.map(lambda i: team.live(i, rounds), range(count)))
    total = np.sum([counts for counts, _ in lives], axis=0) / count / (rounds - WARM_UP)
    of_nodes = {name: requests for name, (_, requests) in zip(team.names, lives, strict=True)}
    series = [
        n
        for number, of in serial_latencies(of_nodes).items()
        if number >= WARM_UP
        for n in of.values()
    ]
    return {
        "nodes": count, "values": values, "rounds": rounds - WARM_UP,
        "payload": 4 * team.coder.lengths[-1], **Counts(*total.tolist())._asdict(),
        "latencies": median(series), "most_latencies": max(series),
    }  # fmt: skip


class Reads(TracedBucket):
    """A bucket that notes what is read.

    Attributes:
      sizes: bytes of the objects that were read, by name.
    """

    def __init__(self, bucket: Bucket):
        super().__init__(bucket)
        self.sizes: dict[str, int] = {}

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        objects = super().get(names)
        self.sizes |= {k: len(x) for k, x in zip(names, objects, strict=True) if x is not None}
        return objects


def newcomer(count: int, values: int, url: str, pace: float, after: int) -> dict[str, Any]:
    """What a node reads that joins `count` others after some rounds, and when it counts.

    Bytes of objects are those that it needs: a checkpoint, the lists since, and their messages.
    """
    team = Team(count, values, url, pace)
    with ThreadPoolExecutor(count) as pool:
        lives = [pool.submit(team.live, i, 10**9) for i in range(count)]
        try:
            while team.closed < after and not any(life.done() for life in lives):
                time.sleep(pace / 20)
            bucket: Any = Reads(team.open())
            began = time.monotonic()
            member = team.member("newcomer", bucket)
            read, sizes, seconds = bucket.counts, dict(bucket.sizes), time.monotonic() - began
            number, draw = member.shared.number, np.random.default_rng(count)
            outcomes = [team.exchange(member, bucket, draw) for _ in range(EXTRA)]
            perform(member.leave(), bucket)
        finally:
            team.stop.set()
        for life in lives:
            life.result()
    counted = [outcome.round for outcome in outcomes if outcome.counted]
    parts = {
        "checkpoint": sum(x for name, x in sizes.items() if name.startswith("checkpoint/")),
        "lists": sum(x for name, x in sizes.items() if name.endswith("/close")),
        "messages": sum(x for name, x in sizes.items() if name.endswith(".msg")),
    }
    return {
        "nodes": count, "values": values, "joined": number, "read": read.down,
        "replayed": sum(name.endswith("/close") for name in sizes), **parts,
        "ratio": read.down / sum(parts.values()), "requests": read.get + read.list + read.create,
        "seconds": seconds, "counted": counted[0] - number + 1 if counted else None,
    }  # fmt: skip


@contextmanager
def empty_bucket(where: str) -> Iterator[str]:
    """The URL of an empty bucket, in memory or in a folder that is removed after the block."""
    if where == MEMORY:
        yield "memory:///"
        return
    with tempfile.TemporaryDirectory(prefix="jgc-rounds-") as folder:
        yield folder


def reduced(payload: float, nodes: int) -> tuple[float, float]:
    """Bytes up and down a node and round if each node reduces one fragment of the vector.

    A node sends its message, reads its fragment of the others' messages, sends the coded mean of
    that, and reads the other means. The same as two shots (`jgc.comm`), through a bucket.

    Example:
      >>> reduced(800.0, 8)
      (900.0, 1400.0)
    """
    return payload * (1 + 1 / nodes if nodes > 1 else 1), 2 * payload * (nodes - 1) / nodes
