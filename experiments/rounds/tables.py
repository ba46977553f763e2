"""Tables of `python -m experiments rounds`: means over seeds, with their sample standard deviation."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from experiments.rounds.cells import BUCKET, GLOO, MESSAGES, TORCH, TORCHFT, Cell, Measured, shown
from experiments.rounds.newcomer import reduced
from experiments.rounds.overlap import Pair
from jgc.lab.shared.rate import bits, bytes_per_second
from jgc.lab.shared.tables import filled_table, table
from jgc.training.output.table import size

WAYS = {
    BUCKET: "rounds", GLOO: "`jgc.local_steps`, Gloo", TORCH: "PyTorch local SGD, Gloo",
    TORCHFT: "torchft LocalSGD, Gloo",
}  # fmt: skip


class Row(NamedTuple):
    """A cell with all of its seeds; `cell` has the first of them."""

    cell: Cell
    runs: tuple[Measured, ...]

    def mean(self, name: str) -> float | None:
        """The mean of a figure, None if a run has it not."""
        values = [run.get(name) for run in self.runs]
        return None if None in values else mean(values)  # type: ignore[type-var]

    def text(self, name: str, digits: int) -> str:
        """The mean of a figure, with its deviation if there are several seeds."""
        value = self.mean(name)
        if value is None:
            return ""
        spread = stdev(run[name] for run in self.runs) if len(self.runs) > 1 else None
        return f"{value:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def rows_of(results: Mapping[Cell, Measured]) -> list[Row]:
    """A row for all runs that differ in their seed only, in the order of `order`."""
    groups = defaultdict(list)
    for cell in sorted(results, key=lambda cell: cell.seed):
        groups[cell._replace(seed=-1)].append(cell)
    rows = [Row(cells[0], tuple(results[x] for x in cells)) for cells in groups.values()]
    return sorted(rows, key=lambda row: order(row.cell))


def order(cell: Cell) -> tuple[Any, ...]:
    """Where a cell stands in a table."""
    return (
        list(WAYS).index(cell.via), list(MESSAGES).index(cell.method), cell.every, cell.overlap,
        shown(cell.outer.merge), cell.outer[:2], bytes_per_second(cell.rate), cell.delay_ms,
        cell.steps,
    )  # fmt: skip


def places(cells: Iterable[Cell]) -> list[tuple[str, float]]:
    """The links of cells, the slowest first."""
    pairs = {(cell.rate, cell.delay_ms) for cell in cells}
    return sorted(pairs, key=lambda pair: (bytes_per_second(pair[0]), pair[1]))


def link(rate: str, delay_ms: float | None = None) -> str:
    """A link for people.

    Example:
      >>> link("10mbit", 100.0), link("1gbit")
      ('10 Mbit/s, 100 ms', '1 Gbit/s')
    """
    return bits(bytes_per_second(rate)) + ("" if delay_ms is None else f", {delay_ms:g} ms")


def name_of(cell: Cell) -> str:
    """A line's name."""
    return f"{WAYS[cell.via]}: {MESSAGES[cell.method].name}"


def utilisations(rows: Sequence[Row]) -> str:
    """Utilisation by link."""
    columns = places(row.cell for row in rows)
    lines: dict[tuple[str, ...], dict[tuple[str, float], str]] = {}
    for row in rows:
        cell = row.cell
        line = name_of(cell), str(cell.every), overlap_of(cell), str(cell.steps)
        lines.setdefault(line, {})[cell.rate, cell.delay_ms] = row.text("utilisation", 3)
    head = ["", "H", "overlap", "steps", *(link(*place) for place in columns)]
    return filled_table(
        head, [[*line, *(of.get(x, "") for x in columns)] for line, of in lines.items()]
    )


def overlap_of(cell: Cell) -> str:
    """A cell's overlap and merge for people.

    Example:
      >>> from experiments.rounds.cells import Outer
      >>> outer = Outer(1.0, 0.0, 0.5)
      >>> like = Cell("bucket", "qsgd", "1mbit", 0.0, 10, 1, outer, 1, 0, 0, 0, 4, "")
      >>> overlap_of(like), overlap_of(like._replace(overlap=0))
      ('merge 0.5', 'no')
    """
    return f"merge {shown(cell.outer.merge)}" if cell.overlap else "no"


def details(rows: Sequence[Row]) -> str:
    """Seconds, losses, bytes and requests of every row."""
    head = [
        "", "H", "overlap", "outer rate, momentum", "link", "loss, nats", "after, s", "a round, s",
        "a step, s", "exchange, s", "waited, s", "up", "down", "link up", "link down", "PUT",
        "LIST",
        "GET", "in series: median, most", "USD a 1,000: requests, egress",
    ]  # fmt: skip
    return filled_table(head, [_detail(row) for row in rows])


def _detail(row: Row) -> list[str]:
    cell, last = row.cell, mean(run["curve"][-1][0] for run in row.runs)
    series, most = row.mean("latencies"), row.mean("most_latencies")
    requests, egress = row.mean("dollars_requests"), row.mean("dollars_egress")
    return [
        name_of(cell), str(cell.every), overlap_of(cell),
        f"{cell.outer.rate:g}, {cell.outer.momentum:g}",
        link(cell.rate, cell.delay_ms), row.text("loss", 3), f"{last:.0f}",
        row.text("seconds_round", 2), row.text("seconds_step", 3), row.text("seconds_exchange", 2),
        row.text("waited", 2),
        *(bytes_of(row.mean(x)) for x in ("up", "down", "link_up", "link_down")),
        row.text("create", 1), row.text("list", 1), row.text("get", 1),
        "" if series is None or most is None or cell.overlap else f"{series:.3g}, {most:.3g}",
        "" if requests is None or egress is None else f"{1e3 * requests:.3f}, {1e3 * egress:.3f}",
    ]  # fmt: skip


def bytes_of(value: float | None) -> str:
    """Bytes for people, "" if not known."""
    return "" if value is None else size(value)


def of_overlap(rows: Sequence[Row], losses: Mapping[Cell, float]) -> str:
    """The search for an outer step with and without overlap."""
    lines = [
        [overlap_of(row.cell), f"{row.cell.outer.rate:g}", f"{row.cell.outer.momentum:g}",
         f"{losses[row.cell]:.3f}", f"{row.mean('closed'):.0f}", row.text("utilisation", 3),
         len(row.runs)]
        for row in sorted(rows, key=lambda row: (row.cell.overlap, losses[row.cell]))
    ]  # fmt: skip
    head = ["overlap", "outer rate", "momentum", "loss, nats", "rounds", "utilisation", "seeds"]
    return table(head, lines)


def of_pairs(pairs: Sequence[Pair]) -> str:
    """Losses with overlap and without at equal seconds."""
    head = ["", "H", "link", "utilisation without", "loss without", "loss with", "seeds"]
    return table(head, [
        [MESSAGES[x.cell.method].name, x.cell.every, link(x.cell.rate, x.cell.delay_ms),
         f"{x.utilisation:.3f}", *(f"{loss:.3f}" for loss in x.losses), x.seeds]
        for x in pairs
    ])  # fmt: skip


def newcomers(lines: Sequence[Mapping[str, Any]]) -> str:
    """What newcomers read."""
    head = [
        "nodes", "bucket", "values", "joined after rounds", "replayed", "checkpoint", "lists",
        "their messages",
        "read in all", "over these", "requests", "counted in round after joining",
    ]  # fmt: skip
    return table(head, [
        [x["nodes"], x["where"], f"{x['values']:,}", x["joined"], x["replayed"],
         size(x["checkpoint"]),
         size(x["lists"]), size(x["messages"]), size(x["read"]), f"{x['ratio']:.4f}", x["requests"],
         x["counted"] or f"not within {x['nodes']}"]
        for x in lines
    ])  # fmt: skip


def scaling(lines: Sequence[Mapping[str, Any]]) -> str:
    """Requests and bytes as nodes are added."""
    head = [
        "nodes", "bucket", "message", "PUT", "LIST", "GET", "up", "down",
        "down over (K - 1) messages",
        "in series: median, most",
    ]  # fmt: skip
    rows = []
    for x in sorted(lines, key=lambda x: (x["where"], x["nodes"])):
        others = (x["nodes"] - 1) * x["payload"]
        over = f"{x['down'] / others:.3f}" if others else "-"
        counts = [f"{x[name]:.2f}" for name in ("create", "list", "get")]
        series = f"{x['latencies']:g}, {x['most_latencies']:g}"
        ends = [size(x["payload"]), *counts, size(x["up"]), size(x["down"]), over, series]
        rows.append([x["nodes"], x["where"], *ends])
    return table(head, rows)


def with_reducers(payload: float, counts: Sequence[int]) -> str:
    """Bytes with a reducer for each fragment, computed, next to those without."""
    rows = []
    for nodes in counts:
        up, down = reduced(payload, nodes)
        rows.append([nodes, size(payload), size((nodes - 1) * payload), size(up), size(down)])
    return table(["nodes", "up now", "down now", "up with reducers", "down with reducers"], rows)
