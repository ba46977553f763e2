"""The picture of `experiments codecs`: error and cosine of each row over its bits."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from experiments.codecs.measure import EXACT, Row, front
from jgc.lab.shared.pictures import new_figure
from jgc.training.run.folder import write_figure

TRIVIAL = {  # colour and label of trivial codes, by the end of their names
    "only the leader's exact values": ("#888888", "only the leader's exact values"),
    "each node's means": ("#c08000", "leader's signs, each node's means"),
    "the leader's positions": ("#b06070", "2- to 4-bit values, leader's positions"),
    "gradient is largest": ("#4060a0", "2-bit and exact values, leader's positions over all layers"),
    "each node's positions": ("#8060c0", "1- to 4-bit values, each node's positions, layer by layer"),
    "over all layers": ("#d02090", "1- to 4-bit values, each node's positions over all layers"),
}
METHODS = ("tab:blue", "tab:green", "tab:red", "tab:cyan", "tab:olive", "tab:brown", "tab:pink", "tab:purple")
MARKS = "sD^v<>ph*"


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Write the picture."""
    figure = new_figure(13, 6.4, title)
    left, right = figure.subplots(1, 2)
    _panel(left, rows, "cosine", "cosine with the true mean (higher is better)")
    _panel(right, rows, "error", "relative error of the mean (lower is better)")
    right.set_ylim(0, min(1.6, right.get_ylim()[1]))  # beyond 1, zeros would have been nearer
    right.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    right.annotate("sending nothing", (0.99, 1.005), xycoords=("axes fraction", "data"), ha="right", fontsize=8)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    write_figure(path, figure)


def _panel(axes: Axes, rows: Sequence[Row], by: str, label: str) -> None:
    for name, style, which in _groups(rows):
        points = sorted((row.bits, getattr(row, by)) for row in which)
        axes.plot(*zip(*points, strict=True), label=name, markersize=6, zorder=3, **style)
    best = [(rows[i].bits, getattr(rows[i], by)) for i in front(rows, by)]
    axes.plot(*zip(*best, strict=True), color="black", linewidth=5, alpha=0.18, zorder=1, drawstyle="steps-post",
              label="the front: nothing cheaper is better")
    axes.set_xscale("log")
    axes.set_xlabel("bits sent up for each parameter, mean over nodes (uncompressed: 32)")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3, which="both")
    if by == "cosine":
        axes.set_ylim(0, 1.03)


def _groups(rows: Sequence[Row]) -> list[tuple[str, dict, list[Row]]]:
    """Label, style and rows of each group: trivial codes hollow, methods filled, learned bases as stars."""
    out: list[tuple[str, dict, list[Row]]] = []
    for ending, (colour, label) in TRIVIAL.items():
        which = [row for row in rows if row.family == "trivial" and row.name.endswith(ending)]
        out.append((f"trivial: {label}", {"color": colour, "marker": "o", "fillstyle": "none", "linestyle": ""}, which))
    names = list(dict.fromkeys(row.name for row in rows if row.family == "method"))
    for i, name in enumerate(names):
        look = {"color": METHODS[i % len(METHODS)], "marker": MARKS[i % len(MARKS)], "linestyle": "-", "linewidth": 0.7}
        which = [row for row in rows if row.family == "method" and row.name == name]
        out.append((f"method: {name}" + (" (exact)" if all(row.error < EXACT for row in which) else ""), look, which))
    learned = [row for row in rows if row.family == "learned basis"]
    style = {"color": "black", "marker": "*", "linestyle": ""}
    out.append(("learned bases (on trial): 1-, 2-, 4-, 32-bit coefficients", style, learned))
    return [group for group in out if group[2]]
