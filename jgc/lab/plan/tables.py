"""Plans as tables: memory of a device by what takes it, and bytes of a step by role."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jgc.lab.plan.memory import ESTIMATED, FROM_ONE, MEASURED
from jgc.lab.plan.plan import PhaseBytes, Plan
from jgc.training.table import size

COLUMNS = 6  # methods beside each other
WIDTH = 120  # where the output is not a terminal

HOW = {
    MEASURED: "by the compiler for the program as training has it",
    FROM_ONE: "from the compiler's figure for one node's program",
    ESTIMATED: "an estimate",
}


def show(plans: Sequence[Plan], console: Console | None = None) -> None:
    """Print what the runs need.

    Args:
      plans: one method's each, of one workload.
      console: where to print; standard output by default.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(heading(plans[0]), highlight=False, soft_wrap=True)
    for some in batched_plans(plans):
        console.print(memory_table(some))
    for how in dict.fromkeys(t.how for plan in plans for t in plan.temporary):
        console.print(f"({how}): {HOW[how]}; all without a remark follows from shapes", highlight=False)
    console.print(bytes_table(plans))
    console.print(
        "Logical bytes of one step, upper bounds where a method finds its sizes in the run. Positions are part of what "
        "a node sends up, the leader's first where they differ. Once: on entering the phase, to all nodes together.",
        highlight=False,
        soft_wrap=True,
    )


def batched_plans(plans: Sequence[Plan]) -> list[tuple[Plan, ...]]:
    """As many at a time as stand beside each other."""
    return [tuple(plans[i : i + COLUMNS]) for i in range(0, len(plans), COLUMNS)]


def heading(plan: Plan) -> str:
    """What is planned, in one line."""
    config, devices = plan.config, plan.config.nodes // plan.per_device
    where = f"{devices} device{'s' if devices > 1 else ''}"
    share = f", {plan.per_device} on each" if devices > 1 else ""
    return (
        f"{config.workload}: {config.model.name} with {plan.values:,} parameters, {config.nodes} nodes on {where}"
        f"{share}, batch {config.batch_size}; a gradient has {size(plan.dense)} uncompressed"
    )


def memory_table(plans: Sequence[Plan]) -> Table:
    """Bytes of one device, a column for each method."""
    table = Table(title="Memory of one device", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", *(plan.method for plan in plans)):
        table.add_column(name, justify="right" if name else "left")
    for name in dict.fromkeys(name for plan in plans for name in plan.held):
        table.add_row(name, *(size(plan.held.get(name)) for plan in plans))
    programs = [{f"while computing: {t.name} ({t.how})": t.bytes for t in plan.temporary} for plan in plans]
    for name in dict.fromkeys(name for of_plan in programs for name in of_plan):
        table.add_row(name, *(size(of_plan.get(name)) for of_plan in programs))
    table.add_section()
    table.add_row("at most, with the larger of those", *(size(plan.peak) for plan in plans))
    return table


def bytes_table(plans: Sequence[Plan]) -> Table:
    """What is sent in a step, a row for each phase of each method."""
    table = Table(title="Bytes of one step", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("method", "phase", "leader\nup", "worker\nup", "of that\npositions", "worker\nratio", "leader\ndown",
                 "worker\ndown", "all nodes\nup", "all nodes\ndown", "once"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("method", "phase") else "right", no_wrap=name == "phase")
    for plan in plans:
        for i, phase in enumerate(plan.phases):
            table.add_row("" if i else plan.method, phase.name, *cells(phase, plan.dense))
    return table


def cells(phase: PhaseBytes, dense: float) -> list[str]:
    """A row's figures."""
    up, has_leader = sent(phase, "worker", "up"), "leader" in phase.logical
    positions = dict.fromkeys(size(sent(phase, role, "up", "positions")) for role in ("leader", "worker"))
    return [
        size(sent(phase, "leader", "up") if has_leader else None),
        size(up),
        ", ".join(positions),
        f"{dense / up:,.4g}x" if up else "-",
        size(sent(phase, "leader", "down") if has_leader else None),
        size(sent(phase, "worker", "down")),
        size(sent(phase, "server", "up")),
        size(sent(phase, "server", "down")),
        size(sum(sum(kinds.values()) for kinds in phase.once.get("server", {}).values())),
    ]


def sent(phase: PhaseBytes, role: str, direction: str, kind: str = "") -> float:
    """Bytes, of some kind or all, of one node of a role; a leader is a worker where there is none.

    The server's are those of all nodes together.
    """
    by_role = phase.logical
    ways = by_role.get(role, by_role.get("worker", {}) if role == "leader" else {})
    return sum(count for name, count in ways.get(direction, {}).items() if kind in name)
