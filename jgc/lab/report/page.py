"""`python -m jgc report`: report.md, report.html and pictures, from run folders."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from markdown_it import MarkdownIt

from jgc.lab.report import plots
from jgc.lab.report.ages import EXPLANATION, age_table
from jgc.lab.report.runs import Group, find, pool
from jgc.lab.report.seconds import draw as draw_over_time, measured, seconds_table
from jgc.lab.report.tables import (
    FEWEST,
    bytes_table,
    fewest_bytes_table,
    reconstruction_table,
    score_table,
    settings_table,
    time_table,
)
from jgc.training.errors import UserError, cannot_write
from jgc.training.run.folder import write_whole

PICTURES = {
    "score.png": ("{score} over steps", plots.scores),
    "loss.png": ("Training loss over steps", plots.loss),
    "bytes.png": ("{score} for the bytes sent", plots.bytes_against_score),
    "step_bytes.png": ("{score} for the bytes of a step", plots.step_bytes_against_score),
}

STYLE = (  # on a phone tables scroll by themselves, under a first column that stays
    "body{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em;line-height:1.45}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;font-size:90%}"
    "td,th{border:1px solid #bbb;padding:.25em .6em;min-width:3.5em}th{background:#eee}"
    "td:first-child,th:first-child{position:sticky;left:0;background:#eee}"
    "img{max-width:100%}pre{overflow-x:auto}code{overflow-wrap:anywhere}"
)


@dataclass(frozen=True)
class Report:
    """Tables and pictures of finished runs; runs that differ only in their seed are one row.

    Writes report.md, report.html and the pictures.

        python -m jgc report runs/compare --output report

        | method | seeds | test accuracy, % | against the baseline, points |
        | baseline | 0, 1, 2 | 59.98 ± 0.71 |  |
        | topk | 0, 1, 2 | 61.49 ± 1.29 | +1.51 ± 0.64 (3 pairs) |
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """run folders, or folders of them"""
    output: Path = Path("report")
    """folder of the report"""
    by_folder: bool = False
    """name rows after the folders that hold their runs, as `compare --run-dir` made them"""
    baseline: str = ""
    """name of the row that all others are compared with; if not given, the uncompressed runs that differ only in
    the method"""
    seconds: Path | None = None
    """JSON file that says which measurement of `bench network` belongs to which row, for a picture of the score over
    time: {"results": "network/results.json", "rows": {"topk": "topk:alpha=0.01"}}, the path seen from this file"""

    def run(self, line: str) -> None:
        """Write the report, and print where it is."""
        if not self.runs:
            raise UserError("give the folders of runs, or a folder of them: python -m jgc report RUN...")
        print(write(self.runs, self.output, (), self.by_folder, self.baseline, self.seconds))


def write(
    paths: Sequence[Path],
    output: Path,
    remarks: Sequence[str] = (),
    by_folder: bool = False,
    baseline: str = "",
    seconds: Path | None = None,
) -> Path:
    """Write a report on runs and return the path of its Markdown.

    Args:
      paths: run folders, or folders of them.
      output: folder for report.md, report.html and the pictures; made if need be.
      remarks: lines at the top.
      by_folder, baseline: see `pool`.
      seconds: see `jgc.lab.report.seconds`; None for no picture over time.

    Raises:
      UserError: no finished run, a file that cannot be read, an unknown row, a full disk.
    """
    if output.is_file():
        raise UserError(f"--output must be a folder, got the file {output}")
    runs, unfinished = find(paths)
    groups = pool(runs, by_folder, baseline)
    timed = {} if seconds is None else measured(seconds, groups)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output, error) from error
    draw_timed = partial(draw_over_time, seconds=timed)
    over_time = {"seconds.png": ("{score} over measured time, by rate", draw_timed)} if timed else {}
    pictures = PICTURES | over_time
    for name, (_, draw) in pictures.items():
        draw(groups, output / name)
    hours = sum(run.hours for run in runs)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    lines = [f"{count}, {hours:.2f} hours of training steps in all (each phase's median times its steps; "
            "evaluation and checkpoints come on top).", *remarks]  # fmt: skip
    for run in runs:
        if missing := run.summary.get("steps_without_metrics"):
            lines.append(f"`{run.folder}` lacks the metrics of {missing} steps: its totals count only the others.")
    if unfinished:
        lines.append(f"Left out, because not finished: {', '.join(f'`{folder}`' for folder in unfinished)}.")
    titles = {name: title.format(score=plots.score_name(groups)) for name, (title, _) in pictures.items()}
    text = markdown(groups, lines, titles)
    if timed:
        text += f"\n### Measured time by rate\n\n{seconds_table(groups, timed)}\n\nMedian steps of `bench network`.\n"
    write_whole(output / "report.md", text.encode())
    write_whole(output / "report.html", as_html(text).encode())
    return output / "report.md"


def markdown(groups: Sequence[Group], remarks: Sequence[str], pictures: dict[str, str]) -> str:
    """The report. Figures are means over seeds, with the sample standard deviation."""
    blocks = ["# Report", *remarks]
    for workload, shown in plots.by(groups, lambda group: group.workload).items():
        blocks += [f"## {workload}", setting(shown), *tables(shown, groups)]
    blocks += ["## Pictures", *(f"### {title}\n\n![{title}]({name})" for name, title in pictures.items())]
    return "\n\n".join(blocks) + "\n"


def setting(groups: Sequence[Group]) -> str:
    """Settings and versions common to the runs of a workload."""
    common = [", ".join(dict.fromkeys(str(group.settings.get(name)) for group in groups))
              for name in ("nodes", "steps", "batch_size")]  # fmt: skip
    versions = groups[0].runs[0].summary.get("versions", {})
    layouts = ", ".join(dict.fromkeys(str(group.runs[0].summary["layout"]) for group in groups))
    return (f"Nodes: {common[0]} ({layouts}). Steps: {common[1]}. Batch of all nodes: {common[2]}. "
            f"Python {versions.get('python')}, jax {versions.get('jax')}.")  # fmt: skip


def tables(shown: Sequence[Group], groups: Sequence[Group]) -> list[str]:
    """The tables of a workload, with explanations."""
    emulated = any(not group.runs[0].summary["phases"][-1]["wire"]["physical"] for group in shown)
    blocks = [
        f"### {shown[0].score.title.capitalize()}",
        score_table(shown, groups),
        f"Mean ± sample standard deviation over seeds. Against {_baseline(shown[0])}; (means) "
        "where no seed is common, and empty where there is no such baseline. Whether a method is as good is said of "
        f"{FEWEST} pairs or more. The first cosine compares decoded values with the mean over nodes of their "
        "residuals, at the positions that were sent (of all values where a method sends a code of all): 1 for exact "
        "values at shared positions, so it compares codes of the same positions and not methods. The second compares "
        "the aggregate with the mean gradient of that step; error feedback sends the rest later.",
        *reconstruction(shown),
        "### Settings",
        settings_table(shown, groups),
        "The settings in which rows of one method differ.",
        "### Bytes",
        bytes_table(shown, groups),
        "Bytes and ratios of a step are of the last phase, logical: a node's message in the paper's topology, "
        "every value, position and scale counted. Where a method has no leader its column shows a worker. The whole "
        "run includes the uncompressed and the top-k phases, and one-off messages such as trained weights. "
        "Positions: of a node that sends some.",
    ]
    if emulated:
        blocks.append("Physical bytes are empty where all nodes are emulated on one device: nothing was sent between "
                      "devices. The next column has a device's bytes with a node on each.")  # fmt: skip
    blocks += _fewest_bytes(shown, groups)
    ages = age_table(shown)
    if ages:
        blocks += ["### Age of residuals", ages, EXPLANATION]
    local = " With local steps the median step has no exchange: what one takes is not in it." if any(
        run.every > 1 for group in shown for run in group.runs) else ""  # fmt: skip
    blocks += ["### Time", time_table(shown, groups),
               f"Medians within a run, means over seeds. Nodes on one device share no network, so their seconds hold "
               f"what compression costs and not what it saves on a link.{local}"]
    return blocks


def _fewest_bytes(shown: Sequence[Group], groups: Sequence[Group]) -> list[str]:
    """The row of each method that is as good as the baseline for the fewest bytes, where rows have a baseline."""
    least, score = fewest_bytes_table(shown, groups), shown[0].score
    if not least:
        return []
    return [f"### Fewest bytes within {score.tolerance:g} {score.point or score.title} of the baseline", least,
            "Of the rows of each method that are as good, the one with the fewest bytes in the whole run."]  # fmt: skip


def _baseline(group: Group) -> str:
    """The baseline of the groups, in words."""
    pairs = "the mean over pairs of runs with equal seed"
    if group.baseline:
        return f"`{group.baseline}`, whatever else differs: {pairs}"
    alike = "differ in nothing but the method (and in the learning rate where the settings say so)"
    return f"the baseline: {pairs}, which {alike}"


def reconstruction(groups: Sequence[Group]) -> list[str]:
    """Quality of reconstruction, where a method has a code."""
    coded = reconstruction_table(groups)
    if not coded:
        return []
    return ["### Reconstruction", coded,
            "Means over the last phase and over seeds, at the positions that were sent. Ceiling: with exact values "
            "instead of the code."]  # fmt: skip


def as_html(text: str) -> str:
    """A standalone page. Markup in settings is escaped."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    title = html.escape(text.partition("\n")[0].lstrip("# "))
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
            f"<style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n")  # fmt: skip
