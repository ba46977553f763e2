"""The page of `bench network`: a table for each number of hosts and rate, and bytes by the number of hosts."""

from pathlib import Path
from typing import Any

from jgc.lab.bench.network.figures import Figures, Interval, of_cells
from jgc.lab.bench.network.models import task_named
from jgc.lab.bench.network.namespaces import HEADERS, UNLIMITED
from jgc.lab.bench.network.results import Results
from jgc.lab.shared.tables import table
from jgc.training.output.table import size

TOLERANCE = 0.05  # between the interface and Wire.physical


def cells_of(measured: Results) -> list[tuple[int, str]]:
    """Numbers of hosts and rates with measurements, the slowest rate first."""
    from jgc.lab.shared.rate import bytes_per_second

    pairs = {(c["hosts"], c["rate"]) for c in measured["cells"].values() if c.get("full")}
    return sorted(pairs, key=lambda p: (p[0], float("inf") if p[1] == UNLIMITED else bytes_per_second(p[1])))


def page(measured: Results, pictures: list[Path]) -> str:
    """All measurements as Markdown.

    Args:
      found: see `jgc.lab.bench.network.results`.
      pictures: to show, next to the page.
    """
    parts = [about(measured), *(f"![{picture.stem}]({picture.name})" for picture in pictures)]
    for hosts, rate in cells_of(measured):
        title = f"## {hosts} hosts, {rate if rate != UNLIMITED else 'no limited rate'}"
        rows = of_cells(measured, hosts, rate)
        parts += [
            title,
            each_table(rows, task_named(measured["settings"]["model"]).unit),
            times(rows),
            bytes_table(rows),
        ]
    parts += [note for note in (growth(measured), failures(measured)) if note]
    return "\n\n".join(parts) + "\n"


def about(measured: Results) -> str:
    """The method of measurement, in words."""
    s = measured["settings"]
    task, versions = task_named(s["model"]), ", ".join(measured["versions"].values())
    wait = s.get("delay_ms")
    delayed = f" A process keeps every packet for {wait:g} ms at the switch." if wait else ""
    congestion = f" TCP's congestion control: {s['congestion']}." if "congestion" in s else ""
    kind = task.model if task.window else f"{task.model} for CIFAR with group norm"
    return (
        f"{kind}, {s.get('parameters', 0):,} parameters in {s.get('tensors', 0)} "
        f"tensors, {s['batch']} {task.examples} a host and step; {s['machine']}, {versions}. Hosts are network "
        "namespaces of ONE machine: they share its cores, and all compute at the same time, so that seconds say "
        "little, and ratios within a table much. Both frameworks use one thread a process. Rates by `tc tbf` in both "
        f"directions, MTU 1500, offloads: {s.get('offloads', 'not known')}.{congestion}{delayed} SGD with momentum; "
        "every method in its last phase, its state as initialised (an autoencoder untrained); all layers are treated "
        "alike.\n\n"
        "A step begins on all hosts at the same moment and ends when the slowest is done. Medians, with the range of "
        "90 % of bootstrap draws, of whole blocks of steps, in brackets. Computation: gradients and update, of that "
        "framework. Compression: the step with local copies instead of collectives, less computation (PyTorch: "
        "with a group of one process). Communication: the rest, waiting for other hosts included. Added: the step "
        "less computation. Processor: processor time of a host over that of its computation. Bytes are those that a "
        "host's interface counts, acknowledgements and retransmissions included; what Gloo adds to a collective was "
        "measured on single ones of the same kind and size. DDP f32 and fp16 send while they still compute, so that "
        "less may be added than their bytes need.\n\n"
        "H local steps (H = 30) are measured as whole rounds, which begin on all hosts together: H steps of "
        "each host and then the exchange. All figures are a round's, divided by H. Their computation is "
        "measured on as many steps without any exchange, if that row was measured."
    )


def each_table(rows: list[Figures], unit: str) -> str:
    """The table of seconds and bytes of a token or an image."""
    head = ["method", "steps or rounds", f"microseconds {unit}", "over that of no exchange",
            f"bytes that a host sends {unit}"]  # fmt: skip
    return table(head, [
        [row.label, str(row.steps), interval(Interval(*(1e6 * x for x in row.each)), 1), interval(row.over),
         f"{row.sent_each:,.3g}" if row.sent_each < 100 else f"{row.sent_each:,.0f}"] for row in rows
    ])  # fmt: skip


def times(rows: list[Figures]) -> str:
    """The table of seconds."""
    head = ["method", "steps", "step, s", "added, s", "computation", "compression", "communication",
            "processor, added", "floor of its bytes, s"]  # fmt: skip
    return table(head, [
        [row.label, str(row.steps), interval(row.step), interval(row.added), seconds(row.computation),
         seconds(row.compression), seconds(row.communication), seconds(row.cpu), seconds(row.floor)]
        for row in rows
    ])  # fmt: skip


def bytes_table(rows: list[Figures]) -> str:
    """The table of bytes."""
    head = ["method, one host in a step", "sent, without headers", "of that Gloo's framing",
            f"headers ({HEADERS} B a packet)", "received", "`Wire.physical`", "compiled program",
            "sent, without framing, over that", "of the twenty lines' bytes"]  # fmt: skip
    return table(head, [
        [row.label, size(row.sent), size(row.framing), size(row.headers), size(row.received), size(row.physical),
         f"{size(row.compiled)} (differs)" if row.audit else size(row.compiled), _over(row),
         "-" if row.of_twenty is None else f"{row.of_twenty:.3f}"]
        for row in rows
    ])  # fmt: skip


def _over(row: Figures) -> str:
    expected = row.physical if row.physical is not None else row.compiled
    if not expected:
        return "-"
    share = (row.sent - (row.framing or 0)) / expected
    return f"{share:.3f}" + ("" if abs(share - 1) <= TOLERANCE else " (outside 5 %)")


def growth(measured: Results) -> str:
    """Bytes by the number of hosts; empty for a single number."""
    counts = sorted({hosts for hosts, _ in cells_of(measured)})
    if len(counts) < 2:
        return ""
    sent: dict[str, dict[int, tuple[float, float]]] = {}
    for hosts, rate in cells_of(measured):
        for row in of_cells(measured, hosts, rate):
            sent.setdefault(row.label, {})[hosts] = (row.sent, row.received)
    first, last = counts[0], counts[-1]
    rows = []
    for label, by in sent.items():
        cells = [" / ".join(map(size, by[k])) if k in by else "-" for k in counts]
        whole = {first, last} <= by.keys() and by[first][0] > 0
        rows.append([label, *cells, f"{by[last][0] / by[first][0]:.2f}" if whole else "-"])
    ring = (2 * (last - 1) / last) / (2 * (first - 1) / first)
    gathers = (last - 1) / (first - 1)
    return "\n\n".join([
        "## Bytes as hosts are added",
        f"Sent / received by a host in a step, headers apart. An all-reduce or a ring sends 2 (K - 1) / K of its "
        f"payload, from {first} to {last} hosts {ring:.2f} times as much; a gather K - 1 payloads, {gathers:.2f} times "
        "as much.",
        table(["method", *(f"{k} hosts" for k in counts), f"{last} over {first}"], rows),
    ])  # fmt: skip


def failures(measured: Results) -> str:
    """Methods that failed, and those whose compiled program sends other bytes than `Wire` says."""
    lines = [f"- {name}: {told.get('error') or told.get('audit')}" for name, told in measured["methods"].items()
             if told.get("error") or told.get("audit")]  # fmt: skip
    return "\n".join(["## What went wrong (hosts/method)", "", *lines]) if lines else ""


def interval(value: Interval, digits: int = 3) -> str:
    """For people.

    Example:
      >>> interval(Interval(0.12345, 0.1, 0.2))
      '0.123 [0.100, 0.200]'
    """
    return f"{value.middle:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def summary(measured: Results) -> list[dict[str, Any]]:
    """Seconds and bytes of a token or an image of every row, as plain data."""
    unit = task_named(measured["settings"]["model"]).unit.replace(" ", "_")
    return [
        {"hosts": hosts, "rate": rate, "method": row.method, f"seconds_{unit}": row.each,
         f"bytes_{unit}": row.sent_each, "over_no_exchange": row.over}
        for hosts, rate in cells_of(measured) for row in of_cells(measured, hosts, rate)
    ]  # fmt: skip


def seconds(value: float | None) -> str:
    """Seconds, or a dash if not known."""
    return "-" if value is None else f"{value:.3f}"
