"""Published logs: what `docs/results/thin.py` keeps of a run, and that reports show the same of it."""

import gzip
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from experiments.papers.wallclock import steps_of_lines
from jgc.lab.report.runs import read_run

THIN = Path(__file__).parents[2] / "docs" / "results" / "thin.py"


@pytest.fixture
def folder(tmp_path):
    """A run of 205 steps in two phases, with sizes that vary from step to step and two evaluations."""
    lines = [
        {"step": step, "phase": "dense" if step <= 33 else "last", "loss": 1 / step + 1e-9,
         "bytes": 1000.0 if step <= 33 else 100.0 + 1e-3 * (step % 7), "seconds": 0.123456789}
        | ({"test_accuracy": 0.7654321} if step in (98, 205) else {})
        for step in range(1, 206)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.json").write_text(json.dumps({"method": "topk"}))
    phases = [{"name": "dense", "start": 0, "steps": 33}, {"name": "last", "start": 33, "steps": 172}]
    summary = dict.fromkeys("method workload seed steps parameters layout nodes".split(), 0)
    summary |= {"phases": phases, "test_accuracy": 0.7, "score": "test_accuracy", "total_bytes": 1.0}
    summary |= {"dense_total_bytes": 1.0, "compression_ratio": {"leader": 1.0, "worker": 1.0}, "other": {}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_thinned_log_keeps_what_reports_read(folder):
    thin = runpy.run_path(str(THIN))["thin"]
    before = read_run(folder)
    thin(folder)
    after = read_run(folder)
    assert not (folder / "metrics.jsonl").exists() and after.lines[0]["thinned"] == 10
    steps = [line["step"] for line in after.lines]
    assert steps == sorted({1, 33, 34, 98, 205, *range(10, 206, 10)})
    assert after.step_bytes == before.step_bytes
    assert [x["test_accuracy"] for x in after.lines if "test_accuracy" in x] == [0.76543, 0.76543]
    assert after.lines[-1]["loss"] == pytest.approx(np.mean([1 / step for step in range(196, 206)]), rel=1e-4)
    assert steps_of_lines(after).sum() == 205 and set(steps_of_lines(before)) == {1}


def test_thinned_log_is_left_alone(folder):
    thin = runpy.run_path(str(THIN))["thin"]
    thin(folder)
    first = gzip.decompress((folder / "metrics.jsonl.gz").read_bytes())
    thin(folder)
    assert gzip.decompress((folder / "metrics.jsonl.gz").read_bytes()) == first
