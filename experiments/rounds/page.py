"""The page of `python -m experiments rounds` from the files of a folder."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean

from experiments.rounds import overlap, plot, tables
from experiments.rounds.cells import (
    BUCKET,
    GOAL,
    MESSAGES,
    Cell,
    Measured,
    read_cells,
    read_lines,
)
from experiments.rounds.newcomer import NEWCOMERS, SCALING
from experiments.rounds.tables import Row
from jgc.lab.bench.network.models import task_named
from jgc.lab.shared.page import write_page
from jgc.lab.shared.rate import bytes_per_second

PAGE, TITLE = "README.md", "Rounds through a bucket on slow links"
CLAIMS = (("qsgd", "10mbit"), ("sparseloco", "1mbit"))  # with H = 30
COMMANDS = "commands.txt"
ABOUT = """The commands filled this page together: none measures again what the folder holds.

Four nodes are processes in network namespaces, each behind `tc tbf` at the rate in both directions;
the bucket is SeaweedFS on a host without a rate, behind a relay at which every request waits for
the delay. With collectives half of the delay is that of every packet in either direction.
Utilisation is time in local steps over wall time, a node's mean, without joining and the first
round. Bytes and requests are a node's in a round: "up" and "down" count objects (a listing has
300 bytes an entry), "link" what its interface counts, headers included. "In series":
requests one by one: the upload of the last message, and from its arrival until a node has
the list. With overlap steps go on meanwhile, and none is shown; a step takes longer then, because
the exchange uses the same cores, and utilisation counts that as time in steps. It does not depend on
the outer step, as losses do; the chart's outer steps are not the defaults. Losses are of the shared
parameters, on 128 windows of the validation text; evaluating takes no time of a run. The optimiser
is the workload's AdamW with a constant rate after its warm-up. torchft is its `LocalSGD`, which
averages after a quorum and before a commit. An empty place was not measured. Learned top-k has
no row through a bucket: its positions follow from all nodes' messages, so that a node cannot
encode by itself, and `jgc.rounds.join` refuses it."""
PAIRS = """This table has the losses in nats of nodes that meet in a bucket, at the second when the run with
overlap ends, by utilisation without overlap. The table of seconds and bytes has the outer steps:
one with overlap, one without. Pairs whose run without overlap ended earlier are left out."""
REDUCERS = """Downloads grow with the nodes: each reads K - 1 messages. With a reducer for each
fragment they would not: node f reads the f-th part of every message (a GET of a range), decodes and
averages, encodes the mean once more with noise of round and fragment, and creates it under the
fragment's name; the list then names K fragments, and each node reads K - 1 of them. Decoding and
mean have the same bits on all nodes, so after `patience` the next node may reduce the fragment of
one that is late, and a create decides. That costs three more latencies in series (the listing that
shows all messages, the ranges, the fragments) and a second rounding, as in two shots
(docs/results/exchanges.md: at 4 bits at most 1.42 times the error of a gather). It is not built;
computed, not measured:"""


def write(folder: Path, line: str) -> str:
    """Write the page and its picture from what is in the folder, and return the page.

    Args:
      folder: of results.
      line: the command line, for a folder without any; the page shows the first that measured.
    """
    if not (folder / COMMANDS).exists():
        note_command(folder, line)
    commands = (folder / COMMANDS).read_text().splitlines()
    results = read_cells(folder)
    chart = {cell: x for cell, x in results.items() if cell.steps != overlap.ENDLESS}
    searches = {cell: x for cell, x in results.items() if cell.steps == overlap.ENDLESS}
    parts = [f"and {len(commands) - 1} more, in [{COMMANDS}]({COMMANDS})."] if commands[1:] else []
    parts += [_claims(chart)] if chart else []
    parts += _chart(chart, folder)
    if found := overlap.pairs(chart):
        parts += ["## Overlap in the runs of the chart", PAIRS, tables.of_pairs(found)]
    parts += _overlap(searches)
    parts += _newcomers(folder)
    text = "\n\n".join(part for part in parts if part) or "Nothing has been measured yet."
    write_page(folder / PAGE, TITLE, commands[0], f"{text}\n")
    return text


def note_command(folder: Path, line: str) -> None:
    """Add a command that measured to the folder's."""
    path = folder / COMMANDS
    lines = path.read_text().splitlines() if path.exists() else []
    if line not in lines:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{x}\n" for x in [*lines, line]))


def _chart(chart: Mapping[Cell, Measured], folder: Path) -> list[str]:
    """Picture and tables, for each pace of runs."""
    parts = []
    for i, (setting, cells) in enumerate(groupby(sorted(chart, key=_setting), key=_setting)):
        rows = tables.rows_of({cell: chart[cell] for cell in cells})
        path = folder / (plot.NAME if not i else f"rounds-{i + 1}.png")
        plot.draw(rows, path)
        alt = "Utilisation by rate, local steps a round and delay, and losses against seconds"
        parts += [f"![{alt}]({path.name})", _settings(setting, rows), tables.utilisations(rows)]
        parts += ["## Seconds, bytes and requests", tables.details(rows)]
    return [*parts, f"## How it was measured\n\n{ABOUT}"] if parts else []


def _setting(cell: Cell) -> tuple:
    return cell.workload, cell.nodes, cell.step_seconds, cell.seconds


def _settings(setting: tuple, rows: Sequence[Row]) -> str:
    workload, nodes, pace, seconds = setting
    steps = sorted({row.cell.steps for row in rows})
    lasts = f"lasts at least {pace:g} s" if pace else "takes what the machine takes"
    ends = f", or until a round or two after {seconds:g} s" if seconds else ""
    runs = [run for row in rows for run in row.runs]
    versions = ", ".join(sorted({run["version"] for run in runs}))
    data = ", ".join(sorted({run["data"] for run in runs}))
    return (
        f"`{workload}` ({data}), {nodes} nodes with {task_named(workload).batch} windows each; a "
        f"local step {lasts}; "
        f"{' or '.join(map(str, steps))} local steps{ends}; {versions}."
    )


def _claims(chart: Mapping[Cell, Measured]) -> str:
    """Whether the utilisation that was asked for is reached, in a sentence each."""
    lines = []
    for method, rate in CLAIMS:
        cells = {
            cell: x for cell, x in chart.items()
            if (cell.via, cell.method, cell.rate) == (BUCKET, method, rate)
            and (cell.every, cell.delay_ms) == (30, 0)
        }  # fmt: skip
        for row in tables.rows_of(cells):
            use, pace = row.mean("utilisation"), row.cell.step_seconds
            assert use is not None
            side = "at least" if use >= GOAL else "below"
            overlapped = tables.overlap_of(row.cell)
            how = "without overlap" if overlapped == "no" else f"with overlap ({overlapped})"
            step = f", steps of {pace:g} s at least" if pace else ""
            seeds = f"{len(row.runs)} {'seed' if len(row.runs) == 1 else 'seeds'}"
            lines.append(
                f"- {tables.name_of(row.cell)} at {tables.link(rate)}, H = 30, {how}{step}: utilisation "
                f"{row.text('utilisation', 3)} ({seeds}), {side} {GOAL}."
            )
    lines += _reached(chart)
    buckets = [x for cell, x in chart.items() if cell.via == BUCKET and not cell.overlap]
    series = [x["most_latencies"] for x in buckets if x.get("most_latencies") is not None]
    if series:
        typical = mean(x["latencies"] for x in buckets if x.get("latencies") is not None)
        lines.append(
            f"- Without overlap a round has {typical:.1f} requests in series (median, mean over "
            f"{len(series)} runs), {max(series)} at most."
        )
    return "\n".join(lines)


def _reached(chart: Mapping[Cell, Measured]) -> list[str]:
    """The lowest rate at which each message's utilisation is as asked for, as a list's entry."""
    rows = [
        row for row in tables.rows_of(chart)
        if (row.cell.via, row.cell.every, row.cell.delay_ms) == (BUCKET, 30, 0)
    ]  # fmt: skip
    parts = []
    for method in dict.fromkeys(row.cell.method for row in rows):
        ends = []
        for i, how in enumerate(("without overlap", "with it")):
            of = [row for row in rows if (row.cell.method, row.cell.overlap) == (method, i)]
            enough = [row.cell.rate for row in of if (row.mean("utilisation") or 0.0) >= GOAL]
            if of:
                slowest = min(enough, key=bytes_per_second) if enough else None
                ends.append(f"{tables.link(slowest) if slowest else 'none of the rates'} {how}")
        parts.append(f"{MESSAGES[method].name}: {', '.join(ends)}")
    if not parts:
        return []
    return [
        f"- The lowest rate measured at which utilisation is at least {GOAL}, through a bucket, "
        f"H = 30, no delay. {'; '.join(parts)}."
    ]


def _overlap(searches: Mapping[Cell, Measured]) -> list[str]:
    """Overlap at equal seconds: what was searched, and the best of both with all seeds."""
    parts = []
    seeds = sorted({cell.seed for cell in searches})
    first = {cell: x for cell, x in searches.items() if cell.seed == seeds[0]} if seeds else {}
    for _, cells in groupby(sorted(first, key=_setting), key=_setting):
        of = list(cells)
        rows = [row for row in tables.rows_of(searches) if _setting(row.cell) == _setting(of[0])]
        losses = {row.cell: _loss(row) for row in rows}
        parts += [
            f"## Overlap at equal seconds\n\n{overlap.verdict(searches, of[0], seeds)}",
            "QSGD with 4 bits at 10 Mbit/s, no delay, H = 10, a local step of at least "
            f"{of[0].step_seconds:g} s; "
            f"{of[0].seconds:g} s each.",
            tables.of_overlap(rows, losses),
        ]
    return parts


def _loss(row: Row) -> float:
    losses = [overlap.final(row.cell, {row.cell: run}) for run in row.runs]
    return mean(losses) if all(map(math.isfinite, losses)) else math.inf


def _newcomers(folder: Path) -> list[str]:
    """What newcomers read, and requests and bytes as nodes are added."""
    joined, sizes = read_lines(folder, NEWCOMERS), read_lines(folder, SCALING)
    parts = []
    if joined:
        most = max(line["ratio"] for line in joined)
        parts += [
            "## A newcomer",
            f"A newcomer reads at most {most:.4f} times a checkpoint, the lists since and their "
            "messages. "
            "Nodes are threads of one process, messages 4-bit QSGD, a checkpoint every 20 rounds.",
            tables.newcomers(joined),
        ]
    if sizes:
        parts += [
            "## More nodes",
            "A node and round, threads on one bucket: PUT and bytes up stay as they are, GET and "
            "bytes down grow as K - 1. A GET takes 16 objects in parallel, so that 32 nodes need a "
            "latency more.",
            tables.scaling(sizes),
            REDUCERS,
            tables.with_reducers(sizes[0]["payload"], sorted({line["nodes"] for line in sizes})),
        ]
    return parts
