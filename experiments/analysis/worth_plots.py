"""The pictures of `experiments worth`: when a leader's values predict the mean gradient, and in which layers."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from experiments.analysis.information_rows import ALL
from experiments.analysis.worth import Setting, Worth
from jgc.lab.shared.pictures import BLUE, GREEN, ORANGE, RED, new_figure
from jgc.training.run.folder import write_figure

LOOKS: dict[str, tuple[str, str, Any]] = {
    "innovations": ("leader exact, others by their means, a tenth exact (LGC, perfect code)", GREEN, "-"),
    "leader": ("only the leader's exact values", BLUE, "-"),
    "signs": ("the leader's signs and every node's mean, no values", RED, "-"),
    "chance": ("the leader's exact values if nodes had nothing in common", ORANGE, "--"),
}


def select(rows: Sequence[Worth], **wanted: Any) -> list[Worth]:
    """Rows with these values of fields."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def overview(path: Path, runs: dict[str, list[Worth]], batches: dict[str, int], alpha: float, title: str) -> None:
    """Draw a row of panels for each run: cosines over alpha, nodes, batch per node and step.

    Args:
      path: the picture.
      runs: rows by the run's title.
      batches: examples of a recorded node in a step.
      alpha: for the panels without an axis of alpha.
      title: of the picture.
    """
    figure = new_figure(17, 4.3 * len(runs) + 1.2, title)
    grid = figure.subplots(len(runs), 4, sharey=True, squeeze=False)
    for panels, (name, rows) in zip(grid, runs.items(), strict=True):
        rows = select(rows, layer=ALL)
        most = Setting(max(row.setting.nodes for row in rows), 1)
        two, whole = [r for r in rows if r.setting.nodes == 2], select(rows, setting=most)
        alone = [r for r in rows if r.setting.merged == 1]
        batch = partial(_batch, batches[name])
        at = f"alpha = {alpha:.2%}"
        ones: tuple[tuple[list[Worth], str, Callable[[Worth], float], str], ...] = (
            (whole, "alpha: share of values picked, %", lambda r: 100 * r.alpha, f"{most.nodes} nodes, all steps"),
            (select(alone, alpha=alpha), "nodes", lambda r: r.setting.nodes, f"{at}, all steps"),
            (select(two, alpha=alpha), "batch per node (recorded nodes merged)", batch, f"2 nodes, {at}, all steps"),
            (select(whole, alpha=alpha), "step", lambda r: r.step, f"{most.nodes} nodes, {at}"),
        )  # fmt: skip
        for axes, (points, label, place, text) in zip(panels, ones, strict=True):
            _curves(axes, points, label, place)
            axes.set_title(text, fontsize=10)
        _powers(panels[0], 10)
        _powers(panels[1], 2)
        _powers(panels[2], 2)
        panels[3].xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panels[0].set_ylabel(f"{name}\n\ncosine with the mean over nodes\nat the leader's positions", fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    write_figure(path, figure)


def _batch(recorded: int, row: Worth) -> float:
    return recorded * row.setting.merged


def _curves(axes: Axes, rows: Sequence[Worth], label: str, at: Callable[[Worth], float]) -> None:
    places = sorted({at(row) for row in rows})
    for name, (words, colour, style) in LOOKS.items():
        means = [np.mean([getattr(row, name) for row in rows if at(row) == place]) for place in places]
        axes.plot(places, means, color=colour, linestyle=style, marker="o", markersize=4, label=words, linewidth=1.8)
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.03)
    axes.grid(alpha=0.3)


def _powers(axes: Axes, base: int) -> None:
    """A logarithmic axis with a tick at every point drawn."""
    places = axes.lines[0].get_xdata()
    axes.set_xscale("log", base=base)
    axes.set_xticks(list(np.asarray(places)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def by_layer(path: Path, rows: Sequence[Worth], layers: Sequence[str], title: str) -> None:
    """Draw the same by layer, means over the steps, and the share of energy at the positions."""
    figure = new_figure(max(8.0, 0.42 * len(layers) + 4.0), 9.0, title)
    above, below = figure.subplots(2, 1, sharex=True)
    by_layers = [select(rows, layer=layer) for layer in layers]
    at = np.arange(len(layers))
    for name, (label, colour, style) in LOOKS.items():
        means = [np.mean([getattr(row, name) for row in each]) for each in by_layers]
        above.plot(at, means, color=colour, linestyle=style, marker="o", markersize=4, label=label)
    curves = (("at the leader's positions", BLUE, "covered"), ("at the mean's largest values", GREEN, "best"))
    for label, colour, name in curves:
        shares = [100 * np.mean([getattr(row, name) for row in each]) for each in by_layers]
        below.plot(at, shares, color=colour, marker="o", markersize=4, label=label)
    above.set_ylim(0, 1.03)
    above.set_ylabel("cosine with the mean over nodes\nat the leader's positions")
    below.set_ylim(bottom=0)
    below.set_ylabel("energy of the mean gradient, %")
    below.set_xticks(at, layers, rotation=60, ha="right", fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    write_figure(path, figure)
