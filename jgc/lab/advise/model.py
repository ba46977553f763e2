"""The model behind `jgc advise`: seconds of a step on a network, from its computation and its collectives.

    step = computation + compression + sum over its collectives of (overhead + hops * latency + bytes * pace)
    pace = the slower of 1 / (bandwidth * efficiency) and contention / limit, in seconds a byte

With local steps compression and collectives come once in H steps, and a step has a part in H of their time.

Through a bucket (`jgc.rounds`) an exchange is an upload of a message, REQUESTS in series, and downloads of the K - 1
messages of the others; its overhead is 0. It replaces a collective, with the op `BUCKET`.

Bytes and collectives come from `Wire.physical`. Hops are messages that wait for each other: 2(K-1) in an all-reduce,
which is a ring, K-1 in a gather, 1 in a permute and in an all-to-all, as Gloo has them. Nothing overlaps: neither two
collectives nor communication and computation. If `contention` hosts share a processor, its work takes `contention`
times as long.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jgc.lab.shared.rate import bytes_per_second
from jgc.types import Sent

UNLIMITED = "unlimited"
ETHERNET = 1448 / 1538  # share of a cable's bytes that are payload: TCP with time stamps, MTU 1500
BUCKET_LATENCY = 0.05  # seconds of a request to a bucket; assumed
LATENCY, OVERHEAD = 1e-4, 1e-3  # seconds: a message within a data centre; a collective of Gloo (measured)
BUCKET, REQUESTS = "bucket", 5  # an exchange through a bucket, and its requests that wait for each other
_HOPS = {
    BUCKET: lambda hosts: REQUESTS,
    "all-reduce": lambda hosts: 2 * (hosts - 1),
    "all-gather": lambda hosts: hosts - 1,
    "reduce-scatter": lambda hosts: hosts - 1,
    "all-to-all": lambda hosts: 1,
    "collective-permute": lambda hosts: 1,
}


class Link(NamedTuple):
    """The network between hosts, and its costs.

    Attributes:
      rate: bytes a second of a host in each direction; infinite if unlimited.
      latency: seconds that a message of any size travels.
      overhead: seconds of a collective of any size, on a host that shares no processor.
      efficiency: share of the rate left for messages after headers and gaps.
      limit: the most bytes a second that a host that shares no processor can send; infinite if unknown.
      contention: hosts that share a processor; at least 1.
    """

    rate: float
    latency: float = LATENCY
    overhead: float = OVERHEAD
    efficiency: float = ETHERNET
    limit: float = math.inf
    contention: float = 1.0


class Row(NamedTuple):
    """One host's step with a method.

    Attributes:
      method: its name.
      computation, compression: seconds, measured; compression of an exchange.
      sent: the collectives of an exchange.
      every: H, steps from one exchange to the next.
    """

    method: str
    computation: float
    compression: float
    sent: tuple[Sent, ...]
    every: int = 1

    @property
    def bytes(self) -> float:
        """Bytes that a host sends in a step."""
        return float(sum(s.bytes for s in self.sent)) / self.every


class Example(NamedTuple):
    """A measured step to fit a link to.

    Attributes:
      sent: its collectives.
      seconds: of the collectives.
      step: seconds of the whole step; errors count in shares of it.
      processor: processor seconds of the collectives; None if not measured.
    """

    sent: tuple[Sent, ...]
    seconds: float
    step: float
    processor: float | None = None


def rate_of(text: str) -> float:
    """Bytes a second of a rate such as 100mbit, or of "unlimited".

    Raises:
      ValueError: it is not written like that, or not positive.

    Example:
      >>> rate_of("1Gbit"), rate_of("unlimited")
      (125000000.0, inf)
    """
    return math.inf if text.strip().lower() == UNLIMITED else bytes_per_second(text)


def contention(hosts: int, processors: float) -> float:
    """Hosts that share a processor.

    Example:
      >>> contention(8, 2), contention(2, 4)
      (4.0, 1.0)
    """
    return max(1.0, hosts / processors)


def pace(link: Link) -> float:
    """Seconds a byte."""
    return max(1 / (link.rate * link.efficiency), link.contention / link.limit)


def hops(sent: Sequence[Sent], hosts: int) -> int:
    """Messages that wait for each other, over all collectives."""
    return sum(_HOPS[s.op](hosts) for s in sent)


def bytes_in_turn(sent: Sequence[Sent], hosts: int) -> float:
    """Bytes sent one by one. A permute between two hosts sends its two directions in turn (Gloo).

    Through a bucket a host reads the others' messages after its upload.
    """
    times = {BUCKET: hosts, "collective-permute": 2 if hosts == 2 else 1}
    return float(sum(s.bytes * times.get(s.op, 1) for s in sent))


def communication(sent: Sequence[Sent], hosts: int, link: Link) -> float:
    """Seconds of a step's collectives.

    Args:
      sent: `Wire.physical` for that number of hosts.
      hosts: K.
      link: between them.

    Example:
      >>> from fractions import Fraction
      >>> gather = Sent("all-gather", "values", Fraction(3000))
      >>> communication([gather], 4, Link(1e6, latency=0.001, overhead=0.002, efficiency=1.0))
      0.008
    """
    waiting = len(sent) * link.overhead * link.contention + hops(sent, hosts) * link.latency
    return waiting + bytes_in_turn(sent, hosts) * pace(link)


def step(row: Row, hosts: int, link: Link) -> float:
    """Seconds of a step."""
    return row.computation + (row.compression + communication(row.sent, hosts, link)) / row.every


def fit(examples: Sequence[Example], hosts: int, rate: float, contention: float) -> Link:
    """Fit a link to measured steps: least squares of errors in shares of each step.

    Latency and overhead are at least 0, efficiency is between 1/2 and 1. The limit is fitted to processor times. At an
    unlimited rate it is fitted to the steps themselves, and the efficiency stays `ETHERNET`.

    Args:
      examples: of one rate and number of hosts.
      hosts: K.
      rate: bytes a second.
      contention: hosts that share a processor there.

    Raises:
      ValueError: fewer than three examples for three unknowns.
    """
    from scipy.optimize import lsq_linear

    if len(examples) < 3:
        raise ValueError(f"a link can be fitted to at least 3 methods, got {len(examples)}")
    limited = math.isfinite(rate)
    columns = np.array([[bytes_in_turn(e.sent, hosts) / (rate if limited else 1.0),
                         len(e.sent) * contention, hops(e.sent, hosts)] for e in examples])  # fmt: skip
    shares = 1 / np.array([e.step for e in examples])
    seconds = np.array([e.seconds for e in examples])
    size = np.abs(columns * shares[:, None]).max(axis=0)  # scales the three unknowns to one size
    size[size == 0] = 1.0
    least = np.array([1.0 if limited else 0.0, 0.0, 0.0])
    most = np.array([2.0 if limited else np.inf, np.inf, np.inf])
    solution = lsq_linear(columns * shares[:, None] / size, seconds * shares, (least * size, most * size), tol=1e-12)
    slowness, overhead, latency = map(float, solution.x / size)
    if not limited:
        limit = contention / slowness if slowness > 0 else math.inf
        return Link(rate, latency, overhead, ETHERNET, limit, contention)
    return Link(rate, latency, overhead, 1 / slowness, _limit(examples), contention)


def _limit(examples: Sequence[Example]) -> float:
    """Bytes a second that a processor can send, from processor times; each collective also has a fixed cost."""
    from scipy.optimize import nnls

    timed = [(e, e.processor) for e in examples if e.processor is not None]
    if len(timed) < 2:
        return math.inf
    columns = np.array([[float(sum(s.bytes for s in e.sent)), len(e.sent)] for e, _ in timed])
    shares = 1 / np.array([e.step for e, _ in timed])
    size = np.maximum(np.abs(columns * shares[:, None]).max(axis=0), 1e-30)
    busy, _ = nnls(columns * shares[:, None] / size, np.array([seconds for _, seconds in timed]) * shares)
    return float(size[0] / busy[0]) if busy[0] > 0 else math.inf
