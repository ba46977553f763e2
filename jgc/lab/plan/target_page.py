"""The plan for targets as a table, a page, plan.json and a picture."""

import json
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid

import jgc
from jgc.lab.plan.programs import READ, Program, Refusal, Row
from jgc.lab.plan.targets import PACKAGES, Target
from jgc.lab.shared.pictures import COLOURS, new_figure, save_figure
from jgc.lab.shared.tables import filled, table
from jgc.training.rundir import write_whole
from jgc.training.table import size

DENSE = "dense"
LEFT_OUT = (
    "Cycles are the TPU compiler's estimates of fused operations. They leave out sorts, `TopK` calls, gathers, "
    "scatters and collectives, which carry none: plan.json counts those of each program."
)
WIDTH = 150  # where the output is not a terminal


class TargetPlan(NamedTuple):
    """The rows of one target.

    Attributes:
      target: the devices.
      model: its name for headings.
      shard: whether the devices of a node divide the parameters.
      values: number of parameters.
      leaves: of them.
      rows: `READ`'s first, then every phase of every method.
      gbits: Gbit/s of the slow link out of a host or slice; 0 if not given.
    """

    target: Target
    model: str
    shard: bool
    values: int
    leaves: int
    rows: tuple[Row, ...]
    gbits: float = 0.0

    @property
    def dense(self) -> Program | None:
        """The dense method's row."""
        return next((row for row in self.rows if isinstance(row, Program) and row.method == DENSE), None)


def heading(plan: TargetPlan) -> str:
    """The target, its nodes and the model, in one sentence."""
    target = plan.target
    if target.groups == 1:
        nodes = f"{len(target.devices)} nodes, one on each device of a {target.chip.group}"
    else:
        how = "which divide the parameters" if plan.shard else "which hold copies"
        nodes = f"{target.groups} nodes, each a {target.chip.group} of {target.per_group} devices, {how}"
    model = f"{plan.model}, {plan.values:,} parameters in {plan.leaves} leaves"
    return f"{target.name}: {nodes}; {model}, a gradient of {size(4 * plan.values)}"


def table_of(plan: TargetPlan) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; columns that are empty on this target are left out."""
    link = plan.target.slow_link
    head = ["method", "phase", f"inside a {plan.target.chip.group}", "of dense", link, "of dense", f"{link}, ms",
            "collectives", "temporary", "of the gradient", "arguments", "compile, s", "cycles", "reads"]  # fmt: skip
    return filled(head, [cells(row, plan) for row in plan.rows])


def cells(row: Row, plan: TargetPlan) -> list[str]:
    """A row of the table."""
    if isinstance(row, Refusal):
        return [row.method, f"refused: {row.reason}", *[""] * 12]
    read = next((one.cycles for one in plan.rows if isinstance(one, Program) and one.method == READ), None)
    cycles = ["", ""]
    if row.cycles and read:
        cycles = [f"{row.cycles.total:,}", f"{row.cycles.total / max(read.total, 1):.1f}"]
    memory = [size(row.temporary), f"{row.temporary / (4 * plan.values):.2f}", size(row.arguments)]
    if row.method == READ:
        return [row.method, *[""] * 7, *memory, f"{row.seconds:.1f}", *cycles]
    several = plan.target.groups > 1
    dense = plan.dense
    inside, across = sum(row.inside.values()), sum(row.across.values())
    sent = [_bytes(inside), _share(inside, dense and sum(dense.inside.values()))]
    sent += [_bytes(across), _share(across, dense and sum(dense.across.values()))] if several else ["", ""]
    ms = slow_ms(row, plan)
    sent += ["" if ms is None else f"{ms:,.3g}", collectives(row)]
    return [row.method, row.phase, *sent, *memory, f"{row.seconds:.1f}", *cycles]


def collectives(row: Program) -> str:
    """How many collectives a step runs, by kind."""
    times = Counter[str]()
    for one in row.collectives:
        times[one.op] += one.times
    return ", ".join(f"{count} {op}" for op, count in times.items())


def slow_ms(row: Program, plan: TargetPlan) -> float | None:
    """Milliseconds that a step's bytes need on the link out of a host or slice; None without a bandwidth or a link."""
    if not plan.gbits or plan.target.groups == 1:
        return None
    return 1e3 * 8 * sum(row.across.values()) * plan.target.per_group / (plan.gbits * 1e9)


def _bytes(count: float) -> str:
    return size(count) if count else ""


def _share(count: float, dense: float | None) -> str:
    return f"{count / dense:.4g}" if dense and count else ""


def notes(plan: TargetPlan) -> list[str]:
    """What the columns mean on this target."""
    told = ["Bytes are those that one device sends in a step, read from the compiled program; temporary memory and "
            "arguments are one device's, too."]  # fmt: skip
    if plan.target.groups > 1 and plan.gbits:
        told.append(
            f"The slow link's time is that of the bytes of all {plan.target.per_group} devices of a "
            f"{plan.target.chip.group} at {plan.gbits:g} Gbit/s, without latency."
        )
    if any(isinstance(row, Program) and row.cycles for row in plan.rows):
        told.append(f"{LEFT_OUT} `reads`: cycles over those of one read of the gradient.")
    return told


def show(plan: TargetPlan, console: Console) -> None:
    """Print a target's table."""
    head, rows = table_of(plan)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    grid = Grid(box=SIMPLE_HEAD, pad_edge=False)
    for name in head:
        left = name in ("method", "phase")
        grid.add_column(name.replace(" ", "\n"), justify="left" if left else "right", no_wrap=not left)
    for row in rows:
        grid.add_row(*row)
    console.print(heading(plan), highlight=False, soft_wrap=True)
    console.print(grid)
    for note in notes(plan):
        console.print(note, highlight=False, soft_wrap=True)


def markdown(plans: Sequence[TargetPlan]) -> str:
    """The page: a section for each target."""
    parts = [f"Compiled, not run. Versions: {', '.join(f'{name} {of}' for name, of in versions(plans).items())}."]
    for plan in plans:
        parts += [f"## {plan.target.name}", heading(plan) + ".", table(*table_of(plan)), *notes(plan)]
    return "\n\n".join(parts) + "\n"


def versions(plans: Sequence[TargetPlan]) -> dict[str, str]:
    """Versions of jgc, JAX and the compilers' packages."""
    found = {"jgc": jgc.__version__, "jax": jax.__version__}
    for package in dict.fromkeys(name for plan in plans for name in PACKAGES[plan.target.chip.kind].values()):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # put there in another way
            found[package] = "unknown"
    return found


def write_json(path: Path, plans: Sequence[TargetPlan], line: str) -> None:
    """Write all figures.

    Raises:
      UserError: the file cannot be written.
    """
    whole = {"command": line, "versions": versions(plans), "targets": [as_json(plan) for plan in plans]}
    write_whole(path, (json.dumps(whole, indent=1) + "\n").encode())


def as_json(plan: TargetPlan) -> dict[str, Any]:
    """The figures of one target."""

    def row(one: Row) -> dict[str, Any]:
        if isinstance(one, Refusal):
            return one._asdict()
        cycles = one.cycles and one.cycles._asdict()
        return {**one._asdict(), "cycles": cycles, "slow_link_ms": slow_ms(one, plan), "collectives": collectives(one)}

    return {
        "target": plan.target.name,
        "devices": len(plan.target.devices),
        "groups": plan.target.groups,
        "nodes": plan.target.nodes().count,
        "model": plan.model,
        "parameters": plan.values,
        "leaves": plan.leaves,
        "shard": plan.shard,
        "gbits": plan.gbits or None,
        "programs": [row(one) for one in plan.rows],
    }


def draw(path: Path, plans: Sequence[TargetPlan]) -> None:
    """Bytes that a device sends in the last phase of every method, on every target: over the slow link, if any."""
    figure = new_figure(10, 1 + 2.6 * len(plans))
    for axes, plan in zip(figure.subplots(len(plans), 1, squeeze=False)[:, 0], plans, strict=True):
        last = {row.method: row for row in plan.rows if isinstance(row, Program) and row.method != READ}
        several = plan.target.groups > 1
        sent = [sum((row.across if several else row.inside).values()) for row in last.values()]
        # points: a log scale has no zero for bars to start from
        axes.plot(range(len(last)), [max(x, 1) for x in sent], "o", color=COLOURS[1])
        axes.set_yscale("log")
        axes.margins(y=0.2)
        axes.set_xticks(range(len(last)), list(last), rotation=45, ha="right")
        axes.set_ylabel("bytes a device")
        where = plan.target.slow_link if several else f"inside a {plan.target.chip.group}"
        axes.set_title(f"{plan.target.name}, {plan.model}: sent {where} in a step", fontsize=10)
    save_figure(figure, path)
