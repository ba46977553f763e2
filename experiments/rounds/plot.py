"""The picture of `python -m experiments rounds`: utilisation by rate, H and delay, and loss against seconds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.rounds.cells import BUCKET, GLOO, GOAL, MESSAGES, TORCH, TORCHFT, Cell
from experiments.rounds.tables import Row, link
from jgc.lab.shared.pictures import BLACK, BLUE, GREEN, ORANGE, RED, new_figure, save_figure
from jgc.lab.shared.rate import bytes_per_second

NAME = "rounds.png"
COLOURS = dict(zip(MESSAGES, (RED, BLUE, GREEN, ORANGE), strict=True))
LOOKS: dict[tuple[str, int], tuple[Any, str]] = {  # line style and marker by way and overlap
    (BUCKET, 0): ("-", "o"), (BUCKET, 1): ((0, (5, 2)), "s"), (GLOO, 0): ((0, (1, 1.5)), "^"),
    (TORCH, 0): ((0, (1, 1.5)), "x"), (TORCHFT, 0): ((0, (1, 1.5)), "+"),
}  # fmt: skip
WORDS = {
    (BUCKET, 0): "rounds", (BUCKET, 1): "rounds, overlap", (GLOO, 0): "jgc.local_steps over Gloo",
    (TORCH, 0): "PyTorch local SGD over Gloo", (TORCHFT, 0): "torchft LocalSGD over Gloo",
}  # fmt: skip
AXES = {  # settings of a cell that a panel varies, and its label
    "rate": "rate of a node's link, Mbit/s", "every": "H, local steps in a round",
    "delay_ms": "delay of a request, ms",
}  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel for each axis, with the others at their commonest value, and losses by rate."""
    centre = {name: _commonest(getattr(row.cell, name) for row in rows) for name in AXES}
    rates = sorted({row.cell.rate for row in rows}, key=bytes_per_second)
    figure = new_figure(9.6, 6.4)
    upper, lower = figure.subfigures(2, 1, squeeze=False)[:, 0]
    for axes, name in zip(upper.subplots(1, len(AXES), sharey=True), AXES, strict=True):
        _utilisation(axes, name, _along(name, centre, rows))
        axes.set_title(_place(centre, without=name), fontsize=9)
    upper.axes[-1].text(0.5, 0.04, f"grey line: the goal, {GOAL}", fontsize=8, ha="center")
    upper.axes[0].set_ylabel("utilisation: local steps / wall time", fontsize=8)
    by_rate = _along("rate", centre, rows)
    panels = lower.subplots(1, len(rates), squeeze=False, sharey=True)[0]
    for axes, rate in zip(panels, rates, strict=True):
        _losses(axes, [row for row in by_rate if row.cell.rate == rate])
        axes.set_title(_place(centre | {"rate": rate}), fontsize=9)
    lower.axes[0].set_ylabel("validation loss, nats", fontsize=8)
    methods = [name for name in MESSAGES if any(row.cell.method == name for row in rows)]
    looks = [x for x in LOOKS if any((row.cell.via, row.cell.overlap) == x for row in rows)]
    handles = [Line2D([], [], color=COLOURS[name], label=MESSAGES[name].name) for name in methods]
    handles += [
        Line2D([], [], color=BLACK, linestyle=style, marker=marker, markersize=4, label=WORDS[x])
        for x, (style, marker) in ((x, LOOKS[x]) for x in looks)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)


def _commonest(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _along(name: str, centre: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    """The rows at the centre but for one setting."""
    others = {key: value for key, value in centre.items() if key != name}
    return [
        row for row in rows
        if all(getattr(row.cell, key) == value for key, value in others.items())
    ]  # fmt: skip


def _place(centre: Mapping[str, Any], without: str = "") -> str:
    words = {
        "rate": link(centre["rate"]), "every": f"H = {centre['every']}",
        "delay_ms": f"{centre['delay_ms']:g} ms of delay" if centre["delay_ms"] else "no delay",
    }  # fmt: skip
    return ", ".join(text for name, text in words.items() if name != without)


def _number(cell: Cell, name: str) -> float:
    return 8e-6 * bytes_per_second(cell.rate) if name == "rate" else getattr(cell, name)


def _utilisation(axes: Axes, name: str, rows: Sequence[Row]) -> None:
    lines: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row in rows:
        point = _number(row.cell, name), row.mean("utilisation") or 0.0
        lines.setdefault((row.cell.via, row.cell.method, row.cell.overlap), []).append(point)
    values = sorted({_number(row.cell, name) for row in rows})
    for (via, method, overlap), points in lines.items():
        style, marker = LOOKS[via, overlap]
        x = [values.index(value) for value, _ in sorted(points)]
        y = [use for _, use in sorted(points)]
        look = {"color": COLOURS[method], "linestyle": style, "marker": marker}
        axes.plot(x, y, **look, markersize=4, linewidth=1.3)
    axes.axhline(GOAL, color=BLACK, linewidth=0.6, alpha=0.5)
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set_xlim(-0.3, len(values) - 0.7)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel(AXES[name], fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _losses(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        style, marker = LOOKS[row.cell.via, row.cell.overlap]
        points = [point for point in row.runs[0]["curve"] if point[1] > 0]
        x, y = [point[0] for point in points], [point[2] for point in points]
        look = {"color": COLOURS[row.cell.method], "linestyle": style, "marker": marker}
        axes.plot(x, y, **look, markersize=3, linewidth=1.2)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
