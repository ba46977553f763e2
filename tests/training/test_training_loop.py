"""Whole runs of a tiny model: their files, stops, failures and resumes."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiny import tiny_conv_model, tiny_model
from training_helpers import small_files, tiny_config, wide_model

from jgc.compress import Dense, Gradiveq, TopK
from jgc.lab.report.page import write as write_report
from jgc.lab.report.runs import find
from jgc.nodes.layouts import make_nodes
from jgc.training import data
from jgc.training.errors import NonFinite, UserError
from jgc.training.output import curves
from jgc.training.output.metrics import read
from jgc.training.output.recorder import Recorder
from jgc.training.run import checkpoint, loop, setup as building

# a failed read or write of Orbax leaves callbacks for an event loop that is gone
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

SPARSE = TopK(alpha=0.1, warmup_steps=2)


@pytest.fixture(autouse=True, scope="module")
def tiny():
    """The tiny model, and all nodes on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", tiny_model)
        patch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """An uninterrupted run of lgc_ps through three phases of two steps each."""
    path = tmp_path_factory.mktemp("runs") / "reference"
    assert loop.run(tiny_config(path)) == 0
    return path


def arrays(path, step=6):
    found = checkpoint.restore(checkpoint.open_manager(path))
    assert found.step == step
    return found.arrays


def assert_same_run(path, reference):
    """Bit-equal states, and equal metrics except for times."""
    got, expected = arrays(path), arrays(reference)
    assert got.keys() == expected.keys()
    assert all(got[name].tobytes() == expected[name].tobytes() for name in got)
    lines, expected_lines = timeless(path), timeless(reference)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert lines[-1] == expected_lines[-1]
    for line in (*lines, *expected_lines):  # a run evaluates where it stops, too
        line.pop("test_accuracy", None)
    assert lines == expected_lines


def timeless(path):
    """The lines of metrics.jsonl without times."""
    return [{name: x for name, x in line.items() if name != "seconds"} for line in read(path / "metrics.jsonl")]


def test_run_outputs(reference, capsys):
    summary = json.loads((reference / "summary.json").read_text())
    assert (summary["method"], summary["workload"], summary["nodes"]) == ("lgc_ps", "digits_convnet5", 2)
    assert (summary["seed"], summary["steps"]) == (0, 6)
    lines = read(reference / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["seconds"] > 0 and line["loss"] > 0 and line["residual_norm"] >= 0 for line in lines)
    assert summary["test_accuracy"] == lines[-1]["test_accuracy"]  # of the last step, not the best
    assert [(p["name"], p["steps"]) for p in summary["phases"]] == [("dense", 2), ("top-k", 2), ("compressed", 2)]
    for phase in summary["phases"]:
        assert phase["seconds_per_step"] > 0 and 0 <= phase["test_accuracy"] <= 1
        assert set(phase["wire"]) == {"logical", "once", "physical", "physical_one_node_per_device"}
        assert phase["wire"]["logical"]["worker"]["up"] and phase["wire"]["physical"] == {}
    assert set(summary["compression_ratio"]) == {"leader", "worker"}
    assert summary["total_bytes"] == sum(line["bytes"] for line in lines)
    assert summary["dense_total_bytes"] == summary["parameters"] * 4 * 2 * 6
    for name in ("reconstruction_cosine", "relative_error", "ceiling_cosine", "signs_means_cosine", "true_cosine"):
        assert np.isfinite(summary[name]), name
    assert summary["reconstruction_cosine_p5"] <= summary["reconstruction_cosine"]
    assert summary["element_ratio"] > 1
    assert 0 < summary["entropy_position_bytes"] < summary["position_bytes"] < summary["deflate_position_bytes"]
    assert {"python", "jax", "jaxlib", "flax", "optax", "orbax", "jgc"} <= set(summary["versions"])
    assert summary["other"]["diagnose"]["compressed"] == {"times": 2, "bytes": pytest.approx(1e4, rel=10)}
    config = json.loads((reference / "config.json").read_text())
    assert config["method"] == "lgc_ps" and config["compressor"]["alpha"] == 0.05
    assert (reference / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert list((reference / "tensorboard").iterdir())


def test_weights_counted_once(reference):
    lines = read(reference / "metrics.jsonl")
    phases = json.loads((reference / "summary.json").read_text())["phases"]
    once = sum(sum(kinds.values()) for kinds in phases[-1]["wire"]["once"]["server"].values())
    assert once > 0
    assert lines[4]["bytes"] == lines[5]["bytes"] + once


@pytest.mark.parametrize("stop", [3, 4])
def test_resume_is_exact(tmp_path, reference, stop):
    """Stopped inside the second phase, and at the start of the third, whose transition must run once."""
    loop.run(tiny_config(tmp_path, steps=stop))
    assert loop.run(tiny_config(tmp_path, resume=True, log_every=1, diagnose_every=1)) == 0
    assert_same_run(tmp_path, reference)


def test_a_run_that_is_killed_while_it_draws_is_taken_up(tmp_path, reference, monkeypatch):
    """summary.json says that a run is finished, so it comes after the pictures."""

    def killed(*args):
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(curves, "draw", killed)
        with pytest.raises(SystemExit):
            loop.run(tiny_config(tmp_path, log_every=1, diagnose_every=1))
    assert not (tmp_path / "summary.json").exists()
    assert loop.run(tiny_config(tmp_path, resume=True, log_every=1, diagnose_every=1)) == 0
    assert (tmp_path / "curves.png").is_file()
    assert_same_run(tmp_path, reference)


def test_damaged_newest_checkpoint(tmp_path, reference, capsys):
    """As after a kill: lines of steps after the last undamaged checkpoint, the last one half-written."""
    shutil.copytree(reference, tmp_path / "run")
    path = tmp_path / "run"
    file = max((path / "checkpoints" / "6" / "state").rglob("*"), key=lambda f: f.stat().st_size * f.is_file())
    file.write_bytes(file.read_bytes()[:40])
    with open(path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 7, "pha')
    assert loop.run(tiny_config(path, resume=True)) == 0
    assert "checkpoint 6 is damaged" in capsys.readouterr().out
    assert_same_run(path, reference)


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_signal_saves_checkpoint(tmp_path, monkeypatch, capsys, number, code, name):
    push = Recorder.push

    def push_and_signal(self, step, *args, **kwargs):
        push(self, step, *args, **kwargs)
        if step == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Recorder, "push", push_and_signal)
    before = signal.getsignal(number)
    command = "python train.py --layers 'k{1}' --run-dir {run_dir} --resume"
    assert loop.run(tiny_config(tmp_path, method=SPARSE), command) == code
    said = capsys.readouterr().out
    assert f"{name}: saved after step 3 of 6" in said and f"--layers 'k{{1}}' --run-dir {tmp_path} --resume" in said
    assert signal.getsignal(number) == before
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    arrays(tmp_path, step=3)


def test_nan_stops_run(tmp_path, monkeypatch):
    source = data.source_of(data.load_dataset("digits"))

    def poisoned(seed, step, *nodes_and_sizes):
        images, labels = source.batch(seed, step, *nodes_and_sizes)
        if step == 3:
            images[1] = np.nan
        return images, labels

    monkeypatch.setattr(building, "data_of", lambda config: source._replace(batch=poisoned))
    with pytest.raises(NonFinite, match=r"stopped at step 4: .*last good checkpoint is that of step 2") as error:
        loop.run(tiny_config(tmp_path, method=SPARSE))
    assert error.value.exit_code != 0 and "\n" not in str(error.value)
    assert read(tmp_path / "metrics.jsonl")[-1]["loss"] is None
    arrays(tmp_path, step=2)


def test_absurd_parameters_are_not_good(tmp_path, monkeypatch):
    """A batch that throws the parameters far away, where all is finite: the checkpoint before it is kept and named."""
    source = data.source_of(data.load_dataset("digits"))

    def poisoned(seed, step, *nodes_and_sizes):
        images, labels = source.batch(seed, step, *nodes_and_sizes)
        return (images * 1e6 if step == 2 else images * np.nan if step == 6 else images), labels

    monkeypatch.setattr(building, "data_of", lambda config: source._replace(batch=poisoned))
    monkeypatch.setattr(building, "make_model", wide_model)  # without a norm
    with pytest.raises(NonFinite, match=r"stopped at step 7: .*last good checkpoint is that of step 1 in") as error:
        loop.run(tiny_config(tmp_path, method=Dense(), steps=9, checkpoint_every=1, diagnose_every=0))
    assert "no good step came after that of step 6" in str(error.value)
    assert [line["loss"] > 100 for line in read(tmp_path / "metrics.jsonl")[:6]] == [False, False] + 4 * [True]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "5", "6"]


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"[1]", b"{}", b"5", b'{"step": "3"}', b"\x00" * 40, b""])
def test_damaged_metrics(tmp_path, reference, garbage):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    lines = (path / "metrics.jsonl").read_bytes().splitlines()
    (path / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], garbage, *lines[3:]]) + b"\n")
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: its line 3 is no step"):
        loop.run(tiny_config(path, resume=True, steps=7))
    (path / "metrics.jsonl").write_bytes(b"\n".join([*lines, garbage]))  # half-written, as after a kill
    assert len(read(path / "metrics.jsonl")) == 6


def test_lost_metrics_are_said(tmp_path, reference, capsys):
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(b"".join(lines[2:]))
    assert loop.run(tiny_config(path, resume=True, steps=7)) == 0
    assert "metrics.jsonl lacks 2 of 7 steps: all figures leave them out" in capsys.readouterr().out
    assert json.loads((path / "summary.json").read_text())["steps_without_metrics"] == 2
    assert write_report([path], tmp_path / "report").read_text().count("lacks the metrics of 2 steps") == 1


def test_a_run_resumed_at_its_end_has_all_its_steps_and_its_score(tmp_path, reference):
    """As after a power cut that left a checkpoint of the last step and two lines."""
    path = tmp_path / "run"
    shutil.copytree(reference, path)
    before = json.loads((path / "summary.json").read_text())
    (path / "summary.json").unlink()
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:20])
    assert loop.run(tiny_config(path, resume=True)) == 0
    after = json.loads((path / "summary.json").read_text())
    assert (after["steps"], after["steps_without_metrics"]) == (6, 4)
    assert after["test_accuracy"] == before["test_accuracy"] is not None
    write_report([path], tmp_path / "report")


def test_checkpoint_of_another_run(tmp_path, reference, capsys):
    path, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(reference, path)
    loop.run(tiny_config(other, seed=1))
    shutil.rmtree(path / "checkpoints" / "6")
    shutil.copytree(other / "checkpoints" / "6", path / "checkpoints" / "6")
    assert loop.run(tiny_config(path, resume=True)) == 0
    assert "checkpoint 6 is not of this run: checkpoint 6 was made with a different config: seed was 1" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert_same_run(path, reference)


@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache")
def test_full_disk(tmp_path):
    config = tiny_config(tmp_path, method=SPARSE, steps=2)
    loop.run(config)
    with small_files(3000), pytest.raises(UserError, match="cannot write"):
        loop.run(dataclasses.replace(config, resume=True, steps=6))
    arrays(tmp_path, step=2)


def test_resuming_with_other_data(tmp_path, reference, monkeypatch):
    path, source = tmp_path / "run", data.source_of(data.load_dataset("digits"))
    shutil.copytree(reference, path)
    monkeypatch.setattr(building, "data_of", lambda config: source._replace(facts="other digits"))
    with pytest.raises(UserError, match=r"checkpoint 6 was made with other data: digits of shapes .*; these are other"):
        loop.run(tiny_config(path, resume=True, steps=7))


def test_unusable_run_folders(tmp_path, reference):
    config = tiny_config(reference)
    before = (reference / "summary.json").read_bytes()
    for changes, message in (
        ({}, "already holds a run"),
        ({"resume": True, "seed": 1}, "a different config: seed was 0, is 1"),
        ({"resume": True, "steps": 3}, "has had 6 steps already, more than --steps 3"),
        ({"resume": True, "run_dir": str(tmp_path / "none")}, "there is no folder"),
        ({"run_dir": "/proc/jgc/run"}, "cannot write /proc/jgc/run"),
        ({"run_dir": __file__}, "is not a folder"),
    ):
        with pytest.raises(UserError, match=message):
            loop.run(dataclasses.replace(config, **changes))
    assert (reference / "summary.json").read_bytes() == before


def test_read_only_disk(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match=r"cannot write .*: Read-only file system"):
        loop.run(tiny_config(tmp_path, method=SPARSE))


def test_resume_with_other_nodes(tmp_path, reference):
    shutil.copytree(reference, tmp_path / "run")
    assert loop.run(tiny_config(tmp_path / "run", resume=True, nodes=4, steps=7)) == 0
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 8))


def test_resume_dynamic_phases(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "make_model", tiny_conv_model)
    cycles = Gradiveq(warmup_steps=1, sampling_steps=3, compressed_steps=2, loss=0.2)
    whole, stopped = (tiny_config(tmp_path / name, cycles, steps=11) for name in ("whole", "stopped"))
    assert loop.run(whole) == 0
    for i, steps in enumerate((1, 3, 5, 8, 11)):  # at the end and in the middle of phases
        assert loop.run(dataclasses.replace(stopped, steps=steps, resume=i > 0)) == 0
    got, expected = (arrays(tmp_path / name, 11) for name in ("stopped", "whole"))
    assert all(got[name].tobytes() == expected[name].tobytes() for name in expected)
    lines, expected_lines = (timeless(tmp_path / name) for name in ("stopped", "whole"))
    names = ["dense"] + (["sampling"] * 3 + ["compressed"] * 2) * 2
    assert [line["phase"] for line in lines] == names
    for line in (*lines, *expected_lines):
        line.pop("test_accuracy", None)
    assert lines == expected_lines
    summary = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert [(p["name"], p["steps"]) for p in summary["phases"]] == [("dense", 1), ("sampling", 6), ("compressed", 4)]
    sent = [line["bytes_up_worker"] for line in lines if line["phase"] == "compressed"]
    assert sent[0] < lines[0]["bytes_up_worker"]
    dense = summary["parameters"] * 4
    assert summary["compression_ratio"]["worker"] == pytest.approx(dense / np.mean(sent))


def test_a_finished_run_that_goes_on_has_no_summary_until_it_ends(reference, tmp_path, monkeypatch):
    path = tmp_path / "longer"
    shutil.copytree(reference, path)
    (path / "summary.json").read_text()

    def stopped(*_):
        raise UserError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", stopped)
        with pytest.raises(UserError, match="stopped"):
            loop.run(tiny_config(path, steps=8, resume=True))
    assert not (path / "summary.json").exists() and json.loads((path / "config.json").read_text())["steps"] == 8
    with pytest.raises(UserError, match=r"has not finished; train\.py --resume goes on with it"):
        find([path])
    assert loop.run(tiny_config(path, steps=8, resume=True)) == 0
    assert json.loads((path / "summary.json").read_text())["steps"] == 8


def test_what_is_printed_is_no_markup(tmp_path, capsys):
    path = tmp_path / "[bold] layer[/]"
    assert loop.run(tiny_config(path, steps=2)) == 0
    assert f"are in {path}" in capsys.readouterr().out.replace("\n", " ")


def test_a_run_without_a_reader_goes_on(tmp_path):
    words = f"""import sys; sys.path.insert(0, {os.path.dirname(__file__)!r} + "/.."); import training_helpers as t
from jgc.training.run import loop
sys.exit(loop.run(t.tiny_config({str(tmp_path / "run")!r}, t.compress.TopK(), log_every=1)))"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "nobody reads standard output any more: the run goes on without it" in done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
