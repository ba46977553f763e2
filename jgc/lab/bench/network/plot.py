"""The picture of `bench network`: the time that each method adds to a step, a panel for each rate."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from jgc.lab.bench.network.figures import Figures, of_cells
from jgc.lab.bench.network.methods import LABELS, PLAIN_TORCH
from jgc.lab.bench.network.namespaces import UNLIMITED
from jgc.lab.bench.network.results import Results
from jgc.lab.bench.network.tables import cells_of
from jgc.lab.shared.pictures import new_figure
from jgc.lab.shared.rate import bits, bytes_per_second
from jgc.training.run.folder import write_figure

OURS, JAX, TORCH = "#0072B2", "#009E73", "#D55E00"  # safe for the colour-blind
LEAST = 1e-3  # seconds; smaller values stand at the edge


def draw(folder: Path, measured: Results) -> list[Path]:
    """Draw added-{hosts}-hosts.png for each number of hosts, and return their paths."""
    paths = []
    for hosts in sorted({hosts for hosts, _ in cells_of(measured)}):
        paths.append(folder / f"added-{hosts}-hosts.png")
        _picture(paths[-1], measured, hosts)
    return paths


def _picture(path: Path, measured: Results, hosts: int) -> None:
    """Points, not bars: the scale is logarithmic, on which a bar's length means nothing."""
    rates = [rate for k, rate in cells_of(measured) if k == hosts]
    panels = {rate: {row.label: row for row in of_cells(measured, hosts, rate)} for rate in rates}
    first = panels[rates[0]]
    order = sorted({label for rows in panels.values() for label in rows},
                   key=lambda label: -first[label].added.middle if label in first else 0.0)  # fmt: skip
    figure = new_figure(4.4 + 3.4 * len(rates), 2.1 + 0.28 * len(order))
    axes = figure.subplots(1, len(rates), sharey=True, sharex=True, squeeze=False)[0]
    for panel, rate in zip(axes, rates, strict=True):
        _panel(panel, panels[rate], order, "no limit" if rate == UNLIMITED else bits(bytes_per_second(rate)))
    axes[0].set_yticks(range(len(order)), order)
    axes[0].set_ylim(-0.6, len(order) - 0.4)
    s = measured["settings"]
    figure.suptitle(f"What exchanging the gradients adds to a training step\n{hosts} hosts on one machine, "
                    f"{s['model']}, {s.get('parameters', 0) / 1e6:.1f}M parameters", fontsize=11)  # fmt: skip
    drawn = {_colour(row.method) for rows in panels.values() for row in rows.values()}
    kinds = {name: c for name, c in (("jgc", OURS), ("plain JAX", JAX), ("PyTorch", TORCH)) if c in drawn}
    handles = [axes[0].plot([], [], color=colour, marker="o", linestyle="-", label=f"{name}: median, 90 % interval")[0]
               for name, colour in kinds.items()]  # fmt: skip
    handles += axes[0].plot([], [], color="black", marker="|", markersize=9, linestyle="",
                            label=f"time that its bytes need at that rate, {LEAST:g} or less at the edge")  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    write_figure(path, figure)


def _panel(axes: Axes, rows: dict[str, Figures], order: list[str], title: str) -> None:
    for place, label in enumerate(order):
        row = rows.get(label)
        if row is None:
            continue
        middle, low, high = (max(LEAST, seconds) for seconds in row.added)
        colour, measured = _colour(row.method), row.added.middle > LEAST
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        filled = colour if measured else "none"
        axes.plot([middle], [place], color=colour, marker="o", markersize=6, markerfacecolor=filled)
        text = f"{row.added.middle:.3f}" if measured else f"below {LEAST:g}"
        axes.annotate(text, (high, place), (6, 0), textcoords="offset points", va="center", fontsize=7.5)
        if row.floor:
            axes.plot([max(LEAST, row.floor)], [place], color="black", marker="|", markersize=9)
    axes.set_xscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("seconds added to a step without exchange (log scale)", fontsize=8)
    axes.margins(x=0.14)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="both", alpha=0.3)


def _colour(method: str) -> str:
    return TORCH if method in PLAIN_TORCH else JAX if method in LABELS else OURS
