"""Nodes of rounds through a bucket: train.py's settings, mistakes, a run, and a node that is stopped and resumed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from training_helpers import tiny_config

pytest.importorskip("obstore")

from tiny import tiny_model

from jgc.compress import Dense, Dgc, PowerSgd, TopK
from jgc.nodes.layouts import make_nodes
from jgc.rounds.bucket import open_bucket
from jgc.training.errors import UserError
from jgc.training.output.metrics import read
from jgc.training.output.table import rounds_lines
from jgc.training.run import loop, rounds_setup, setup as building
from jgc.training.run.rounds_file import summarised
from jgc.training.run.setup import Setup
from jgc.training.settings.cli import parse
from jgc.training.settings.config import LayersConfig, RecordConfig, check
from jgc.training.settings.local_config import LocalConfig
from jgc.training.settings.rounds_config import RoundsConfig

SPARSE = TopK(alpha=0.1, warmup_steps=1)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A small model on one device."""
    monkeypatch.setattr(building, "make_model", tiny_model)
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))


def config_of(path, node="a", method=SPARSE, every=2, more=None, **changes):
    settings = {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 12, "steps": 8, "diagnose_every": 0,
                "nodes": 1, "local": LocalConfig(every=every), "layers": LayersConfig(dense="", top_k="")}  # fmt: skip
    where = RoundsConfig(bucket=str(path / "bucket"), node=node, grace=20.0, checkpoint_every=2)
    where = dataclasses.replace(where, **(more or {}))
    return tiny_config(path / node, method, rounds=where, **{**settings, **changes})


def test_a_bucket_makes_the_process_one_node():
    line = ["--method", "topk", "--rounds.bucket", "s3://b/run", "--rounds.node", "paris", "--local.every", "30"]
    config = parse([*line, "--rounds.keep", "9", "--rounds.overlap", "--rounds.merge", "0.5"])
    assert (config.nodes, config.batch_size) == (1, 16)  # 128 of 8 nodes
    assert config.rounds.retained == 9 and config.rounds.overlap and config.rounds.merge == 0.5
    assert config.local.outer_momentum == 0.3 and parse(line).local.outer_momentum == 0.9
    momentum = ["--rounds.overlap", "--local.outer-momentum", "0.9"]
    assert parse([*line, *momentum]).local.outer_momentum == 0.9
    of_adam = ["--rounds.overlap", "--rounds.outer", "adamw", "--local.outer-learning-rate", "0.001"]
    assert parse([*line, *of_adam]).local.outer_momentum == 0.9
    assert rounds_setup.begun(config).run_dir == "runs/run-paris"
    assert parse([*line, "--rounds.overlap", "--rounds.merge", "eager"]).rounds.merge == "eager"
    with pytest.raises(UserError, match=r"--rounds.merge must be a number"):
        parse([*line, "--rounds.merge", "late"])
    assert parse(["--method", "topk"]).nodes == 8 and parse([*line, "--batch-size", "3"]).batch_size == 3


MISTAKES = [
    ({"node": ""}, {}, "--rounds.bucket needs --rounds.node"),
    ({"node": "a/b"}, {}, "--rounds.node must be 1 to 60 letters"),
    ({"grace": 0.0}, {}, "--rounds.grace must be positive, got 0.0"),
    ({"quorum": 0}, {}, "--rounds.quorum must be a whole number of at least 1, got 0"),
    ({"quorum": 3, "start": 2}, {}, "--rounds.start=2 is below quorum=3"),
    ({"retained": 0}, {}, "--rounds.keep must be a whole number of at least 1, got 0"),
    ({"timeout": -1.0}, {}, "--rounds.timeout must be positive"),
    ({"merge": 0.5}, {}, "--rounds.merge 0.5 does nothing without --rounds.overlap"),
    ({"merge": 2.0, "overlap": True}, {}, "--rounds.merge must be in [0, 1] or eager, got 2.0"),
    ({"merge": "eager", "overlap": True, "outer": "adamw"}, {"local": LocalConfig(every=2, outer_learning_rate=0.1)},
     "--rounds.merge eager needs --rounds.outer sgd"),
    ({"seconds": -1.0}, {}, "--rounds.seconds must be at least 0"),
    ({"outer_beta2": 0.9}, {}, "--rounds.outer-beta2 0.9 does nothing without --rounds.outer adamw"),
    ({"outer_beta2": 1.0, "outer": "adamw"}, {"local": LocalConfig(every=2, outer_learning_rate=0.1)}, "b2 must be in"),
    ({"outer": "adamw"}, {}, "--rounds.outer adamw would move every parameter by up to --local.outer-learning-rate"),
    ({"bucket": ""}, {}, "--rounds.node a does nothing without --rounds.bucket"),
    ({"bucket": "", "node": "", "quorum": 2}, {}, "--rounds.quorum 2 does nothing without --rounds.bucket"),
    ({}, {"nodes": 2}, "--nodes 2 does not go with --rounds.bucket: a process is one node"),
    ({}, {"local": LocalConfig()}, "--rounds.bucket needs --local.every H"),
    ({}, {"local": LocalConfig(every=2, fragments=2)}, "--local.fragments 2 does not go with --rounds.bucket"),
    ({}, {"local": LocalConfig(every=2, overlap=1)}, "--local.overlap 1 does not go with --rounds.bucket; give"),
    ({}, {"layers": LayersConfig(shard=True)}, "--layers.shard does not go with --rounds.bucket"),
    ({}, {"record": RecordConfig(every=1)}, "--record.every 1 does not go with --rounds.bucket"),
    ({}, {"local": LocalConfig(every=9)}, "the first outer step comes after 9 steps"),
]


@pytest.mark.parametrize("more, changes, message", MISTAKES)
def test_settings_that_do_not_go_together_are_one_line(tmp_path, more, changes, message):
    config = config_of(tmp_path)
    config = dataclasses.replace(config, rounds=dataclasses.replace(config.rounds, **more), **changes)
    with pytest.raises(UserError) as error:
        check(config)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_distributed_is_refused():
    line = "--method topk --local.every 2 --rounds.bucket x --rounds.node a --distributed.coordinator h:1"
    with pytest.raises(UserError, match=r"--distributed does not go with --rounds.bucket"):
        check(parse(line.split()))


@pytest.mark.parametrize("method, named", [
    (PowerSgd(warmup_steps=0), "^powersgd with the phase .* use one that sends in one go, such as topk, qsgd"),
    (Dgc(warmup_steps=0), "--compressor.no-momentum-correction"),
])  # fmt: skip
def test_a_method_that_cannot_is_named_before_anything_is_written(tmp_path, method, named):
    with pytest.raises(UserError, match=named) as error:
        loop.run(config_of(tmp_path, method=method))
    assert "\n" not in str(error.value) and not (tmp_path / "a" / "config.json").exists()


@pytest.mark.parametrize("bucket, named", [
    ("/nowhere/at/all", "/nowhere/at/all: No such file or directory; give an existing folder or a URL"),
    ("az://container/run", "AZURE_STORAGE_ACCOUNT_NAME"), ("bogus://x", "bogus://x: not the URL of a bucket: give s3://"),
])  # fmt: skip
def test_no_bucket_and_no_credentials_are_one_line(tmp_path, bucket, named, monkeypatch):
    monkeypatch.setattr(loop, "build", lambda *_: pytest.fail("built all the same"))
    with pytest.raises(UserError, match=named) as error:
        loop.run(config_of(tmp_path, more={"bucket": bucket}))
    assert "\n" not in str(error.value) and not (tmp_path / "a" / "config.json").exists()


@pytest.mark.parametrize("outer, rate", [("sgd", 0.7), ("adamw", 0.001)])
def test_settings_of_a_run_do_not_meet_those_that_rounds_compare(tmp_path, outer, rate):
    """What nodes of train.py compare, before the first of them joins."""
    local = LocalConfig(every=2, outer_learning_rate=rate)
    setup = building.build(config_of(tmp_path, more={"outer": outer}, local=local))
    rounds_setup.check(setup, tmp_path / "a")
    names = rounds_setup.alike(setup)
    assert {"--seed", "--momentum", "--weight-decay", "--learning-rate", "--local.every"} <= names.keys()
    assert "--batch-size" not in names and "--steps" not in names


def test_nodes_have_other_batches_and_each_the_same_again(tmp_path):
    def batches(node, seed=0):
        setup = building.build(config_of(tmp_path, node, seed=seed))
        made = rounds_setup.batches_of_node(setup, 0)
        return [np.asarray(next(made)[0]) for _ in range(3)]

    first = batches("a")
    assert all((x == y).all() for x, y in zip(first, batches("a"), strict=True))
    for other in (batches("b"), batches("a", seed=1)):
        assert all((x != y).any() for x, y in zip(first, other, strict=True))


def test_all_settings_that_must_be_alike_are_compared(tmp_path):
    def settings(**changes):
        return rounds_setup.alike(_setup(config_of(tmp_path, **changes)))

    own = {"batch_size": 4, "steps": 20, "evaluate_every": 7, "node": "b", "more": {"seconds": 3.0, "grace": 1.0}}
    assert settings(**own) == settings()
    assert settings(learning_rate=0.1) != settings() and settings(every=3) != settings()
    assert settings(method=Dense()) != settings() and settings()["data"] and settings()["--local.every"] == 2


def _setup(config):
    source = building.data_of(config)
    return Setup(building.Parts(config, None, None, None, None, None, None), source, None, None, (), 0)


LINE = {"step": 30, "run": "r", "steps": 30, "tokens": 90, "local": 8.0, "exchange": 2.0, "wall": 10.0, "create": 2,
        "get": 3, "list": 2, "delete": 0, "up": 1000, "down": 2000, "round": 4, "members": ["a", "b"], "counted": True,
        "reason": "", "left_out": {}, "waited": 1.5, "closed_by": "a", "digest": "d" * 64, "number": 5}  # fmt: skip


def test_the_closing_table_adds_up_the_starts_of_a_node():
    start = {"step": 0, "run": "r", "joined": 4, "seconds": 1.0, "create": 1, "get": 4, "list": 3, "delete": 0,
             "up": 10, "down": 5000}  # fmt: skip
    late = LINE | {"step": 60, "round": 5, "counted": False, "reason": "late", "left_out": {"c": "dissent"},
                   "waited": 4.0, "number": 6, "wall": 14.0}  # fmt: skip
    flying = {name: LINE[name] for name in list(LINE)[:13]} | {"local": 0.0, "steps": 0, "wall": 0.5}
    found = summarised([start, LINE, start, late, flying], "s3://b", "a")
    assert found["utilisation"] == pytest.approx(16 / 24.5) and found["starts"] == 2 and found["tokens"] == 270
    assert (found["exchanges"], found["counted"], found["not_counted"]) == (2, 1, {"late": 1})
    assert found["others_left_out"] == {"c": 1} and found["longest_wait"] == {"seconds": 4.0, "round": 5}
    assert (found["up"], found["down"], found["create"]) == (3020, 16000, 8)
    assert found["dollars"]["requests"] == pytest.approx((8 + 12) * 5e-6 + 17 * 4e-7)
    said = "\n".join(rounds_lines(found))
    for text in ("utilisation 0.653", "counted in 1 of 2 (1 late)", "left out: c 1 times", "2 times started", "8 PUT"):
        assert text in said
    assert rounds_lines(summarised([], "s3://b", "a")) == ["no exchange of node a has ended"]


# --- whole runs -------------------------------------------------------------------------------------------------------


def lines(path, name="rounds.jsonl"):
    return read(path / name)


@pytest.mark.slow
def test_a_run_of_one_node_is_resumed_by_the_same_line(tmp_path, capsys):
    config = config_of(tmp_path, evaluate_every=4)
    assert loop.run(dataclasses.replace(config, steps=4)) == 0
    assert loop.run(config) == 0
    found = lines(tmp_path / "a")
    assert [line.get("joined") for line in found if "joined" in line] == [0, 2]
    assert [line["round"] for line in found if "round" in line] == [0, 1, 2, 3]
    metrics = lines(tmp_path / "a", "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert [line["step"] for line in metrics if line["bytes"]] == [2, 4, 6, 8]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["rounds"]["counted"] == 4 and summary["rounds"]["starts"] == 2 and summary["steps"] == 8
    assert 0 < summary["rounds"]["utilisation"] < 1 and summary["total_bytes"] == sum(x["bytes"] for x in metrics)
    said = capsys.readouterr().out
    assert "utilisation" in said and "joined" in said and "round 3: members a" in said

    with open(tmp_path / "a" / "rounds.jsonl", "a") as file:
        file.write('{"step"')  # half-written, as after a kill
    again = config_of(tmp_path, steps=8, evaluate_every=4)  # is over: nothing to do but the table
    assert loop.run(again) == 0
    assert lines(tmp_path / "a", "metrics.jsonl") == metrics
    assert lines(tmp_path / "a")[: len(found)] == found

    assert loop.run(config_of(tmp_path, "late", evaluate_every=4)) == 0  # all rounds are closed
    late = json.loads((tmp_path / "late" / "summary.json").read_text())
    assert late["test_accuracy"] is not None and late["steps"] == 0
    assert late["compression_ratio"] == {"leader": None, "worker": None}

    with pytest.raises(UserError, match=r"was made with a different config: learning_rate was 0.01, is 0.02"):
        loop.run(dataclasses.replace(config, learning_rate=0.02))
    with pytest.raises(UserError, match=r"the bucket has a run with other settings: --learning-rate=0.01, here 0.02"):
        loop.run(config_of(tmp_path, "b", learning_rate=0.02))
    with pytest.raises(UserError, match=r"other settings: --local.every=2, here 4"):
        loop.run(config_of(tmp_path, "b", every=4))
    with pytest.raises(UserError, match=r"a different config: rounds.bucket was"):
        loop.run(config_of(tmp_path, more={"bucket": str(tmp_path / "other")}))
    (tmp_path / "bucket").rename(tmp_path / "saved")
    with pytest.raises(UserError, match=r"is of the run .* has no run: give a different --run-dir"):
        loop.run(config)
    (tmp_path / "bucket").rmdir()
    (tmp_path / "saved").rename(tmp_path / "bucket")
    open_bucket(tmp_path / "bucket").delete(["checkpoint/00000002", "checkpoint/00000004", "checkpoint/00000000"])
    with pytest.raises(UserError, match="the bucket forgets"):
        loop.run(config_of(tmp_path, "b"))


@pytest.mark.slow
def test_overlap_records_every_round(tmp_path):
    outer = LocalConfig(every=2, outer_learning_rate=1e-3)
    config = config_of(tmp_path, more={"overlap": True, "outer": "adamw", "seconds": 0.05}, local=outer)
    assert loop.run(config) == 0
    found = [line for line in lines(tmp_path / "a") if "steps" in line]
    assert [line.get("round") for line in found] == [None, 0, 1, 2, 3] and found[-1]["steps"] == 0
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["rounds"]["closed"] == 4


@pytest.mark.slow
def test_a_node_of_two_devices_is_one_node(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "make_nodes", make_nodes)
    assert loop.run(config_of(tmp_path, devices_per_node=2, optimizer="sgd", learning_rate=0.05)) == 0
    assert loop.run(config_of(tmp_path, "b", steps=10, optimizer="sgd", learning_rate=0.05)) == 0  # has one
    found = [line for node in "ab" for line in lines(tmp_path / node) if "round" in line]
    assert [(line["members"], line["counted"]) for line in found] == [(["a"], True)] * 4 + [(["b"], True)]


@pytest.mark.slow
def test_a_quorum_above_the_nodes_names_who_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"round 0 has 1 of 5 messages \(a\); missing: nodes that nobody") as error:
        loop.run(config_of(tmp_path, more={"quorum": 5, "timeout": 0.5, "end": True}))
    assert error.value.exit_code == 1 and "\n" not in str(error.value)
    assert list(tmp_path.glob("bucket/rounds/00000000/a.left"))


def _start(tmp_path, request, node, steps, quorum=2, **environment):
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    line = (f"train.py --method topk --compressor.warmup-steps 1 --compressor.no-momentum-correction --rounds.bucket "
            f"{tmp_path / 'bucket'} --rounds.node {node} --rounds.quorum {quorum} --rounds.grace 60 --local.every 3 "
            f"--steps {steps} --batch-size 8 --evaluate-every 0 --run-dir {tmp_path / node}")  # fmt: skip
    with open(tmp_path / f"{node}.txt", "a") as out:
        where = {"cwd": request.config.rootpath, "env": {**os.environ, "XLA_FLAGS": flags, **environment}}
        return subprocess.Popen([sys.executable, *line.split()], stdout=out, stderr=subprocess.STDOUT, **where)


def _closed(tmp_path, number, *running):
    deadline = time.monotonic() + 300
    while not (tmp_path / "bucket" / "rounds" / f"{number:08d}" / "close").exists():
        assert all(process.poll() is None for process in running) and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_one_is_killed_and_one_is_stopped(tmp_path, request):
    a, b = (_start(tmp_path, request, node, 48) for node in "ab")
    _closed(tmp_path, 2, a, b)
    b.kill()
    assert b.wait() == -signal.SIGKILL
    b = _start(tmp_path, request, "b", 48)
    _closed(tmp_path, 6, a, b)
    a.send_signal(signal.SIGTERM)
    assert a.wait(timeout=300) == 143, (tmp_path / "a.txt").read_text()
    a = _start(tmp_path, request, "a", 48)
    assert [x.wait(timeout=500) for x in (a, b)] == [0, 0], (tmp_path / "a.txt").read_text()
    digests = [{x["number"]: x["digest"] for x in lines(tmp_path / n) if "round" in x} for n in "ab"]
    both = digests[0].keys() & digests[1].keys()
    assert len(both) >= 6 and all(digests[0][i] == digests[1][i] for i in both) and 16 in both
    said = (tmp_path / "a.txt").read_text()
    assert "SIGTERM: saved after step" in said and "Traceback" not in said
