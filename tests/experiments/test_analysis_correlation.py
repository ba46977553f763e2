"""The measurements of `experiments correlation` on data whose answers are known, and the command from end to end."""

import json

import numpy as np
import pytest
from tiny import tiny_conv_model

from experiments.analysis import correlation, mean_gradients
from experiments.analysis.correlation import basis, dimensions, lost, pca, shares, size, sizes, slices, two_axes
from experiments.analysis.correlation_age import CURVES, Ageing, ageing, losses_by_age
from experiments.analysis.correlation_conclusions import on_age
from experiments.analysis.correlation_page import measure, write
from experiments.analysis.mean_gradients import MeanGradients, choose
from experiments.commands import main
from jgc.training.errors import UserError
from jgc.training.run import setup

S, SAMPLES, K, MODES = 60, 40, 64, 5
SHAPE = (2, 3, 4, 16)  # F * D = K
FILES = ("correlation.md", "correlation.json", "figure4.png", "figure5.png", "age.png")


def _layer(same: bool, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """f32[S, n]: slices of F*D values in a space of MODES dimensions, the same for all of them or each one's own."""
    rng = np.random.default_rng(seed)
    count = SHAPE[0] * SHAPE[1]
    spaces = [np.linalg.qr(rng.standard_normal((K, MODES)))[0] for _ in range(count)]
    means = rng.standard_normal((count, K)) / 10
    weights = rng.standard_normal((count, S, MODES))
    each = [mean + w @ (spaces[0] if same else u).T for mean, w, u in zip(means, weights, spaces, strict=True)]
    x = np.stack(each, axis=1) + noise * rng.standard_normal((S, count, K))
    return x.reshape(S, -1).astype(np.float32)


def _recording(flat: np.ndarray) -> MeanGradients:
    config = {"workload": "w", "nodes": 2, "batch_size": 4, "seed": 0}
    return MeanGradients(flat, SHAPE, "conv/kernel", 7, config, "here")


def test_rank_two_needs_two_axes():
    rng = np.random.default_rng(0)
    points = rng.standard_normal((S, 2)) @ rng.standard_normal((2, 3)) + 5
    assert dimensions(pca(points).variances[None], 1e-9) == 2
    held = shares(points)
    assert held[:2].sum() == pytest.approx(1) and held[2] < 1e-12
    assert shares(np.ones((S, 3))).tolist() == [0, 0, 0]


def test_axes_are_orthonormal_and_complete():
    samples = np.random.default_rng(0).standard_normal((6, 20)).astype(np.float32)
    found = pca(samples)
    assert found.axes.shape == (20, 5) and found.axes.dtype == np.float64  # L - 1 axes
    np.testing.assert_allclose(found.axes.T @ found.axes, np.eye(5), atol=1e-12)
    assert lost(samples[:, None], found.mean[None], found.axes)[1].sum() < 1e-9
    assert found.variances.sum() == pytest.approx(((samples - samples.mean(0)) ** 2).sum() / 6, rel=1e-5)


@pytest.mark.parametrize("loss, d", [(0.0, 4), (0.09, 3), (0.11, 2), (0.4, 1), (0.99, 1)])
def test_dimension_is_smallest_allowed(loss, d):
    assert dimensions(np.array([[6.0, 3.0, 0.9, 0.1]]), loss) == d


def test_constant_samples_have_one_axis():
    assert basis(np.ones((5, 8)), 0.01).shape == (8, 1)


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.2])
def test_sample_loss_is_at_most_lambda(loss):
    """Of noise, too, and for every slice size; |g - mu|^2 is no more than |g|^2."""
    flat = np.random.default_rng(1).standard_normal((S, 384)).astype(np.float32)
    for row in correlation.sweep(flat, SHAPE, SAMPLES, loss):
        assert row.first_samples.basis <= loss + 1e-9
        assert 1 <= row.d <= min(SAMPLES - 1, row.k)
        assert row.slices == 384 // row.k


def test_basis_serves_slices_of_equal_covariance():
    row = size(_layer(same=True), SHAPE, SAMPLES, 1e-6, K)
    assert (row.d, row.aligned, row.slices) == (MODES, "FD", 6)
    assert max(row.first_later.basis, row.others_samples.basis, row.others_later.basis) < 1e-6
    assert row.others_later.mean_only > 0.5
    assert row.others_later.random == pytest.approx(row.others_later.mean_only * (1 - MODES / K), rel=0.1)


def test_basis_fails_on_other_covariance():
    row = size(_layer(same=False), SHAPE, SAMPLES, 1e-6, K)
    assert row.first_later.basis < 1e-6
    assert row.others_later.basis > 0.7 * row.others_later.mean_only


def test_loss_drops_at_aligned_slices():
    flat = _layer(same=True)
    aligned, beside = (size(flat, SHAPE, SAMPLES, 1e-6, k) for k in (K, K + 8))
    assert beside.aligned == "" and aligned.others_later.basis < 1e-3 * beside.others_later.basis


def test_lost_energy_by_definition():
    x = slices(_layer(same=True, noise=0.1), K)
    mean = x[:SAMPLES].mean(0, dtype=np.float64)
    u = basis(x[:SAMPLES, 0], 0.1)
    expected = [((x - decoded) ** 2).sum((1, 2)) for decoded in (mean, (x - mean) @ u @ u.T + mean)]
    np.testing.assert_allclose(lost(x, mean, u), expected, rtol=1e-6)


def test_age_counts_from_last_sample():
    found = ageing(_layer(same=False), K, SAMPLES, 1e-6)
    assert (found.age[0], found.age[SAMPLES - 1], found.age[-1]) == (1 - SAMPLES, 0, S - SAMPLES)
    assert set(found.lost) == set(CURVES)
    later = losses_by_age(found, 1, S)
    assert max(later["first"], later["others own"], later["first renewed"], later["others renewed"]) < 1e-6
    assert later["others"] > 0.5 and found.d_own == MODES
    assert np.isnan(found.lost["first renewed"][:SAMPLES]).all()


def test_renewed_basis_does_not_age():
    half = _layer(same=True, seed=1), _layer(same=True, seed=2)
    found = ageing(np.concatenate(half), K, SAMPLES, 1e-6)
    early, late = (losses_by_age(found, a, b) for a, b in ((1, S - SAMPLES), (2 * S - SAMPLES - 10, 10**9)))
    assert early["first"] < 1e-6 and late["first"] > 0.5
    assert late["first renewed"] < 0.5 * late["first"]


@pytest.mark.parametrize("own, late, others, said", [
    (0.5, 0.5, 0.6, "hardly age"), (1.2, 1.2, 1.3, "are no good at any age"), (0.5, 0.5, 1.3, "hardly age"),
    (0.9, 1.1, 1.3, "age fast"),
])  # fmt: skip
def test_a_basis_that_loses_more_than_all_is_not_called_slow_to_age(own, late, others, said):
    """That such a loss is the same at every age says nothing for it."""
    steps, age = np.ones(60), np.arange(60) - 9
    loss = np.where(age > 10, late, own)
    left = {name: {"first": loss, "others own": loss, "others": others * steps}.get(name, 2 * loss) for name in CURVES}
    line = on_age(Ageing(8, 2, 2.0, age, {"first": steps, "others": steps}, left), 0.01)[-1]
    assert f"(observation 3): the axes {said}.**" in line
    assert ("the others lose more than 100 %" in line) == (others > 1)


def test_shuffling_removes_correlation():
    rng = np.random.default_rng(0)
    common = rng.standard_normal((400, 20, 1)) + 0.1 * rng.standard_normal((400, 20, 3))
    flat = common.reshape(400, 60)
    assert two_axes(flat).min() > 0.98
    assert two_axes(flat, shuffled=True).max() < 0.8


@pytest.mark.parametrize("shape", [(3, 3, 16, 16), (3, 3, 1, 32), (1, 1, 8, 8), (3, 3, 2, 2)])
def test_slice_sizes(shape):
    found, n, fd = sizes(shape), np.prod(shape), shape[-1] * shape[-2]
    assert found == sorted(set(found)) and found[0] >= 2 and found[-1] <= n // 2
    assert all(j * fd in found for j in range(1, n // 2 // fd + 1))
    assert any(k % fd for k in found)


@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 8, 48), (6, 1, 1, 64)])
def test_page_for_every_shape(shape, tmp_path):
    flat = _layer(same=True, noise=0.01)
    recording = _recording(flat)._replace(shape=shape)
    page = write(tmp_path / "new", recording, SAMPLES, 0.01, "analyze --data-dir /somebodys/data").read_text()
    assert "/somebodys" not in page and "--data-dir DIR" in page and "nan" not in page
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(FILES)
    json.loads((tmp_path / "new" / "correlation.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("same, said", [(True, "(observation 2) holds.**"), (False, "(observation 2) does not hold")])
def test_page_states_observation_2(same, said, tmp_path):
    page = write(tmp_path, _recording(_layer(same, noise=0.003)), SAMPLES, 0.01, "").read_text()
    assert said in page
    assert ("the loss drops sharply" in page) == same


def test_recording_round_trip(tmp_path):
    wrote = _recording(_layer(same=True))
    mean_gradients.save(tmp_path / "r.npz", wrote)
    read = mean_gradients.load(tmp_path / "r.npz")
    np.testing.assert_array_equal(read.flat, wrote.flat)
    assert read._replace(flat=None) == wrote._replace(flat=None)
    assert measure(read, SAMPLES, 0.01).age.d == measure(wrote, SAMPLES, 0.01).age.d


def test_choose_convolution():
    params = {f"layer{i}": {"kernel": np.zeros((3, 3, 2, 4)), "bias": np.zeros(4)} for i in range(1, 6)}
    assert choose(params, "") == "layer3/kernel"
    assert choose(params, "layer4") == "layer4/kernel"
    for pattern, said in (("head", "no convolution"), ("layer", "5 convolutions"), ("(", "no regular expression")):
        with pytest.raises(UserError, match=said):
            choose(params, pattern)


RUN = ["correlation", "--workload", "digits_convnet5", "--nodes", "2", "--start", "2", "--steps", "12"]


@pytest.mark.slow
def test_command_and_its_recording(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(setup, "make_model", tiny_conv_model)
    first, again = tmp_path / "first", tmp_path / "again"
    assert main([*RUN, "--layer", "conv", "--samples", "8", "--loss", "0.1", "--output", str(first)]) == 0
    assert {path.name for path in first.iterdir()} == {*FILES, "recording.npz"}
    assert capsys.readouterr().out.strip() == str(first / "correlation.md")
    recording = mean_gradients.load(first / "recording.npz")
    assert recording.flat.shape == (12, 36) and recording.shape == (3, 3, 1, 4)
    assert np.isfinite(recording.flat).all() and np.abs(recording.flat).max() > 0
    redo = ["correlation", "--from-recording", str(first / "recording.npz"), "--output", str(again)]
    assert main([*redo, "--samples", "8", "--loss", "0.1"]) == 0
    assert {path.name for path in again.iterdir()} == set(FILES)
    assert (again / "correlation.json").read_bytes() == (first / "correlation.json").read_bytes()


@pytest.mark.parametrize(
    "change, said",
    [
        (["--samples", "12"], "needs at least 13 recorded steps"),
        (["--samples", "1"], "--samples must be at least 2"),
        (["--loss", "1"], "--loss must be in [0, 1), got 1"),
        (["--loss", "-0.1"], "--loss must be in [0, 1)"),
        (["--loss", "nan"], "--loss must be in [0, 1)"),
        (["--samples", "8", "--layer", "head"], "matches no convolution"),
        (["--samples", "8", "--from-recording", "nowhere.npz"], "no recording nowhere.npz"),
        (["--samples", "8", "--start", "-1"], "--start must be at least 0"),
    ],
)
def test_wrong_option_is_one_line(change, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, *change]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
