"""What stands for a coder, a bucket, a disk and a process in a simulation, and how often it fails."""

from typing import Any, NamedTuple

import numpy as np

from jgc.rounds.node_disk import NoDisk

N = 6


class Halves:
    """Sends the larger half of the values, rounded to f16; the residual keeps the rest."""

    size = N

    def first(self):
        return {"residual": np.zeros(N, np.float32)}

    def encode(self, number, memory, difference, noise):
        v = memory["residual"] + difference
        positions = np.argsort(-np.abs(v), kind="stable")[: N // 2].astype(np.int32)
        fields = {"positions": positions, "values": v[positions].astype(np.float16)}
        return fields, {"residual": v - self.decode(number, fields)}

    def decode(self, number, fields):
        vector = np.zeros(N, np.float32)
        vector[np.clip(fields["positions"], 0, N - 1)] = fields["values"].astype(np.float32)
        return vector

    def shapes(self, number):
        return {"positions": np.zeros(N // 2, np.int32), "values": np.zeros(N // 2, np.float16)}


class Bytes:
    """A bucket in memory that remembers every object, also deleted ones."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.history: dict[str, bytes] = {}

    def create(self, name, data):
        if name in self.objects:
            return False
        self.objects[name] = data
        self.history.setdefault(name, data)
        return True

    def get(self, names):
        return [self.objects.get(name) for name in names]

    def list(self, folder, after=""):
        inside = (x for x in self.objects if x.startswith(f"{folder}/") and x > after)
        return {name: len(self.objects[name]) for name in sorted(inside)}

    def delete(self, names):
        for name in names:
            self.objects.pop(name, None)


class History(Bytes):
    """What a bucket held over all time."""

    def __init__(self, bucket):
        self.objects = self.history = bucket.history


class MemoryDisk(NoDisk):
    """A node's disk; outlives its processes."""

    def __init__(self):
        self.pending = None

    def write(self, pending):
        self.pending = pending

    def read(self):
        return self.pending


class Faults(NamedTuple):
    """How often a request or a process fails.

    Attributes:
      lost: requests that fail before they reach the bucket.
      unanswered: requests that are carried out and whose answer is lost.
      slow: requests that take up to `longest` seconds, half before and half after they are carried out.
      killed: processes that die at a request; they come back after up to 100 s.
      stopped: processes that stand still at a request for up to 150 s.
      left: processes that get Ctrl-C while they wait; they come back after up to 100 s.
      rubbish: rounds into which somebody writes objects that are no messages.
      ulp: exchanges of node a before which one bit of its theta flips.
    """

    lost: float = 0.0
    unanswered: float = 0.0
    slow: float = 0.0
    killed: float = 0.0
    stopped: float = 0.0
    left: float = 0.0
    rubbish: float = 0.0
    ulp: float = 0.0
    longest: float = 8.0


class Left(Exception):
    """Ctrl-C."""


class Process:
    """A process of a node: where its generator is, and when it goes on.

    Attributes:
      inside: where Ctrl-C finds it: "steps", "exchange", or "" before and after the rounds.
    """

    def __init__(self, node, steps, member=None):
        self.node, self.steps, self.member = node, steps, member
        self.request: Any = None
        self.value: Any = None
        self.error: Exception | None = None
        self.wake, self.alive, self.carried_out, self.inside = 0.0, True, True, ""
