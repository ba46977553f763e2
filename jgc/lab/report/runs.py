"""Read run folders, and pool runs that differ only in their seed: a row of a report."""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jgc.lab.launch import minutes
from jgc.lab.shared.choices import NAMES
from jgc.training.data import Score, final, further_of, score_of
from jgc.training.errors import UserError, did_you_mean
from jgc.training.output.metrics import Line, read
from jgc.training.output.summary import read_summary
from jgc.training.run.folder import CONFIG, METRICS, SUMMARY, read_object
from jgc.training.settings.config import DistributedConfig, RecordConfig
from jgc.training.settings.saved_config import FREE, completed

# Settings that do not make a different experiment. Steps and nodes do, though --resume may change them.
PARTS = {"record": RecordConfig, "distributed": DistributedConfig}  # whose every setting is as good as any other
IGNORED = (FREE - {"steps", "nodes"}) | {"seed", *(f"{part}.{f.name}" for part, kind in PARTS.items()
                                                   for f in dataclasses.fields(kind))}  # fmt: skip
ABSENT = "absent"  # for a setting that a run does not have


class Run(NamedTuple):
    """A finished run: the settings, the summary and the metrics that its folder holds."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    lines: list[Line]

    @property
    def score(self) -> Score:
        """Its score."""
        return score_of(self.summary)

    @property
    def result(self) -> float:
        """The final score in its usual unit."""
        return final(self.summary)

    @property
    def hours(self) -> float:
        """Hours of its steps, from the median of each phase, so without times in which the machine waited."""
        return minutes(self.summary) / 60

    @property
    def every(self) -> int:
        """Steps from one exchange to the next: 1, or H of local steps."""
        return self.config.get("local", {}).get("every") or 1

    @property
    def step_bytes(self) -> float | None:
        """Bytes that all nodes send up in a step of the last phase, mean; with local steps a step's share.

        The first exchange is left out, with which weights may travel. None without metrics. The log of a
        published run lacks steps, and its summary has the figure (docs/results/thin.py).
        """
        if "step_bytes" in self.summary:
            return self.summary["step_bytes"]
        name = self.summary["phases"][-1]["name"]
        sent = [line["bytes"] for line in self.lines if line["phase"] == name]
        if self.every > 1:
            sent = [count for count in sent if count]  # of exchanges
        share = self.config.get("local", {}).get("fragments", 1) / self.every
        return share * statistics.fmean(sent[1:] or sent) if sent else None


class Group(NamedTuple):
    """Runs that differ only in seed, in the order of their seeds.

    Attributes:
      label: the row's name.
      runs: of one seed each.
      baseline: label of the group to compare with; "" for the uncompressed runs that differ only in the method.
    """

    label: str
    runs: tuple[Run, ...]
    baseline: str = ""

    @property
    def method(self) -> str:
        return self.runs[0].summary["method"]

    @property
    def workload(self) -> str:
        return self.runs[0].summary["workload"]

    @property
    def score(self) -> Score:
        return self.runs[0].score

    @property
    def further(self) -> tuple[Score, ...]:
        """Further figures of the evaluation."""
        return further_of(self.runs[0].summary)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.summary["seed"] for run in self.runs)

    @property
    def settings(self) -> dict[str, Any]:
        return flat(self.runs[0].config)


class Spread(NamedTuple):
    """Mean over seeds, and the sample standard deviation of two or more."""

    mean: float
    std: float | None


def find(paths: Sequence[Path]) -> tuple[list[Run], list[Path]]:
    """The finished runs in run folders or in folders at any depth above, and the folders of unfinished ones.

    Raises:
      UserError: a path is not a folder, holds no run, or is itself a run that has not finished.
    """
    runs: dict[Path, Run] = {}
    unfinished: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        if (path / CONFIG).exists() and not (path / SUMMARY).exists():
            raise UserError(f"{path} has no {SUMMARY}: the run has not finished; train.py --resume goes on with it")
        folders = [path] if (path / SUMMARY).exists() else _below(path)
        if not folders:
            raise UserError(f"{path} holds no run: there is no {CONFIG} in it or below")
        for folder in folders:
            if not (folder / SUMMARY).exists():
                unfinished.append(folder)
            elif folder.resolve() not in runs:
                runs[folder.resolve()] = read_run(folder)
    if not runs:
        raise UserError(f"no run has finished in {', '.join(map(str, paths))}: none has a {SUMMARY}")
    return list(runs.values()), unfinished


def _below(path: Path) -> list[Path]:
    """The folders of runs below a folder; `**` does not follow links, so those in the folder itself are found apart."""
    return sorted({found.parent for pattern in ("*", "**") for found in path.glob(f"{pattern}/{CONFIG}")})


def read_run(folder: Path) -> Run:
    """A finished run.

    Raises:
      UserError: a file of it cannot be read.
    """
    config = completed(read_object(folder / CONFIG))
    return Run(folder, config, read_summary(folder), read(folder / METRICS))


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name.

    Example:
      >>> flat({"a": 1, "data": {"name": "digits"}})
      {'a': 1, 'data.name': 'digits'}
    """
    out: dict[str, Any] = {}
    for name, value in config.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


def pool(runs: Sequence[Run], by_folder: bool = False, baseline: str = "") -> list[Group]:
    """Groups of runs with equal settings except the seed; the baseline first, then as given.

    Args:
      runs: finished ones.
      by_folder: name groups after the folders that hold their runs.
      baseline: name of the group that all are compared with; if not given, the uncompressed runs that differ in the
        method.

    Raises:
      UserError: two folders hold the same experiment with the same seed, which would count it twice; or no group has
        the baseline's name.
    """
    pooled: dict[str, dict[int, Run]] = {}
    for run in runs:
        settings = {name: value for name, value in flat(run.config).items() if name not in IGNORED}
        holder = str(run.folder.resolve().parent) if by_folder else ""
        seeds = pooled.setdefault(holder + json.dumps(settings, sort_keys=True), {})
        seed = run.summary["seed"]
        if seed in seeds:
            raise UserError(f"{seeds[seed].folder} and {run.folder} have the same settings and seed: give one of them")
        seeds[seed] = run
    groups = [Group("", tuple(seeds[seed] for seed in sorted(seeds))) for seeds in pooled.values()]
    groups.sort(key=lambda group: group.method != "dense")
    label = _label_by_folder if by_folder else _label
    named = [group._replace(label=label(group, groups), baseline=baseline) for group in groups]
    names = [group.label for group in named]
    if baseline and baseline not in names:
        raise UserError(f"--baseline must be the name of a row, got {baseline!r}{did_you_mean(baseline, names)}; "
                        f"the rows are {', '.join(names)}")  # fmt: skip
    return sorted(named, key=lambda group: group.label != baseline)


def _label_by_folder(group: Group, groups: Sequence[Group]) -> str:
    """The name of the folder that holds the runs, with the method's if it holds several methods.

    Of folders with the same name as much of the path as tells them apart.
    """
    holders = [g.runs[0].folder.resolve().parent for g in groups]
    folder, parts = group.runs[0].folder.resolve().parent, 1
    while any(other != folder and other.parts[-parts:] == folder.parts[-parts:] for other in holders):
        parts += 1
    name = "/".join(folder.parts[-parts:])
    return name if holders.count(folder) == 1 else f"{name}, {_label(group, groups)}"


def _label(group: Group, groups: Sequence[Group]) -> str:
    """The method's name, and enough settings to distinguish the group from others of this method and workload."""
    name, settings = NAMES.get(group.method, group.method), group.settings
    words = ", ".join(
        f"{key.removeprefix('compressor.')}={settings.get(key, ABSENT)}" for key in _telling(group, groups)
    )
    return f"{name} ({words})" if words else name


def alike(group: Group, groups: Sequence[Group]) -> list[Group]:
    """The groups of the same method and workload."""
    return [g for g in groups if (g.method, g.workload) == (group.method, group.workload)]


def varying(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Settings in which groups differ, and their values in each."""
    settings = [group.settings for group in groups]
    known = dict.fromkeys(key for settings_of in settings for key in settings_of if key not in IGNORED)
    had = {key: [str(settings_of.get(key, ABSENT)) for settings_of in settings] for key in known}
    return {key: values for key, values in had.items() if len(set(values)) > 1}


def _telling(group: Group, groups: Sequence[Group]) -> list[str]:
    """Enough of the varying settings to distinguish all groups, chosen greedily."""
    had = varying(alike(group, groups))

    def kinds(keys: Iterable[str]) -> int:
        return len(set(zip(*(had[key] for key in keys), strict=True)))

    chosen: list[str] = []
    while kinds(chosen) < kinds(had):
        chosen.append(max(had, key=lambda key: kinds([*chosen, key])))
    return [key for key in had if key in chosen]


def baseline_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """The group that this one is compared with: the one named as the baseline, if it has the same workload.

    Without such a name: the uncompressed runs that differ only in the method, else also in the learning rate, because a
    method may need a different one; else None.
    """

    def outside(g: Group, *skip: str) -> dict[str, Any]:
        skip = (*IGNORED, "method", *skip)
        return {k: v for k, v in g.settings.items() if k not in skip and not k.startswith(("compressor.", "layers."))}

    if group.baseline:
        return next((g for g in groups if (g.label, g.workload) == (group.baseline, group.workload)), None)
    for skip in ((), ("learning_rate",)):
        for g in groups:
            if g.method == "dense" and outside(g, *skip) == outside(group, *skip):
                return g
    return None


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation.

    Example:
      >>> spread([1.0, 3.0])
      Spread(mean=2.0, std=1.4142135623730951)
    """
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def against(group: Group, baseline: Group) -> tuple[Spread, int]:
    """Points of the score over the baseline, over pairs of runs with equal seeds, and the number of pairs."""
    results, baselines = ({run.summary["seed"]: run.result for run in g.runs} for g in (group, baseline))
    common = [seed for seed in results if seed in baselines]
    if common:
        return spread([results[seed] - baselines[seed] for seed in common]), len(common)
    return Spread(statistics.fmean(results.values()) - statistics.fmean(baselines.values()), None), 0
