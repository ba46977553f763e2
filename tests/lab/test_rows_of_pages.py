"""The rows of docs/results/local_steps, long_runs and gpu: every command is one that jgc takes."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import jax
import pytest
from camvid_helpers import write_camvid
from image_helpers import png, write_imagenet, write_prepared, write_tiny_imagenet
from text_helpers import write_text

import experiments.commands
from jgc.compress import Dense, LearnedTopK, TopK
from jgc.compress.lgc.ring import RING_PAPER_RECIPE
from jgc.compress.lgc.server import PAPER_RECIPE
from jgc.lab import launch
from jgc.lab.commands import PROGRAM
from jgc.training.settings.options import read
from jgc.training.settings.workloads import WORKLOADS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ROUNDS = ("diloco", "muloco", "streaming", "lgc_ps", "klt", "klt_refresh", "recorded")


def rows_of(page):
    rows = [shlex.split(line) for line in (RESULTS / page / "rows.txt").read_text().splitlines()]
    common = rows.pop(0) if rows[0][0] == "common" else []
    return [(name, command, common[1:] + words) for name, command, *words in rows]


def check_recipe(name, compressor):
    """LGC's positions and autoencoder are those that a row's name says: the paper's or jgc's."""
    recipe = RING_PAPER_RECIPE if "ring" in name else PAPER_RECIPE
    followed = [field for field, value in recipe.items() if getattr(compressor, field) == value]
    assert (followed == list(recipe)) == name.endswith("_paper")
    assert compressor.positions == ("leader" if "_leader" in name or "ring" in name else "own")


class Reached(Exception):
    """All runs of a row have passed the checks that come before training."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_text(tmp_path_factory.mktemp("data"), {"train": 18000, "valid": 200, "test": 100})
    images = {split: [(png(i), i % 10) for i in range(count)] for split, count in (("train", 160), ("test", 9))}
    write_prepared(folder, "cifar10", images, ("32", "32", "3"), 10)
    write_prepared(folder, "cifar100", images, ("32", "32", "3"), 100)
    write_imagenet(folder / "imagenet")
    write_camvid(folder)
    return write_tiny_imagenet(folder)


@pytest.fixture
def config_of(folder, tmp_path, monkeypatch):
    """`(row of rows_of) -> the settings of its first run`."""

    def of(name, command, words):
        trained = []

        def stop(job, *_):
            trained.append(job.config)
            raise Reached

        monkeypatch.setattr(launch, "train_one", stop)
        one = jax.devices()[:1]  # as on the machines that train these rows: 22 nodes do not divide among eight
        monkeypatch.setattr(jax, "devices", lambda *_: one)
        where = ["--run-dir", str(tmp_path / name), "--data-dir", str(folder)]
        with pytest.raises(Reached):
            read(PROGRAM.commands[command].load(), [*words, *where], f"jgc {command}").run("")
        return trained[0]

    return of


def names(row):
    return row[0]


@pytest.mark.parametrize("row", rows_of("local_steps"), ids=names)
def test_row_of_local_steps_is_one_that_trains(row, config_of):
    name, command, _ = row
    config = config_of(*row)
    of_name = [int(part) for part in name.split("_") if part.isdecimal()]
    assert config.local.every == (of_name[0] if of_name else 30 if name.startswith(ROUNDS) else None)
    short = 900 if command == "sweep" else 1500 if name == "recorded" else 3000
    assert (config.steps, config.schedule_steps) == (short, 900 if command == "sweep" else 3000)
    if name.startswith(("sparseloco", "search_sparseloco")):
        assert config.compressor.selection == "chunks" and config.compressor.value_code == "2bit-codebook"
        assert (config.local.outer_learning_rate, config.local.outer_momentum) == (1.0, 0.0)


@pytest.mark.parametrize("row", rows_of("long_runs"), ids=names)
def test_row_of_long_runs_is_one_that_trains(row, config_of):
    name = row[0]
    config = config_of(*row)
    steps = 20000 if name.endswith("_20000") else 6000
    assert (config.steps, config.schedule_steps, config.nodes, config.batch_size) == (steps, steps, 4, 64)
    assert (config.learning_rate, config.model.norm) == (0.1, "batch")
    all_layers = ("baseline", "gradiveq", "qsgd", "egc", "gradient_dropping_paper")
    assert config.layers.dense == ("" if name.startswith(all_layers) or "_all" in name else "first")
    compressor = config.compressor
    if name.startswith("gradiveq_paper"):
        assert (compressor.warmup_steps, compressor.sampling_steps, compressor.compressed_steps) == (2500, 100, 400)
        part = name.split("lambda_")[-1]
        assert compressor.loss == (0.01 if part == name else float(part))
        assert compressor.reuse == (int(name[-1]) if "_s" in name else 0)
        assert not compressor.error_feedback
    if name.startswith(("gradiveq", "qsgd")):
        return
    if name.startswith("baseline"):
        assert compressor == Dense(momentum_correction=True)
        return
    of_name = {"lgc_ps": 0.5, "lgc_ps_untrained": 0.5, "lgc_ps_no_code": 0.5, "egc_paper": None, "egc_literal": None,
               "scalecom_paper": 100 / 64, "gradient_dropping_paper": 1.0}  # fmt: skip
    percent = next((float(part) for part in name.split("_") if part in ("0.1", "0.5", "2")), of_name.get(name, 0.1))
    assert percent is None or compressor.alpha == pytest.approx(percent / 100, rel=0.03)
    if any(part in name for part in ("_paper", "_leader", "_own", "lgc_ring")):
        assert (compressor.min_values, compressor.momentum_at_once) == (1, False)
    if name.startswith(("lgc_ps", "lgc_ring")):
        check_recipe(name, compressor)
    if name.startswith("topk"):
        assert isinstance(compressor, LearnedTopK if name.endswith("learned") else TopK)
        assert compressor.value_code == next((part for part in name.split("_") if part in ("1bit", "2bit")), "float32")


@pytest.mark.parametrize("row", rows_of("other_models"), ids=names)
def test_row_of_other_models_is_one_that_trains(row, config_of):
    config = config_of(*row)
    model, method = row[0].split("_")
    assert model in config.workload.replace("lstm", "") and config.steps == config.schedule_steps
    assert (config.nodes, config.batch_size) == {"alexnet": (4, 128), "ptb": (4, 20), "convnet5": (22, 132)}[model]
    if method in ("fixed", "exponential", "warmup"):
        assert config.compressor.strategy == method


@pytest.mark.parametrize("row", rows_of("learned_positions"), ids=names)
def test_row_of_learned_positions_is_one_that_trains(row, config_of):
    workload, share, code = row[0].removesuffix("_learned").split("_")
    config = config_of(*row)
    compressor = config.compressor
    assert workload in config.workload and config.layers.dense == "" and compressor.alpha == float(share) / 100
    assert compressor.value_code == {"f32": "float32"}.get(code, code)
    assert isinstance(compressor, LearnedTopK if row[0].endswith("learned") else TopK)


@pytest.mark.parametrize("page", ["local_steps", "long_runs", "other_models"])
def test_page_has_every_row(page):
    text = (RESULTS / page / "README.md").read_text()
    shown = [name for name, *_ in rows_of(page) if not name.startswith("search_")]
    assert [name for name in shown if f"| `{name}` |" not in text] == []


def test_local_steps_has_the_bytes_that_were_measured():
    """MB on four hosts' links: what a host's interface counts in a step, of 4 hosts in 3,000 steps."""
    folder = RESULTS / "local_steps"
    cells = json.loads((folder / "network.json").read_text())["cells"]
    lines = (folder / "README.md").read_text().split("## ")[0].splitlines()
    shown = {words[1].strip(" `"): words[6] for words in (line.split("|") for line in lines) if len(words) == 9}
    for row, method in json.loads((folder / "seconds.json").read_text())["rows"].items():
        cell = cells[f"4/10mbit/{method}"]
        megabytes = cell["tx_bytes"] / cell["steps_counted"] * 4 * 3000 / 1e6
        assert float(shown[row].replace(",", "")) == pytest.approx(megabytes, rel=0.01), row


@pytest.mark.parametrize("row", [row for row in rows_of("gpu") if row[1] == "compare"], ids=names)
def test_row_for_a_gpu_is_one_that_trains(row, config_of):
    name = row[0]
    config = config_of(*row)
    assert config.steps == WORKLOADS[config.workload].steps
    assert name.split("_")[0] in config.workload
    if "_lgc_" in name:
        check_recipe(name, config.compressor)
    if "_topk" in name:
        assert config.compressor.momentum_at_once != name.endswith("_plain")
        assert config.compressor.value_code == ("1bit" if name.endswith("_1bit") else "float32")


@pytest.mark.parametrize("row", [row for row in rows_of("gpu") if row[1] != "compare"], ids=names)
def test_benchmark_for_a_gpu_is_one(row):
    _, command, words = row
    experiment = command == "experiments"
    program, name = (experiments.commands.PROGRAM, words[0]) if experiment else (PROGRAM, f"{command} {words[0]}")
    assert read(program.commands[name].load(), words[1:], name)


@pytest.fixture
def gpu(tmp_path):
    """`(what python does, ROWS) -> (exit status, output)` of gpu.sh."""

    def run(python, rows="select methods"):
        fake = tmp_path / "bin" / "python"
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f'#!/bin/sh\necho "$@"\n{python}\n')
        fake.chmod(0o755)
        env = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}", "ROWS": rows, "SECONDS_A_PIECE": "1"}
        done = subprocess.run(["bash", RESULTS / "gpu.sh", tmp_path / "runs"], env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_gpu_script_goes_on_with_what_is_left(gpu):
    rows = "select resnet50_baseline"
    status, said = gpu("exit 0", rows)
    assert status == 75 and "-m experiments select" in said
    status, said = gpu("exec sleep 30", rows)
    assert status == 75 and "resnet50_baseline: saved, not finished" in said
    status, said = gpu("exit 2", rows)
    assert status == 2 and "-m jgc compare" in said
    assert gpu("exit 0", rows)[0] == 0
    assert gpu("exit 3", rows) == (0, "all rows are finished\n")


def test_gpu_script_passes_over_a_benchmark_that_takes_too_long(gpu):
    status, said = gpu("exec sleep 30")
    assert status == 75 and "select: not finished, passed over" in said
    status, said = gpu("exit 0")
    assert status == 0 and "-m jgc bench methods" in said and "all rows are finished, but for select:" in said
    assert gpu("exit 3") == (0, said[said.index("all rows") :])
    assert gpu("exit 3", "methods") == (0, "all rows are finished\n")


def test_gpu_script_passes_over_a_row_that_fails(gpu):
    rows = "resnet50_baseline resnet50_topk"
    status, said = gpu("exit 1", rows)
    assert status == 75 and "resnet50_baseline: failed, passed over" in said
    status, said = gpu("exit 0", rows)
    assert status == 1 and said.endswith("failed: resnet50_baseline (delete its .failed to try again)\n")
    assert gpu("exit 0", rows)[0] == 1


def test_gpu_script_names_an_unknown_row(gpu):
    status, said = gpu("exit 0", "selekt")
    assert status == 2 and said.startswith("error: no row selekt in ") and said.count("\n") == 1
