"""Advice as a page, on the terminal and as JSON."""

import json
import math
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from jgc.lab.advise.advice import CONTROL, F32, UNCOMPRESSED, Advice, conclusion, name, paying
from jgc.lab.advise.evidence import keeps_accuracy, on_record
from jgc.lab.advise.model import BUCKET, REQUESTS, Row, communication, step
from jgc.lab.shared.page import write_page
from jgc.lab.shared.rate import bits
from jgc.lab.shared.tables import table
from jgc.training.data.score import NATS
from jgc.training.output.table import size
from jgc.training.run.folder import write_whole

HEAD = ("method", "sent by a host in a step", "computation, s", "compression, s", "communication, s (estimate)",
        "step, s", "times faster than f32", "accuracy on record")  # fmt: skip


def cells(row: Row, advice: Advice, digits: int = 4) -> list[str]:
    """A row of the table, seconds with `digits` decimals."""
    hosts, link = advice.hosts, advice.link
    step_seconds = step(row, hosts, link)
    f32 = next((step(r, hosts, link) for r in advice.rows if r.method == F32), None)
    control = " (control)" if row.method == CONTROL else ""
    compression, network = (x / row.every for x in (row.compression, communication(row.sent, hosts, link)))
    seconds = [f"{x:.{digits}f}" for x in (row.computation, compression, network, step_seconds)]
    ratio = "-" if f32 is None or not step_seconds else f"{f32 / step_seconds:.2f}"
    return [name(row.method) + control, size(row.bytes), *seconds, ratio, accuracy(row, advice.kind)]


def accuracy(row: Row, kind: str) -> str:
    """The difference from uncompressed exchanges in every step that is on record for a kind of data."""
    local = row.every > 1
    record = on_record(row.method, kind, local)
    if record is None:
        return "" if not kind or row.method == CONTROL or (row.method in UNCOMPRESSED and not local) else "none"
    unit = " nats" if record.score is NATS else ""  # on text they stand next to perplexities
    far = not keeps_accuracy(row.method, kind, local)
    return f"{record.difference:+.2f}{unit}" + (", too far" if far else "")


def notes(advice: Advice) -> list[str]:
    """Notes on the figures."""
    link = advice.link
    limit = "" if link.limit == math.inf else f", a host sends at most {bits(link.limit)}"
    what = f"latency {link.latency:.3g} s a message, overhead {link.overhead:.3g} s a collective"
    if any(s.op == BUCKET for row in advice.rows for s in row.sent):
        what = (
            f"they meet in a bucket: a message up, {advice.hosts - 1} down, and {REQUESTS} requests of "
            f"{link.latency:.3g} s in series"
        )
    share = f"messages get {100 * link.efficiency:.1f} % of the bandwidth"
    lines = [
        f"{advice.hosts} hosts at {bits(link.rate)}; {what}, {share}{limit}. {advice.about}",
        "Computation and compression are measured, unless they are said to be given; communication, and with it the "
        "step, is an estimate without overlap of communication with computation. Bytes come from `Wire.physical`. "
        "Every method is in its last phase, which has most steps of a run (bytes of two phases in turn: their mean); "
        "an uncompressed step before it takes as long as uncompressed f32. Recommended are only methods that keep "
        "their accuracy on record for data of this kind, however fast others are.",
    ]
    every = max((row.every for row in advice.rows), default=1)
    if every > 1:
        lines.append(
            f"Methods exchange pseudo-gradients every {every} steps, uncompressed f32 and f16 gradients in every step: "
            f"a step has one part in {every} of an exchange's bytes and seconds. The outer step is not counted. "
            "Accuracies on record are of local steps, too, compared with exchanges in every step. Recommended are "
            "methods that keep the accuracy of equally rare uncompressed exchanges."
        )
    return lines + [f"Left out: {method}: {why}" for method, why in advice.failed.items()]


def markdown(advice: Advice) -> str:
    """The advice as a page."""
    rows = [cells(row, advice) for row in advice.rows]
    sentences = " ".join(conclusion(advice))
    return "\n\n".join([sentences[:1].upper() + sentences[1:], table(HEAD, rows), *notes(advice)]) + "\n"


def show(advice: Advice, console: Console) -> None:
    """Print the advice."""
    grid = Table(title="Does it pay?", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(("method", "a host\nsends", "com-\npute\ns", "com-\npress\ns", "network\ns*", "step\ns*",
                                "times\nfaster", "accu-\nracy")):  # fmt: skip
        grid.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in advice.rows:
        *figures, record = cells(row, advice, 3)
        grid.add_row(*figures, record.removesuffix(", too far"))
    widest = Measurement.get(console, console.options.update(width=200), grid).maximum
    console.width = max(console.width, widest)  # a narrow terminal would cut the figures
    console.print(grid)
    key = "* estimates; times faster: than uncompressed f32; accuracy: on record, against uncompressed runs"
    for line in (key, *notes(advice), *conclusion(advice)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def as_json(advice: Advice) -> dict[str, Any]:
    """The advice as plain data; seconds, bytes, and bytes a second (None: unlimited).

    "pays_between" are the ranges of bandwidth in which compression pays, None if there is nothing to compare.
    """
    hosts, link = advice.hosts, advice.link
    rows = [{
        "method": row.method, "accuracy": accuracy(row, advice.kind), "every": row.every, "bytes": row.bytes,
        "computation": row.computation, "compression": row.compression / row.every,
        "communication": communication(row.sent, hosts, link) / row.every, "step": step(row, hosts, link),
        "collectives": [{"op": s.op, "kind": s.field, "bytes": float(s.bytes)} for s in row.sent],
    } for row in advice.rows]  # fmt: skip
    ranges = paying(advice)
    between = None if ranges is None else [[low, None if high == math.inf else high] for low, high in ranges]
    return {"hosts": hosts, "link": finite(link._asdict()), "rows": rows, "failed": advice.failed,
            "kind": advice.kind, "conclusion": conclusion(advice), "pays_between": between}  # fmt: skip


def finite(figures: dict[str, float]) -> dict[str, float | None]:
    """JSON has no infinity: None in its place."""
    return {key: None if value == math.inf else value for key, value in figures.items()}


def write(folder: Path, title: str, line: str, page: str, data: dict[str, Any]) -> None:
    """Write advise.md and advise.json.

    Raises:
      UserError: they cannot be written.
    """
    write_page(folder / "advise.md", title, line, page)
    write_whole(folder / "advise.json", json.dumps(data, indent=1).encode())
