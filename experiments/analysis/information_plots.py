"""The pictures of `experiments information`: Figures 3, 4 and 12 with controls, cells, and ScaleCom's similarity."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from experiments.analysis.information_conclusions import mean
from experiments.analysis.information_rows import ALL, PAPER, Cosine, Measured, Row
from jgc.lab.shared.pictures import BLACK, BLUE, GREEN, ORANGE, RED, new_figure
from jgc.training.run.folder import write_figure

SHOWN = 4  # layers in a picture over steps
GREY = "#888888"


class Curve(NamedTuple):
    """A quantity and its look in all pictures."""

    label: str
    colour: str
    style: Any
    value: Callable[[Row], float]
    width: float = 1.8  # wider for a curve that others cover


def _or_gap(x: float) -> float:
    return x if np.isfinite(x) else np.nan


ENTROPY = Curve("entropy H of one node's gradient", GREY, "-", lambda r: r.paper.entropy, 7.0)
MUTUAL = Curve("mutual information I of the two nodes", BLUE, "-", lambda r: r.paper.mutual, 3.4)
SHUFFLED = Curve("I when one is shuffled: nothing is shared", ORANGE, "--", lambda r: r.paper.shuffled, 1.6)
NEIGHBOURS = Curve("nearest neighbours", BLUE, "-", lambda r: r.pair.neighbours)
CONTROL = Curve("nearest neighbours, shuffled", ORANGE, "--", lambda r: r.pair.neighbours_shuffled)
GAUSSIAN = Curve("Gaussian pair of the same correlation", GREEN, "-.", lambda r: _or_gap(r.pair.gaussian))
MILLER = Curve("few cells*, bias-corrected", RED, "-", lambda r: r.few.corrected)
MILLER_CONTROL = Curve("few cells*, corrected, shuffled", RED, (0, (1, 1.5)), lambda r: r.few.corrected_shuffled)
PAPERS = (ENTROPY, MUTUAL, SHUFFLED)
OTHERS = (NEIGHBOURS, CONTROL, GAUSSIAN, MILLER, MILLER_CONTROL)
ABOVE = f"2^{PAPER} cells, as in the paper\nbits a value"
BELOW = "other estimates of I\nbits a value"
NOTE = "* no more cells of the pair than values"


def some_layers(layers: Sequence[str]) -> list[str]:
    """The first, the last and up to two between them.

    Example:
      >>> some_layers(["a", "b", "c", "d", "e", "f", "g"])
      ['a', 'c', 'e', 'g']
    """
    at = np.linspace(0, len(layers) - 1, min(SHOWN, len(layers)))
    return [layers[i] for i in sorted({round(float(x)) for x in at})]


def figure3(path: Path, measured: Measured, title: str) -> None:
    """Draw the paper's entropy and mutual information over steps above other estimates; a column for each layer."""
    _over_steps(path, measured, measured.first, title, marks=True)


def figure12(path: Path, measured: Measured, title: str) -> None:
    """Draw the same for random pairs: a point for each, a line through their means."""
    _over_steps(path, measured, measured.random, title, marks=False)


def _over_steps(path: Path, measured: Measured, rows: Sequence[Row], title: str, marks: bool) -> None:
    layers = some_layers(measured.layers)
    figure = new_figure(4.2 * len(layers) + 1.2, 8.4, title)
    grid = figure.subplots(2, len(layers), sharey="row", sharex=True, squeeze=False)
    for column, layer in enumerate(layers):
        points = [r for r in rows if r.layer == layer]
        steps = sorted({r.step for r in points})
        for axes, curves in zip(grid[:, column], (PAPERS, OTHERS), strict=True):
            for curve in curves:
                means = [mean([r for r in points if r.step == s], curve.value) for s in steps]
                axes.plot(steps, means, color=curve.colour, linestyle=curve.style, label=curve.label,
                          linewidth=curve.width, marker="o" if marks else "", markersize=3)  # fmt: skip
                if not marks:
                    at, values = [r.step for r in points], [curve.value(r) for r in points]
                    axes.plot(at, values, color=curve.colour, linestyle="", marker=".", markersize=4, alpha=0.5)
            _plain(axes)
        grid[0, column].set_title(f"{layer}\n{points[0].values:,} values", fontsize=9)
        grid[1, column].set_xlabel("step")
        grid[1, column].xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _legends(grid)
    write_figure(path, figure)


def figure4(path: Path, measured: Measured, title: str) -> None:
    """Draw means over the steps by layer."""
    layers = measured.layers
    by_layer = [[r for r in measured.first if r.layer == layer] for layer in layers]
    figure = new_figure(max(8.0, 0.42 * len(layers) + 3.0), 9.0, title)
    grid = figure.subplots(2, 1, sharex=True, squeeze=False)
    at = np.arange(len(layers))
    for axes, curves in zip(grid[:, 0], (PAPERS, OTHERS), strict=True):
        for curve in curves:
            axes.plot(at, [mean(rows, curve.value) for rows in by_layer], color=curve.colour, linestyle=curve.style,
                      marker="o", markersize=4, linewidth=curve.width, label=curve.label)  # fmt: skip
        _plain(axes)
    most = [np.log2(rows[0].pair.n) for rows in by_layer]
    grid[0, 0].plot(at, most, color=GREY, linestyle="", marker="_", markersize=16,
                    label="log2 of the number of values: the most H can be")  # fmt: skip
    grid[1, 0].set_xticks(at, layers, rotation=60, ha="right", fontsize=8)
    _legends(grid)
    write_figure(path, figure)


def cells(path: Path, measured: Measured, title: str) -> None:
    """Draw the common share over the number of cells, of the pair and of the shuffled pair."""
    layers = some_layers(measured.layers)
    figure = new_figure(4.2 * len(layers) + 1.0, 5.0, title)
    grid = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
    for axes, layer in zip(grid, layers, strict=True):
        rows = [r for r in measured.first if r.layer == layer]
        bits = [h.bits for h in rows[0].pair.histograms]
        for label, colour, style, name in (
            ("two nodes", BLUE, "-", "share"),
            ("two nodes, one shuffled: nothing is shared", ORANGE, "--", "shuffled_share"),
        ):
            shares = [100 * mean(rows, lambda r, b=b, name=name: getattr(r.at(b), name)) for b in bits]  # type: ignore[misc]
            axes.plot(bits, shares, color=colour, linestyle=style, marker="o", markersize=4, label=label)
        samples = float(np.log2(rows[0].pair.n) / 2)
        axes.axvline(samples, color=GREY, linewidth=0.9, linestyle=":", label="as many cells (of the pair) as values")
        axes.set_xticks(bits, [f"{b}" for b in bits], fontsize=8)
        axes.set_xlabel("b, for 2^b cells a node\n(the paper: 32)")
        axes.set_title(f"{layer}\n{rows[0].values:,} values", fontsize=9)
        axes.set_ylim(-3, 104)
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("I / H, \"common information\", %\n(mean over steps)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    write_figure(path, figure)


def similarity(path: Path, cosines: Sequence[Cosine], title: str) -> None:
    """Draw the mean cosine of two nodes' residuals over the steps, by layer, next to the cosine of their gradients."""
    kinds = [kind for kind in ("residual", "gradient") if any(c.kind == kind for c in cosines)]
    figure = new_figure(6.6 * len(kinds) + 2.2, 5.6, title)
    panels = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
    layers = list(dict.fromkeys(c.layer for c in cosines if c.kind == kinds[-1]))
    colours = _shades(len(layers))
    for axes, kind in zip(panels, kinds, strict=True):
        for layer, colour in zip(layers, colours, strict=True):
            points = [c for c in cosines if (c.layer, c.kind) == (layer, kind)]
            whole = layer == ALL
            axes.plot([c.step for c in points], [c.mean for c in points], color=BLACK if whole else colour, label=layer,
                      linewidth=2.6 if whole else 1.2, marker="o", markersize=3, zorder=3 if whole else 2)  # fmt: skip
            if whole:
                axes.fill_between([c.step for c in points], [c.lowest for c in points], [c.highest for c in points],
                                  color=BLACK, alpha=0.12, linewidth=0)  # fmt: skip
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_xlabel("step")
        axes.set_title(f"{kind.capitalize()}s", fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("cosine between two nodes, mean over all pairs\n(band: lowest to highest pair, all layers)")
    handles, labels = panels[-1].get_legend_handles_labels()
    if len(labels) > 14:  # more would not fit next to the panels
        keep = sorted({round(x) for x in np.linspace(0, len(labels) - 2, 12)} | {len(labels) - 1})
        handles, labels = [handles[i] for i in keep], [labels[i] for i in keep]
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    write_figure(path, figure)


def _shades(count: int) -> list[Any]:
    """Shades from light to dark by the layer's index."""
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0.92, 0.05, count)]


def _plain(axes: Axes) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.grid(alpha=0.3)


def _legends(grid: np.ndarray) -> None:
    """One legend for the upper row, one for the lower, each next to its row."""
    for axes, label in zip(grid[:, 0], (ABOVE, BELOW), strict=True):
        axes.set_ylabel(label)
    for row, note in zip(grid, ("", NOTE), strict=True):
        row[-1].legend(*row[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8,
                       frameon=False, title=note, title_fontsize=8)  # fmt: skip
