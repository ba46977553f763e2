"""The pictures of `experiments correlation`: GradiVeQ's Figures 4 and 5, and the loss over the age of a basis."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from experiments.analysis.correlation import Losses, Size, pca, shares, spared
from experiments.analysis.correlation_age import CURVES, Ageing
from jgc.lab.shared.pictures import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, new_figure
from jgc.training.run.folder import write_figure

MOVING = 15  # steps of the moving mean
MARKS = {"FD": ("o", 8.0, "full"), "F": ("s", 4.5, "none"), "": ("x", 5.5, "full")}
LOOKS = {  # curves of the loss over age: colour, line style, width
    "first": (BLUE, "-", 2.0),
    "first mean": (BLACK, ":", 1.6),
    "first renewed": (SKY, "--", 1.8),
    "others": (RED, "-", 2.0),
    "others own": (GREEN, "-", 2.0),
    "others renewed": (PINK, "--", 1.8),
    "others random": (ORANGE, "-.", 1.6),
    "others mean": (BLACK, ":", 1.6),
}


def figure4(path: Path, points: np.ndarray, cosines: np.ndarray, control: np.ndarray, title: str) -> None:
    """Draw three neighbouring values as points, along their principal axes too, and the histogram of all triples.

    Args:
      path: the picture.
      points: f64[S, 3].
      found: share of variance in the first two axes, for many triples of the layer, f64[T].
      control: the same with each value's steps shuffled by themselves.
      title: of the picture.
    """
    figure = new_figure(16, 5.6, title)
    scale = 10.0 ** np.floor(np.log10(max(np.abs(points).max(), 1e-30)))
    power = f"(x 1e{int(np.log10(scale)):+d})"
    axes = pca(points / scale)
    held = 100 * shares(points)
    first: Any = figure.add_subplot(1, 3, 1, projection="3d")
    _scatter(first, points / scale, [f"gradient {i + 1} {power}" for i in range(3)], equal=False)
    first.set_title("Three neighbouring values of the mean gradient\n(blue), and their projections (grey)", fontsize=10)
    second: Any = figure.add_subplot(1, 3, 2, projection="3d")
    turned = (points / scale - axes.mean) @ axes.axes
    _scatter(second, turned, [f"axis {i + 1}' {power}" for i in range(3)], equal=True)
    second.set_title(
        "The same along their principal axes, equal scales; green: what d = 2 keeps;\n"
        f"share of variance: 1' {held[0]:.1f} %, 2' {held[1]:.1f} %, 3' {held[2]:.1f} %",
        fontsize=10,
    )
    _histogram(figure.add_subplot(1, 3, 3), 100 * cosines, 100 * control, float(held[:2].sum()))
    write_figure(path, figure)


def _scatter(axes: Any, points: np.ndarray, labels: Sequence[str], equal: bool) -> None:
    """Points and their projections on three walls. Along principal axes the floor's are green: those would be sent."""
    low, high = points.min(0), points.max(0)
    middle, half = (low + high) / 2, (high - low) / 2
    half = np.full(3, half.max()) if equal else np.where(half > 0, half, 1.0)
    low, high = middle - 1.25 * half, middle + 1.25 * half
    walls = (low[0], high[1], low[2])  # those behind the points
    for wall, at in enumerate(walls):
        shadow = points.copy()
        shadow[:, wall] = at
        colour = GREEN if equal and wall == 2 else "#999999"
        axes.scatter(*shadow.T, s=7, color=colour, alpha=0.6, depthshade=False, linewidths=0)
    axes.scatter(*points.T, s=16, color=BLUE, depthshade=False, edgecolors="white", linewidths=0.3)
    for name, label, a, b in zip("xyz", labels, low, high, strict=True):
        getattr(axes, f"set_{name}lim")(a, b)
        getattr(axes, f"set_{name}label")(label, fontsize=9, labelpad=4)
        getattr(axes, f"{name}axis").set_major_locator(MaxNLocator(4))
    axes.tick_params(labelsize=7, pad=1)
    axes.view_init(elev=22, azim=-55)
    axes.set_box_aspect((1, 1, 1), zoom=0.95)


def _histogram(axes: Axes, values: np.ndarray, control: np.ndarray, this: float) -> None:
    bins = np.linspace(min(values.min(), control.min(), 99.0), 100, 61)
    each = np.full(len(values), 100 / len(values))
    label = f"control: each value's steps shuffled,\nno correlation left; median {np.median(control):.1f} %"
    axes.hist(control, bins.tolist(), weights=each, color="#bbbbbb", label=label)
    label = f"as recorded; median {np.median(values):.1f} %"
    axes.hist(values, bins.tolist(), weights=each, histtype="step", color=BLUE, linewidth=1.8, label=label)
    axes.axvline(this, color=RED, linestyle="--", label=f"the three values on the left: {this:.1f} %")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, loc="upper right", framealpha=1)
    axes.set_xlabel("variance in the first two of three principal axes, %")
    axes.set_ylabel("triples, %")
    axes.set_title(f"{len(values):,} triples of neighbours all over the layer", fontsize=10)


def figure5(path: Path, rows: Sequence[Size], shape: Sequence[int], samples: int, loss: float, title: str) -> None:
    """Draw the loss on the samples and on later steps, the loss spared and the ratio, by slice size.

    Args:
      path: the picture.
      rows: by slice size.
      shape: (H, W, D, F).
      samples: L_t.
      loss: lambda.
      title: of the picture.
    """
    figure = new_figure(15, 10.5, title)
    ((on, after), (gain, ratio)) = figure.subplots(2, 2)
    after.sharey(on)
    _losses(on, rows, loss, [(row.first_samples, row.others_samples) for row in rows])
    _losses(after, rows, loss, [(row.first_later, row.others_later) for row in rows])
    on.set_title(f"Loss on the {samples} steps that the basis was made from", fontsize=11)
    after.set_title("Loss on the recorded steps after them (held out)", fontsize=11)
    on.set_ylabel("compression loss, |decoded - g|² / |g|²")
    on.set_ylim(bottom=-0.03)
    _gains(gain, rows)
    _ratio(ratio, rows, samples, loss)
    for axes in (on, after, gain, ratio):
        _slice_axis(axes, shape[-1] * shape[-2], rows[-1].k)
    handles, labels = after.get_legend_handles_labels()
    for aligned, what in (("FD", "a multiple of F·D"), ("F", "a multiple only of F"), ("", "neither")):
        handles.append(Line2D([], [], color=BLACK, linestyle="", **_mark(aligned)))
        labels.append(f"K is {what}")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    write_figure(path, figure)


def _losses(axes: Axes, rows: Sequence[Size], loss: float, pairs: Sequence[tuple[Losses, Losses]]) -> None:
    """Losses of the first slice and of the others."""
    curves = (
        ("first slice, its basis", BLUE, "-", [first.basis for first, _ in pairs]),
        ("other slices, the first's basis", RED, "-", [others.basis for _, others in pairs]),
        ("other slices, as many random axes (control)", ORANGE, "-.", [others.random for _, others in pairs]),
        ("other slices, means only (d = 0)", BLACK, ":", [others.mean_only for _, others in pairs]),
    )
    for label, colour, style, values in curves:
        axes.plot([row.k for row in rows], values, color=colour, linestyle=style, linewidth=1.4, label=label)
        if style == "-":
            _marks(axes, values, rows, colour)
    axes.axhline(loss, color=GREEN, linewidth=1.2, linestyle="--", label=f"lambda = {loss:g}")
    axes.axhline(1, color="#888888", linewidth=0.8, label="zeros instead of the gradient")


def _gains(axes: Axes, rows: Sequence[Size]) -> None:
    """The share of the random axes' loss that the first slice's basis spares in the other slices."""
    kinds = (("on the samples", SKY, [row.others_samples for row in rows]),
             ("on later steps", RED, [row.others_later for row in rows]))  # fmt: skip
    for label, colour, losses in kinds:
        values = [100 * spared(each.basis, each.random) for each in losses]
        axes.plot([row.k for row in rows], values, color=colour, linewidth=1.4, label=label)
        _marks(axes, values, rows, colour)
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
    axes.set_ylabel("share of the random axes' loss, %")
    axes.set_title("Other slices: what the first slice's axes spare\nof the loss of random ones (100 %: all of it)",
                   fontsize=11)  # fmt: skip
    axes.legend(fontsize=9, loc="upper right", ncols=2)


def _ratio(axes: Axes, rows: Sequence[Size], samples: int, loss: float) -> None:
    """K/d and its lower bound from the number of samples."""
    ks, ratios = [row.k for row in rows], [row.k / row.d for row in rows]
    axes.plot(ks, ratios, color=BLUE, linewidth=1, label="K/d, measured")
    _marks(axes, ratios, rows, BLUE)
    most = samples - 1
    forced = f"max(1, K / {most}): the least for any data at all,\n{samples} samples span at most {most} axes"
    axes.plot(ks, [max(1.0, k / most) for k in ks], color=BLACK, linestyle=":", label=forced)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("compression ratio, K/d")
    axes.set_title(f"Compression ratio, with d for a loss of {loss:g} on the first slice's samples", fontsize=11)
    axes.legend(fontsize=9, loc="upper left")


def _marks(axes: Axes, values: Sequence[float], rows: Sequence[Size], colour: str) -> None:
    for aligned in MARKS:
        at = [i for i, row in enumerate(rows) if row.aligned == aligned]
        axes.plot([rows[i].k for i in at], [values[i] for i in at], color=colour, linestyle="", **_mark(aligned))


def _mark(aligned: str) -> dict[str, Any]:
    marker, size, fill = MARKS[aligned]
    return {"marker": marker, "markersize": size, "fillstyle": fill}


def _slice_axis(axes: Axes, fd: int, highest: int) -> None:
    """Ticks and lines at multiples of F*D."""
    multiples = range(fd, highest + 1, fd)
    for k in multiples:
        axes.axvline(k, color="#cccccc", linewidth=0.8, zorder=0)
    if multiples:
        axes.set_xticks([0, *multiples[:: -(-len(multiples) // 8)]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(f"slice size K, values (vertical lines: multiples of F·D = {fd:,})")
    axes.grid(axis="y", alpha=0.3)


def age(path: Path, ages: Ageing, loss: float, title: str) -> None:
    """Draw the loss of each step over its distance from the last sample."""
    figure = new_figure(15, 6.0, title)
    left, right = figure.subplots(1, 2, sharey=True)
    highest = 1.0
    for axes, whose in ((left, "first"), (right, "others")):
        for name, look in LOOKS.items():
            if name.split()[0] == whose:
                each = ages.lost[name] / np.where(ages.energy[whose] > 0, ages.energy[whose], 1.0)
                highest = max(highest, _line(axes, ages.age, each, look, CURVES[name].partition(", ")[2]))
        axes.axvspan(ages.age[0], 0.5, color="#eeeeee", zorder=0)
        axes.axhline(loss, color="#888888", linewidth=0.8)
        axes.axhline(1, color="#888888", linewidth=0.8)
        axes.set_xlim(ages.age[0], ages.age[-1])
        axes.set_xlabel("age of the basis: steps since the last of its samples\n(shaded: the samples themselves)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False)
    left.set_ylim(0, 1.1 * highest)  # single steps may lie above
    left.set_ylabel(f"compression loss of a step, |decoded - g|² / |g|²\n(dots; lines: means over {MOVING} steps)")
    for at, text in ((loss, f"lambda = {loss:g}: of all samples together"), (1.0, "1: zeros instead of the gradient")):
        left.annotate(text, (float(ages.age[-1]), at), (-4, 4), textcoords="offset points", ha="right", fontsize=8,
                      bbox={"color": "white", "alpha": 0.8, "pad": 1})  # fmt: skip
    left.set_title(f"First slice, d = {ages.d}", fontsize=11)
    right.set_title("All other slices", fontsize=11)
    write_figure(path, figure)


def _line(axes: Axes, ages: np.ndarray, each: np.ndarray, look: tuple[str, str, float], label: str) -> float:
    """Draw dots and their moving means, samples and later steps apart; return the highest mean."""
    colour, style, width = look
    axes.plot(ages, each, color=colour, linestyle="", marker=".", markersize=2, alpha=0.35)
    parts = [(ages[at], _moving(each[at])) for at in (ages <= 0, ages > 0)]
    for (x, y), text in zip(parts, ("", label), strict=True):
        axes.plot(x, y, color=colour, linestyle=style, linewidth=width, label=text or None)
    return float(np.nanmax(np.concatenate([y for _, y in parts])))


def _moving(values: np.ndarray) -> np.ndarray:
    """Moving mean, over fewer values at the ends.

    Example:
      >>> _moving(np.array([1.0, 2.0, 6.0]))
      array([1.5, 3. , 4. ])
    """
    width = min(MOVING, len(values))
    count = np.convolve(np.ones(len(values)), np.ones(width), "same")
    return np.convolve(values, np.ones(width), "same") / count
