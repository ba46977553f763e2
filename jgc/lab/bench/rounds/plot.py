"""The picture of `bench rounds`: utilisation against H, and loss against seconds, by link."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from jgc.lab.bench.rounds.cells import BUCKET, GLOO, GOAL, MESSAGES, TORCH, TORCHFT
from jgc.lab.bench.rounds.tables import Row
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
H_OF_LOSSES = 30


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the panels: a column for each rate, a row for each delay, and a row of losses."""
    rates = sorted({row.cell.rate for row in rows}, key=bytes_per_second)
    delays = sorted({row.cell.delay_ms for row in rows})
    figure = new_figure(2.2 + 3.2 * len(rates), 1.4 + 2.4 * (len(delays) + 1))
    panels = figure.subplots(len(delays) + 1, len(rates), squeeze=False)
    for column, rate in enumerate(rates):
        here = [row for row in rows if row.cell.rate == rate]
        for line, delay in enumerate(delays):
            axes = panels[line][column]
            _utilisation(axes, [row for row in here if row.cell.delay_ms == delay])
            axes.set_title(f"{rate}, {delay:g} ms a request", fontsize=9)
        every = _shown_every(rows)
        chosen = [x for x in here if x.cell.every == every and x.cell.delay_ms == delays[0]]
        _losses(panels[-1][column], chosen)
        panels[-1][column].set_title(f"{rate}, {delays[0]:g} ms, H = {every}", fontsize=9)
    for line in range(len(delays)):
        panels[line][0].set_ylabel("local steps / wall time", fontsize=8)
    panels[-1][0].set_ylabel("validation loss, nats", fontsize=8)
    methods = [name for name in MESSAGES if any(row.cell.method == name for row in rows)]
    looks = [x for x in LOOKS if any((row.cell.via, row.cell.overlap) == x for row in rows)]
    handles = [Line2D([], [], color=COLOURS[name], label=MESSAGES[name].name) for name in methods]
    handles += [
        Line2D([], [], color=BLACK, linestyle=style, marker=marker, markersize=4, label=WORDS[x])
        for x, (style, marker) in ((x, LOOKS[x]) for x in looks)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)


def _shown_every(rows: Sequence[Row]) -> int:
    """H of the panels with losses."""
    counts = sorted({row.cell.every for row in rows})
    return H_OF_LOSSES if H_OF_LOSSES in counts else counts[0]


def _utilisation(axes: Axes, rows: Sequence[Row]) -> None:
    lines: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.cell.via, row.cell.method, row.cell.overlap), []).append(row)
    for (via, method, overlap), of in lines.items():
        style, marker = LOOKS[via, overlap]
        x = [row.cell.every for row in of]
        y = [row.mean("utilisation") or 0.0 for row in of]
        axes.plot(
            x, y, color=COLOURS[method], linestyle=style, marker=marker, markersize=4, linewidth=1.3
        )
    axes.axhline(GOAL, color=BLACK, linewidth=0.6, alpha=0.5)
    axes.set_xscale("log")
    axes.set_xticks(sorted({row.cell.every for row in rows}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("H, local steps of a round", fontsize=8)
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
