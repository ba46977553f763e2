"""Language modelling: carried state, perplexity, several nodes against one, resumed runs."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from text_helpers import write_text
from tiny import tiny_model

from jgc.compress import Dense, TopK
from jgc.lab.report.page import write
from jgc.lab.shared.programs import make_gradients
from jgc.nodes.layouts import make_nodes
from jgc.training import data
from jgc.training.data.text import EVALUATED_STREAMS
from jgc.training.errors import UserError
from jgc.training.models import make_model
from jgc.training.output.metrics import read
from jgc.training.run import checkpoint, loop, setup as building
from jgc.training.run.periodic import batches
from jgc.training.settings import cli
from jgc.training.settings.config import Config, DataConfig, resolve
from jgc.training.steps.evaluate import make_evaluate
from jgc.training.steps.optimizer import make_schedule

# a failed read or write of Orbax leaves callbacks for an event loop that is gone
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

WINDOW, STREAMS = 7, 8
EPOCH = 11  # steps, of the text that `folder` makes


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """The folder of a small text; with a small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", tiny_model)
        yield write_text(tmp_path_factory.mktemp("data"))


def text_config(folder, run_dir=None, method=None, **changes) -> Config:
    """A resolved config of a few steps on the small text."""
    config = resolve(Config(method or Dense(), workload="ptb_lstm", data=DataConfig(dir=str(folder), window=WINDOW)))
    settings = {"batch_size": STREAMS, "steps": 14, "evaluate_every": 0, "diagnose_every": 0, "checkpoint_every": 0}
    settings |= {"run_dir": None if run_dir is None else str(run_dir)}
    return dataclasses.replace(config, **{**settings, **changes})


def built(config, monkeypatch, devices=1):
    """A run's parts with its nodes on `devices` devices."""
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:devices]))
    return building.build(config)


def trained(setup, steps):
    """The state after `steps` steps, and the loss of each."""
    state, losses = setup.state, []
    for _, batch in zip(range(steps), batches(setup), strict=False):
        state, metrics = setup.step(state, batch)
        losses.append(float(metrics.loss))
    return state, losses


# The model.


def lstm_by_hand(params, words):
    """Log-probabilities f64[n, words] of the word after each of n words, starting without a carry."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["embedding"]["embedding"][words]
    for name in ("layer1", "layer2"):
        p, rows = params[name], []
        c = h = np.zeros(x.shape[1])
        for row in x:
            i, f, g, o = (row @ p[f"i{gate}"]["kernel"] + h @ p[f"h{gate}"]["kernel"] + p[f"h{gate}"]["bias"]
                          for gate in "ifgo")  # fmt: skip
            c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            h = np.tanh(c) / (1 + np.exp(-o))
            rows.append(h)
        x = np.array(rows)
    logits = x @ params["head"]["kernel"] + params["head"]["bias"]
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_small_model_of_zaremba():
    module = make_model("lstm", 10_000, norm="none").module
    inputs = jax.ShapeDtypeStruct((5, 20), jnp.int32), jax.ShapeDtypeStruct((5,), bool)
    variables = jax.eval_shape(lambda key, x: module.init(key, x, train=False), jax.random.key(0), inputs)
    assert sum(x.size for x in jax.tree.leaves(variables["params"])) == 4_651_600
    assert {x.shape for x in jax.tree.leaves(variables["carry"])} == {(5, 200)}
    small = make_model("lstm", 50, units=20).module.init(jax.random.key(0), (jnp.zeros((2, 3), int), np.ones(2, bool)),
                                                         train=False)  # fmt: skip
    for x in jax.tree.leaves(small["params"]):
        assert -0.1 <= x.min() < 0 < x.max() <= 0.1 and x.mean() == pytest.approx(0, abs=0.04)
    assert all(np.all(x == 0) for x in jax.tree.leaves(small["carry"]))


def test_carried_state():
    module, rng = make_model("lstm", 12, units=6).module, np.random.default_rng(0)
    words = rng.integers(0, 12, (2, 8))
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    params = module.init(jax.random.key(1), (words, yes), train=False)["params"]

    def apply(carry, words, start):
        logits, new = module.apply({"params": params, **carry}, (words, start), train=True, mutable=["carry"])
        return np.asarray(logits), new

    whole, _ = apply({}, words, yes)
    first, carry = apply({}, words[:, :3], yes)
    second, carry = apply(carry, words[:, 3:], no)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-6)
    mixed, _ = apply(carry, words, np.array([True, False]))
    np.testing.assert_array_equal(mixed[0], apply(carry, words, yes)[0][0])
    assert np.abs(mixed[1] - whole[1]).max() > 1e-4
    for row, stream in zip(whole, words, strict=True):
        expected = lstm_by_hand(params, stream)
        got = row - np.log(np.exp(row).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"units": 0}, "`units` must be positive, got 0"), ({"norm": "batch"}, "`norm` must be one of 'none'"),
     ({"layers": -1}, "`layers` must be positive, got -1"), ({"num_classes": 0}, "`num_classes` must be positive")],
)  # fmt: skip
def test_bad_model_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        make_model("lstm", **({"num_classes": 5} | settings))


# Steps.


def test_epoch_resets_state(folder, monkeypatch):
    """The carry affects the steps of its epoch, and not those of the next one."""
    setup = built(text_config(folder, nodes=2), monkeypatch)
    assert setup.source.epoch_steps(STREAMS) == EPOCH
    gradients = jax.jit(make_gradients(setup.parts))
    state, _ = trained(setup, EPOCH)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(state.model_state["carry"]))
    fresh = state._replace(model_state=jax.tree.map(jnp.zeros_like, state.model_state))
    step = dict(zip(range(EPOCH + 2), batches(setup), strict=False))
    for i, same in ((0, True), (EPOCH, True), (EPOCH + 1, False)):
        a, b = (gradients(state.params, s.model_state, step[i]) for s in (state, fresh))
        assert np.array_equal(a.loss, b.loss) == same
        assert all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b))) == same
    again, first = (gradients(state.params, state.model_state, step[i]) for i in (EPOCH, 0))
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(first)))


@pytest.mark.parametrize("devices", [1, 4, 2])
def test_nodes_match_single_node(folder, monkeypatch, devices):
    """In every layout the uncompressed mean over nodes equals the mean over all streams."""
    one, losses = trained(built(text_config(folder, nodes=1, clip_norm=0.0), monkeypatch), EPOCH + 3)
    four, same = trained(built(text_config(folder, nodes=4, clip_norm=0.0), monkeypatch, devices), EPOCH + 3)
    np.testing.assert_allclose(same, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(four.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    for a, b in zip(jax.tree.leaves(one.model_state), jax.tree.leaves(four.model_state), strict=True):
        assert b.shape[:2] == (4, STREAMS // 4)
        np.testing.assert_allclose(a.reshape(STREAMS, -1), b.reshape(STREAMS, -1), rtol=1e-3, atol=1e-5)


def test_non_finite_gradient_keeps_carry(folder, monkeypatch):
    setup = built(text_config(folder, nodes=2), monkeypatch)
    state, _ = trained(setup, 2)
    batch = next(batches(setup, 2))
    carry = jax.tree.map(lambda x: x.at[0].set(jnp.nan), state.model_state)  # so is the node's gradient
    before = jax.device_get(carry)
    after, metrics = setup.step(state._replace(model_state=carry), batch)
    assert not metrics.info.finite
    for a, b in zip(jax.tree.leaves(after.model_state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


# Perplexity.


@pytest.mark.parametrize("devices", [1, 8])
def test_perplexity_by_hand(folder, monkeypatch, devices):
    """Streams start without a carry; window, devices and the run's own carry have no effect."""
    setup = built(text_config(folder, nodes=8), monkeypatch, devices)
    state, _ = trained(setup, 3)
    words = data.load_ptb(folder).validation
    stretch = -(-(len(words) - 1) // EVALUATED_STREAMS)
    pieces = [words[i : i + stretch + 1] for i in range(0, len(words) - 1, stretch)]
    by_hand = [lstm_by_hand(state.params, piece[:-1])[np.arange(len(piece) - 1), piece[1:]] for piece in pieces]
    losses = -np.concatenate(by_hand)
    assert len(losses) == len(words) - 1
    for window in (WINDOW, 3):
        source = data.source_of(data.load_ptb(folder)._replace(window=window))
        assert make_evaluate(setup.parts, source)(state) == {
            "validation_perplexity": pytest.approx(np.exp(losses.mean()), rel=1e-5)
        }


# Whole runs.


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory):
    """An uninterrupted run over the end of an epoch, first dense, then compressed."""
    path = tmp_path_factory.mktemp("runs") / "reference"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
        assert loop.run(sparse(folder, path, evaluate_every=5)) == 0
    return path


def sparse(folder, path, **changes):
    return text_config(folder, path, TopK(alpha=0.2, warmup_steps=3), **changes)


def arrays(path):
    return checkpoint.restore(checkpoint.open_manager(path)).arrays


def losses_of(path):
    return [line["loss"] for line in read(path / "metrics.jsonl")]


def test_run_names_its_score(reference, tmp_path, capsys):
    lines = read(reference / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation_perplexity" in line] == [3, 5, 10, 14]
    assert not any("test_accuracy" in line for line in lines)
    summary = json.loads((reference / "summary.json").read_text())
    assert summary["score"] == "validation_perplexity" and "test_accuracy" not in summary
    assert summary["validation_perplexity"] == lines[-1]["validation_perplexity"] > 1
    dense, last = summary["phases"]
    assert last["validation_perplexity"] == summary["validation_perplexity"]
    assert dense["validation_perplexity"] == lines[2]["validation_perplexity"]
    assert summary["other"]["batch statistics"] == {"times": 4, "bytes": 0}
    assert (reference / "curves.png").read_bytes()[:4] == b"\x89PNG"
    page = write([reference], tmp_path).read_text()
    assert "### Validation perplexity" in page and "against the baseline | within 2.0 |" in page
    assert f" {summary['validation_perplexity']:.2f} |" in page and "accuracy" not in page.partition("## The paper")[0]


def test_run_learns(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
    config = text_config(folder, tmp_path / "run", steps=20 * EPOCH, log_every=EPOCH, learning_rate=2.0, momentum=0.9)
    assert loop.run(config) == 0
    said = capsys.readouterr().out
    perplexity = json.loads((tmp_path / "run" / "summary.json").read_text())["validation_perplexity"]
    assert "220 steps (20 epochs)" in said and f"validation perplexity {perplexity:.2f}\n" in said
    assert f"validation perplexity after 220 steps: {perplexity:.2f}" in said and "accuracy" not in said
    assert perplexity < 4  # of ten words; by their frequencies alone it is 9


@pytest.mark.parametrize("stop", [2, 7, EPOCH])
def test_resume_is_exact(folder, tmp_path, reference, monkeypatch, stop):
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
    assert loop.run(sparse(folder, tmp_path, steps=stop)) == 0
    assert loop.run(sparse(folder, tmp_path, resume=True)) == 0
    got, expected = arrays(tmp_path), arrays(reference)
    assert got.keys() == expected.keys() and sum(name.startswith("carry.") for name in got) == 4
    assert [name for name in got if got[name].tobytes() != expected[name].tobytes()] == []
    assert losses_of(tmp_path) == losses_of(reference)


def test_carry_with_other_nodes(folder, tmp_path, monkeypatch):
    """Eight streams on four, two or eight nodes give the same uncompressed run."""
    monkeypatch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
    whole, moved = (text_config(folder, tmp_path / name, clip_norm=0.0) for name in ("whole", "moved"))
    assert loop.run(whole) == 0
    for nodes, steps in ((4, 4), (2, 9), (8, 14)):
        assert loop.run(dataclasses.replace(moved, nodes=nodes, steps=steps, resume=nodes != 4)) == 0
    np.testing.assert_allclose(losses_of(tmp_path / "moved"), losses_of(tmp_path / "whole"), rtol=1e-5)


def test_report_of_different_scores(folder, reference, tmp_path):
    """Including a run from before there were scores."""
    old = tmp_path / "old"
    shutil.copytree(reference, old)
    summary = json.loads((old / "summary.json").read_text())
    name = summary.pop("score")
    for part in (summary, *summary["phases"]):
        part["test_accuracy"] = part.pop(name) and 0.5
    for file, content in (("summary", summary), ("config", json.loads((old / "config.json").read_text()))):
        (old / f"{file}.json").write_text(json.dumps(content | {"workload": "digits_convnet5"}))
    page = write([reference, old], tmp_path / "page").read_text()
    assert "### Test accuracy" in page and "### Validation perplexity" in page and " 50.00 |" in page
    (old / "summary.json").write_text(json.dumps(summary | {"score": "bleu"}))
    with pytest.raises(UserError, match="`score` must be one of"):
        write([old], tmp_path / "page")


# Settings.


def test_halving_schedule(folder):
    config = text_config(folder)
    schedule, epoch = make_schedule(config), config.schedule_steps // 13
    assert epoch == 2323 and config.steps != config.schedule_steps == 13 * epoch
    for i in range(13):
        rate = 20.0 * 0.5 ** max(i - 3, 0)
        assert float(schedule(i * epoch)) == pytest.approx(rate) == pytest.approx(float(schedule((i + 1) * epoch - 1)))
    short = make_schedule(dataclasses.replace(config, schedule_steps=10, learning_rate_warmup=0))
    assert float(short(10)) == pytest.approx(20.0 * 0.5**9)  # though ends of stretches coincide


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--data-dir {tmp}", "ptb is missing: there is no {tmp}/ptb/ptb.train.txt; put the files ptb.train.txt"),
        ("--data-dir {text} --batch-size 400", "ptb has 674 words to train on, which are no batch of 400 streams"),
        ("--data-dir {text} --batch-size 10", "4 nodes do not divide a batch of 10"),
        ("--data-dir {text} --data.window -1", "the window must be at least 1 word, got -1"),
        ("--data-dir {text} --batch-size 16 --devices-per-node 2", "lstm carries a state from batch to batch, which"),
        ("--workload digits_convnet5 --data.window 5", "--data.window is a setting of texts, not of digits"),
        ("--workload ptb_gpt --data.name digits", "--data.name digits has images"),  # the window is the workload's
        ("--data-dir {text} --model.norm batch", "`norm` must be one of 'none', got 'batch'"),
        ("--data-dir {text} --model.stem cifar", "--model.stem is a setting of ResNets, not of lstm"),
    ],
)
def test_bad_options(folder, options, said, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(request.config.rootpath)
    words = ["--workload", "ptb_lstm", *options.format(tmp=tmp_path, text=folder).split()]
    config = ["--method", "dense", "--run-dir", str(tmp_path / "run")]
    assert cli.main([*config, *words]) == 2
    error = capsys.readouterr().err
    assert said.format(tmp=tmp_path) in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
