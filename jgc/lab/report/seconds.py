"""The score over the time that training takes on links of several rates, from steps that `bench network` measured.

A JSON file says which measurement belongs to which row, and where `bench network` wrote them, relative to itself:

    {"results": "network/results.json", "rows": {"adamw": "dense", "sparseloco_30": "sparseloco:every=30"}}

Whether the measurement is of the rows' model and batch is for the file's author to know: the two name them differently.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from jgc.lab.bench.network.namespaces import UNLIMITED
from jgc.lab.bench.network.results import parsed
from jgc.lab.report.plots import points
from jgc.lab.report.runs import Group
from jgc.lab.shared.pictures import look, new_figure, save_figure
from jgc.lab.shared.rate import bits, bytes_per_second
from jgc.lab.shared.tables import table
from jgc.training.errors import UserError, did_you_mean

Seconds = dict[str, dict[str, float]]  # by rate and row


def measured(path: Path, groups: Sequence[Group]) -> Seconds:
    """Seconds of a step by rate and row, medians; the slowest rate first. Rates without any of the rows are left out.

    Args:
      path: of the JSON file.
      groups: the rows, of one workload. Those that the file does not name have no time.

    Raises:
      UserError: the file or the results cannot be read; several workloads; or the file names no row, or one that does
        not exist or has several phases, or a measurement that there is not with the row's number of nodes.
    """
    rows, results = _said(path)
    labels = [group.label for group in groups]
    if len({group.workload for group in groups}) > 1:
        raise UserError("--seconds needs rows of one workload")
    for row in rows:
        if row not in labels:
            meant = did_you_mean(row, labels)
            raise UserError(f"{path} names the row {row!r}{meant}; the rows are {', '.join(labels)}")
    steps, seconds = _steps(results), Seconds()
    for group in groups:
        if group.label not in rows:
            continue
        hosts, method = group.settings["nodes"], rows[group.label]
        if any(len(run.summary["phases"]) > 1 for run in group.runs):
            raise UserError(f"{path}: {group.label} has several phases, whose steps take different times: --seconds "
                            "is for rows of one phase")  # fmt: skip
        if (hosts, method) not in steps:
            known = ", ".join(sorted(name for k, name in steps if k == hosts))
            raise UserError(f"{results} has no measurement {method!r} with {hosts} hosts; it has {known or 'none'}")
        for rate, step in steps[hosts, method].items():
            seconds.setdefault(rate, {})[group.label] = step
    return {rate: seconds[rate] for rate in sorted(seconds, key=bytes_per_second)}


def _said(path: Path) -> tuple[dict[str, str], Path]:
    """The measurement of each row, and where the results are.

    Raises:
      UserError: the file cannot be read, or says something else.
    """
    try:
        recorded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    rows = recorded.get("rows") if isinstance(recorded, dict) else None
    names = [*rows.values(), recorded.get("results")] if isinstance(rows, dict) else []
    if not rows or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path} must hold {{"results": PATH, "rows": {{ROW: MEASUREMENT, ...}}}}, all of them strings')
    if not (path.parent / recorded["results"]).is_file():
        raise UserError(f"{path} names {path.parent / recorded['results']}, which is not a file")
    return rows, path.parent / recorded["results"]


def _steps(results: Path) -> dict[tuple[int, str], dict[str, float]]:
    """Median seconds of a step by number of hosts and method, then by rate, of limited rates only.

    Raises:
      UserError: no results of `bench network`.
    """
    steps: dict[tuple[int, str], dict[str, float]] = {}
    try:
        for cell in parsed(results)["cells"].values():
            if cell.get("full") and cell["rate"] != UNLIMITED:
                bytes_per_second(cell["rate"])  # raises if it is no rate
                of_method = steps.setdefault((cell["hosts"], cell["method"]), {})
                of_method[cell["rate"]] = float(np.median(cell["full"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{results} is not a file of bench network: {error}") from error
    return steps


def draw(groups: Sequence[Group], path: Path, seconds: Seconds) -> None:
    """The score over time, a panel for each rate, a line for each row: the mean over seeds."""
    score, labels = groups[0].score, [group.label for group in groups]
    figure = new_figure(2.6 + 3.6 * len(seconds), 4.6)
    figure.suptitle(f"{score.title.capitalize()} over the time of training, by the rate of each node's link")
    panels = figure.subplots(1, len(seconds), sharey=True, squeeze=False)[0]
    for axes, (rate, of_rows) in zip(panels, seconds.items(), strict=True):
        for group in groups:
            if group.label not in of_rows:
                continue
            colour, style, marker = look(labels, group.label)
            at, values, *_ = points(group, score.name, score.scale)
            axes.plot(at * of_rows[group.label] / 60, values, color=colour, linestyle=style, marker=marker,
                      markersize=3.5, linewidth=1.3, label=group.label)  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(title=bits(bytes_per_second(rate)), xlabel="minutes")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(score.heading)
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=9, handlelength=3.5)
    save_figure(figure, path)


def seconds_table(groups: Sequence[Group], seconds: Seconds) -> str:
    """Seconds of a step and minutes of the run by rate."""
    head = ["method", *(f"{rate}: s a step" for rate in seconds), *(f"{rate}: minutes of the run" for rate in seconds)]
    rows = []
    for group in groups:
        steps = [of_rows.get(group.label) for of_rows in seconds.values()]
        if any(steps):
            whole = [None if step is None else step * group.settings["steps"] / 60 for step in steps]
            rows.append([group.label, *("" if s is None else f"{s:.3f}" for s in steps),
                         *("" if m is None else f"{m:.1f}" for m in whole)])  # fmt: skip
    return table(head, rows)
