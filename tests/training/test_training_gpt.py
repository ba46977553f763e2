"""GPTs on characters: batches, the loss in nats and bits by hand, AdamW, samples, whole runs with local steps."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from text_helpers import write_text
from tiny import tiny_model

from jgc.compress import Dense
from jgc.nodes.layouts import make_nodes
from jgc.training import data
from jgc.training.data.text import EVALUATED_STREAMS, Window, text_batch
from jgc.training.models import lstm, make_model
from jgc.training.output.metrics import read
from jgc.training.output.sample import sample
from jgc.training.run import checkpoint, loop, setup as building
from jgc.training.settings import cli
from jgc.training.settings.config import Config, DataConfig, check, resolve
from jgc.training.settings.local_config import LocalConfig
from jgc.training.steps.optimizer import make_inner, make_optimizer

CONFIGS = ("diloco", "streaming_diloco", "sparseloco")


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """The folder of a small text; with a small model, and all nodes on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_model", tiny_model)
        patch.setattr(building, "make_nodes", lambda count, **_: make_nodes(count, jax.devices()[:1]))
        yield write_text(tmp_path_factory.mktemp("data"))


def config_of(folder, run_dir=None, **changes) -> Config:
    """A resolved config of a few steps on the small text."""
    config = resolve(Config(Dense(), workload="ptb_gpt", data=DataConfig(dir=str(folder), window=12)))
    settings = {"batch_size": 8, "nodes": 2, "steps": 12, "evaluate_every": 6, "diagnose_every": 0,
                "checkpoint_every": 0, "learning_rate_warmup": 2, "run_dir": run_dir and str(run_dir)}  # fmt: skip
    return dataclasses.replace(config, **{**settings, **changes})


# Data.


def test_blank_lines_of_a_text_hold_no_characters(tmp_path):
    (tmp_path / "ptb").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text("ab c\n\n\nd\n")
    text = data.load_ptb_characters(tmp_path)
    assert "".join(text.vocabulary[i] for i in text.train) == "ab c\n\n\nd"


def test_text_is_one_of_characters(folder):
    text, words = data.load_ptb_characters(folder), data.load_ptb(folder)
    written = "".join(text.vocabulary[i] for i in text.train)
    assert written.replace("\n", " <eos> ").split() == [words.vocabulary[i] for i in words.train][:-1]
    assert set(text.vocabulary) == {*"abcdefgh \n", "\N{REPLACEMENT CHARACTER}"} and text.window == 128
    counts = [written.count(c) for c in text.vocabulary]
    assert counts == sorted(counts, reverse=True)


def test_windows_follow_from_seed_and_step_alone(folder):
    text = data.load_ptb_characters(folder)._replace(window=9)
    (window, labels), (same, _) = (text_batch(text, 3, 5, nodes, 8) for nodes in (4, 2))
    assert np.array_equal(window.words.reshape(8, 9), same.words.reshape(8, 9)) and window.start.all()
    assert np.array_equal(window.words[..., 1:], labels[..., :-1])
    for other in (text_batch(text, 3, 6, 4, 8), text_batch(text, 4, 5, 4, 8)):
        assert not np.array_equal(other[0].words, window.words)
    own, _ = text_batch(text, 3, 5, 4, 8, slice(1, 3))
    assert np.array_equal(own.words, window.words[1:3])
    starts = [w for step in range(60) for w in text_batch(text, 0, step, 1, 8)[0].words.reshape(8, 9).tolist()]
    assert len({tuple(w) for w in starts}) > 200  # windows start anywhere, not only at multiples of 9


# Model, optimiser, loss, sample.


@pytest.mark.parametrize(("workload", "values"), [("ptb_gpt", 810_496), ("ptb_gpt_3m", 3_193_856)])
def test_sizes(workload, values):
    """Matrices and norms of the blocks, 51 characters and 128 positions."""
    config = resolve(Config(Dense(), workload=workload))
    check(config)
    assert (config.optimizer, config.adam_beta2, config.weight_decay, config.clip_norm) == ("adam", 0.95, 0.1, 1.0)
    module = make_model(config.model.name, 51, norm="none", context=config.data.window).module
    shapes = jax.eval_shape(lambda key: module.init(key, jnp.zeros((1, 128), jnp.int32)), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == values


def test_gpt_124m_has_its_size():
    config = resolve(Config(Dense(), workload="gpt_124m"))
    module = make_model(config.model.name, config.model.classes, norm="none", context=config.data.window).module
    shapes = jax.eval_shape(lambda key: module.init(key, jnp.zeros((1, 8), jnp.int32)), jax.random.key(0))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e6) == 124


def test_optimisers_are_adamw_and_clip_each_nodes_gradient(folder):
    config = config_of(folder, learning_rate_warmup=0, schedule="constant", clip_norm=0.5)
    params = {"w": jnp.array([[1.0, -2.0]]), "b": jnp.array([3.0])}
    grads = {"w": jnp.array([[3.0, 0.1]]), "b": jnp.array([-4.0])}
    of_matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(2e-3, b2=0.95, weight_decay=0.1, mask=of_matrices)
    clipped = optax.chain(optax.clip_by_global_norm(0.5), adamw)
    for ours, theirs in ((make_optimizer(config, False), adamw), (make_inner(config), clipped)):
        states, results = [ours.init(params), theirs.init(params)], [params, params]
        for i in range(3):
            for j, tx in enumerate((ours, theirs)):
                scaled = jax.tree.map(lambda g, i=i: g * (-0.5) ** i, grads)
                updates, states[j] = tx.update(scaled, states[j], results[j])
                results[j] = optax.apply_updates(results[j], updates)
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    sgd = dataclasses.replace(config, optimizer="sgd", momentum=0.0, learning_rate=1.0, clip_norm=0.5)
    updates, _ = make_inner(sgd).update(grads, make_inner(sgd).init(params), params)
    coupled = {"w": grads["w"] + 0.1 * params["w"], "b": grads["b"]}  # decay, then clipping, as in the ordinary step
    norm = float(np.sqrt(sum(np.sum(np.square(x)) for x in coupled.values())))
    np.testing.assert_allclose(updates["w"], -coupled["w"] * 0.5 / norm, rtol=1e-5)


def test_muon_moves_kernels_and_adamw_the_rest(folder):
    config = config_of(folder, learning_rate_warmup=0, schedule="constant", clip_norm=0.0, optimizer="muon")
    shapes = {"block": {"kernel": (3, 5)}, "conv": {"kernel": (2, 2, 3, 4)}, "head": {"kernel": (3, 4), "bias": (4,)},
              "embed": {"embedding": (6, 3)}}  # fmt: skip
    draw = lambda seed: jax.tree.map(  # noqa: E731
        lambda shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32), shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    params, ours = draw(0), make_inner(config)
    adamw = optax.adamw(2e-3, b2=0.95, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))
    flat = lambda tree: {"block": tree["block"]["kernel"], "conv": tree["conv"]["kernel"].reshape(-1, 4)}  # noqa: E731
    muon = optax.contrib.muon(2e-3, consistent_rms=0.2, weight_decay=0.1)
    states = [ours.init(params), adamw.init(params), muon.init(flat(params))]
    for i in range(3):
        grads = draw(i + 1)
        updates, states[0] = ours.update(grads, states[0], params)
        of_adamw, states[1] = adamw.update(grads, states[1], params)
        of_muon, states[2] = muon.update(flat(grads), states[2], flat(params))
        pairs = (flat(updates), of_muon), *((updates[name], of_adamw[name]) for name in ("head", "embed"))
        for a, b in pairs:
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), a, b)


def test_sample_follows_the_model():
    """A model that always continues 0, 1, 2, 3, 0 ..., also past its window."""

    def apply(variables, inputs, train, mutable):
        tokens, _ = inputs
        return 100.0 * jax.nn.one_hot((tokens + variables["params"]) % 4, 4), {}

    assert sample(apply, jnp.int32(1), jax.random.key(0), 0, 5, 12).tolist() == [1, 2, 3, 0] * 3
    level = lambda *_, **__: (jnp.zeros((1, 5, 4)), {})  # noqa: E731
    counts = np.bincount(np.asarray(sample(level, 0, jax.random.key(1), 0, 5, 400)))
    assert counts.min() > 60  # drawn, not the likeliest


def test_sample_of_an_lstm_which_carries_a_state():
    module = lstm(12, units=8).module
    window = Window(jnp.zeros((1, 5), jnp.int32), jnp.ones(1, bool))
    made = module.init(jax.random.key(0), window, train=False)
    drawn = sample(module.apply, made["params"], jax.random.key(1), 0, 5, 12)
    assert drawn.shape == (12,) and ((drawn >= 0) & (drawn < 12)).all()


# Whole runs.


@pytest.mark.slow
def test_run_reports_nats_bits_and_a_sample(folder, tmp_path, capsys):
    config = config_of(folder, tmp_path, steps=120, learning_rate=0.01, evaluate_every=0)
    assert loop.run(config) == 0
    summary, said = json.loads((tmp_path / "summary.json").read_text()), capsys.readouterr().out
    nats = summary["validation_nats"]
    assert summary["score"] == "validation_nats" and summary["validation_bits"] == pytest.approx(nats / np.log(2))
    assert f"validation loss after 120 steps: {nats:.3f} nats" in said and " B a token" in said
    text = (tmp_path / "sample.txt").read_text()
    assert len(text) > 200 and text in said and set(text) <= set("abcdefgh \n\N{REPLACEMENT CHARACTER}")
    assert nats < 1.8 < np.log(11)  # half of the characters are spaces; the letter that follows is mostly the next

    setup = building.build(config)  # the loss by hand
    found = checkpoint.restore(checkpoint.open_manager(tmp_path))
    params = checkpoint.fit(setup.state, found, 2).params
    words, losses = data.load_ptb_characters(folder).validation, []
    stretch = -(-(len(words) - 1) // EVALUATED_STREAMS)
    for first in range(0, len(words) - 1, stretch):
        piece = words[first : first + stretch + 1]
        for at in range(0, len(piece) - 1, 12):
            part = piece[at : at + 13]
            logits = setup.parts.apply({"params": params}, jnp.asarray(part[None, :-1]), train=False)[0]
            losses += optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(part[1:])).tolist()
    assert len(losses) == len(words) - 1 and np.mean(losses) == pytest.approx(nats, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_configs_train(folder, tmp_path, name, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    options = "--steps 60 --batch-size 16 --data.window 12 --learning-rate 0.01 --learning-rate-warmup 2"
    options += f" --evaluate-every 0 --local.every 10 --data-dir {folder} --run-dir {tmp_path}"
    assert cli.main(["--config", f"configs/{name}.py", *options.split()]) == 0
    lines, summary = read(tmp_path / "metrics.jsonl"), json.loads((tmp_path / "summary.json").read_text())
    assert summary["validation_nats"] < lines[0]["loss"] - 0.3
    every = 3 if name == "streaming_diloco" else 1
    assert sum(line["bytes"] > 0 for line in lines) == every * 6


def test_configs_are_what_they_say(request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    diloco, streaming, sparse = (cli.parse(["--config", f"configs/{name}.py"]) for name in CONFIGS)
    assert {c.workload for c in (diloco, streaming, sparse)} == {"ptb_gpt"}
    assert diloco.local == LocalConfig(every=30) and diloco.compressor == Dense()
    assert (streaming.local.fragments, streaming.local.overlap, streaming.local.merge) == (3, 5, 0.5)
    assert (sparse.local.outer_learning_rate, sparse.local.outer_momentum) == (1.0, 0.0)
    assert sparse.compressor.residual_decay == 0.95 and sparse.compressor.warmup_steps == 0
