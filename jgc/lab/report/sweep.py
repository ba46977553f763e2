"""One setting at several values, one run for each value and seed: `python -m jgc sweep`."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jgc.lab.launch import train_all
from jgc.lab.report import paper
from jgc.lab.report.ages import last_ages
from jgc.lab.report.compare import (
    FIXED,
    finished_of,
    option_word,
    options_of,
    remarks_on,
    say,
    seeds_of,
    tell_unfinished,
    variants_of,
    words,
)
from jgc.lab.report.plots import COLOURS, MARKERS, save_figure
from jgc.lab.report.runs import Run, Spread, read_run, spread
from jgc.lab.report.tables import filled_table, plus_minus, ratio
from jgc.training.config import GROUPS, Config
from jgc.training.errors import UserError, did_you_mean
from jgc.training.rundir import write_whole
from jgc.training.workloads import workload_named

PAGE, PICTURE = "sweep.md", "sweep.png"
OWN = "compressor."  # before a setting of the method's own
ENTROPY = "entropy_bits"  # a figure of diagnose steps
FLAT = 0.1  # bits: entropies no further apart say nothing in a picture


class Point(NamedTuple):
    """Runs with one value of the setting.

    Attributes:
      method: as `--methods` has it.
      value: as `--values` has it; None for a method that does not have the setting.
      runs: one for each seed.
    """

    method: str
    value: str | None
    runs: tuple[Run, ...]

    @property
    def result(self) -> Spread:
        """What the runs came to, as people read their score."""
        return spread([run.result for run in self.runs])

    @property
    def elements(self) -> float | None:
        """Values of the gradient over values that a node sends in a step of the last phase, mean over seeds."""
        return _mean([run.summary.get("element_ratio") for run in self.runs])

    @property
    def bytes(self) -> float | None:
        """The same in bytes, of a worker."""
        return _mean([run.summary["compression_ratio"]["worker"] for run in self.runs])

    @property
    def entropy(self) -> float | None:
        """Of a layer's histogram in bits, mean over the values, over diagnose steps and over seeds."""
        return _mean([_mean([line[ENTROPY] for line in run.lines if ENTROPY in line]) for run in self.runs])

    @property
    def oldest(self) -> tuple[str, float] | None:
        """The layer whose oldest residual has waited longest at the last diagnose step of a run, and how many steps."""
        found = [pair for run in self.runs for pair in last_ages(run).items()]
        return max(found, key=lambda pair: pair[1], default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if found and len(found) == len(values) else None


def sweep(
    field: str,
    values: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[str],
    workload: str,
    run_dir: Path,
    data_dir: str | None = None,
    changes: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    command: str = "",
) -> Path:
    """Train what has not been trained yet, and write a page and a picture into the runs' folder.

    Args:
      field: a setting of `train.py` (nodes, correction.patience) or of the methods (compressor.ratio). A method that
        does not have it is trained once, to compare with.
      values: of the setting, as `--values` takes them.
      methods: names, as `--methods` takes them.
      seeds: numbers, as `--seeds` takes them.
      workload: a name in `jgc.training.workloads`.
      run_dir: folder of the runs and of the page.
      data_dir: folder of prepared data sets.
      changes: settings of the runs in place of the workload's.
      settings: entries, as `--set` takes them; the field's values have the last word.
      command: to put at the top of the page.

    Returns:
      The page's path.

    Raises:
      UserError: a field, value, name or number that is none, or a folder with other settings; also where runs diverge,
        after a page on the others.
    """
    workload_named(workload)
    variants, numbers, wanted = variants_of(words(methods)), seeds_of(seeds), words(values)
    points = plan(field, wanted, variants)
    common = options_of(settings, variants)
    options = {label: [*common[method], *([] if value is None else [option_word("", field, value)])]
               for label, (method, value) in points.items()}  # fmt: skip
    chosen = {label: variants[method] for label, (method, _) in points.items()}
    failed: dict[str, str] = {}
    train_all(chosen, run_dir, workload, numbers, data_dir, None, changes, options, say, failed)
    folders = {label: [run_dir / f"{label}-seed{seed}" for seed in numbers] for label in points}
    trained = [folder for of_point in folders.values() for folder in of_point]
    finished = set(finished_of(trained, failed))
    measured = []
    for label, (method, value) in points.items():
        runs = tuple(read_run(folder) for folder in folders[label] if folder in finished)
        if runs:
            measured.append(Point(method, value, runs))
    draw(measured, field, run_dir / PICTURE)
    page = run_dir / PAGE
    write_whole(page, markdown(measured, field, workload, numbers, command, remarks_on(failed)).encode())
    tell_unfinished(trained, failed, page)
    return page


def plan(field: str, values: Sequence[str], variants: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """Method and value of every run, by the name of its folder.

    Raises:
      UserError: a field that neither train.py nor any of the methods has, no values, or one that is no folder's name.

    Example:
      >>> from jgc.compress import Dense, Egc
      >>> plan("compressor.ratio", ["64", "256"], {"baseline": Dense(), "egc": Egc()})
      {'baseline': ('baseline', None), 'egc-ratio=64': ('egc', '64'), 'egc-ratio=256': ('egc', '256')}
    """
    name = field.replace("-", "_")
    own = {method: {OWN + f.name for f in dataclasses.fields(default)} for method, default in variants.items()}
    common = {f.name for f in dataclasses.fields(Config)} - {*FIXED, *GROUPS}
    common |= {f"{group}.{f.name}" for group, kind in GROUPS.items() for f in dataclasses.fields(kind)}
    known = common.union(*own.values())
    if name not in known:
        hint = did_you_mean(OWN + name if OWN + name in known else name, sorted(known))
        raise UserError(f"--field must be a setting of train.py or of the methods, got {field!r}{hint}")
    if not values:
        raise UserError("--values names none (one or more, separated by commas)")
    bad = next((value for value in values if "/" in value), None)
    if bad is not None:
        raise UserError(f"--values must be such that a folder can be named by them, got {bad!r}")
    out: dict[str, tuple[str, str | None]] = {}
    for method in variants:
        if name not in common and name not in own[method]:
            out[method] = (method, None)
            continue
        for value in values:
            out[f"{method}-{name.removeprefix(OWN)}={value}"] = (method, value)
    return out


def markdown(
    points: Sequence[Point],
    field: str,
    workload: str,
    seeds: Collection[int],
    command: str,
    remarks: Sequence[str] = (),
) -> str:
    """The page: the table and the picture, and remarks between them."""
    name = field.removeprefix(OWN)
    rows = []
    for point in points:
        oldest = point.oldest
        rows.append([
            point.method, point.value or "-", plus_minus(point.result),
            "" if point.elements is None else ratio(point.elements), ratio(point.bytes),
            "" if point.entropy is None else f"{point.entropy:.3f}",
            "" if oldest is None else f"{oldest[1]:.0f} ({oldest[0]})", *_paper(name, point),
        ])  # fmt: skip
    head = ["method", name, points[0].runs[0].score.heading, "ratio in elements", "ratio in bytes, worker up",
            "entropy of a layer, bits", "oldest residual, steps (layer)", "EGC paper, AlexNet on CIFAR-10: accuracy, %",
            "its ratio in elements"]  # fmt: skip
    steps = " or ".join(dict.fromkeys(str(run.summary["steps"]) for point in points for run in point.runs))
    many = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds, mean ± standard deviation"
    parts = [
        f"# {name} on {workload}",
        f"    {command}" if command else "",
        f"{steps} steps, {many}. Ratios are of the last phase: in elements as papers count; in bytes with "
        "positions and with what of a message is not used.",
        filled_table(head, rows),
        *([paper.EGC_SWEEP_NOTE] if any(any(_paper(name, point)) for point in points) else []),
        *remarks,
        f"![{name}]({PICTURE})",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _paper(name: str, point: Point) -> tuple[str, str]:
    """What the EGC paper has at this value: of another model and far longer runs, to be held against in shape only."""
    theirs = paper.EGC_SWEEPS.get(name, {}).get(point.method, {}).get(str(point.value))
    return ("", "") if theirs is None else (f"{theirs[0]}", f"{theirs[1]:g}x")


# --- the picture ----------------------------------------------------------------------------------------------------


def draw(points: Sequence[Point], field: str, path: Path) -> None:
    """The score against the setting's value, and beside it the entropy where that changes with it, else the ratio."""
    name = field.removeprefix(OWN)
    values = list(dict.fromkeys(point.value for point in points if point.value is not None))
    places = _places(values)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    entropies = [point.entropy for point in points if point.entropy is not None]
    entropy = bool(entropies) and max(entropies) - min(entropies) > FLAT
    for i, method in enumerate(dict.fromkeys(point.method for point in points)):
        mine = [point for point in points if point.method == method]
        look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "label": method}
        results = [point.result for point in mine]
        if mine[0].value is None:
            left.axhline(results[0].mean, color=look["color"], linestyle="--", label=method)
            continue
        at = [places[str(point.value)] for point in mine]
        left.errorbar(at, [r.mean for r in results], [r.std or 0.0 for r in results], capsize=3, **look)
        beside = [point.entropy if entropy else point.elements for point in mine]
        if all(value is not None for value in beside):
            right.plot(at, beside, **look)
    low, high = right.dataLim.intervaly
    if not entropy and high > 4 * low > 0:
        right.set_yscale("log")
    score = points[0].runs[0].score
    several = any(len(point.runs) > 1 for point in points)
    left.set(ylabel=score.heading,
             title=score.title.capitalize() + (": mean and standard deviation over seeds" if several else ", one seed"))
    right.set(ylabel="bits" if entropy else "values of the gradient / values sent",
              title="Entropy of a layer's histogram" if entropy else "Compression ratio in elements")  # fmt: skip
    for axes in (left, right):
        _ticks(axes, name, values, places)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    save_figure(figure, path)


def _places(values: Sequence[str]) -> dict[str, float]:
    """Where values stand: numbers by their size, on a scale of factors of two if all are positive; else in turn."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return {value: float(i) for i, value in enumerate(values)}
    places = np.log2(numbers) if min(numbers, default=0) > 0 else np.array(numbers)
    return dict(zip(values, places.tolist(), strict=True))


def _ticks(axes: Axes, name: str, values: Sequence[str], places: Mapping[str, float]) -> None:
    axes.set_xticks([places[value] for value in values], values)
    axes.set_xlabel(name)
    axes.grid(alpha=0.3)
