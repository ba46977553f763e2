"""Does compression pay? Time per step and bytes of every method on a network that need not be there.

    python -m jgc advise --config configs/sparse_gd.py --workload cifar10_resnet20 --bandwidth 1gbit --hosts 16

What is computed is measured on this device (`advise_measure`) or taken from a run of `bench network`
(`advise_results`); what the network takes is estimated (`advise_model`).
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jgc.lab.advise.model import Link, Row, communication, step
from jgc.lab.report.tables import table
from jgc.training.errors import cannot_write
from jgc.training.rundir import write_whole
from jgc.training.table import size

F32, F16 = "psum_f32", "psum_f16"
LABELS = {F32: "uncompressed f32", F16: "uncompressed f16"}
UNCOMPRESSED = (F32, F16, "dense")
CONTROL = "silent"  # sends nothing and does not train: never what to pick
SLOWEST, FASTEST, RATES = 1e2, 1e13, 200  # bytes a second between which turning points are looked for, and how often
HEAD = ("method", "sent by a host in a step", "computation, s", "compression, s", "communication, s (estimate)",
        "step, s", "times faster than f32")  # fmt: skip


class Advice(NamedTuple):
    """What to show.

    Attributes:
      rows: by predicted time of a step, the shortest first.
      hosts: K.
      link: between them.
      about: sentences on what was measured.
      failed: by method, why it is not among the rows.
    """

    rows: tuple[Row, ...]
    hosts: int
    link: Link
    about: str
    failed: dict[str, str]


def advise(
    rows: Sequence[Row], hosts: int, link: Link, about: str = "", failed: dict[str, str] | None = None
) -> Advice:
    """Sort the rows by what a step of theirs will take."""
    return Advice(tuple(sorted(rows, key=lambda row: step(row, hosts, link))), hosts, link, about, failed or {})


def best(rows: Sequence[Row], hosts: int, link: Link, compressed: bool) -> Row | None:
    """The fastest method that compresses, or that does not; None where there is none."""
    mine = [row for row in rows if row.method != CONTROL and (row.method not in UNCOMPRESSED) == compressed]
    return min(mine, key=lambda row: step(row, hosts, link), default=None)


def conclusion(advice: Advice) -> list[str]:
    """Whether compression pays, in plain sentences.

    Example:
      >>> rows = [Row(F32, 1.0, 0.0, ()), Row("topk", 1.0, 0.5, ())]
      >>> conclusion(advise(rows, 2, Link(1e6)))[0]
      'no: uncompressed f32 takes 1 s a step, the best method, topk, 1.5 s, 1.5 times as long.'
    """
    rows, hosts, link = advice.rows, advice.hosts, advice.link
    ours, plain = best(rows, hosts, link, True), best(rows, hosts, link, False)
    if ours is None or plain is None:
        return ["nothing to compare: no method that compresses was measured."]
    mine, theirs = step(ours, hosts, link), step(plain, hosts, link)
    f32 = next((row for row in rows if row.method == F32), plain)
    if mine < theirs:
        over = [f"{step(row, hosts, link) / mine:.3g} times faster than {name(row.method)} "
                f"({shown(step(row, hosts, link))} s)" for row in dict.fromkeys((f32, plain))]  # fmt: skip
        verdict = f"yes: {ours.method} takes {shown(mine)} s a step, {' and '.join(over)}."
    else:
        also = "" if plain is f32 else f" ({name(f32.method)} {shown(step(f32, hosts, link))} s)"
        verdict = f"no: {name(plain.method)} takes {shown(theirs)} s a step{also}, the best method, {ours.method}, "
        verdict += f"{shown(mine)} s" + (f", {mine / theirs:.3g} times as long." if theirs > 0 else ".")
    close = "The two are within 25 %, which is what such an estimate may well miss." if _close(mine, theirs) else ""
    return [sentence for sentence in (verdict, _turning_points(advice), close) if sentence]


def _close(mine: float, theirs: float) -> bool:
    return abs(mine / theirs - 1) < 0.25 if theirs > 0 else True


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
    """The ranges of bandwidth, in bytes a second, in which the best method wins, up to 1 %; 0 and inf are no bounds.

    Several, where one method is quick to compute and another sends little. None where there is nothing to compare.
    """
    if any(best(advice.rows, advice.hosts, advice.link, compressed) is None for compressed in (True, False)):
        return None

    def pays(rate: float) -> bool:
        link = advice.link._replace(rate=rate)
        ours, plain = (best(advice.rows, advice.hosts, link, compressed) for compressed in (True, False))
        assert ours is not None and plain is not None
        return step(ours, advice.hosts, link) < step(plain, advice.hosts, link)

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


# --- the page -------------------------------------------------------------------------------------------------------


def cells(row: Row, advice: Advice) -> list[str]:
    """A row of the table."""
    hosts, link = advice.hosts, advice.link
    taken = step(row, hosts, link)
    f32 = next((step(r, hosts, link) for r in advice.rows if r.method == F32), None)
    control = " (control)" if row.method == CONTROL else ""
    return [name(row.method) + control, size(row.bytes), f"{row.computation:.4f}", f"{row.compression:.4f}",
            f"{communication(row.sent, hosts, link):.4f}", f"{taken:.4f}",
            "-" if f32 is None or not taken else f"{f32 / taken:.2f}"]  # fmt: skip


def notes(advice: Advice) -> list[str]:
    """What the figures are."""
    link = advice.link
    limit = "" if link.limit == math.inf else f", a host sends at most {bits(link.limit)}"
    lines = [
        f"{advice.hosts} hosts at {bits(link.rate)}; latency {link.latency:.3g} s a message, overhead "
        f"{link.overhead:.3g} s a collective, {100 * link.efficiency:.1f} % of the bandwidth are messages{limit}. "
        + advice.about,
        "Computation and compression are measured; communication, and with it the step, is an estimate: nothing of it "
        "overlaps with computing. Bytes are those of `Wire.physical`. Every method is in its last phase, whose steps "
        "are most of a run; uncompressed steps before it take as long as uncompressed f32. Time is not all: how well a "
        "method trains is another question.",
    ]
    return lines + [f"Left out: {method}: {why}" for method, why in advice.failed.items()]


def markdown(advice: Advice) -> str:
    """The advice as a page."""
    rows = [cells(row, advice) for row in advice.rows]
    said = " ".join(conclusion(advice))
    return "\n\n".join([said[:1].upper() + said[1:], table(HEAD, rows), *notes(advice)]) + "\n"


def show(advice: Advice, console: Console) -> None:
    """Print the advice."""
    grid = Table(title="Does it pay?", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(("method", "a host\nsends", "compute\ns", "compress\ns", "network\ns*", "step\ns*",
                                "times\nfaster*")):  # fmt: skip
        grid.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in advice.rows:
        grid.add_row(*cells(row, advice))
    console.print(grid)
    for line in ("* estimates; times faster: than uncompressed f32", *notes(advice), *conclusion(advice)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def as_json(advice: Advice) -> dict[str, Any]:
    """The advice as plain data; seconds, bytes, and bytes a second (None: unlimited).

    "pays_between" are the ranges of bandwidth in which the best method wins, None where there is nothing to compare.
    """
    hosts, link = advice.hosts, advice.link
    rows = [{
        "method": row.method, "bytes": row.bytes, "computation": row.computation, "compression": row.compression,
        "communication": communication(row.sent, hosts, link), "step": step(row, hosts, link),
        "collectives": [{"op": s.op, "kind": s.kind, "bytes": float(s.bytes)} for s in row.sent],
    } for row in advice.rows]  # fmt: skip
    ranges = paying(advice)
    between = None if ranges is None else [[low, None if high == math.inf else high] for low, high in ranges]
    return {"hosts": hosts, "link": finite(link._asdict()), "rows": rows, "failed": advice.failed,
            "conclusion": conclusion(advice), "pays_between": between}  # fmt: skip


def finite(figures: dict[str, float]) -> dict[str, float | None]:
    """JSON has no infinity: None in its place."""
    return {key: None if value == math.inf else value for key, value in figures.items()}


def write(folder: Path, title: str, command: str, page: str, data: dict[str, Any]) -> None:
    """advise.md and advise.json.

    Raises:
      UserError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    write_whole(folder / "advise.md", f"# {title}\n\n    {command}\n\n{page}".encode())
    write_whole(folder / "advise.json", json.dumps(data, indent=1).encode())


def name(method: str) -> str:
    """A method for people."""
    return LABELS.get(method, method)


def shown(seconds: float) -> str:
    """Seconds with three digits."""
    return f"{seconds:.3g}"


def bits(rate: float) -> str:
    """Bytes a second as bits, for people.

    Example:
      >>> bits(12.5e6), bits(float("inf"))
      ('100 Mbit/s', 'unlimited bandwidth')
    """
    if rate == math.inf:
        return "unlimited bandwidth"
    unit = next((u for u in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if 8 * rate >= u[0]), (1.0, ""))
    return f"{8 * rate / unit[0]:.3g} {unit[1]}bit/s"
