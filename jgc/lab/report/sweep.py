"""`python -m jgc sweep`: one setting at several values, one run for each value and seed."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from jgc.lab.launch import Runs, launch
from jgc.lab.report.ages import last_ages
from jgc.lab.report.runs import Run, Spread, read_run, spread
from jgc.lab.report.tables import plus_minus
from jgc.lab.shared.choices import fields_of_runs, known_methods, option_word, options_of, seeds_of, variants_of, words
from jgc.lab.shared.pictures import COLOURS, MARKERS, new_figure, save_figure
from jgc.lab.shared.tables import filled_table, ratio
from jgc.training.errors import UserError, did_you_mean
from jgc.training.run.folder import write_whole
from jgc.training.settings.workloads import workload_named

PAGE, PICTURE = "sweep.md", "sweep.png"
OWN = "compressor."  # before a setting of a method
ENTROPY = "entropy_bits"  # in the lines of diagnose steps
FLAT = 0.1  # bits; entropies no further apart are not drawn


@dataclass(frozen=True, kw_only=True)
class Sweep(Runs):
    """Train with several values of one setting: a table and a picture.

    The folder of the runs, {method}-{setting}={value}-seed{seed}, gets sweep.md and sweep.png.

        python -m jgc sweep --field compressor.ratio --values 256,512,1024 --methods egc,dense --run-dir runs/sweep

        | method | ratio | test accuracy, % | ratio in elements | ratio in bytes, worker up |
        | egc | 256 | 98.33 ± 0.00 | 256.4x | 195x |
        | egc | 512 | 98.06 ± 0.00 | 512.7x | 380.9x |
    """

    field: str
    """a setting of train.py, such as nodes, or of the methods, such as compressor.ratio; a method that does not
    have it is trained once, to compare with"""
    values: tuple[str, ...]
    """values of the setting, separated by commas or spaces"""
    methods: tuple[str, ...] = ("egc",)
    """as in compare"""

    def run(self, line: str) -> None:
        """Train, and print where the page is."""
        print(sweep(self, line))


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
        """The final score in its usual unit."""
        return spread([run.result for run in self.runs])

    @property
    def elements(self) -> float | None:
        """Values of the gradient over values that a node sends in a step of the last phase, mean over seeds."""
        return _mean([run.summary.get("element_ratio") for run in self.runs])

    @property
    def bytes(self) -> float | None:
        """Compression ratio of a worker in bytes."""
        return _mean([run.summary["compression_ratio"]["worker"] for run in self.runs])

    @property
    def entropy(self) -> float | None:
        """Entropy of a layer's histogram in bits, mean over values, diagnose steps and seeds."""
        return _mean([_mean([line[ENTROPY] for line in run.lines if ENTROPY in line]) for run in self.runs])

    @property
    def oldest(self) -> tuple[str, float] | None:
        """The layer with the oldest residual at the last diagnose step of a run, and its age in steps."""
        ages = [pair for run in self.runs for pair in last_ages(run).items()]
        return max(ages, key=lambda pair: pair[1], default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers and len(numbers) == len(values) else None


def sweep(asked: Sweep, line: str = "") -> Path:
    """Train what has not been trained yet, write a page and a picture, and return the page's path.

    Args:
      asked: the options.
      line: the command line, shown at the top of the page.

    Raises:
      UserError: an unknown field or name, a bad value or number, a folder with other settings; or runs diverged, after
        a page on the others is written.
    """
    workload_named(asked.workload)
    variants = variants_of(words(asked.methods))
    planned = plan(asked.field, words(asked.values), variants)
    common = options_of(asked.set, variants)
    options = {label: [*common[method], *([] if value is None else [option_word("", asked.field, value)])]
               for label, (method, value) in planned.items()}  # fmt: skip
    outcome = launch(asked, {label: variants[method] for label, (method, _) in planned.items()}, options)
    points = [Point(*planned[label], tuple(map(read_run, folders)))
              for label, folders in outcome.folders.items() if folders]  # fmt: skip
    draw(points, asked.field, asked.run_dir / PICTURE)
    page = asked.run_dir / PAGE
    text = markdown(points, asked.field, asked.workload, seeds_of(asked.seeds), line, outcome.remarks)
    write_whole(page, text.encode())
    outcome.check(page)
    return page


def plan(field: str, values: Sequence[str], variants: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """Method and value of every run, by the name of its folder.

    Raises:
      UserError: an unknown field, no values, or a value that cannot be in a folder's name.

    Example:
      >>> from jgc.compress import Dense, Egc
      >>> plan("compressor.ratio", ["64", "256"], {"baseline": Dense(), "egc": Egc()})
      {'baseline': ('baseline', None), 'egc-ratio=64': ('egc', '64'), 'egc-ratio=256': ('egc', '256')}
    """
    name = field.replace("-", "_")
    fields = {method: {OWN + f.name for f in dataclasses.fields(default)} for method, default in variants.items()}
    common = fields_of_runs()
    known = common.union(*fields.values())
    of_others = {OWN + f.name for kind in known_methods().values() for f in dataclasses.fields(kind)}
    if name not in known and name in of_others:
        raise UserError(f"--field {field}: none of --methods {', '.join(variants)} has it")
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
        if name not in common and name not in fields[method]:
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
    """The page: the table, remarks and the picture."""
    name = field.removeprefix(OWN)
    rows = []
    for point in points:
        oldest = point.oldest
        rows.append([
            point.method, point.value or "-", plus_minus(point.result),
            "" if point.elements is None else ratio(point.elements), ratio(point.bytes),
            "" if point.entropy is None else f"{point.entropy:.3f}",
            "" if oldest is None else f"{oldest[1]:.0f} ({oldest[0]})",
        ])  # fmt: skip
    head = ["method", name, points[0].runs[0].score.heading, "ratio in elements", "ratio in bytes, worker up",
            "entropy of a layer, bits", "oldest residual, steps (layer)"]  # fmt: skip
    steps = " or ".join(dict.fromkeys(str(run.summary["steps"]) for point in points for run in point.runs))
    many = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds, mean ± standard deviation"
    fewer = [f"{p.method}, {p.value or '-'}: {len(p.runs)}" for p in points if len(p.runs) < len(seeds)]
    many += f" (of fewer, for runs failed: {'; '.join(fewer)})" if fewer else ""
    parts = [
        f"# {name} on {workload}",
        f"    {command}" if command else "",
        f"{steps} steps, {many}. Ratios are of the last phase: in elements as papers count; in bytes with "
        "positions and unused parts of messages.",
        filled_table(head, rows),
        *remarks,
        f"![{name}]({PICTURE})",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# --- the picture ----------------------------------------------------------------------------------------------------


def draw(points: Sequence[Point], field: str, path: Path) -> None:
    """Draw the score over the setting's value, and next to it the entropy if that varies, else the ratio."""
    name = field.removeprefix(OWN)
    values = list(dict.fromkeys(point.value for point in points if point.value is not None))
    places = _places(values)
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    entropies = [point.entropy for point in points if point.entropy is not None]
    entropy = bool(entropies) and max(entropies) - min(entropies) > FLAT
    for i, method in enumerate(dict.fromkeys(point.method for point in points)):
        series = sorted((p for p in points if p.method == method), key=lambda p: places.get(str(p.value), 0))
        look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "label": method}
        results = [point.result for point in series]
        if series[0].value is None:
            left.axhline(results[0].mean, color=look["color"], linestyle="--", label=method)
            continue
        at = [places[str(point.value)] for point in series]
        left.errorbar(at, [r.mean for r in results], [r.std or 0.0 for r in results], capsize=3, **look)
        shown = [point.entropy if entropy else point.elements for point in series]
        if all(value is not None for value in shown):
            right.plot(at, shown, **look)
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
    """Places on the axis: numbers by size, on a log scale if all are positive; other values in turn."""
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
