"""The score over the time that training takes on links of several rates, from steps that `bench network` measured.

A JSON file says which measurement belongs to which row, and where `bench network` wrote them, relative to itself:

    {"results": "network/results.json", "rows": {"adamw": "dense", "sparseloco_30": "sparseloco:every=30"}}
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter

from jgc.lab.bench.network.results import Results, parsed
from jgc.lab.report.plots import points
from jgc.lab.report.runs import Group
from jgc.lab.shared.pictures import look, new_figure, save_figure
from jgc.lab.shared.tables import table
from jgc.training.errors import UserError
from jgc.wire.rate import bytes_per_second

Seconds = dict[str, dict[str, float]]


def measured(path: Path, groups: Sequence[Group]) -> Seconds:
    """Seconds of a step by rate and row, medians; the slowest rate first.

    Args:
      path: of the JSON file.
      groups: the rows; those that it does not name have no time.

    Raises:
      UserError: the file or the results cannot be read, no rate was measured with the groups' number of nodes, or the
        file names a row or a measurement that does not exist.
    """
    try:
        told = json.loads(path.read_text())
        rows, results = dict(told["rows"]), path.parent / told["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} must hold {{\"results\": PATH, \"rows\": {{ROW: MEASUREMENT}}}}: {error!r}") from error
    if not results.is_file():
        raise UserError(f"{path} names {results}, which is no file")
    labels, hosts = [group.label for group in groups], groups[0].settings["nodes"]
    for row in rows:
        if row not in labels:
            raise UserError(f"{path} names the row {row!r}; the rows are {', '.join(labels)}")
    found = _by_rate(parsed(results), hosts)
    known = {method for methods in found.values() for method in methods}
    for row, method in rows.items():
        if method not in known:
            raise UserError(f"{results} has no measurement {method!r} with {hosts} hosts, for the row {row}; it has "
                            f"{', '.join(sorted(known)) or 'none'}")  # fmt: skip
    return {
        rate: {row: methods[rows[row]] for row in labels if rows.get(row) in methods} for rate, methods in found.items()
    }


def _by_rate(found: Results, hosts: int) -> Seconds:
    """Median seconds of a step by rate and method."""
    cells = [cell for cell in found["cells"].values() if cell["hosts"] == hosts and cell.get("full")]
    limited = {cell["rate"] for cell in cells if cell["rate"] != "unlimited"}
    return {
        rate: {cell["method"]: float(np.median(cell["full"])) for cell in cells if cell["rate"] == rate}
        for rate in sorted(limited, key=bytes_per_second)
    }


def draw(groups: Sequence[Group], path: Path, seconds: Seconds) -> None:
    """The score over time, a panel for each rate, a line for each row: the mean over seeds."""
    score, labels = groups[0].score, [group.label for group in groups]
    figure = new_figure(2.6 + 3.6 * len(seconds), 4.6)
    figure.suptitle(f"{score.title.capitalize()} over the time of training, by the rate of each node's link")
    panels = figure.subplots(1, len(seconds), sharey=True, squeeze=False)[0]
    for axes, (rate, of_step) in zip(panels, seconds.items(), strict=True):
        for group in groups:
            if group.label not in of_step:
                continue
            colour, style, marker = look(labels, group.label)
            at, values, *_ = points(group, score.name, score.scale)
            axes.plot(at * of_step[group.label] / 60, values, color=colour, linestyle=style, marker=marker,
                      markersize=3.5, linewidth=1.3, label=group.label)  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set(title=rate, xlabel="minutes")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(score.heading)
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=9, handlelength=3.5)
    save_figure(figure, path)


def seconds_table(groups: Sequence[Group], seconds: Seconds) -> str:
    """Seconds of a step and hours of the run by rate."""
    head = ["method", *(f"{rate}: s a step" for rate in seconds), *(f"{rate}: hours" for rate in seconds)]
    rows = []
    for group in groups:
        steps = [of_step.get(group.label) for of_step in seconds.values()]
        if any(steps):
            whole = [None if step is None else step * group.settings["steps"] / 3600 for step in steps]
            rows.append([group.label, *("" if s is None else f"{s:.3f}" for s in steps),
                         *("" if h is None else f"{h:.2f}" for h in whole)])  # fmt: skip
    return table(head, rows)
