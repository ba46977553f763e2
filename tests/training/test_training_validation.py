"""The validation loss: held-out data, its record, and the learning rate that follows it."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from text_helpers import write_text
from tiny import tiny_model
from training_helpers import tiny_config

from jgc.compress import Dense, Egc, TopK
from jgc.nodes.layouts import make_nodes
from jgc.training import data
from jgc.training.output.metrics import read
from jgc.training.run import checkpoint, loop, periodic as between, setup as building
from jgc.training.settings import cli
from jgc.training.settings.config import Config, CorrectionConfig, DataConfig, resolve
from jgc.training.steps.evaluate import make_validate

pytestmark = pytest.mark.slow

EVERY, STEPS = 2, 12


@pytest.fixture(autouse=True, scope="module")
def tiny():
    """The tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", tiny_model)
        yield


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))


def validated(run_dir=None, method=None, **changes) -> Config:
    """A run with a high learning rate, so that its validation loss sometimes rises."""
    settings = {
        "schedule": "validation",
        "correction": CorrectionConfig(decay=0.5, every=EVERY, min_learning_rate=0.05),
        "data": DataConfig("digits", validation=0.1),
        "learning_rate": 0.5,
        "learning_rate_warmup": 3,
        "steps": STEPS,
        "checkpoint_every": 0,
        "diagnose_every": 0,
    }
    return tiny_config(run_dir, method or Dense(), **{**settings, **changes})


def arrays(run_dir):
    return checkpoint.restore(checkpoint.open_manager(run_dir)).arrays


def rates_by_hand(lines, first, decay, least, warmup):
    """Equation (3) and Algorithm 2 with a patience of 1, on the recorded losses."""
    rate, best, epoch, rates = first, np.inf, 0, []
    for i, line in enumerate(lines):
        rates.append(rate * min(1, (i + 1) / warmup))
        if "validation_loss" in line:
            epoch += 1
            if line["validation_loss"] >= best:
                rate = max(first / (1 + decay * epoch), least)
            best = min(best, line["validation_loss"])
    return rates


def test_rate_follows_losses(one_device, tmp_path, capsys):
    assert loop.run(validated(tmp_path)) == 0
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation_loss" in line] == list(range(EVERY, STEPS + 1, EVERY))
    rates = [line["learning_rate"] for line in lines]
    np.testing.assert_allclose(rates, rates_by_hand(lines, 0.5, 0.5, 0.05, 3), rtol=1e-6)
    assert rates[-1] < 0.5  # it has fallen
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["learning_rate"], summary["validation_loss"]) == (
        rates[-1],
        [line["validation_loss"] for line in lines if "validation_loss" in line][-1],
    )
    assert "last validation loss" in capsys.readouterr().out


def test_rate_changes_training(one_device, tmp_path):
    """Until the rate falls, the run equals one with a constant rate."""
    assert loop.run(validated(tmp_path / "falling")) == 0
    constant = {"schedule": "constant", "correction": CorrectionConfig(every=EVERY)}
    assert loop.run(validated(tmp_path / "constant", **constant)) == 0
    falling, constant = (read(tmp_path / name / "metrics.jsonl") for name in ("falling", "constant"))
    changed = next(i for i, line in enumerate(falling) if i > 3 and line["learning_rate"] < 0.5)
    assert {line["learning_rate"] for line in constant[3:]} == {0.5}
    # a step's loss is that before its update: the first one to differ comes after the first lower rate
    losses = [[line["loss"] for line in lines] for lines in (falling, constant)]
    np.testing.assert_allclose(losses[0][: changed + 1], losses[1][: changed + 1], rtol=1e-6)
    assert abs(losses[0][changed + 1] / losses[1][changed + 1] - 1) > 1e-4
    seen = [[line["validation_loss"] for line in lines if "validation_loss" in line] for lines in (falling, constant)]
    assert len(seen[0]) == len(seen[1]) == STEPS // EVERY


def test_validation_loss_by_hand(one_device):
    setup = building.build(validated())
    _, held = data.hold_out(data.load_digits(), 0.1)
    mean_stats = jax.tree.map(lambda x: x.mean(axis=0), setup.state.model_state["batch_stats"])
    images = (held.test_images - held.mean) / held.std
    variables = {"params": setup.state.params, "batch_stats": mean_stats}
    logits = setup.parts.apply(variables, images.astype(np.float32), train=False)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, held.test_labels).mean()
    assert make_validate(setup.parts, setup.source)(setup.state) == pytest.approx(float(expected), rel=1e-5)


def test_held_out_images_not_trained_on(one_device):
    """Nor used as test images."""
    whole, (kept, held) = data.load_digits(), data.hold_out(data.load_digits(), 0.1)
    rows = [x.reshape(len(x), -1) for x in (kept.train_images, held.test_images, whole.train_images)]
    assert len(rows[1]) == round(0.1 * len(rows[2]))
    np.testing.assert_array_equal(*(np.sort(x, axis=0) for x in (np.concatenate(rows[:2]), rows[2])))
    np.testing.assert_array_equal(kept.test_images, whole.test_images)
    np.testing.assert_array_equal(data.hold_out(whole, 0.1)[1].test_labels, held.test_labels)  # always the same
    source = building.build(validated()).source
    assert source.epoch_steps(1) == len(rows[0]) and source.facts != data.source_of(whole).facts


@pytest.mark.parametrize("stop", [5, 6])
def test_resume_is_exact(one_device, tmp_path, stop):
    """Stopped between two validations, or right after one."""
    method = TopK(alpha=0.1, warmup_steps=2)
    assert loop.run(validated(tmp_path / "whole", method)) == 0
    assert loop.run(validated(tmp_path / "stopped", method, steps=stop)) == 0
    assert loop.run(validated(tmp_path / "stopped", method, resume=True)) == 0
    whole, stopped = arrays(tmp_path / "whole"), arrays(tmp_path / "stopped")
    assert sum(".learning_rate" in name for name in whole) == 1
    assert [name for name in whole if whole[name].tobytes() != stopped[name].tobytes()] == []


def test_mesh_matches_one_device(tmp_path, monkeypatch):
    assert loop.run(validated(tmp_path / "mesh")) == 0
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
    assert loop.run(validated(tmp_path / "one")) == 0
    mesh, one = ([line["learning_rate"] for line in read(tmp_path / x / "metrics.jsonl")] for x in ("mesh", "one"))
    np.testing.assert_allclose(mesh, one, rtol=1e-6)


def test_default_interval_is_an_epoch(one_device):
    config = validated(correction=CorrectionConfig())
    setup = building.build(config)
    assert between.steps_between_validations(config, setup) == round(len(data.load_digits().train_labels) * 0.9 / 16)


def test_egc_measures_once_an_epoch():
    config = validated(method=Egc(measure_every=0))
    source = building.data_of(config)
    epoch = round(len(data.load_digits().train_labels) * 0.9 / 16)
    assert building.steps_of_epoch(config, source) == epoch > 1
    assert building.with_epoch(config.compressor, epoch).measure_every == epoch
    assert building.build(config).parts.compressor.schedule[-1].name == "entropy"


def test_text_validation_split(one_device, tmp_path):
    folder = write_text(tmp_path / "data")
    config = resolve(Config(Dense(), workload="ptb_lstm", data=DataConfig(dir=str(folder), window=7)))
    config = dataclasses.replace(config, batch_size=8, steps=4, evaluate_every=2, schedule="validation",
                                 correction=CorrectionConfig(every=2), run_dir=str(tmp_path / "run"))  # fmt: skip
    assert loop.run(config) == 0
    found = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "validation_loss" in line]
    assert len(found) == 2
    for line in found:
        assert line["validation_perplexity"] == pytest.approx(np.exp(line["validation_loss"]), rel=1e-5)
    other = json.loads((tmp_path / "run" / "summary.json").read_text())["other"]
    assert other["batch statistics"]["times"] == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--schedule validation", "--schedule validation needs images held out from training: give their share"),
        ("--data.validation 1.0", "--data.validation must be a share of the images, at least 0 and below 1 (0.1)"),
        ("--data.validation -0.5", "--data.validation must be a share of the images, at least 0 and below 1 (0.1)"),
        ("--data.validation 0.0001", "a validation set must have at least one of the 1437 training images of digits"),
        ("--correction.every -1", "--correction.every must be at least 0 steps, got -1"),
        ("--schedule validation --data.validation 0.1 --correction.decay 0", "decay must be positive, got 0"),
        ("--schedule validation --data.validation 0.1 --correction.patience 0", "patience must be at least 1, got 0"),
        ("--schedule validation --data.validation 0.1 --correction.min-learning-rate 9", "min_learning_rate must be"),
        ("--workload ptb_lstm --data-dir {text} --data.validation 0.1", "ptb comes with a validation text: nothing"),
    ],
)
def test_bad_options(one_device, options, said, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(request.config.rootpath)
    words = options.format(text=write_text(tmp_path / "data")).split()
    assert cli.main(["--method", "dense", "--run-dir", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
