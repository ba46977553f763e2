"""The pictures of a report: means over seeds with a band from the lowest to the highest, in colours for all eyes."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from jgc.lab.report.runs import Group, Run
from jgc.lab.report.tables import FEWEST, fewest_bytes
from jgc.lab.shared.pictures import look, new_figure, save_figure
from jgc.training.output.table import size

BAND = "lines: mean over seeds; bands: lowest to highest seed"
CROWDED = 10  # rows in a panel; with more of them those near the baseline have a second one
LEGEND_WIDTH = 34  # letters in a line of the legend; more would leave the curves no room
Points = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # steps, mean, lowest, highest


def scores(groups: Sequence[Group], path: Path) -> None:
    """The score over steps, a panel for each workload."""
    figure, panels, shared = panels_of(by(groups, lambda group: group.workload), f"{score_name(groups)} over training")
    for axes, shown in panels:
        for group in shown:
            data = points(group, group.score.name, group.score.scale)
            draw_line(axes, data, *look(shared, group.label), group.label)
        axes.set_ylabel(shown[0].score.heading)
    save(figure, panels, path)


def loss(groups: Sequence[Group], path: Path) -> None:
    """Training loss over steps, a panel for each workload."""
    figure, panels, shared = panels_of(by(groups, lambda group: group.workload), "Training loss")
    for axes, shown in panels:
        for group in shown:
            draw_line(axes, points(group, "loss", smoothed=True), *look(shared, group.label), group.label)
        loss_axis(axes)
    save(figure, panels, path)


def bytes_against_score(groups: Sequence[Group], path: Path) -> None:
    """The final score over the bytes that all nodes sent up in the run: a point for each seed."""
    title = f"{score_name(groups)} for the bytes sent"
    _against_score(groups, path, title, lambda run: run.summary["total_bytes"],
                   "bytes that all nodes sent up in the whole run")  # fmt: skip


def step_bytes_against_score(groups: Sequence[Group], path: Path) -> None:
    """The same over the bytes of a step of the last phase, whatever earlier phases sent."""
    title = f"{score_name(groups)} for the bytes of a step"
    _against_score(groups, path, title, lambda run: run.step_bytes,
                   "bytes that all nodes sent up in a step of the last phase, mean")  # fmt: skip


def _against_score(
    groups: Sequence[Group], path: Path, title: str, bytes_of: Callable[[Run], float | None], across: str
) -> None:
    views: dict[str, tuple[list[Group], list[Group]]] = {}  # by title: the rows of a panel, and all rows
    for workload, rows in by(groups, lambda group: group.workload).items():
        views[workload] = rows, rows
        if len(rows) > CROWDED and (near := near_baseline(rows)):
            views[f"{workload}, near the baseline"] = near, rows
    figure, panels, shared = panels_of({name: shown for name, (shown, _) in views.items()}, title)
    for (axes, groups_shown), (_, rows) in zip(panels, views.values(), strict=True):
        filled = {id(best.row) for best in fewest_bytes(rows, rows)}
        for group in groups_shown:
            colour, _, marker = look(shared, group.label)
            _point(axes, group, bytes_of, colour, marker, id(group) in filled)
        least = as_good_from(rows)
        if least is not None:
            axes.axhline(
                least, color="#888888", linestyle="--", linewidth=1, label=f"as good: {_worse(groups_shown[0])}"
            )
        axes.set_xscale("log")
        if groups_shown is rows:
            _room(axes)
        else:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        axes.set_ylabel(groups_shown[0].score.heading)
    save(figure, panels, path, across, "large: mean over seeds; small: each seed; "
          f"filled: fewest bytes in the run; of a method, as good over {FEWEST} pairs")  # fmt: skip


def _point(
    axes: Axes, group: Group, bytes_of: Callable[[Run], float | None], colour: str, marker: str, filled: bool
) -> None:
    sent = [count for run in group.runs if (count := bytes_of(run)) is not None]
    if len(sent) < len(group.runs):
        axes.plot([], [], linestyle="", label=f"{group.label}: no metrics, not shown")
    elif min(sent) <= 0 or (group.settings["nodes"] == 1 and not group.settings.get("rounds.bucket")):
        axes.plot([], [], linestyle="", label=f"{group.label}: sends nothing, not shown")
    else:
        results = [run.result for run in group.runs]
        axes.plot(sent, results, linestyle="", marker=marker, color=colour, markersize=4)
        axes.plot(np.mean(sent), np.mean(results), linestyle="", marker=marker, color=colour, markersize=12,
                  markerfacecolor=to_rgba(colour, 0.4 if filled else 0), markeredgecolor=colour, markeredgewidth=1.6,
                  label=group.label)  # fmt: skip


def near_baseline(groups: Sequence[Group]) -> list[Group]:
    """The rows within three tolerances of the baseline that send less; none where all are, or there is no baseline."""
    score, baselines = groups[0].score, [group for group in groups if group.label == group.baseline]
    if not baselines or not score.tolerance:
        return []
    means = {id(group): float(np.mean([run.result for run in group.runs])) for group in groups}
    near = [group for group in groups if score.is_as_good((means[id(group)] - means[id(baselines[0])]) / 3)]
    return [] if len(near) == len(groups) else [group for group in near if _sends_less(group)]


def _sends_less(group: Group) -> bool:
    """Whether a run sends less than uncompressed: else it would take the room of those that do."""
    return all(run.summary["total_bytes"] < run.summary["dense_total_bytes"] for run in group.runs)


def as_good_from(groups: Sequence[Group]) -> float | None:
    """The worst score that counts as good as the baseline's mean; None without one baseline for all rows."""
    score = groups[0].score
    baselines = [group for group in groups if group.label == group.baseline]
    if not baselines or not score.tolerance:
        return None
    mean = float(np.mean([run.result for run in baselines[0].runs]))
    return mean - score.tolerance if score.higher_is_better else mean + score.tolerance


def _worse(group: Group) -> str:
    """How much worse than the baseline still counts as good."""
    score = group.score
    where = "below" if score.higher_is_better else "above"
    return f"{score.tolerance:g} {score.point or score.unit} {where} {group.baseline}"


def _room(axes: Axes) -> None:
    """Widen the axis to whole powers of ten, so that ticks have labels."""
    low, high = axes.get_xlim()
    axes.set_xlim(10 ** np.floor(np.log10(low) + 1e-9), 10 ** np.ceil(np.log10(high) - 1e-9))


def by(groups: Iterable[Group], key: Callable[[Group], str]) -> dict[str, list[Group]]:
    """Groups by panel."""
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(key(group), []).append(group)
    return parts


def points(group: Group, name: str, scale: float = 1.0, smoothed: bool = False) -> Points:
    """Mean, lowest and highest over seeds, at the steps that all seeds have; of each seed's moving mean if smoothed."""
    series = [{line["step"]: scale * line[name] for line in run.lines if line.get(name) is not None}
              for run in group.runs]  # fmt: skip
    steps = sorted(set.intersection(*(set(curve) for curve in series)))
    values = np.array([[curve[step] for step in steps] for curve in series], float).reshape(len(series), len(steps))
    if smoothed:  # each seed before they are compared, else the band would show how single steps vary
        values = np.array([moving_mean(curve) for curve in values])
    return np.array(steps), values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def moving_mean(values: np.ndarray) -> np.ndarray:
    """A mean over a fiftieth of the steps, over fewer at the ends."""
    if not len(values):
        return values
    window = np.ones(max(1, len(values) // 50))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def score_name(groups: Sequence[Group]) -> str:
    """The name of the groups' common score, capitalised for a title."""
    titles = {group.score.title for group in groups}
    return titles.pop().capitalize() if len(titles) == 1 else "Score"


def draw_line(axes: Axes, data: Points, colour: str, style: Any, marker: str, label: str) -> None:
    steps, mean, low, high = data
    if len(steps):
        marker = marker if len(steps) <= 40 else ""  # more of them would hide the line
        axes.plot(steps, mean, color=colour, linestyle=style, label=label, linewidth=1.6, marker=marker, markersize=3.5)
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def loss_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=15))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_ylabel("training loss, mean over nodes (moving mean)")


def panels_of(
    parts: dict[str, list[Group]], title: str
) -> tuple[Figure, list[tuple[Axes, list[Group]]], list[str]]:
    shared = list(dict.fromkeys(group.label for groups in parts.values() for group in groups))
    figure = new_figure(3.2 + 5.2 * len(parts), max(4.6, 1 + 0.22 * len(shared)))  # as high as the legend
    if len(parts) > 1:
        figure.suptitle(title)
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, name in zip(panels, parts, strict=True):
        axes.set_title(name if len(parts) > 1 else f"{title}: {name}", fontsize=11)
        axes.grid(alpha=0.3)
    return figure, list(zip(panels, parts.values(), strict=True)), shared


def save(
    figure: Figure, panels: Sequence[tuple[Axes, list[Group]]], path: Path, across: str = "step", note: str = BAND
) -> None:
    handles: dict[str, Any] = {}
    if all(len(group.runs) == 1 for _, groups in panels for group in groups):
        note = "one seed each"
    for axes, _ in panels:
        axes.set_xlabel(across)
        if across == "step":
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [textwrap.fill(label, LEGEND_WIDTH, subsequent_indent="  ", break_on_hyphens=False) for label in handles]
    figure.legend(handles.values(), labels, loc="outside right upper", fontsize=9,
                  title=note.replace("; ", "\n"), title_fontsize=8, handlelength=3.5)  # fmt: skip
    save_figure(figure, path)
