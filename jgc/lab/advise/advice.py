"""From the times of all methods on a link: whether compression pays, and at which bandwidths."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jgc.lab.advise.evidence import SMALL, keeps_accuracy, on_record
from jgc.lab.advise.model import Link, Row, step
from jgc.lab.shared.rate import bits

F32, F16 = "psum_f32", "psum_f16"
LABELS = {F32: "uncompressed f32", F16: "uncompressed f16"}
UNCOMPRESSED = (F32, F16, "dense")
CONTROL = "silent"  # sends nothing and does not train: never recommended
SLOWEST, FASTEST, RATES = 1e2, 1e13, 200  # bytes a second: the range searched for turning points, and its points


class Advice(NamedTuple):
    """Predicted steps of all methods.

    Attributes:
      rows: by predicted time of a step, the shortest first; methods without accuracy on record after the others.
      hosts: K.
      link: between the hosts.
      about: sentences on the measurement.
      failed: by method, why it has no row.
      kind: of the workload's data, "images", "scenes" or "text", for which accuracy must be on record; "": any method.
    """

    rows: tuple[Row, ...]
    hosts: int
    link: Link
    about: str
    failed: dict[str, str]
    kind: str = ""


def advise(
    rows: Sequence[Row], hosts: int, link: Link, about: str = "", failed: dict[str, str] | None = None, kind: str = ""
) -> Advice:
    """Sort the rows: those that can be recommended, then the others, each by their predicted time of a step."""
    order = sorted(rows, key=lambda row: (not ranked(row, kind), step(row, hosts, link)))
    return Advice(tuple(order), hosts, link, about, failed or {}, kind)


def ranked(row: Row, kind: str) -> bool:
    """Whether a method can be recommended: uncompressed in every step, or with accuracy on record for such data."""
    exact = row.method in UNCOMPRESSED and row.every == 1
    return (exact or keeps_accuracy(row.method, kind, row.every > 1)) and row.method != CONTROL


def saves(row: Row) -> bool:
    """Whether less is sent than the gradient in every step: compressed, or `dense` with local steps."""
    return row.method not in UNCOMPRESSED or row.every > 1


def best(advice: Advice, compressed: bool) -> Row | None:
    """The fastest method with or without compression that can be recommended; None if there is none."""
    candidates = [row for row in advice.rows if saves(row) == compressed]
    candidates = [row for row in candidates if ranked(row, advice.kind)]
    return min(candidates, key=lambda row: step(row, advice.hosts, advice.link), default=None)


def conclusion(advice: Advice) -> list[str]:
    """Whether compression pays, in plain sentences.

    Example:
      >>> rows = [Row(F32, 1.0, 0.0, ()), Row("topk", 1.0, 0.5, ())]
      >>> conclusion(advise(rows, 2, Link(1e6)))[0]
      'no: uncompressed f32 takes 1 s a step, the best method, topk, 1.5 s, 1.5 times as long.'
    """
    rows, hosts, link = advice.rows, advice.hosts, advice.link
    compressed, plain = best(advice, True), best(advice, False)
    if compressed is None or plain is None:
        return [_nothing(advice)]
    seconds, plain_seconds = step(compressed, hosts, link), step(plain, hosts, link)
    f32 = next((row for row in rows if row.method == F32), plain)
    if seconds < plain_seconds:
        over = [f"{step(row, hosts, link) / seconds:.3g} times faster than {name(row.method)} "
                f"({shown(step(row, hosts, link))} s)" for row in dict.fromkeys((f32, plain))]  # fmt: skip
        verdict = f"yes: {titled(compressed)} takes {shown(seconds)} s a step, {' and '.join(over)}."
    else:
        also = "" if plain is f32 else f" ({name(f32.method)} {shown(step(f32, hosts, link))} s)"
        longer = f", {seconds / plain_seconds:.3g} times as long." if plain_seconds > 0 else "."
        verdict = (
            f"no: {name(plain.method)} takes {shown(plain_seconds)} s a step{also}, the best method, "
            f"{titled(compressed)}, {shown(seconds)} s{longer}"
        )
    close = (
        "The two are within 25 %, which is what such an estimate may well miss."
        if _close(seconds, plain_seconds)
        else ""
    )
    return [
        sentence for sentence in (verdict, _evidence(advice, compressed), _turning_points(advice), close) if sentence
    ]


def _nothing(advice: Advice) -> str:
    """Why there is no verdict."""
    others = [row for row in advice.rows if saves(row) and row.method != CONTROL]
    if not others:
        return "nothing to compare: no method that compresses was measured."
    plain = best(advice, False)
    if plain is None:
        return "nothing to compare with: no uncompressed exchange was measured; give dense among the methods."
    none = f"of {', '.join(titled(row) for row in others)} none is on record as keeping its accuracy on {advice.kind}"
    uncompressed = step(plain, advice.hosts, advice.link)
    faster = [row.method for row in others if step(row, advice.hosts, advice.link) < uncompressed]
    if not faster:
        return f"no: {name(plain.method)} takes {shown(uncompressed)} s a step, and no method takes less."
    every = max(row.every for row in others)
    local = f" --set local.every={every}" if every > 1 else ""
    return (
        f"no advice: {none}. In time only, these are faster than {name(plain.method)} ({shown(uncompressed)} s): "
        f"{', '.join(faster)}. Train with them before a long run: python -m jgc compare "
        f"{methods_of_compare(faster)} --workload {SMALL[advice.kind]}{local}"
    )


def methods_of_compare(rows: Sequence[str]) -> str:
    """Options of `jgc compare` for methods as rows have them, of each method the first row, and `dense`.

    Example:
      >>> methods_of_compare(["topk:alpha=0.01:every=30", "topk:alpha=0.1", "qsgd"])
      '--methods dense,topk,qsgd --set topk.alpha=0.01'
    """
    settings: dict[str, list[str]] = {"dense": []}
    for row in rows:
        method, *words = row.split(":")
        settings.setdefault(method, [x for x in words if not x.startswith(("every=", "phase="))])
    options = [f" --set {method}.{setting}" for method, words in settings.items() for setting in words]
    return f"--methods {','.join(settings)}" + "".join(options)


def _evidence(advice: Advice, compressed: Row) -> str:
    """The record of the recommended method, and which faster ones have none."""
    record = on_record(compressed.method, advice.kind, compressed.every > 1)
    if not advice.kind or (record is None and compressed.every == 1):
        return ""
    faster = [row.method for row in advice.rows if row.method != CONTROL and not ranked(row, advice.kind)
              and step(row, advice.hosts, advice.link) < step(compressed, advice.hosts, advice.link)]  # fmt: skip
    record_of = f"not on record as keeping accuracy on {advice.kind}"
    passed = f" Faster, but {record_of}: {', '.join(faster)}." if faster else ""
    return (
        f"On record for {titled(compressed)} on {advice.kind}: {'nothing' if record is None else record.text}.{passed}"
    )


def _close(seconds: float, others: float) -> bool:
    return abs(seconds / others - 1) < 0.25 if others > 0 else True


def _turning_points(advice: Advice) -> str:
    """At which bandwidths compression pays, all else being equal."""
    ranges = paying(advice)
    if ranges is None:
        return ""
    if ranges == ((0.0, math.inf),):
        where = "at any bandwidth"
    else:
        where = " and ".join(_between(low, high) for low, high in ranges) or "at no bandwidth"
    return f"With these hosts, latency and times of computing it pays {where}."


def _between(low: float, high: float) -> str:
    if low == 0:
        return f"below about {bits(high)}"
    return f"above about {bits(low)}" if high == math.inf else f"between about {bits(low)} and {bits(high)}"


def paying(advice: Advice) -> tuple[tuple[float, float], ...] | None:
    """The ranges of bandwidth, in bytes a second, in which compression pays, to 1 %; 0 and inf mean no bound.

    Several if one method is quick to compute and a different one sends little. None if there is nothing to compare.
    """
    if any(best(advice, compressed) is None for compressed in (True, False)):
        return None

    def pays(rate: float) -> bool:
        there = advice._replace(link=advice.link._replace(rate=rate))
        row, plain = (best(there, compressed) for compressed in (True, False))
        assert row is not None and plain is not None
        return step(row, there.hosts, there.link) < step(plain, there.hosts, there.link)

    def turn(low: float, high: float) -> float:
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if pays(middle) == pays(low) else (low, middle)
        return low

    rates = [float(rate) for rate in np.geomspace(SLOWEST, FASTEST, RATES)]
    verdicts = [pays(rate) for rate in rates]
    bounds = [turn(rates[i], rates[i + 1]) for i in range(RATES - 1) if verdicts[i] != verdicts[i + 1]]
    bounds = ([0.0] if verdicts[0] else []) + bounds + ([math.inf] if verdicts[-1] else [])
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def titled(row: Row) -> str:
    """A method, and how often it exchanges if not in every step."""
    return row.method if row.every == 1 else f"{row.method} every {row.every} steps"


def name(method: str) -> str:
    """A method for people."""
    return LABELS.get(method, method)


def shown(seconds: float) -> str:
    """Seconds with three digits."""
    return f"{seconds:.3g}"
