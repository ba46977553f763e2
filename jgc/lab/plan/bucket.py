"""A round through a bucket (`jgc.rounds`) in a plan: the message of each phase, its cost and its time."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from jgc.lab.advise.model import BUCKET, BUCKET_LATENCY, REQUESTS, Link, communication
from jgc.rounds.bucket import Counts
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.prices import dollars
from jgc.training.output.table import size
from jgc.types import Compressor, PyTree, Sent

if TYPE_CHECKING:
    from jgc.lab.plan.needs import Plan

HEAD = ["method", "phase", "up, a message", "down, of the others", "USD for requests", "USD for downloads", "seconds"]
NOTE = (
    "Payloads of messages, whose headers come on top. Dollars are of a thousand exchanges of a node, without "
    "checkpoints, with 1.25 PUT and 2.1 LIST each as measured, at S3's prices (docs/rounds.md); downloads cost only "
    f"outside of the bucket's region. Seconds are estimated: upload, downloads and {REQUESTS} requests of "
    f"{BUCKET_LATENCY:g} s in series."
)


def messages_of(compressor: Compressor, params: PyTree) -> tuple[int, ...] | str:
    """Bytes of a message's payload by phase; or why the method does not go through a bucket."""
    try:
        return tuple(4 * words for words in CompressorCoder(compressor, params, 0).lengths)
    except ValueError as error:
        return str(error)


def round_costs(
    plans: Sequence["Plan"], rate: float, shown: Callable[[float | None], str] = size
) -> tuple[list[str], list[list[str]]]:
    """The table: headings, and a row for each phase of each method that goes through a bucket.

    Args:
      plans: made with `bucket`.
      rate: bytes a second of a node's link; infinite if not given, and then there are no seconds.
      shown: bytes for people.
    """
    rows = []
    for plan in plans:
        if not isinstance(plan.messages, tuple):
            continue
        others = plan.config.nodes - 1
        for phase, message in zip(plan.phases, plan.messages, strict=True):
            counts = Counts(create=1250, get=1000 * (others + 1), list=2100, down=1000 * others * message)
            cost, link = dollars(counts), Link(rate, BUCKET_LATENCY, 0.0)
            seconds = communication([Sent(BUCKET, "message", Fraction(message))], others + 1, link)
            rows.append([plan.method, phase.name, shown(message), shown(others * message), f"{cost.requests:.2g}",
                         f"{cost.egress:.2g}", "-" if rate == math.inf else f"{seconds:.3g}"])  # fmt: skip
    return HEAD, rows


def remarks(plans: Sequence["Plan"]) -> list[str]:
    """A line for each method that does not go through a bucket."""
    return [f"not through a bucket: {plan.method}: {plan.messages}" for plan in plans if isinstance(plan.messages, str)]
