"""The plan for targets as a table, a page and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid

from jgc.lab.plan.programs import READ, Program, Refusal, Row
from jgc.lab.plan.targets import Target, versions
from jgc.lab.shared.pictures import COLOURS, new_figure, save_figure
from jgc.lab.shared.tables import filled, table
from jgc.training.output.table import size

DENSE = "dense"
LEFT_OUT = (
    "Cycles are the TPU compiler's estimates of fused operations. They leave out sorts, `TopK` calls, gathers, "
    "scatters and collectives, which carry none: the JSON file counts them for each program."
)
KERNELS = (
    "Kernels and host copies are counted in the compiled program: an instruction that XLA runs as several kernels "
    "(a sort) counts once. A host copy is a predicate that decides a loop or branch, and the GPU waits for it."
)
BYTES = (
    "Bytes are those that one device sends in a step in the method's last phase, read from the compiled program: over "
    "the slow link where there is one."
)
TRACED = (
    "Bytes are those that one device sends in a step, counted while the step was traced; nothing was compiled. "
    "`pytest -m targets` compares such counts with compiled programs, for small parameters and every method."
)
WIDTH = 150  # where the output is not a terminal


class TargetPlan(NamedTuple):
    """The rows of one target.

    Attributes:
      target: the devices.
      model: its name for headings.
      shard: whether parameters are sharded within a node.
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
        how = "which hold shards" if plan.shard else "which hold copies"
        nodes = f"{target.groups} nodes, each a {target.chip.group} of {target.per_group} devices, {how}"
    model = f"{plan.model}, {plan.values:,} parameters in {plan.leaves} leaves"
    return f"{target.name}: {nodes}; {model}, a gradient of {size(4 * plan.values)}"


def table_of(plan: TargetPlan) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; columns that are empty on this target are left out."""
    link = plan.target.slow_link
    head = ["method", "phase", f"inside a {plan.target.chip.group}", "of dense", link, "of dense", f"{link}, ms",
            "collectives", "temporary", "of the gradient", "arguments", "compile, s", "cycles", "reads",
            "kernels", "host copies"]  # fmt: skip
    return filled(head, [cells(row, plan) for row in plan.rows])


def cells(row: Row, plan: TargetPlan) -> list[str]:
    """A row of the table."""
    if isinstance(row, Refusal):
        return [row.method, f"refused: {row.reason}", *[""] * 14]
    costs = [f"{row.cycles.total:,}" if row.cycles else "", str(reads(row, plan) or "")]
    if row.kernels:
        at_least = "" if row.kernels.is_complete else ">= "
        costs += [f"{at_least}{row.kernels.launches}", f"{at_least}{row.kernels.host_copies}"]
    else:
        costs += ["", ""]
    memory = ["", "", ""]
    if row.temporary is not None:
        memory = [size(row.temporary), f"{row.temporary / (4 * plan.values):.2f}", size(row.arguments)]
    seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
    if row.method == READ:
        return [row.method, *[""] * 7, *memory, seconds, *costs]
    several = plan.target.groups > 1
    dense = plan.dense
    inside, across = sum(row.inside.values()), sum(row.across.values())
    sent = [_bytes(inside), _share(inside, dense and sum(dense.inside.values()))]
    sent += [_bytes(across), _share(across, dense and sum(dense.across.values()))] if several else ["", ""]
    ms = slow_ms(row, plan)
    sent += ["" if ms is None else _ms(ms), ", ".join(f"{count} {op}" for op, count in row.collectives.items())]
    return [row.method, row.phase, *sent, *memory, seconds, *costs]


def reads(row: Program, plan: TargetPlan) -> float | None:
    """A program's estimated cycles over one read of the gradient's, if the compiler estimates them."""
    read = next(
        (program.cycles for program in plan.rows if isinstance(program, Program) and program.method == READ), None
    )
    return round(row.cycles.total / max(read.total, 1), 1) if row.cycles and read else None


def is_compiled(plan: TargetPlan) -> bool:
    """Whether the plan's programs were compiled, not only traced."""
    return any(isinstance(row, Program) and row.method == READ for row in plan.rows)


def slow_ms(row: Program, plan: TargetPlan) -> float | None:
    """Milliseconds that a step's bytes need on the link out of a host or slice; None without a bandwidth or a link."""
    if not plan.gbits or plan.target.groups == 1:
        return None
    return 1e3 * 8 * sum(row.across.values()) * plan.target.per_group / (plan.gbits * 1e9)


def _ms(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _bytes(count: float) -> str:
    return size(count) if count else ""


def _share(count: float, dense: float | None) -> str:
    return f"{count / dense:.4g}" if dense and count else ""


def notes(plan: TargetPlan) -> list[str]:
    """The meaning of the columns on this target."""
    told = ["Bytes are those that one device sends in a step, read from the compiled program; temporary memory and "
            "arguments are also one device's." if is_compiled(plan) else TRACED]  # fmt: skip
    if plan.target.groups > 1 and plan.gbits:
        told.append(
            f"The slow link's time is for the bytes of all {plan.target.per_group} devices of a "
            f"{plan.target.chip.group} at {plan.gbits:g} Gbit/s, without latency."
        )
    if any(isinstance(row, Program) and row.cycles for row in plan.rows):
        told.append(f"{LEFT_OUT} `reads`: cycles, in multiples of one read of the gradient.")
    if any(isinstance(row, Program) and row.kernels for row in plan.rows):
        told.append(KERNELS)
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


def markdown(plans: Sequence[TargetPlan], files: str = "") -> str:
    """The page: the table of one target, or of several the bytes of every method's last phase.

    Args:
      plans: of the targets.
      files: the names of the files with all figures.
    """
    of = ", ".join(f"{name} {version}" for name, version in versions([plan.target for plan in plans]).items())
    headings = [heading(plan) + "." for plan in plans]
    how = "Compiled" if is_compiled(plans[0]) else "Traced"
    if len(plans) == 1:
        parts = [*headings, table(*table_of(plans[0])), *notes(plans[0])]
    else:
        parts = [table(*bytes_table(plans)), BYTES if is_compiled(plans[0]) else TRACED]
        parts.append("\n".join(f"- {line}" for line in headings))
    return "\n\n".join([f"{how}, not run. Versions: {of}.", *parts, files]).rstrip() + "\n"


def bytes_table(plans: Sequence[TargetPlan]) -> tuple[list[str], list[list[str]]]:
    """A device's bytes in the last phase of every method, by target, with their share of dense."""
    sent = [last_sent(plan) for plan in plans]
    rows = []
    for method in dict.fromkeys(row.method for plan in plans for row in plan.rows if row.method != READ):
        row = [method]
        for sizes in sent:
            count = sizes.get(method)
            share = f"{count / sizes[DENSE]:.2g} of dense" if count and DENSE in sizes and method != DENSE else ""
            row.append("refused" if count is None else ", ".join(filter(None, [size(count), share])))
        rows.append(row)
    return ["method", *(f"{plan.target.name}, {link_of(plan)}" for plan in plans)], rows


def last_sent(plan: TargetPlan) -> dict[str, float]:
    """Bytes that a device sends in the last phase of every method over the slow link, or without one inside.

    Without methods of which a phase was refused.
    """
    refused = {row.method for row in plan.rows if isinstance(row, Refusal)}
    programs = [row for row in plan.rows if isinstance(row, Program)]
    last = {row.method: row for row in programs if row.method not in {READ, *refused}}
    several = plan.target.groups > 1
    return {name: sum((row.across if several else row.inside).values()) for name, row in last.items()}


def link_of(plan: TargetPlan) -> str:
    """The link that `last_sent` counts."""
    return plan.target.slow_link if plan.target.groups > 1 else f"inside a {plan.target.chip.group}"


def draw(path: Path, plans: Sequence[TargetPlan]) -> None:
    """Bytes that a device sends in the last phase of every method, on every target: over the slow link, if any."""
    figure = new_figure(10, 1 + 2.6 * len(plans))
    for axes, plan in zip(figure.subplots(len(plans), 1, squeeze=False)[:, 0], plans, strict=True):
        sent = last_sent(plan)
        if not sent:
            axes.set_axis_off()
            continue
        # points: a log scale has no zero for bars to start from
        axes.plot(range(len(sent)), [max(x, 1) for x in sent.values()], "o", color=COLOURS[1])
        axes.set_yscale("log")
        axes.margins(y=0.2)
        axes.set_xticks(range(len(sent)), list(sent), rotation=45, ha="right")
        axes.set_ylabel("bytes a device")
        axes.set_title(f"{plan.target.name}, {plan.model}: sent {link_of(plan)} in a step", fontsize=10)
    save_figure(figure, path)
