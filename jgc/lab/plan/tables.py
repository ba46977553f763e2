"""Plans as tables: memory of a device by its use, and bytes of a step by role."""

import math
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid

from jgc.lab.plan import bucket
from jgc.lab.plan.memory import ESTIMATED, FROM_ONE, MEASURED
from jgc.lab.plan.needs import PhaseBytes, Plan
from jgc.lab.plan.whole_run import NOTE as WHOLE_RUN, whole_run
from jgc.lab.shared.tables import ratio, table
from jgc.training.output.table import size

COLUMNS = 6  # methods side by side
BUCKET_TITLE = "An exchange through a bucket"
WIDTH = 140  # where the output is not a terminal
Rows = tuple[list[str], list[list[str]]]  # headings, and the cells of each row

HOW = {
    MEASURED: "by the compiler for the program as training has it",
    FROM_ONE: "from the compiler's figure for one node's program",
    ESTIMATED: "an estimate",
}
NOTE = (
    "Logical bytes of one step or round, upper bounds where a method finds its sizes in the run. Positions are part of "
    "a node's uplink, the leader's first where they differ. Once: on entering the phase, to all nodes together."
)


def show(plans: Sequence[Plan], console: Console | None = None, rate: float = math.inf) -> None:
    """Print the tables.

    Args:
      plans: one for each method, of one workload.
      console: where to print; standard output by default.
      rate: bytes a second of a node's link to the bucket, for plans that have one.
    """
    console = console or Console(markup=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(heading(plans[0]), highlight=False, soft_wrap=True)
    for i in range(0, len(plans), COLUMNS):
        console.print(_grid("Memory of one device", memory(plans[i : i + COLUMNS]), last_apart=True))
    for remark in remarks(plans):
        console.print(remark, highlight=False)
    console.print(_grid(bytes_title(plans), sent_bytes(plans)))
    console.print(NOTE, highlight=False, soft_wrap=True)
    if plans[0].messages is not None:
        console.print(_grid(BUCKET_TITLE, bucket.round_costs(plans, rate)))
        for remark in (bucket.NOTE, *bucket.remarks(plans)):
            console.print(remark, highlight=False, soft_wrap=True)
    if (whole := whole_run(plans))[1]:
        console.print(_grid(f"Bytes of the whole run, {plans[0].config.steps:,} steps", whole))
        console.print(WHOLE_RUN, highlight=False, soft_wrap=True)


def markdown(plans: Sequence[Plan], rate: float = math.inf) -> str:
    """The tables as a page, bytes to the last digit; see `show`."""
    parts = [heading(plans[0]), f"## {bytes_title(plans)}", table(*sent_bytes(plans, _exact)), NOTE]
    if plans[0].messages is not None:
        costs = table(*bucket.round_costs(plans, rate, _exact))
        parts += [f"## {BUCKET_TITLE}", costs, bucket.NOTE, *bucket.remarks(plans)]
    if (whole := whole_run(plans, _exact))[1]:
        parts += [f"## Bytes of the whole run, {plans[0].config.steps:,} steps", table(*whole), WHOLE_RUN]
    parts += ["## Memory of one device", table(*memory(plans, _exact)), *remarks(plans)]
    return "\n\n".join(parts) + "\n"


def _exact(count: float | None) -> str:
    return "-" if count is None else f"{count:,.0f}"


def _grid(title: str, rows: Rows, last_apart: bool = False) -> Grid:
    """A table for the terminal."""
    head, lines = rows
    grid = Grid(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in head:
        grid.add_column(name, justify="left" if name in ("", "method", "phase") else "right", no_wrap=name == "phase")
    for i, line in enumerate(lines):
        grid.add_row(*line, end_section=last_apart and i == len(lines) - 2)  # a rule above the sum
    return grid


def remarks(plans: Sequence[Plan]) -> list[str]:
    """Where the memory's numbers come from."""
    return [f"({how}): {HOW[how]}; all without a remark follows from shapes"
            for how in dict.fromkeys(t.how for plan in plans for t in plan.temporary)]  # fmt: skip


def heading(plan: Plan) -> str:
    """The model, its nodes and its batch in one line."""
    config, devices = plan.config, plan.config.nodes // plan.per_device
    where = f"{devices} device{'s' if devices > 1 else ''}"
    share = f", {plan.per_device} on each" if devices > 1 else ""
    return (
        f"{config.workload}: {config.model.name} with {plan.values:,} parameters, {config.nodes} nodes on {where}"
        f"{share}, batch {config.batch_size}; a gradient has {size(plan.dense)} uncompressed"
    )


def memory(plans: Sequence[Plan], shown: Callable[[float | None], str] = size) -> Rows:
    """Bytes of one device, a column for each method."""
    programs = [{f"while computing: {t.name} ({t.how})": t.bytes for t in plan.temporary} for plan in plans]
    rows = []
    for columns in ([plan.held for plan in plans], programs):
        for name in dict.fromkeys(name for column in columns for name in column):
            rows.append([name, *(shown(column.get(name)) for column in columns)])
    rows.append(["at most, with the larger of those", *(shown(plan.peak) for plan in plans)])
    return ["", *(plan.method for plan in plans)], rows


def bytes_title(plans: Sequence[Plan]) -> str:
    """Title of the bytes: of one step, or of one round of local steps."""
    rounds = {plan.config.local.every for plan in plans}
    if rounds == {None}:
        return "Bytes of one step"
    steps = " or ".join(f"{every or 1}" for every in sorted(rounds, key=lambda every: every or 1))
    return f"Bytes of one round of {steps} steps; ratios compared with a gradient in every step"


def sent_bytes(plans: Sequence[Plan], shown: Callable[[float | None], str] = size) -> Rows:
    """Bytes of a step, a row for each phase of each method."""
    head = ["method", "phase", "leader\nup", "leader\nratio", "worker\nup", "worker\nratio", "of that\npositions",
            "leader\ndown", "worker\ndown", "all nodes\nup", "all nodes\ndown", "once"]  # fmt: skip
    rows = [["" if i else plan.method, phase.name, *cells(phase, _dense(plan), shown)]
            for plan in plans for i, phase in enumerate(plan.phases)]  # fmt: skip
    return head, rows


def _dense(plan: Plan) -> float:
    """A node's uncompressed bytes in a step, or in the steps of a round."""
    return (plan.config.local.every or 1) * plan.dense


def cells(phase: PhaseBytes, dense: float, shown: Callable[[float | None], str] = size) -> list[str]:
    """A row's figures."""
    leader = sent(phase, "leader", "up") if "leader" in phase.logical else None
    worker = sent(phase, "worker", "up")
    positions = dict.fromkeys(shown(sent(phase, role, "up", "positions")) for role in ("leader", "worker"))
    return [
        shown(leader),
        ratio(dense / leader) if leader else "-",
        shown(worker),
        ratio(dense / worker) if worker else "-",
        ", ".join(positions),
        shown(sent(phase, "leader", "down") if leader is not None else None),
        shown(sent(phase, "worker", "down")),
        shown(sent(phase, "server", "up")),
        shown(sent(phase, "server", "down")),
        shown(sum(sum(kinds.values()) for kinds in phase.once.get("server", {}).values())),
    ]


def sent(phase: PhaseBytes, role: str, direction: str, kind: str = "") -> float:
    """Bytes of one node of a role, of one kind or of all; the server's are of all nodes together."""
    by_role = phase.logical
    ways = by_role.get(role, by_role.get("worker", {}) if role == "leader" else {})
    return sum(count for name, count in ways.get(direction, {}).items() if kind in name)
