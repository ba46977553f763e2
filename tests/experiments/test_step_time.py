"""`experiments step_time`: the pieces of `lgc_ps`, and seconds counted in dense steps."""

import dataclasses

import numpy as np
import pytest
from training_helpers import wide_model

from experiments import step_time
from jgc.lab.bench.costs import UPDATE, Costs, Row
from jgc.training.settings import workloads


@pytest.mark.slow
def test_page_has_every_piece_and_phase(monkeypatch, capsys):
    short = {name: {"warmup_steps": 1, "autoencoder_steps": 1} for name in ("lgc_ps", "lgc_ring")}
    tiny = dataclasses.replace(workloads.WORKLOADS["digits_convnet5"], batch_size=4, methods=short)
    monkeypatch.setattr(workloads, "WORKLOADS", {"tiny": tiny})
    monkeypatch.setattr("jgc.training.run.setup.make_model", wide_model)
    step_time.StepTime(workload="tiny", nodes=2, repeats=1, alpha=0.01).run("")
    times, pieces = capsys.readouterr().out.split("## Pieces")
    assert [f"| {name} | {phase} |" in times for name in ("lgc_ps", "lgc_ring")
            for phase in ("dense", "top-k", "compressed")] == [True] * 6  # fmt: skip
    assert len([line for line in pieces.splitlines() if line.startswith("| ")]) == 7  # a head and six pieces


def test_table_v_counts_in_dense_steps():
    """Multiples of our dense step next to multiples of the paper's."""
    dense, ours = (Row(name, phase, {UPDATE: np.array([update])}, (0.0, 0.0))
                   for name, phase, update in (("dense", "dense", 0.1), ("lgc_ps", "top-k", 0.3)))  # fmt: skip
    page = step_time.table_v(Costs("w", 8, 1, 1, np.array([0.1]), (dense, ours), {}))
    (line,) = [line for line in page.splitlines() if line.startswith("| lgc_ps | top-k | 0.400")]
    assert line == "| lgc_ps | top-k | 0.400 | 1.6 | 2.00 | 1.60 |"
