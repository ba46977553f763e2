"""Tables of ours next to the papers', and the papers' rows."""

from collections.abc import Sequence

from experiments.papers import reported
from jgc.lab.report.runs import Group
from jgc.lab.report.tables import figures, plus_minus
from jgc.lab.shared.tables import filled_table, ratio, table
from jgc.training.output.table import size


def score_table(groups: Sequence[Group], everything: Sequence[Group]) -> str:
    """A workload's score next to the papers'; empty if no paper trained it."""
    rows = []
    for group in groups:
        papers = reported.rows_of(group.workload, group.method)
        text = "; ".join(f"{row.accuracy} ({row.paper}, Table {row.table})" for row in papers)
        rows.append([group.label, plus_minus(figures(group, everything).result, group.score.digits), text])
    head = ["method", groups[0].score.heading, f"paper: {reported.figure(groups[0].workload)}"]
    return table(head, rows) if any(row[-1] for row in rows) else ""


def bytes_table(groups: Sequence[Group], everything: Sequence[Group]) -> str:
    """Bytes and ratios of a step of the last phase next to the papers'; empty if no paper trained the workload."""
    rows = []
    for group in groups:
        f, papers = figures(group, everything), reported.rows_of(group.workload, group.method)
        ours = [size(f.leader), size(f.worker), ratio(f.ratios["leader"]), ratio(f.ratios["worker"])]
        rows.append([group.label, *ours, *paper_bytes(*papers)])
    head = ["method", "leader up, a step", "worker up, a step", "leader ratio", "worker ratio",
            "paper: MB a step", "paper: ratio"]  # fmt: skip
    return table(head, rows) if any(row[-1] for row in rows) else ""


def time_table(groups: Sequence[Group], everything: Sequence[Group]) -> str:
    """Seconds of a step in the phases that the LGC paper's Table V has; empty if there are none."""
    rows = [
        [group.label, name, f"{seconds:.3f}", f"{reported.SECONDS[group.method][name]:.1f}"]
        for group in groups
        for name, seconds in figures(group, everything).seconds.items()
        if name in reported.SECONDS.get(group.method, {})
    ]
    return table(["method", "phase", "seconds a step", "paper: seconds (Table V, ImageNet)"], rows) if rows else ""


def paper_section(workloads: set[str]) -> str:
    """The papers' rows, each workload labelled as ours or as one that was not trained here."""
    blocks = ["## The papers' figures"]
    for which, (source, notes) in reported.PAPERS.items():
        blocks.append(source)
        for name, title in reported.WORKLOADS.items():
            number = next((r.table for r in reported.REPORTED if (r.workload, r.paper) == (name, which)), None)
            if number is None:
                continue
            other = "" if name in workloads else " (not trained in the runs above: not to be compared)"
            blocks += [f"### {which}, Table {number}: {title}{other}", paper_table(name, which)]
        if which == "EGC":
            blocks += [sweep_table(name) for name in reported.EGC_SWEEPS]
        blocks.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(blocks)


def paper_table(workload: str, which: str) -> str:
    """A paper's rows for one of its workloads."""
    rows = [[row.name, f"{row.accuracy}", *paper_bytes(row), "" if row.terabytes is None else f"{row.terabytes} TB"]
            for row in reported.REPORTED if (row.workload, row.paper) == (workload, which)]  # fmt: skip
    head = ["method", reported.figure(workload), "MB a node sends in a step", "ratio", "whole training, all nodes"]
    return filled_table(head, rows)


def sweep_table(name: str) -> str:
    """Accuracy and ratio by a setting, from the EGC paper's Tables I and III."""
    rows = [[method, value, f"{accuracy}", f"{count:g}x"]
            for method, by_value in reported.EGC_SWEEPS[name].items()
            for value, (accuracy, count) in by_value.items()]  # fmt: skip
    return table(["method", name, "accuracy, % (AlexNet on CIFAR-10)", "ratio in elements"], rows)


def paper_bytes(*rows: reported.Reported) -> tuple[str, str]:
    """The papers' megabytes and ratios of some rows, leader / worker; EGC's ratios are in values."""
    megabytes = [" / ".join(map(str, row.megabytes)) for row in rows if row.megabytes]
    ratios = [" / ".join(f"{value:,}x" for value in row.ratio) + " in values" * (row.paper == "EGC") for row in rows]
    return "; ".join(megabytes), "; ".join(ratios)
