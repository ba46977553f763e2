"""Score over time on a link of a given rate, and the parts of that time: Figure 7 of the GradiVeQ paper.

Runs that emulate their nodes on one device send nothing, so the time of a step is a sum of three parts:

    computation   the baseline's median step, for one node: devices compute in parallel
    compression   the method's median step of the phase minus an uncompressed one (of the same run if it has some), for
                  one node
    sending       the bytes that a node sends in a step of the phase, with a node on each device, over the link's rate

Sending is an estimate: no latency, no overlap with computation, every node's link at its full rate at all times.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.papers.figures import DoesNotFit
from experiments.papers.reported import GRADIVEQ
from jgc.lab.report.runs import Group, Run, baseline_of
from jgc.lab.shared.pictures import look, new_figure, save_figure

CYCLE = 500  # steps of the paper's breakdown


class StepTime(NamedTuple):
    """Seconds of a step of one node."""

    computation: float
    compression: float
    sending: float


def step_times(run: Run, baseline: Run, rate: float) -> dict[str, StepTime]:
    """The time of a step of each phase.

    Args:
      run: of a method.
      baseline: uncompressed, of the same workload and nodes.
      rate: of the link, bytes a second.
    """
    seconds, share = _seconds(baseline, "dense"), _nodes_in_turn(run)
    plain = _seconds(run, "dense") or seconds
    times = {}
    for phase in run.summary["phases"]:
        physical = phase["wire"]["physical_one_node_per_device"]
        longer = max(_seconds(run, phase["name"]) - plain, 0.0)
        times[phase["name"]] = StepTime(seconds / share, longer / share, sum(physical.values()) / run.every / rate)
    return times


def _seconds(run: Run, phase: str) -> float:
    """Median seconds of a step of a phase; 0 if the run has no such phase, or one of a single step."""
    return next((p["seconds_per_step"] for p in run.summary["phases"] if p["name"] == phase), None) or 0.0


def _nodes_in_turn(run: Run) -> int:
    """Number of nodes that one device computes.

    Raises:
      DoesNotFit: several devices compute several nodes each.
    """
    if run.summary["layout"] not in ("emulated", "one per device"):
        raise DoesNotFit("figure 7 needs runs whose nodes lie on one device, or on one each")
    return int(run.summary["nodes"]) if run.summary["layout"] == "emulated" else 1


def steps_of_lines(run: Run) -> np.ndarray:
    """Steps that each line of a run stands for: 1, but in a thinned log those since the line before."""
    return np.diff([line["step"] for line in run.lines], prepend=0)


def breakdown(run: Run, times: dict[str, StepTime]) -> StepTime:
    """Seconds of 500 steps after the uncompressed warm-up, each phase with its share of them."""
    counted = list(zip([line["phase"] for line in run.lines], steps_of_lines(run), strict=True))
    later = [(name, steps) for name, steps in counted if name != "dense"] or counted
    whole = CYCLE * np.average([times[name] for name, _ in later], axis=0, weights=[steps for _, steps in later])
    return StepTime(*(float(x) for x in whole))


def draw(groups: Sequence[Group], path: Path, rate: float, rate_name: str) -> None:
    """Draw the score over estimated time, and the breakdown of 500 steps.

    Raises:
      DoesNotFit: several workloads, or a row without an uncompressed one that differs only in the method.
    """
    if len({group.workload for group in groups}) > 1:
        raise DoesNotFit("figure 7 needs runs of one workload")
    if not all(run.lines for group in groups for run in group.runs):
        raise DoesNotFit("figure 7 needs metrics.jsonl of every run")
    baselines = _baselines(groups)
    score, labels = groups[0].score, [group.label for group in groups]
    figure = new_figure(13, 4.8)
    figure.suptitle(f"Time on a link of {rate_name} for each node: sending estimated from bytes, the rest measured")
    left, right = figure.subplots(1, 2)
    for group in groups:
        colour, style, marker = look(labels, group.label)
        for i, (run, baseline) in enumerate(_pairs(group, baselines)):
            times = step_times(run, baseline, rate)
            steps = steps_of_lines(run)
            at = np.cumsum([n * sum(times[x["phase"]]) for n, x in zip(steps, run.lines, strict=True)]) / 60
            seen = [j for j, line in enumerate(run.lines) if line.get(score.name) is not None]
            scores = [score.scale * run.lines[j][score.name] for j in seen]
            left.plot(at[seen], scores, color=colour, linestyle=style, marker=marker, markersize=3.5, linewidth=1.3,
                      label=group.label if i == 0 else None)  # fmt: skip
    title = f"{score.title.capitalize()} against time, a line a seed"
    left.set(xlabel="minutes", ylabel=score.heading, title=title)
    left.set_xlim(left=0)
    parts = list(_parts(groups, baselines, rate).values())
    bottom = np.zeros(len(groups))
    for name, colour in zip(StepTime._fields, ("#0072B2", "#E69F00", "#999999"), strict=True):
        heights = np.array([getattr(part, name) for part in parts])
        right.bar(range(len(groups)), heights, bottom=bottom, color=colour, label=name, width=0.6)
        bottom += heights
    for i, total in enumerate(bottom):
        right.annotate(f"{total:.0f} s", (i, total), ha="center", va="bottom", fontsize=9)
    right.set_xticks(range(len(groups)), labels, rotation=15, ha="right")
    right.set(ylabel="seconds", title=f"{CYCLE} steps after the warm-up")
    right.set_ylim(top=1.12 * max(bottom))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    save_figure(figure, path)


def _baselines(groups: Sequence[Group]) -> dict[str, Group]:
    """The uncompressed row to compare each row with, by its label."""
    baselines = {}
    for group in groups:
        baseline = baseline_of(group._replace(baseline=""), groups)
        if baseline is None:
            raise DoesNotFit(f"figure 7 needs an uncompressed run (--method dense) set like {group.label}")
        baselines[group.label] = baseline
    return baselines


def _parts(groups: Sequence[Group], baselines: dict[str, Group], rate: float) -> dict[str, StepTime]:
    """The breakdown of each row, by its label: the mean over its runs, each compared with one of the baseline's."""
    parts = {}
    for group in groups:
        each = [breakdown(run, step_times(run, baseline, rate)) for run, baseline in _pairs(group, baselines)]
        parts[group.label] = StepTime(*np.mean(each, axis=0))
    return parts


def _pairs(group: Group, baselines: dict[str, Group]) -> list[tuple[Run, Run]]:
    """Each run of a row with a run of its baseline, in order; the last one again where the baseline has fewer."""
    plain = baselines[group.label].runs
    return [(run, plain[min(i, len(plain) - 1)]) for i, run in enumerate(group.runs)]


def section(groups: Sequence[Group], rate: float) -> str:
    """The breakdown of 500 steps as a table, next to the paper's."""
    baselines = _baselines(groups)
    parts = _parts(groups, baselines, rate)
    head = "| method | computation, s | compression, s | sending, s | aggregation against the baseline's | whole step |"
    rows = [head, "|---|---|---|---|---|---|"]
    for label, part in parts.items():
        aggregation, reference = part.compression + part.sending, parts[baselines[label].label]
        faster = reference.sending / aggregation if aggregation else float("inf")
        rows.append(
            f"| {label} | {part.computation:.1f} | {part.compression:.1f} | {part.sending:.1f} | {faster:.2f}x "
            f"| {sum(reference) / sum(part):.2f}x |"
        )
    lines = (
        f"Seconds of {CYCLE} steps after the warm-up, of one node; means over seeds. Sending is an estimate: the "
        "bytes that a node sends with a node on each device, over the rate. Compression is what the method's median "
        "step takes longer than an uncompressed one, of the same run where it has some; runs trained at other times or "
        "during other work differ by more than that."
    )
    return "\n".join([lines, "", *rows, "", GRADIVEQ])
