"""Segmentation: void labels, the second head, pixel accuracy and mean IoU, runs that stop and go on, masks.

The model is one convolution with two heads (a small PSPNet takes a minute to compile), the data are scenes that a
fixture writes.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from camvid_helpers import write_camvid
from tiny import tiny_model

from jgc.compress import Dense, LgcPs
from jgc.lab.report.page import write
from jgc.nodes.layouts import make_nodes
from jgc.training import data
from jgc.training.data import VOID, Pictures
from jgc.training.models import WithAuxiliary
from jgc.training.output import masks
from jgc.training.output.metrics import read
from jgc.training.run import checkpoint, loop, setup as building
from jgc.training.settings import cli
from jgc.training.settings.config import Config, DataConfig, resolve
from jgc.training.steps.evaluate import make_evaluate, of_confusion, show
from jgc.training.steps.optimizer import make_schedule
from jgc.training.steps.step import loss_of

# a failed read or write of Orbax leaves callbacks for an event loop that is gone
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

FIGURES = ("test_pixel_accuracy", "test_mean_iou")
CLASSES = 11


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """The folder of a small CamVid; with one device and the tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("arrays")))
        patch.setattr(building, "make_model", tiny_model)
        patch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
        yield write_camvid(tmp_path_factory.mktemp("data")).parent


def scene_config(folder, run_dir=None, method=None, **changes) -> Config:
    """A resolved config of a few steps in crops of 17 pixels."""
    where = DataConfig(dir=str(folder), crop=17)
    config = resolve(Config(method or Dense(), workload="camvid_pspnet", data=where))
    settings = {"batch_size": 4, "steps": 6, "evaluate_every": 0, "diagnose_every": 0, "checkpoint_every": 0}
    settings |= {"run_dir": None if run_dir is None else str(run_dir)}
    return dataclasses.replace(config, **{**settings, **changes})


# The loss.


def cross_entropy(logits, labels):
    """Cross-entropy of each label, in NumPy."""
    logits = np.asarray(logits, np.float64)
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    return log_sums - np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]


def returning(out):
    """A model's `apply` that returns a constant."""
    return lambda variables, inputs, train, mutable: (out, {})


def test_void_labels_and_auxiliary_loss():
    rng = np.random.default_rng(0)
    logits, other = rng.normal(size=(2, 3, 4, 5, CLASSES)).astype(np.float32)
    labels = rng.integers(VOID, CLASSES, (3, 4, 5)).astype(np.int32)
    counts = labels != VOID
    assert 0 < counts.sum() < counts.size

    def loss(logits, other, labels):
        out = WithAuxiliary(logits, other)
        return loss_of(returning(out), void=True)({}, (None, labels), {})

    (value, (_, accuracy)), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(logits, other, labels)
    want = [cross_entropy(x, labels)[counts].mean() for x in (logits, other)]
    assert float(value) == pytest.approx(want[0] + 0.4 * want[1], rel=1e-5)
    assert float(accuracy) == pytest.approx((logits.argmax(-1) == labels)[counts].mean())
    for g in grads:
        assert not np.any(g[~counts]) and np.all(np.any(g[counts], axis=-1))
    nothing, (_, accuracy) = loss(logits, other, np.full_like(labels, VOID))
    assert float(nothing) == float(accuracy) == 0


def test_classification_loss_unchanged():
    """Bit for bit: a plain mean over the labels."""
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(37, 10)).astype(np.float32), rng.integers(0, 10, 37)
    value, (_, accuracy) = loss_of(returning(jnp.asarray(logits)))({}, (None, labels), {})
    plain = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
    assert float(value) == float(plain)
    assert float(accuracy) == float(jnp.mean(logits.argmax(-1) == labels, dtype=jnp.float32))


# The scores.


def scores_by_hand(truth, guess):
    """Pixel accuracy and mean IoU of int[n] labels, class by class."""
    shares = []
    for c in range(CLASSES):
        union = np.sum((truth == c) | (guess == c))
        if union:
            shares.append(np.sum((truth == c) & (guess == c)) / union)
    return np.mean(truth == guess), np.mean(shares)


def with_guesses(folder):
    """A run's parts with a model of random logits, which depend on pixel and image."""
    setup = building.build(scene_config(folder, nodes=4))
    table = jax.random.normal(jax.random.key(0), (36, 48, CLASSES)).at[..., 0].add(jnp.linspace(0, 4, 48))
    parts = setup.parts._replace(apply=lambda variables, inputs, **settings: guess(inputs, **settings))

    def guess(inputs, train, mutable=None):
        logits = table * (1 + jnp.abs(inputs[..., :1])) + inputs[..., 1:2] * jnp.arange(CLASSES)
        return logits if mutable is None else (logits, {})

    return setup._replace(parts=parts), guess


@pytest.mark.parametrize("devices", [1, 4])
def test_scores_over_labelled_pixels(folder, devices, monkeypatch):
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:devices]))
    setup, guess = with_guesses(folder)
    found = make_evaluate(setup.parts, setup.source)(setup.state)
    scenes = data.load_camvid(folder)
    truth, inputs = scenes.test.labels, (scenes.test.images - scenes.mean) / scenes.std
    given, counted = np.asarray(guess(inputs, train=False)).argmax(-1), truth < CLASSES
    assert list(found.values()) == pytest.approx(scores_by_hand(truth[counted], given[counted]), abs=1e-3)
    assert tuple(found) == FIGURES
    shown = show(setup.parts, setup.source, setup.state)  # four of the five images
    np.testing.assert_array_equal(shown.pictures.images[[0, -1]], scenes.test.images[[0, -1]])
    assert np.mean(shown.labels[[0, -1]] == given[[0, -1]]) > 0.999
    assert np.all((shown.pictures.labels[-1] == VOID) == ~counted[-1])


def test_confusion_scores():
    rng = np.random.default_rng(0)
    truth, guess = rng.integers(0, CLASSES - 2, (2, 500))  # two classes that occur nowhere
    truth[truth == 4] = 3  # one that is only ever given
    counts = np.zeros((CLASSES, CLASSES))
    np.add.at(counts, (truth, guess), 1)
    assert list(of_confusion(counts).values()) == pytest.approx(scores_by_hand(truth, guess))

    wide = np.zeros((1000, 1000))  # a model with more outputs than there are classes
    wide[:CLASSES, :CLASSES] = np.eye(CLASSES) * 100
    wide[3, 500] = 1
    assert of_confusion(wide, CLASSES)["test_mean_iou"] == pytest.approx((CLASSES - 1 + 100 / 101) / CLASSES)


# Runs.


def lgc(folder, path, **changes):
    method = LgcPs(warmup_steps=2, autoencoder_steps=2, alpha=0.05)
    return scene_config(folder, path, method, evaluate_every=3, **changes)


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory):
    """An uninterrupted run through the three phases of LGC."""
    path = tmp_path_factory.mktemp("runs") / "reference"
    assert loop.run(lgc(folder, path)) == 0
    return path


def test_run_writes_figures_and_masks(reference, tmp_path):
    lines = read(reference / "metrics.jsonl")
    assert list(dict.fromkeys(line["phase"] for line in lines)) == ["dense", "top-k", "compressed"]
    assert [line["step"] for line in lines if FIGURES[0] in line] == [2, 3, 4, 6]
    assert all((FIGURES[1] in line) == (FIGURES[0] in line) for line in lines)
    summary = json.loads((reference / "summary.json").read_text())
    assert (summary["score"], summary["further_scores"]) == (FIGURES[0], [FIGURES[1]])
    for figure in FIGURES:
        assert summary[figure] == summary["phases"][-1][figure] == lines[-1][figure]
        assert summary["phases"][0][figure] == lines[1][figure] and 0 <= lines[1][figure] <= 1
    assert summary["other"]["batch statistics"]["times"] == 5  # four evaluations and the masks
    for name in ("masks.png", "curves.png"):
        assert (reference / name).read_bytes()[:4] == b"\x89PNG"
    page = write([reference], tmp_path).read_text()
    assert "| test pixel accuracy, % | test mean IoU, % |" in page
    assert f" {100 * summary[FIGURES[0]]:.2f} | {100 * summary[FIGURES[1]]:.2f} |" in page


def test_resume_is_exact(folder, tmp_path, reference, capsys):
    assert loop.run(lgc(folder, tmp_path, steps=3)) == 0
    assert loop.run(lgc(folder, tmp_path, resume=True)) == 0
    got, expected = (checkpoint.restore(checkpoint.open_manager(path)).arrays for path in (tmp_path, reference))
    assert got.keys() == expected.keys()
    assert [name for name in got if got[name].tobytes() != expected[name].tobytes()] == []
    said = capsys.readouterr().out
    assert "test mean IoU: " in said and "summary.json, curves.png, masks.png and metrics.jsonl are in" in said


def test_mask_colours(tmp_path):
    labels = np.array([[[0, 1], [VOID, 5]]], np.int32)  # 5: an output of the model beyond the data's classes
    colours = ((10, 20, 30), (40, 50, 60))
    want = [[[10, 20, 30], [40, 50, 60]], [[0, 0, 0], [0, 0, 0]]]
    assert masks.coloured(labels, colours)[0].tolist() == want
    pictures = Pictures(None, np.zeros((1, 2, 2, 3), np.uint8), labels, ("sky", "road"), colours)
    masks.draw(tmp_path, "a title", pictures, labels)
    assert [file.name for file in tmp_path.iterdir()] == ["masks.png"]


# Settings.


def test_polynomial_schedule(folder):
    schedule = make_schedule(scene_config(folder))
    for step in (0, 600, 1200, 2399, 2400, 5000):
        assert float(schedule(step)) == pytest.approx(0.01 * max(1 - step / 2400, 0) ** 0.9, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--data-dir {tmp}", "camvid is missing: cannot read {tmp}/camvid/train.txt (No such file or directory)"),
        ("--data-dir {data} --data.crop -1", "--data.crop must be at least 0, got -1"),
        ("--data-dir {data} --data.shrink 40", "images of 48x36 pixels can be shrunk by 1 or more"),
        ("--data-dir {data} --data.validation 0.1", "camvid comes with validation images: nothing can be held out"),
        ("--data-dir {data} --nodes 2 --devices-per-node 2", "camvid has pixels without a label, and each device"),
        ("--data-dir {data} --data.window 5", "--data.window is a setting of texts, not of camvid"),
        ("--data-dir {data} --model.name resnet18", "resnet18 takes images, and --data.name camvid has scenes"),
        ("--workload digits_convnet5 --data.crop 9", "--data.crop is a setting of images that are cropped at random"),
        ("--workload digits_convnet5 --data.shrink 2", "--data.shrink is a setting of images with a label per pixel"),
    ],
)
def test_bad_options(folder, options, said, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(request.config.rootpath)
    words = ["--workload", "camvid_pspnet", *options.format(tmp=tmp_path, data=folder).split()]
    assert cli.main(["--method", "dense", "--run-dir", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert said.format(tmp=tmp_path) in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
