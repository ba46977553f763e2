"""Runs with local steps: against ordinary ones, stopped, killed, resumed, other numbers of nodes, several processes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from process_helpers import free_port, start, start_all, wait_for_step
from tiny import tiny_conv_model, tiny_model
from training_helpers import tiny_config

from jgc.compress import Demo, Dense, Gradiveq, TopK
from jgc.lab.shared.hlo import collectives
from jgc.nodes.layouts import make_nodes
from jgc.training.errors import UserError
from jgc.training.output.announce import notes
from jgc.training.output.metrics import read
from jgc.training.run import checkpoint, loop, setup as building
from jgc.training.run.local import Divergence, exchanges_by, watch
from jgc.training.run.periodic import batches
from jgc.training.settings.config import LayersConfig, RecordConfig, check
from jgc.training.settings.local_config import LocalConfig
from jgc.training.settings.rounds_config import RoundsConfig
from jgc.training.steps.step import arrays_by_name

SPARSE = TopK(alpha=0.1, warmup_steps=1)
STREAMING = LocalConfig(every=4, fragments=2, overlap=1)
PLAIN = LocalConfig(every=4)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A small model, and all nodes on one device."""
    monkeypatch.setattr(building, "make_model", tiny_model)
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))


def config_of(path=None, local=PLAIN, method=SPARSE, **changes):
    layers = {"layers": LayersConfig(dense="", top_k="")}
    settings = {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 24, "steps": 14, "diagnose_every": 0}
    return tiny_config(path, method, local=local, **{**layers, **settings, **changes})


def arrays(path):
    return checkpoint.restore(checkpoint.open_manager(path)).arrays


def differing(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if a[name].tobytes() != b[name].tobytes()]


def lines(path):
    return read(path / "metrics.jsonl")


# --- against ordinary runs --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_step_a_round_is_an_ordinary_run(tmp_path):
    """Without clipping: local steps clip to a different norm."""
    same = {"method": Dense(), "optimizer": "sgd", "momentum": 0.0, "weight_decay": 1e-3, "steps": 6}
    mean = LocalConfig(every=1, outer_learning_rate=1.0, outer_momentum=0.0)
    for name, local in (("ordinary", LocalConfig()), ("local", mean)):
        assert loop.run(config_of(tmp_path / name, local, **same)) == 0
    ordinary, local = arrays(tmp_path / "ordinary"), arrays(tmp_path / "local")
    for name, x in ordinary.items():
        if name.startswith(("params.", "batch_stats.")):
            np.testing.assert_allclose(local[name], x, rtol=1e-4, atol=1e-6)
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("ordinary", "local")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert [line["bytes"] for line in lines(tmp_path / "local")] == [
        line["bytes"] for line in lines(tmp_path / "ordinary")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("local", [PLAIN, STREAMING], ids=["plain", "streaming"])
def test_layouts_train_alike(tmp_path, monkeypatch, local):
    for devices in (1, 2, 4):
        monkeypatch.setattr(building, "make_nodes", lambda count, n=devices, **_: make_nodes(count, jax.devices()[:n]))
        assert loop.run(config_of(tmp_path / str(devices), local, nodes=4, batch_size=16, steps=9)) == 0
    for devices in (2, 4):
        losses = [[line["loss"] for line in lines(tmp_path / str(n))] for n in (1, devices)]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


@pytest.mark.slow
def test_inner_steps_of_a_run_send_nothing(monkeypatch):
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:4]))
    setup = building.build(config_of(nodes=4, batch_size=16, clip_norm=1.0))
    batch = next(batches(setup))
    assert collectives(setup.step.lower(setup.state, batch).compile()) == ()


@pytest.mark.slow
def test_bytes_of_a_run_are_those_of_its_exchanges(tmp_path, capsys):
    assert loop.run(config_of(tmp_path / "run", STREAMING, steps=10)) == 0
    found, summary = lines(tmp_path / "run"), json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [line["step"] for line in found if line["bytes"]] == [2, 4, 6, 8, 10]
    dense = sum(line["bytes"] for line in found[:4]) / 2  # of a node, in the round of the warm-up
    assert dense == found[0]["bytes_uncompressed"] / 2 == 4 * summary["parameters"]
    assert 0 < sum(line["bytes"] for line in found[4:8]) < 0.5 * 2 * dense
    assert summary["total_bytes"] == sum(line["bytes"] for line in found)
    sent = summary["sent"]
    assert sent["every"] == 4 and sent["step"] == pytest.approx(summary["total_bytes"] / 20)
    assert sent["label"] == pytest.approx(sent["step"] / 12) and summary["other"]["metrics"]["times"] == 0
    said = capsys.readouterr().out
    assert "up a round" in said and "a round of 4 steps, " in said and "B an image" in said


@pytest.mark.slow
def test_recording_and_diagnosis_see_pseudo_gradients(tmp_path):
    config = config_of(tmp_path, steps=8, diagnose_every=1, record=RecordConfig(every=2), optimizer="sgd", momentum=0.0,
                       clip_norm=0.1, method=Dense())  # fmt: skip
    assert loop.run(config) == 0
    (file,) = sorted((tmp_path / "gradients").iterdir())  # of exchange 0 of two
    recorded = np.load(file)
    assert int(recorded["step"]) == 3
    # every step of a node is at most the rate times the norm that it clips to
    norms = np.sqrt(
        sum((recorded[name] ** 2).reshape(2, -1).sum(1) for name in recorded.files if name.startswith("grad"))
    )
    rates = [line["learning_rate"] for line in lines(tmp_path)[:4]]
    assert np.all(norms > 0) and np.all(norms <= 0.1 * sum(rates) * 1.0001)
    assert loop.run(dataclasses.replace(config_of(tmp_path / "topk", steps=8, diagnose_every=1))) == 0
    assert [line["step"] for line in lines(tmp_path / "topk") if "true_cosine" in line] == [8]
    with pytest.raises(UserError, match=r"the recording would take .* \(2 steps x 2 nodes"):  # of eight steps
        loop.run(config_of(tmp_path / "large", steps=8, record=RecordConfig(every=1, max_megabytes=1e-6)))


# --- stopped, killed, resumed -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs by the name of their settings, made once."""
    made = {}

    def run(name, *args, **changes):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("runs") / name
            assert loop.run(config_of(made[name], *args, **changes)) == 0
        return made[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("stop", [5, 7, 8])
@pytest.mark.parametrize("local", [PLAIN, STREAMING], ids=["plain", "streaming"])
def test_resumed_in_the_middle_of_a_round_equals_the_whole_run(tmp_path, whole, local, stop):
    expected = whole(f"{local.fragments}", local)
    assert loop.run(config_of(tmp_path, local, steps=stop)) == 0
    assert loop.run(config_of(tmp_path, local, resume=True)) == 0
    assert differing(arrays(tmp_path), arrays(expected)) == []
    assert [line["loss"] for line in lines(tmp_path)] == [line["loss"] for line in lines(expected)]


@pytest.mark.slow
def test_phases_that_a_method_finds_are_kept(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(building, "make_model", tiny_conv_model)
    method = Gradiveq(warmup_steps=1, sampling_steps=2, compressed_steps=2, loss=0.3)
    local = LocalConfig(every=2, outer_momentum=0.0, outer_learning_rate=1.0)
    expected = whole("gradiveq", local, method, steps=16)
    assert loop.run(config_of(tmp_path, local, method, steps=9)) == 0
    assert loop.run(config_of(tmp_path, local, method, steps=16, resume=True)) == 0
    assert differing(arrays(tmp_path), arrays(expected)) == []
    assert {line["phase"] for line in lines(tmp_path)} == {"dense", "sampling", "compressed"}


@pytest.mark.slow
@pytest.mark.parametrize("local", [PLAIN, STREAMING], ids=["plain", "streaming"])
def test_other_numbers_of_nodes_keep_the_mean(tmp_path, local):
    """4 to 3 to 8 nodes, each time in the middle of a round."""
    assert loop.run(config_of(tmp_path, local, nodes=4, steps=6)) == 0
    for before, nodes, steps in ((4, 3, 10), (3, 8, 14)):
        config = config_of(tmp_path, local, nodes=nodes, steps=steps, resume=True)
        found = checkpoint.restore(checkpoint.open_manager(tmp_path))
        state = checkpoint.fit(building.build(config).state, found, nodes)
        fitted = checkpoint.flatten(arrays_by_name(state))
        moved = {name for name, x in found.arrays.items() if fitted[name].shape != x.shape}
        assert all(name.startswith(("local.", "batch_stats.", "compressor.")) for name in moved)
        assert any(name.startswith("compressor.0.local.memory") for name in moved) and len(moved) > 10
        for name, x in found.arrays.items():
            new = fitted[name]
            if name in moved:
                assert (x.shape[0], new.shape[0]) == (before, nodes)
                x, new = x.mean(0, dtype=np.float64), new.mean(0, dtype=np.float64)
            np.testing.assert_allclose(new, x, rtol=1e-5, atol=1e-7)
        assert loop.run(config) == 0
    assert lines(tmp_path)[-1]["loss"] < lines(tmp_path)[0]["loss"]


COMMAND = [
    *("train.py", "--method", "topk", "--nodes", "2", "--batch-size", "16", "--steps", "18"),
    *("--local.every", "6", "--local.fragments", "2", "--local.overlap", "2", "--optimizer", "adam"),
    *("--compressor.warmup-steps", "1", "--compressor.alpha", "0.05", "--layers.dense", "", "--learning-rate", "0.002"),
    *("--checkpoint-every", "2", "--evaluate-every", "0", "--diagnose-every", "0"),
]
KILLS = (2, 7, 13)  # in the middle of three rounds


@pytest.mark.slow
def test_kill_and_resume_in_the_middle_of_three_rounds(tmp_path, request):
    def start(run_dir, *more):
        flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
        env = {**os.environ, "XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, *COMMAND, "--run-dir", str(run_dir), *more]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=request.config.rootpath, env=env, **out)

    def newest():
        found = lines(tmp_path / "killed")
        return found[-1]["step"] if found else 0

    run = start(tmp_path / "whole")
    assert run.wait(timeout=300) == 0, run.stdout.read()
    for i, step in enumerate(KILLS):
        run = start(tmp_path / "killed", *(["--resume"] if i else []))
        deadline = time.monotonic() + 300
        while newest() < step and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, run.stdout.read()
    run = start(tmp_path / "killed", "--resume")
    assert run.wait(timeout=300) == 0, run.stdout.read()
    assert differing(arrays(tmp_path / "killed"), arrays(tmp_path / "whole")) == []
    losses = [[(line["step"], line["loss"]) for line in lines(tmp_path / name)] for name in ("killed", "whole")]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, 19))


# --- several processes ------------------------------------------------------------------------------------------------

DISTRIBUTED = (
    "--method topk --compressor.alpha 0.1 --compressor.warmup-steps 1 --batch-size 24 --nodes 4 "
    "--evaluate-every 3 --diagnose-every 0 --optimizer adam --learning-rate 0.01 --local.every 4 --local.fragments 2"
)


def train(tmp_path, name, count, options, **environment):
    return start_all(tmp_path, name, count, f"{DISTRIBUTED} {options} --run-dir {tmp_path / name}", **environment)


@pytest.fixture
def in_root(request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, in_root):
    """With SGD: Adam makes full steps of gradients that are only rounding, such as those before a batch norm."""
    sgd = "--steps 10 --optimizer sgd --learning-rate 0.05"
    for running in [train(tmp_path, f"{count}", count, sgd) for count in (1, 2)]:
        for r in running:
            code, output = r.end()
            assert code == 0, output
    one, two = (arrays(tmp_path / name) for name in "12")
    assert one.keys() == two.keys()
    for name, x in one.items():
        np.testing.assert_allclose(two[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_process_that_hangs_is_late_with_an_exchange(tmp_path, in_root):
    options = f"{DISTRIBUTED} --steps 100000 --run-dir {tmp_path / 'run'} --distributed.timeout 4"
    options += (
        f" --distributed.coordinator 127.0.0.1:{free_port()} --distributed.num-processes 2 --distributed.process-id"
    )
    running = [start(tmp_path, f"{i}", f"{options} {i}", **({"JGC_TEST_HANG": "6"} if i else {})) for i in range(2)]
    assert "error: process 1 has not come to the end of exchange 3, " in running[0].error()
    assert "process 1 ends: process 1 has not come to the end of exchange 3, " in running[1].error()


@pytest.mark.slow
def test_signal_stops_all_processes_after_an_exchange(tmp_path, in_root):
    running = train(tmp_path, "run", 2, "--steps 100000 --checkpoint-every 0 --log-every 1000")
    wait_for_step(tmp_path / "run", 9, running)
    os.kill(running[1].process.pid, signal.SIGTERM)
    assert [r.end()[0] for r in running] == [143, 143], running[0].output.read_text()
    found = checkpoint.restore(checkpoint.open_manager(tmp_path / "run"))
    assert found.step % 2 == 0 and found.step == lines(tmp_path / "run")[-1]["step"]


# --- mistakes, and runs that diverge ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"local": LocalConfig(every=4, outer_learning_rate=300.0)},
         "lower --local.outer-learning-rate (300) or --local.outer-momentum (0.9)"),
        ({"local": LocalConfig(every=4, outer_learning_rate=0.7), "learning_rate": 30.0}, "lower --learning-rate (30)"),
    ],
    ids=["outer", "inner"],
)  # fmt: skip
def test_diverging_run_names_the_setting(tmp_path, changes, named):
    with pytest.raises(UserError) as error:
        loop.run(config_of(tmp_path, method=Dense(), steps=60, optimizer="adam", **changes))
    assert named in str(error.value) and "stopped at step" in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == 1


@pytest.mark.slow
def test_each_phase_is_evaluated_at_its_end(tmp_path):
    assert loop.run(config_of(tmp_path, evaluate_every=0)) == 0  # rounds of 4 steps, the first one uncompressed
    assert [line["step"] for line in lines(tmp_path) if "test_accuracy" in line] == [4, 14]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert all(phase["test_accuracy"] is not None for phase in summary["phases"])
    assert summary["phases"][0]["compression_ratio"]["worker"] == 4  # 7 steps have this phase's name, with one exchange
    up = [line["bytes_up_worker"] for line in lines(tmp_path) if line["step"] in (8, 12)]
    assert summary["compression_ratio"]["worker"] == pytest.approx(16 * summary["parameters"] / np.mean(up))
    sent = [line["elements_sent"] for line in lines(tmp_path) if line["step"] in (8, 12)]
    assert summary["element_ratio"] == pytest.approx(4 * summary["parameters"] / np.mean(sent))


def test_what_a_run_leaves_out_is_noted():
    late = building.build(config_of(steps=14, method=TopK(warmup_steps=3)))  # rounds of 4 steps
    early, exact = notes(late)
    assert early.startswith("note: this run of 3 exchanges ends before phase top-k, which begins after 3")
    assert exact.startswith("note: the last 2 of 14 steps have no exchange after them") and "(--steps 12 ends" in exact
    assert notes(building.build(config_of(steps=16, method=TopK(warmup_steps=3)))) == []
    for steps, parts, note in (
        (14, {"fragments": 2}, []),
        (14, {"overlap": 1}, ["the last 2"]),
        (12, {"overlap": 1}, ["comes after step 13"]),
    ):
        said = notes(building.build(config_of(steps=steps, method=Dense(), local=LocalConfig(every=4, **parts))))
        assert len(said) == len(note) and all(text in line for text, line in zip(note, said, strict=True))
    short = {"schedule": "poly", "schedule_steps": 12, "learning_rate_warmup": 12}
    over, rises = notes(building.build(config_of(steps=16, method=TopK(warmup_steps=3), **short)))
    assert "the learning rate is 0 from step 14 on, where --schedule poly ends; give --schedule-steps 16" in over
    assert "the learning rate rises for 12 steps, and its schedule ends after 12" in rises


def test_divergence_by_hand():
    setup = building.build(config_of(method=Dense()))
    config, local = setup.parts.config, setup.parts.local
    calm = Divergence(config, local, None)
    assert not any(calm(step, 2.0 + 0.1 * (step % 3), True) for step in range(1, 40))
    jumps = Divergence(config, local, None)  # after every exchange up by 3, in between down by 0.5 a step
    losses, loss = [], 2.0
    for step in range(1, 45):
        loss += 3 if step > 1 and (step - 1) % 4 == 0 else -0.2
        losses.append(jumps(step, loss, True))
    # above twice the first from step 9 on, and for ten steps, though a round has four
    assert losses[:17] == [""] * 17 and all("lower --local.outer-learning-rate (0.7)" in x for x in losses[17:])
    so_far = [{"step": step, "loss": 1.7 if step == 1 else 5.0} for step in range(1, 11)]  # a resumed run counts on
    assert "lower --l" in watch(config, local, so_far)(11, 5.0, True)
    grows = Divergence(config, local, None)  # tenfold in every step; the last of them follows an outer one
    assert "lower --learning-rate (0.01)" in [grows(step, 10.0**step, True) for step in range(1, 13)][-1]
    assert "lower --learning-rate (0.01)" in Divergence(config, local, 2.0)(3, float("nan"), True)
    assert "--local.outer" in Divergence(config, local, 2.0)(5, 1.0, False)
    late = dataclasses.replace(config, rounds=RoundsConfig(bucket="bucket"))  # the first loss is low by chance
    joins = Divergence(late, local, None)
    assert not any(joins(step, 0.1 if step == 1 else 0.3, True) for step in range(1, 40))
    assert any(joins(step, 0.7, True) for step in range(40, 60))
    assert [exchanges_by(local, done) for done in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local": LocalConfig(every=0)}, "--local.every must be at least 1 step, got 0"),
        ({"local": LocalConfig(every=14, overlap=5)}, "the first outer step comes after 19 steps"),
        ({"local": LocalConfig(every=99)}, "the first outer step comes after 99 steps"),
        ({"local": LocalConfig(fragments=3)}, "--local.fragments 3 does nothing without --local.every"),
        ({"local": LocalConfig(every=4, outer_learning_rate=0.0)}, "--local.outer-learning-rate must be positive"),
        ({"local": LocalConfig(every=4, outer_momentum=1.0)}, "--local.outer-momentum must be in [0, 1), got 1.0"),
        ({"local": LocalConfig(every=4, fragments=5)}, "--local.fragments must be from 1 to every = 4"),
        ({"local": LocalConfig(every=14, fragments=11)}, "fragments=11 exceeds the 8 arrays of the parameters"),
        ({"local": LocalConfig(every=4, overlap=4)}, "--local.overlap must be from 0 to every - 1 = 3 steps, got 4"),
        ({"local": LocalConfig(every=4, merge=-0.1)}, "--local.merge must be in [0, 1)"),
        ({"local": LocalConfig(every=4, merge=0.5)}, "--local.merge=0.5 keeps in a node's parameters a part"),
        ({"method": TopK(momentum_correction=True)}, "--method topk keeps a momentum, which with --local"),
        ({"method": TopK(momentum_correction=True)}, "outer optimiser's: give --compressor.no-momentum-correction"),
        ({"method": Demo()}, "with --local.every is the outer optimiser's: give a different method"),
        ({"schedule": "validation", "local": PLAIN}, "--schedule validation lowers one rate for all nodes"),
        ({"record": RecordConfig(every=1), "local": STREAMING}, "--record.every needs --local.fragments 1, got 2"),
        ({"adam_beta2": 1.0}, "--adam-beta2 must be in [0, 1), got 1.0"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        config = config_of(tmp_path / "run", **changes)
        check(config)
        building.build(config)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_state_of_nodes_is_their_own():
    arrays = building.build(config_of(local=STREAMING)).state
    assert all(x.shape[0] == 2 for x in jax.tree.leaves((arrays.own, arrays.inner)))
    same = jax.tree.map(lambda own, shared: bool(jnp.all(own == shared[None])), arrays.own, arrays.params)
    assert all(jax.tree.leaves(same)) and len(arrays.compressor) == len(arrays.waiting) == 2
