"""The tables of a report, as Markdown."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jgc.compress import METHODS
from jgc.lab.report.runs import ABSENT, Group, Spread, against, alike, baseline_of, spread, varying
from jgc.lab.shared.reconstruction import FIGURES, figures_of
from jgc.lab.shared.tables import filled_table, ratio, table
from jgc.training.data import Score, final
from jgc.training.output.summary import POSITIONS, uplink
from jgc.training.output.table import size, slots

FEWEST = 3  # pairs of runs with equal seed of which a table says whether a method is as good as the baseline


class Figures(NamedTuple):
    """The figures of a row, means over its seeds; bytes and ratios are equal for all seeds.

    Attributes:
      result: the score in its usual unit.
      against: points over the baseline; None without a baseline.
      pairs: number of pairs of runs with equal seed; 0 means a difference of means.
      leader, worker: bytes that such a node sends up in a step of the last phase; with local steps a step's share.
      ratios: of the last phase, by role; None if a node sends nothing.
      total, dense_total: bytes that all nodes sent up in the run, weights that go down once included, and would have
        uncompressed.
      physical: bytes of a device in a step of the last phase; None if one device holds all nodes.
      physical_apart: the same with a device for each node.
      seconds: median seconds of a step by phase.
      cosine: reconstruction cosine of the last phase, or None.
      true_cosine: cosine of the aggregate with the mean gradient of the step, or None.
    """

    result: Spread
    against: Spread | None
    pairs: int
    leader: float
    worker: float
    ratios: dict[str, float | None]
    total: float
    dense_total: float
    physical: float | None
    physical_apart: float
    seconds: dict[str, float]
    cosine: Spread | None
    true_cosine: Spread | None


def figures(group: Group, groups: Sequence[Group]) -> Figures:
    """A group's figures from its summaries."""
    summaries = [run.summary for run in group.runs]
    first, last = summaries[0], summaries[0]["phases"][-1]
    baseline = baseline_of(group, groups)
    difference, pairs = (None, 0) if baseline is None or baseline is group else against(group, baseline)
    wire, every = last["wire"], group.runs[0].every
    physical = _device(wire["physical"])
    cosines, true = ([s[name] for s in summaries if s.get(name) is not None]
                     for name in ("reconstruction_cosine", "true_cosine"))  # fmt: skip
    return Figures(
        spread([run.result for run in group.runs]),
        difference,
        pairs,
        uplink(first["parameters"], first["compression_ratio"]["leader"]),
        uplink(first["parameters"], first["compression_ratio"]["worker"]),
        first["compression_ratio"],
        spread([s["total_bytes"] for s in summaries]).mean,
        spread([s["dense_total_bytes"] for s in summaries]).mean,
        None if physical is None else physical / every,
        (_device(wire.get("physical_one_node_per_device", {})) or 0.0) / every,
        _seconds(summaries),
        spread(cosines) if cosines else None,
        spread(true) if true else None,
    )


def _device(physical: dict[str, float]) -> float | None:
    """Gradient bytes that a device sends, without `other`: flags and metrics."""
    return sum(count for name, count in physical.items() if name != "other") if physical else None


def _seconds(summaries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean over seeds of each phase's median."""
    seconds: dict[str, list[float]] = {}
    for summary in summaries:
        for phase in summary["phases"]:
            if phase["seconds_per_step"] is not None:
                seconds.setdefault(phase["name"], []).append(phase["seconds_per_step"])
    return {name: spread(values).mean for name, values in seconds.items()}


def plus_minus(value: Spread | None, digits: int = 2, sign: str = "") -> str:
    """Mean and spread as text.

    Example:
      >>> plus_minus(Spread(1.234, 0.5), sign="+")
      '+1.23 ± 0.50'
    """
    if value is None:
        return ""
    return f"{value.mean:{sign}.{digits}f}" + ("" if value.std is None else f" ± {value.std:.{digits}f}")


def score_table(groups: Sequence[Group], everything: Sequence[Group]) -> str:
    """A workload's score next to the baseline's."""
    score = groups[0].score
    points, point = (f", {score.point}s", f" {score.point}") if score.point else ("", "")
    further = groups[0].further
    before = [_before_compression(group) for group in groups]
    head = ["method", "seeds", score.heading, *(figure.heading for figure in further),
            *(["before compression"] if any(before) else []),
            f"against the baseline{points}", f"within {score.tolerance}{point}",
            "cosine with the mean, at the positions sent", "cosine with the step's mean gradient"]  # fmt: skip
    rows = []
    for group, first in zip(groups, before, strict=True):
        f = figures(group, everything)
        within = "" if f.against is None or f.pairs < FEWEST else "yes" if score.is_as_good(f.against.mean) else "no"
        rows.append([group.label, ", ".join(map(str, group.seeds)), plus_minus(f.result, score.digits),
                     *(plus_minus(_spread_of(group, figure), figure.digits) for figure in further),
                     *([first] if any(before) else []),
                     difference_text(group, f), within,
                     plus_minus(f.cosine, 3), plus_minus(f.true_cosine, 3)])  # fmt: skip
    return table(head, rows)


def _before_compression(group: Group) -> str:
    """The score at the end of the uncompressed steps, mean over seeds; empty where a run has none, or no others."""
    starts = [(run.summary, run.summary["phases"][0]) for run in group.runs
              if len(run.summary["phases"]) > 1 and run.summary["phases"][0]["name"] == "dense"]  # fmt: skip
    scores = [final(summary, phase) for summary, phase in starts if phase.get(group.score.name) is not None]
    return plus_minus(spread(scores), group.score.digits) if scores and len(scores) == len(group.runs) else ""


def _spread_of(group: Group, figure: Score) -> Spread | None:
    """A further figure of the evaluation over seeds, in its usual unit; None if a run has none."""
    values = [run.summary.get(figure.name) for run in group.runs]
    return None if None in values else spread([figure.scale * value for value in values if value is not None])


def reconstruction_table(groups: Sequence[Group]) -> str:
    """Cosines of decoded values with the true mean, next to trivial codes; empty if no method has a code."""
    rows = []
    for group in groups:
        summaries = [run.summary for run in group.runs]
        if all(summary.get("ceiling_cosine") for summary in summaries):
            share = spread([s["reconstruction_cosine"] / s["ceiling_cosine"] for s in summaries])
            rows.append([group.label, *figures_of(summaries), f"{share.mean:.3f}"])
    return table(["method", *FIGURES.values(), "share of the ceiling"], rows) if rows else ""


def settings_table(groups: Sequence[Group], everything: Sequence[Group]) -> str:
    """Settings of each method other than its class's defaults, and settings of the run in which it differs from others.

    The others are the baseline of choice; without one the runs of the same method, and for the learning rate the
    uncompressed baseline.
    """
    rows = []
    for group in groups:
        defaults = {f.name: f.default for f in dataclasses.fields(METHODS[group.method].settings)}
        settings = group.runs[0].config.get("compressor", {})
        changed = [f"{name} {value}" for name, value in settings.items() if value != defaults.get(name)]
        baseline, rate = baseline_of(group, everything), group.settings.get("learning_rate")
        others = [group, baseline] if group.baseline and baseline is not None else alike(group, everything)
        changed += [f"{name} {group.settings.get(name, ABSENT)}" for name in varying(others)
                    if name != "method" and not name.startswith("compressor.")]  # fmt: skip
        if not group.baseline and baseline is not None and rate != baseline.settings.get("learning_rate"):
            changed.append(f"learning rate {rate} (the baseline's: {baseline.settings['learning_rate']})")
        rows.append([group.label, ", ".join(changed) or "none"])
    return table(["method", "settings other than its defaults"], rows)


def bytes_table(groups: Sequence[Group], everything: Sequence[Group]) -> str:
    """Bytes of a step of the last phase and of the whole run."""
    head = ["method", "leader up, a step", "worker up, a step", "leader ratio", "worker ratio",
            "ratio in values, as EGC counts", "whole run, all nodes up and once", "less than uncompressed",
            "physical, a device, a step", "one node per device: physical",
            "positions a step: sent / entropy bound / DEFLATE",
            "message of fixed size"]  # fmt: skip
    rows = []
    for group in groups:
        f = figures(group, everything)
        rows.append([group.label, size(f.leader), size(f.worker), ratio(f.ratios["leader"]), ratio(f.ratios["worker"]),
                     _in_values(group), size(f.total), ratio(f.dense_total / f.total if f.total else None),
                     "" if f.physical is None else size(f.physical), size(f.physical_apart), _positions(group),
                     slots(group.runs[0].summary)])  # fmt: skip
    return filled_table(head, rows)


class FewestBytes(NamedTuple):
    """Of a method's rows that are as good as the baseline and send less, those with the fewest bytes in the whole run.

    Attributes:
      method: the method.
      compared: number of its rows.
      row: of rows of `FEWEST` pairs or more; None if none is as good.
      chance: of rows of fewer pairs, where one sends less than `row`.
    """

    method: str
    compared: int
    row: Group | None
    chance: Group | None


def fewest_bytes(groups: Sequence[Group], everything: Sequence[Group]) -> list[FewestBytes]:
    """By method, the rows with the fewest bytes among those as good as the baseline; none if there is no baseline."""
    known = [(group, f) for group in groups if (f := figures(group, everything)).against is not None]
    lines = []
    for method in dict.fromkeys(group.method for group, _ in known):
        rows = [(group, f) for group, f in known if group.method == method]
        good = [(f.total, f.pairs >= FEWEST, group) for group, f in rows
                if f.against is not None and group.score.is_as_good(f.against.mean)
                and f.total < f.dense_total]  # fmt: skip
        good.sort(key=lambda pair: pair[0])
        row = next((group for _, sure, group in good if sure), None)
        first = good[0][2] if good else None
        lines.append(FewestBytes(method, len(rows), row, None if first is row else first))
    return lines


def fewest_bytes_table(groups: Sequence[Group], everything: Sequence[Group]) -> str:
    """`fewest_bytes` as a table; empty if there is no baseline."""
    rows = []
    for method, compared, row, chance in fewest_bytes(groups, everything):
        cells = ["none", "", "", ""]
        if row is not None:
            f = figures(row, everything)
            cells = [row.label, size(f.leader), size(f.total), difference_text(row, f)]
        less = ""
        if chance is not None:
            f = figures(chance, everything)
            less = f"{chance.label}: {size(f.total)}, {difference_text(chance, f)}"
        rows.append([method, *cells, str(compared), less])
    head = ["method", f"row of {FEWEST} pairs or more", "leader up, a step", "whole run, all nodes up",
            "against the baseline", "rows compared", "less, of fewer pairs: perhaps by chance"]  # fmt: skip
    return table(head, rows) if rows else ""


def difference_text(group: Group, f: Figures) -> str:
    """The difference from the baseline, and of how many pairs it is the mean."""
    if f.against is None:
        return ""
    pairs = "means" if not f.pairs else "1 pair" if f.pairs == 1 else f"{f.pairs} pairs"
    return f"{plus_minus(f.against, group.score.digits, '+')} ({pairs})"


def _in_values(group: Group) -> str:
    """Compression ratio in values, in the last phase, mean over nodes."""
    shares = [share for run in group.runs if (share := run.summary.get("element_ratio"))]
    return ratio(spread(shares).mean) if len(shares) == len(group.runs) else ""


def _positions(group: Group) -> str:
    """Bytes of a step's positions in the first run: sent, entropy bound and DEFLATE; "" if none are sent."""
    run = group.runs[0]
    sizes = [run.summary.get(name) for name in POSITIONS]
    return " / ".join("-" if count is None else size(count / run.every) for count in sizes) if any(sizes) else ""


def time_table(groups: Sequence[Group], everything: Sequence[Group]) -> str:
    """Seconds of a step in every phase."""
    rows = []
    for group in groups:
        f = figures(group, everything)
        for name, seconds in f.seconds.items():
            phases = (phase for run in group.runs for phase in run.summary["phases"])
            steps = next(phase["steps"] for phase in phases if phase["name"] == name)
            rows.append([group.label, name, str(steps), f"{100 * steps / group.runs[0].summary['steps']:.1f} %",
                         f"{seconds:.3f}"])  # fmt: skip
    head = ["method", "phase", "steps", "share of the steps", "seconds a step"]
    return table(head, rows)
