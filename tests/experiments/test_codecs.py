"""The arithmetic of `experiments codecs` on gradients small enough to count by hand."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from test_analysis_information import LAYERS, write_run

from experiments.codecs import basis as bases, measure, recorded, trivial
from experiments.codecs.measure import Row, front
from experiments.commands import main
from experiments.record import Recording, flat
from jgc import compress
from jgc.layout.pack import make_packing
from jgc.nodes.layouts import make_nodes

K, SHAPE = 4, (20, 10)
RNG = np.random.default_rng(0)


@pytest.fixture
def rows(monkeypatch):
    """Rows of dense and top-k on three steps, the last held out."""
    chosen = {name: compress.METHODS[name] for name in ("dense", "topk")}
    monkeypatch.setattr(compress, "METHODS", chosen)
    recording = Recording("", make_nodes(K), {"kernel": jnp.zeros(SHAPE)}, RNG.standard_normal((3, K, 200), np.float32))
    found = list(measure._methods(recording, 1, (0.05,), 1))
    return recording, {row.name: row for row in found}


def test_dense_is_the_mean_at_32_bits(rows):
    _, found = rows
    assert found["dense"].bits == 32
    assert found["dense"].cosine == pytest.approx(1, abs=1e-6)
    assert found["dense"].error < 1e-6


def test_chunks_have_rows_of_their_own(rows):
    _, found = rows
    assert found["topk, chunks"].cosine == found["topk"].cosine  # one layer, smaller than a chunk
    assert measure.variants(compress.METHODS["topk"], [0.01, 1e-4], np.zeros(1))[2:] == [
        ({"alpha": 0.01, "selection": "chunks"}, "alpha 0.01")
    ]


def test_top_k_error_and_bytes(rows):
    recording, found = rows
    g = recording.flat[-1].astype(np.float64)
    kept = np.zeros_like(g)
    for one, of in zip(g, kept, strict=True):
        at = np.argsort(-np.abs(one))[:10]
        of[at] = one[at]
    true = g.mean(0)
    expected = np.linalg.norm(kept.mean(0) - true) / np.linalg.norm(true)
    assert found["topk"].error == pytest.approx(expected, rel=1e-5)
    assert found["topk"].bits == pytest.approx((10 + 2) * 32 / 200)  # values; positions in 63 bits, two words


def test_chosen_methods_have_rows_by_their_settings():
    recording = Recording("", make_nodes(K), {"kernel": jnp.zeros(SHAPE)}, RNG.standard_normal((2, K, 200), np.float32))
    names = ("cast:format=mxfp4", "cast:format=mxfp4:rounding=stochastic", "qsgd:bits=8:bucket=200")
    block, at_random, integers = measure.measure_methods(recording, 1, names, 1)
    assert (block.name, at_random.setting) == ("cast", "format mxfp4, rounding stochastic")
    assert block.bits == at_random.bits == (7 * 16 + 7) * 8 / 200  # words of 224 codes, a byte for 32 values
    assert integers.error < block.error < at_random.error


def test_front_is_pareto():
    figures = [(1.0, 0.5, 0.9), (2.0, 0.4, 0.8), (2.0, 0.6, 0.95), (3.0, 0.6, 0.7), (0.5, 0.1, 1.2)]
    rows = [Row("method", "x", "", bits, error=error, cosine=cosine) for bits, cosine, error in figures]
    assert front(rows) == [4, 0, 2]
    assert front(rows, "error") == [4, 0, 1, 3]


def test_trivial_codes_count_bits():
    layers = make_packing({"kernel": jnp.zeros(SHAPE)}).layers
    g = RNG.standard_normal((K, 200))
    positions = trivial.position_bits(200, 10)
    assert trivial.leader_alone(layers, 0.05, g)[1] == positions + 32 * 10
    assert trivial.signs_means(layers, 0.05, g)[1] == positions + 10 + 32 * K
    assert trivial.at_leaders(layers, 0.05, 3, g)[1] == positions + K * (30 + 32)
    assert trivial.at_leaders(layers, 0.05, 32, g)[1] == positions + K * 320  # exact: no scales
    assert trivial.at_own(layers, 0.05, 1, g)[1] == K * (positions + 10 + 32)
    assert trivial.at_own(layers, 0.05, 3, g)[1] == K * (positions + 30 + 4 * 32)


def test_more_bits_reduce_error():
    layers = make_packing({"kernel": jnp.zeros(SHAPE)}).layers
    g = RNG.standard_normal((1, 200))
    exact = np.where(np.abs(g[0]) >= np.sort(np.abs(g[0]))[-40], g[0], 0)
    errors = [np.linalg.norm(trivial.at_own(layers, 0.2, bits, g)[0] - exact) for bits in (1, 2, 3, 4)]
    assert all(more < 0.7 * fewer for fewer, more in itertools.pairwise(errors))


def test_signs_and_means_exact_for_equal_magnitudes():
    layers = make_packing({"kernel": jnp.zeros(SHAPE)}).layers
    signs = np.sign(RNG.standard_normal(200))
    g = signs * np.arange(1.0, K + 1)[:, None]
    np.testing.assert_allclose(trivial.signs_means(layers, 1.0, g)[0], g.mean(0))


def test_learned_bases_are_lossless():
    packing = make_packing({"kernel": jnp.zeros(SHAPE), "bias": jnp.zeros(10)})
    g = RNG.standard_normal((6, K, 210))
    basis = bases.learn(g[:5], packing)
    np.testing.assert_allclose(bases.backward(basis.parts, bases.forward(basis.parts, g[5, 0])), g[5, 0])
    sent = np.stack([bases.forward(basis.parts, node) for node in g[5]])
    got, bits = bases.code(basis, 1.0, 32)(sent)
    np.testing.assert_allclose(bases.backward(basis.parts, got), g[5].mean(0), atol=1e-10)
    assert bits == 32 * K * 210


def test_learned_bases_find_common_direction():
    """Gradients in one direction and noise: a few coefficients have nearly all of the mean."""
    direction = np.outer(RNG.standard_normal(20), RNG.standard_normal(10)).ravel()
    g = RNG.standard_normal((6, K, 1)) * direction + 0.01 * RNG.standard_normal((6, K, 200))
    basis = bases.learn(g[:5], make_packing({"kernel": jnp.zeros(SHAPE)}))
    sent = np.stack([bases.forward(basis.parts, node) for node in g[5]])
    row = measure.score("learned basis", "", "", bases.code(basis, 0.0, 32), [sent])
    assert row.cosine > 0.99
    assert row.bits == 32 * bases.GROUPS / 200


def test_flat_matches_pack():
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(8.0).reshape(2, 2, 2)}  # a: [K, 3], b: [K, 2, 2]
    np.testing.assert_array_equal(flat(tree), [[0, 1, 2, 3, 0, 1, 2], [4, 5, 6, 7, 3, 4, 5]])


def test_recording_of_a_run_keeps_its_layers(tmp_path):
    run = write_run(tmp_path / "run", nodes=2, steps=3)
    recording = recorded.load(run)
    assert recording.flat.shape == (3, 2, sum(map(np.prod, LAYERS.values())) + 10)
    written = np.load(run / "gradients" / "step-00000005.npz")
    tree = recording.tree(1)
    np.testing.assert_array_equal(tree["layer2"]["conv"]["kernel"], written["gradient/layer2/conv/kernel"])
    np.testing.assert_array_equal(tree["head"]["bias"], np.ones((2, 10)))


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "give either --run-dir"),
        (["--run-dir", "{run}", "--recorded", "{run}"], "give either --run-dir"),
        (["--recorded", "{run}", "--hold-out", "3"], "--hold-out must be between 1 and 2"),
        (["--run-dir", "{run}", "--steps", "5", "--hold-out", "5"], "--hold-out must be between 1 and 4"),
        (["--run-dir", "{run}/new", "--start", "-5"], "--start must be at least 0, got -5"),
        (["--run-dir", "{run}/new", "--nodes", "7"], "batch of 128"),
        (["--run-dir", "{run}/new", "--alphas", "2"], "alpha must be in (0, 1]"),
        (["--recorded", "{run}", "--passes", "0"], "--passes must be at least 1, got 0"),
        (["--run-dir", "{run}", "--steps", "1"], "at least 2 steps must be recorded"),
        (["--recorded", "{run}/gradients"], "is no run folder"),
    ],
)
def test_refused(options, message, tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=3)
    assert main(["codecs", *(option.format(run=run) for option in options)]) == 2
    assert message in capsys.readouterr().err
