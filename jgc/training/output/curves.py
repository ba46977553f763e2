"""curves.png: loss, score, bytes and reconstruction over the steps of a run, with its phases shaded."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jgc.training.data import Score
from jgc.training.output.metrics import Line
from jgc.training.run.folder import CURVES, write_figure
from jgc.training.steps.costs import PhaseCost
from jgc.training.steps.evaluate import LOSS

SHADES = ("#e8eef7", "#fdf1e0", "#e7f4e8", "#f5e8f3")
MOST_SPANS = 40  # of phases that are told apart
LINES, GREENS = ("-", "--", ":"), ("tab:green", "tab:olive", "0.4")  # of the score and the further scores
COSINES = (
    ("reconstruction_cosine", "the aggregate", "tab:blue", "-"),
    ("ceiling_cosine", "exact values instead of codes", "black", (0, (2, 4))),
    ("without_code_cosine", "the same without the code", "tab:red", "-."),
    ("signs_means_cosine", "signs and means only", "tab:orange", ":"),
)


def draw(run_dir: Path, title: str, lines: Sequence[Line], costs: Sequence[PhaseCost], *scores: Score) -> None:
    """Write curves.png with all scores that were evaluated."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(2, 2, sharex=True)
    plots: tuple[Callable[..., None], ...] = (_loss, partial(_scores, scores), _bytes, _cosines)
    for axes, plot in zip(panels.flat, plots, strict=True):
        spans = _spans(lines)
        for i, (_, start, stop) in enumerate(spans):
            axes.axvspan(start, stop, color=SHADES[i % len(SHADES)], zorder=0, linewidth=0)
            if start:
                axes.axvline(start, color="0.6", linewidth=0.8, zorder=1)
        plot(axes, lines, costs)
        _name_phases(axes, spans)
        axes.grid(alpha=0.3)
        axes.set_xlim(0, max(line["step"] for line in lines) if lines else 1)
    for axes in panels[1]:
        axes.set_xlabel("step")
    write_figure(run_dir / CURVES, figure)


def _spans(lines: Sequence[Line]) -> list[tuple[str, int, int]]:
    """(name, step before the first, last step) of each phase; of phases that often take turns, of all turns together.

    Example:
      >>> turns = [{"phase": "pq"[step % 2], "step": step} for step in range(1001, 1201)]
      >>> _spans([*({"phase": "dense", "step": step} for step in range(1, 1001)), *turns])
      [('dense', 0, 1000), ('q / p', 1000, 1200)]
    """
    spans: list[tuple[str, int, int]] = []
    for line in lines:
        if not spans or spans[-1][0] != line["phase"]:
            spans.append((line["phase"], line["step"] - 1, line["step"]))
        spans[-1] = (*spans[-1][:2], line["step"])
    shortest = spans[-1][2] / MOST_SPANS if len(spans) > MOST_SPANS else 0
    joined: list[tuple[str, int, int]] = []
    for in_turn, group in groupby(spans, lambda span: span[2] - span[1] < shortest):
        members = list(group)
        if in_turn:
            names = dict.fromkeys(name for name, *_ in members)
            members = [(" / ".join(names), members[0][1], members[-1][2])]
        joined += members
    return joined


def _name_phases(axes: Axes, spans: Sequence[tuple[str, int, int]]) -> None:
    """Write each phase's name above its first step, on two levels where names would overlap."""
    total = max((stop for *_, stop in spans), default=1)
    free, level = -1.0, 0
    for name, start, _ in spans:
        level = 1 - level if start < free else 0
        top = axes.get_xaxis_transform()
        at: Any = {"xycoords": top, "xytext": (2, 3 + 10 * level), "textcoords": "offset points"}
        axes.annotate(name, (start, 1.0), **at, fontsize=8, color="0.3")
        free = start + total * 0.022 * (len(name) + 1)


def _points(lines: Sequence[Line], name: str) -> tuple[list[int], list[Any]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _loss(axes: Axes, lines: Sequence[Line], costs: Sequence[PhaseCost]) -> None:
    axes.plot(*_points(lines, "loss"), color="tab:blue", linewidth=1, label="training loss, mean over nodes")
    axes.set_yscale("log")
    if any(line.get(LOSS) is not None for line in lines):
        axes.set_ylabel("loss")
        _validation(axes, lines)
    else:
        axes.set_ylabel("training loss, mean over nodes")


def _validation(axes: Axes, lines: Sequence[Line]) -> None:
    """The validation loss, and on a second axis the learning rate that may depend on it."""
    axes.plot(*_points(lines, LOSS), color="tab:red", marker=".", linewidth=1, label="validation loss")
    rates, grey = axes.twinx(), "0.5"
    rates.plot(*_points(lines, "learning_rate"), color=grey, linewidth=1, drawstyle="steps-pre", label="learning rate")
    rates.set_ylabel("learning rate", color=grey)
    rates.set_ylim(bottom=0)
    handles = [*axes.get_legend_handles_labels()[0], *rates.get_legend_handles_labels()[0]]
    rates.legend(handles=handles, fontsize=8, loc="upper right")  # on top of both


def _scores(scores: Sequence[Score], axes: Axes, lines: Sequence[Line], costs: Sequence[PhaseCost]) -> None:
    """The score as a solid line, further scores dashed."""
    for score, style, colour in zip(scores, LINES, GREENS, strict=False):
        _score(score, style, colour, axes, lines)
    if len(scores) > 1:
        axes.set_ylabel(scores[0].unit)
        axes.legend(fontsize=8, loc="best")


def _score(score: Score, style: str, colour: str, axes: Axes, lines: Sequence[Line]) -> None:
    steps, values = _points(lines, score.name)
    axes.plot(steps, [score.scale * v for v in values], linestyle=style, marker="o", markersize=3, color=colour,
              label=score.title)  # fmt: skip
    axes.set_ylabel(score.heading)
    if values:
        at = (-4, -14 if score.higher_is_better else 8)
        end = steps[-1], score.scale * values[-1]
        axes.annotate(score.text(values[-1]), end, xytext=at, textcoords="offset points", ha="right")


def _bytes(axes: Axes, lines: Sequence[Line], costs: Sequence[PhaseCost]) -> None:
    axes.axhline(costs[0].dense, color="0.4", linestyle="--", linewidth=1, label="uncompressed gradient")
    leader, worker = _points(lines, "bytes_up_leader"), _points(lines, "bytes_up_worker")
    if leader[1] != worker[1]:
        axes.plot(*leader, color="tab:red", drawstyle="steps-pre", label="leader")
    positive = [v if v > 0 else float("nan") for v in worker[1]]
    axes.plot(worker[0], positive, color="tab:purple", drawstyle="steps-pre", label="worker")
    axes.set_yscale("log")
    axes.set_ylabel("bytes that one node sends up in a step")
    axes.legend(fontsize=8, loc="center right")


def _cosines(axes: Axes, lines: Sequence[Line], costs: Sequence[PhaseCost]) -> None:
    drawn = False
    for name, label, colour, style in COSINES:
        steps, values = _points(lines, name)
        if values:
            marker = "." if len(steps) < 40 else ""
            axes.plot(steps, values, linestyle=style, color=colour, label=label, linewidth=1.2, marker=marker)
            drawn = True
    axes.set_ylabel("cosine with the true mean\nat the positions sent")
    if drawn:
        axes.legend(fontsize=8, loc="best")
    else:
        axes.text(0.5, 0.5, "nothing was compressed", ha="center", transform=axes.transAxes, color="0.4")
