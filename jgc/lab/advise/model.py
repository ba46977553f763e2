"""How long a step takes on a network, from what it computes and what it sends: the model behind `jgc advise`.

    step = computation + compression + sum over its collectives of (overhead + hops * latency + bytes * pace)
    pace = the slower of 1 / (bandwidth * efficiency) and contention / limit, in seconds a byte

Bytes and collectives are `Wire.physical`'s. Hops are messages that must wait for each other: 2(K-1) in an all-reduce,
which is a ring, K-1 in a gather, 1 in a permute. Nothing overlaps: neither collectives with each other nor sending with
computing. Where hosts share processors, `contention` of them wait for one, and everything that a processor does takes
so many times as long.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jgc.types import Sent
from jgc.wire.rate import bytes_per_second

UNLIMITED = "unlimited"
ETHERNET = 1448 / 1538  # of the bytes on a cable that are a message's: TCP with time stamps, MTU 1500
LATENCY, OVERHEAD = 1e-4, 1e-3  # seconds: a message within a data centre; a collective of Gloo (measured)
_HOPS = {
    "all-reduce": lambda hosts: 2 * (hosts - 1),
    "all-gather": lambda hosts: hosts - 1,
    "reduce-scatter": lambda hosts: hosts - 1,
    "all-to-all": lambda hosts: hosts - 1,
    "collective-permute": lambda hosts: 1,
}


class Link(NamedTuple):
    """What joins the hosts, and what they spend on it.

    Attributes:
      rate: bytes a second that a host sends, and as many that it receives; infinite for none that limits.
      latency: seconds of a message on its way, whatever its size.
      overhead: seconds of a collective, whatever it carries, on a host with a processor of its own.
      efficiency: of the rate, what is left for messages beside headers and gaps.
      limit: bytes a second that a host with a processor of its own can send at most; infinite if not known.
      contention: hosts that share a processor; 1 where none do.
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
      computation, compression: seconds, measured.
      sent: the collectives of a step.
    """

    method: str
    computation: float
    compression: float
    sent: tuple[Sent, ...]

    @property
    def bytes(self) -> float:
        """What a host sends in a step."""
        return float(sum(s.bytes for s in self.sent))


class Example(NamedTuple):
    """A measured step to fit a link to.

    Attributes:
      sent: its collectives.
      seconds: what they took, the rest of the step apart.
      step: seconds of the whole step, in shares of which errors count.
      processor: processor seconds that they took; None where not measured.
    """

    sent: tuple[Sent, ...]
    seconds: float
    step: float
    processor: float | None = None


def rate_of(text: str) -> float:
    """Bytes a second of a rate as people write it, "unlimited" among them.

    Raises:
      ValueError: it is not written so, or not positive.

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
    """Messages that wait for each other, of all collectives."""
    return sum(_HOPS[s.op](hosts) for s in sent)


def bytes_in_turn(sent: Sequence[Sent], hosts: int) -> float:
    """Bytes that pass one after the other. A permute between two hosts sends its two directions in turn (Gloo)."""
    return float(sum(s.bytes * (2 if s.op == "collective-permute" and hosts == 2 else 1) for s in sent))


def communication(sent: Sequence[Sent], hosts: int, link: Link) -> float:
    """Seconds of a step's collectives.

    Args:
      sent: `Wire.physical` for so many hosts.
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
    return row.computation + row.compression + communication(row.sent, hosts, link)


def fit(examples: Sequence[Example], hosts: int, rate: float, contention: float) -> Link:
    """The link that explains measured steps best: least squares of errors in shares of each step.

    Latency and overhead are at least 0, efficiency is between 1/2 and 1. The limit comes from processor times, where
    there are some; without a rate that limits, from the steps themselves, and the efficiency stays `ETHERNET`.

    Args:
      examples: of one rate and number of hosts.
      hosts: K.
      rate: bytes a second.
      contention: hosts that share a processor there.

    Raises:
      ValueError: fewer than three examples: there are three unknowns.
    """
    from scipy.optimize import lsq_linear

    if len(examples) < 3:
        raise ValueError(f"a link can be fitted to at least 3 methods, got {len(examples)}")
    limited = math.isfinite(rate)
    columns = np.array([[bytes_in_turn(e.sent, hosts) / (rate if limited else 1.0),
                         len(e.sent) * contention, hops(e.sent, hosts)] for e in examples])  # fmt: skip
    shares = 1 / np.array([e.step for e in examples])
    seconds = np.array([e.seconds for e in examples])
    size = np.abs(columns * shares[:, None]).max(axis=0)  # so that all three unknowns are of one size
    size[size == 0] = 1.0
    least = np.array([1.0 if limited else 0.0, 0.0, 0.0])
    most = np.array([2.0 if limited else np.inf, np.inf, np.inf])
    found = lsq_linear(columns * shares[:, None] / size, seconds * shares, (least * size, most * size), tol=1e-12)
    slowness, overhead, latency = map(float, found.x / size)
    if not limited:
        limit = contention / slowness if slowness > 0 else math.inf
        return Link(rate, latency, overhead, ETHERNET, limit, contention)
    return Link(rate, latency, overhead, 1 / slowness, _limit(examples), contention)


def _limit(examples: Sequence[Example]) -> float:
    """Bytes a second that a processor can send, from what it was busy for; a collective takes some time as well."""
    from scipy.optimize import nnls

    timed = [(e, e.processor) for e in examples if e.processor is not None]
    if len(timed) < 2:
        return math.inf
    columns = np.array([[float(sum(s.bytes for s in e.sent)), len(e.sent)] for e, _ in timed])
    shares = 1 / np.array([e.step for e, _ in timed])
    size = np.maximum(np.abs(columns * shares[:, None]).max(axis=0), 1e-30)
    busy, _ = nnls(columns * shares[:, None] / size, np.array([seconds for _, seconds in timed]) * shares)
    return float(size[0] / busy[0]) if busy[0] > 0 else math.inf
