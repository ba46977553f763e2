"""Make the log of a finished run small enough to publish.

    python docs/results/thin.py RUN_DIR [RUN_DIR ...]

`metrics.jsonl` (or `.gz`) becomes a `metrics.jsonl.gz` that keeps every tenth step, the first and the last step of each
phase (of phases that take turns, of all turns together), and each line with figures that not every step has:
evaluations, exchanges of local steps, diagnosed steps. Loss and training accuracy become means over the ten steps that
end with the line, so that curves, which show moving means, stay as they were. Numbers keep five digits; bytes and step
numbers stay exact. The first line has `thinned`, and a log that has it is left alone. summary.json, whose totals count
all steps, gets the mean bytes of a step, which the remaining lines no longer tell where they vary from step to step.
"""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from jgc.lab.report.runs import read_run
from jgc.training.output.metrics import Line
from jgc.training.run.folder import METRICS, SUMMARY
from jgc.training.settings import cli

EVERY = 10
AVERAGED = "loss", "train_accuracy"  # what pictures draw as moving means
COMMON = 0.9  # fields of as many of a phase's lines as this are those of an ordinary step


def thinned(lines: list[Line]) -> list[Line]:
    """The lines that stay, with means of AVERAGED."""
    counts = Counter((line["phase"], name) for line in lines for name in line)
    of_phase = Counter(line["phase"] for line in lines)
    phases = [line["phase"] for line in lines]
    remaining: list[Line] = []
    for i, line in enumerate(lines):
        phase = line["phase"]
        around = phases[max(0, i - EVERY) : i], phases[i + 1 : i + 1 + EVERY]  # phases in turn do not begin or end
        changes = any(phase not in some for some in around)
        rare = any(counts[phase, name] < COMMON * of_phase[phase] for name in line)
        if changes or rare or line["step"] % EVERY == 0:
            newest = lines[max(0, i + 1 - EVERY) : i + 1]
            means = {name: mean_of(name, newest) for name in AVERAGED if line.get(name) is not None}
            remaining.append({name: short(name, value) for name, value in {**line, **means}.items()})
    remaining[0]["thinned"] = EVERY
    return remaining


def mean_of(name: str, lines: list[Line]) -> float:
    return fmean(line[name] for line in lines if line.get(name) is not None)


def short(name: str, value: Any) -> Any:
    """A number with five digits; whole ones, and so bytes, as they are."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.5g}")


def thin(folder: Path) -> None:
    """Rewrite the log of a run, unless it is thinned."""
    run = read_run(folder)
    if not run.lines or "thinned" in run.lines[0]:
        return
    summary = {**run.summary, "step_bytes": run.step_bytes}
    text = "".join(json.dumps(line) + "\n" for line in thinned(run.lines))
    packed = gzip.compress(text.encode(), mtime=0)
    (folder / f"{METRICS}.gz").write_bytes(packed)
    (folder / METRICS).unlink(missing_ok=True)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: name a run's folder")
    sys.exit(cli.exit_code_of(lambda: [thin(Path(name)) for name in sys.argv[1:]] and 0))
