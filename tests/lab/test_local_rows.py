"""The rows of docs/results/local_steps: every command is one that `jgc compare` or `jgc sweep` takes."""

import shlex
from pathlib import Path

import pytest
from text_helpers import write_text

from jgc.lab import launch
from jgc.lab.commands import load
from jgc.training.options import read

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "local_steps"
ROWS = [shlex.split(line) for line in (FOLDER / "rows.txt").read_text().splitlines()]


class Reached(Exception):
    """All runs of a row have passed the checks that come before training."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"), {"train": 9000, "valid": 200, "test": 100})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_is_one_that_trains(row, folder, tmp_path, monkeypatch):
    trained = []

    def stop(job, *_):
        trained.append(job.config)
        raise Reached

    monkeypatch.setattr(launch, "train_one", stop)
    name, command, *words = row
    common = ["--workload", "ptb_gpt", "--run-dir", str(tmp_path / name), "--data-dir", str(folder)]
    with pytest.raises(Reached):
        read(load(command), [*common, *words], f"jgc {command}").run("")
    (config,) = trained
    of_name = [int(part) for part in name.split("_") if part.isdecimal()]
    assert config.local.every == (of_name[0] if of_name else 30 if name in ROUNDS else None)
    short = 900 if command == "sweep" else 1500 if name == "recorded" else 3000
    assert (config.steps, config.schedule_steps) == (short, 900 if command == "sweep" else 3000)
    if name.startswith(("sparseloco", "search_sparseloco")):
        assert config.compressor.selection == "chunks" and config.compressor.value_code == "2bit-codebook"
        assert (config.local.outer_learning_rate, config.local.outer_momentum) == (1.0, 0.0)


ROUNDS = ("diloco_4bit", "streaming", "lgc_ps", "klt", "klt_refresh", "recorded")


def test_page_has_every_row():
    page = (FOLDER / "README.md").read_text()
    assert [row[0] for row in ROWS if f"| `{row[0]}` |" not in page and not row[0].startswith("search_")] == []
