"""Estimators on pairs of known mutual information, and pages of `experiments information` from small recordings."""

import csv
import gzip
import json
import math

import numpy as np
import pytest

from experiments.analysis import information, recorded
from experiments.analysis.information import BITS, gaussian, measure
from experiments.analysis.information_conclusions import conclusions
from experiments.analysis.information_rows import ALL, cosines, few_bits, measure_run, pairwise
from experiments.commands import main
from jgc.training.errors import UserError
from jgc.training.models import make_model
from jgc.training.output.recording import save

N = 100_000
LAYERS = {"layer1/conv/kernel": (3, 3, 1, 40), "layer2/conv/kernel": (3, 3, 10, 20), "head/kernel": (40, 10)}


def pair(rho: float, n: int = N, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian vectors of that correlation."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(n)
    return a, rho * a + math.sqrt(1 - rho * rho) * rng.standard_normal(n)


def histograms(a, b, bits):
    order = np.random.default_rng(1).permutation(a.size)
    return {each: information.histogram(a, b, each, order) for each in bits}


@pytest.mark.parametrize(
    "rho, shares",
    [(0.0, {8: 0.03, 12: 0.47, 16: 0.86, 24: 1.0, 32: 1.0}), (0.5, {8: 0.06, 12: 0.48, 16: 0.86, 24: 1.0, 32: 1.0})],
)
def test_histogram_share_depends_on_sample_count(rho, shares):
    """The issue's own figures; a shuffled pair gets what an independent one gets."""
    found = histograms(*pair(rho), shares)
    independent = {8: 0.03, 12: 0.47, 16: 0.86, 24: 1.0, 32: 1.0}
    for bits, share in shares.items():
        assert found[bits].share == pytest.approx(share, abs=0.01)
        assert found[bits].shuffled_share == pytest.approx(independent[bits], abs=0.01)
        assert found[bits].conditional == pytest.approx(found[bits].entropy - found[bits].mutual)
    assert found[32].alone > 0.999 and found[8].alone < 0.1
    assert found[32].entropy == pytest.approx(math.log2(N), abs=0.01)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 0.9, -0.6])
def test_estimates_match_known_information(rho):
    """Within 0.08 bits by 2,000 values' neighbours, three standard deviations and more; within 0.02 bits and 8 % by
    2^6 cells corrected, which are wide for a correlation of 0.9; the Gaussian within 0.01."""
    a, b = pair(rho)
    known = -0.5 * math.log2(1 - rho * rho)
    found = measure(a, b, bits=(6,), neighbours=2000)
    assert found.gaussian == pytest.approx(known, abs=0.01)
    assert found.neighbours == pytest.approx(known, abs=0.08)
    assert found.histograms[0].corrected == pytest.approx(known, abs=0.02 + 0.08 * known)
    assert found.neighbours_shuffled < 0.08 and abs(found.histograms[0].corrected_shuffled) < 0.02
    assert [found.correlation, found.cosine] == pytest.approx([rho] * 2, abs=0.01)


def test_neighbours_find_weak_correlation():
    """A correlation of 0.3 is 0.068 bits, ten times the estimate's standard deviation with 20,000 values."""
    found = measure(*pair(0.3), bits=(6,), neighbours=20_000)
    assert found.neighbours == pytest.approx(0.068, abs=0.025) and found.neighbours_shuffled < 0.025


def test_identical_vectors_share_everything():
    a = pair(0.0, 5000)[0]
    found = measure(a, a, neighbours=2000)
    assert [h.share for h in found.histograms] == pytest.approx([1.0] * len(BITS))
    assert all(abs(h.conditional) < 1e-9 for h in found.histograms)
    assert found.gaussian == math.inf and found.cosine == pytest.approx(1)
    assert found.neighbours > 6  # of at most log2(2000) = 11 that so many values can show
    assert found.neighbours_shuffled < 0.1


def test_discrete_pair_by_hand():
    """H(g_1) = 1, H(g_2) = 1.5, joint cells 1/2, 1/4, 1/4: I = 1; of the shuffled pair, all that its counts say."""
    a = np.repeat([0.0, 1.0], 512)
    b = np.concatenate([np.zeros(512), np.repeat([0.5, 1.0], 256)])
    found = histograms(a, b, (3, 32))
    for h in found.values():
        assert (h.entropy, h.conditional, h.mutual) == pytest.approx((1.5, 0.5, 1.0))
        lacks = (2 + 3 - 3 - 1) / (2 * 1024 * math.log(2))  # Miller and Madow
        assert h.corrected - h.mutual == pytest.approx(lacks) and h.shuffled < 0.01


@pytest.mark.parametrize("a, b", [(np.zeros(200), np.ones(200)), (np.zeros(200), np.arange(200.0))])
def test_constant_vectors_share_nothing(a, b):
    found = measure(a, b)
    assert [h.mutual for h in found.histograms] == pytest.approx([0] * len(BITS), abs=1e-9)
    assert found.neighbours == found.gaussian == found.correlation == 0
    assert all(0 <= h.share < 1e-9 for h in found.histograms)


def test_correlation_of_inverts_gaussian():
    for rho in (0.0, 0.2, 0.9, 0.999):
        assert information.correlation_of(gaussian(rho)) == pytest.approx(rho, abs=1e-6)


# --- recorded runs -------------------------------------------------------------------------------------------------


def write_run(folder, nodes=2, steps=4, common=0.0, residuals=False, dtype="float32", seed=0):
    """A run folder with a recording whose nodes share a part of each gradient, of that correlation."""
    rng = np.random.default_rng(seed)
    (folder / "gradients").mkdir(parents=True)
    config = {"method": "scalecom", "workload": "digits_convnet5", "nodes": nodes, "batch_size": 8 * nodes, "seed": 0,
              "model": {"name": "convnet5"}, "record": {"every": 5}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for i in range(steps):
        arrays = {}
        for layer, shape in LAYERS.items():
            own = rng.standard_normal((nodes, *shape)) * 1e-4
            same = rng.standard_normal((1, *shape)) * 1e-4
            g = (math.sqrt(common) * same + math.sqrt(1 - common) * own).astype(np.float32)
            arrays[f"gradient/{layer}"] = g
            if residuals and layer != "layer1/conv/kernel":
                arrays[f"residual/{layer}"] = i * (g + 3 * same.astype(np.float32))
        arrays["gradient/head/bias"] = np.ones((nodes, 10), np.float32)
        save(folder / "gradients", 5 * i, "top-k", arrays, dtype)
    return folder


def test_recording_order_and_units(tmp_path):
    runs = [recorded.find(write_run(tmp_path / dtype, dtype=dtype)) for dtype in ("float32", "float16")]
    assert runs[0].layers == ("layer1/conv/kernel", "layer2/conv/kernel", "head/kernel", "head/bias")
    assert runs[0].steps == (0, 5, 10, 15) and runs[0].nodes == 2
    for a, b in zip(*map(recorded.read, runs), strict=True):
        for layer, shape in LAYERS.items():
            assert a.gradients[layer].shape == (2, np.prod(shape))
            np.testing.assert_allclose(a.gradients[layer], b.gradients[layer], rtol=1e-3, atol=1e-9)


def test_recording_of_two_numbers_of_nodes(tmp_path):
    folder = write_run(tmp_path / "two", nodes=2, steps=2)
    late = write_run(tmp_path / "four", nodes=4, steps=3) / "gradients" / "step-00000010.npz"
    late.rename(folder / "gradients" / late.name)
    with pytest.raises(UserError, match=r"step-00000010\.npz is of 4 nodes, and the files before it of 2"):
        list(recorded.read(recorded.find(folder)))


def test_measure_run(tmp_path):
    found = measure_run(recorded.find(write_run(tmp_path / "r", nodes=5, common=0.64, residuals=True)), pairs=3)
    assert found.left_out == ("head/bias",) and found.layers == list(LAYERS)
    assert len(found.first) == 4 * 3 and {row.nodes for row in found.first} == {(0, 1)}
    for step in found.run.steps:
        drawn = [row.nodes for row in found.random if (row.step, row.layer) == (step, "head/kernel")]
        assert len(set(drawn)) == len(drawn) == 3 and all(a < b for a, b in drawn)
    assert len({row.nodes for row in found.random}) > 3
    assert len(found.rows) == len({(row.step, row.layer, row.nodes) for row in found.rows})  # each once
    large = [row.pair for row in found.first if row.layer == "layer2/conv/kernel"]
    assert np.mean([p.correlation for p in large]) == pytest.approx(0.64, abs=0.05)
    assert np.mean([p.neighbours for p in large]) == pytest.approx(gaussian(0.64), abs=0.12)
    own = {c.step: c for c in found.cosines if c.kind == "residual" and c.layer == ALL}
    assert list(own) == [5, 10, 15]  # all zeros at first
    # g + 3 same: (0.8 + 3)^2 / ((0.8 + 3)^2 + 0.36) of it is common
    assert own[15].mean == pytest.approx(3.8**2 / (3.8**2 + 0.36), abs=0.01)
    gradients = [c.mean for c in found.cosines if c.kind == "gradient" and c.layer == "layer2/conv/kernel"]
    assert gradients == pytest.approx([0.64] * 4, abs=0.04)


def test_cosines_by_definition():
    x = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    step = recorded.Step(0, "p", {"a": x, "b": 2 * x}, {})
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    expected = [unit[0] @ unit[1], unit[0] @ unit[2], unit[1] @ unit[2]]
    assert pairwise(x.astype(np.float64) @ x.T) == pytest.approx(expected, rel=1e-5)
    assert [c.mean for c in cosines(step)] == pytest.approx([np.mean(expected)] * 3, rel=1e-5)
    assert [c.layer for c in cosines(step)] == ["a", "b", ALL]
    # where only some layers have residuals, their gradients alone count in all layers
    y = np.random.default_rng(1).standard_normal((3, 50)).astype(np.float32)
    step = recorded.Step(0, "p", {"a": x, "b": 2 * x, "first": 9 * y}, {"a": y, "b": y})
    found = {(c.kind, c.layer): c.mean for c in cosines(step)}
    assert found["gradient", ALL] == pytest.approx(np.mean(expected), rel=1e-5)
    assert found["gradient", "first"] == pytest.approx(found["residual", ALL], rel=1e-5)


@pytest.mark.parametrize("common, said", [(0.0, "next to nothing"), (0.5, "something"), (0.9, "much")])
def test_conclusions_follow_numbers(common, said, tmp_path):
    """The paper's estimate is about the same for all of them, and says so."""
    lines = conclusions(measure_run(recorded.find(write_run(tmp_path / "r", common=common))))
    assert "**The paper's estimate says nothing of the gradients.**" in lines[0]
    assert lines[1].startswith(f"**Two nodes share {said}: ")
    assert "stays about the same" in " ".join(lines) or "next to nothing throughout" in " ".join(lines)


def test_layers_in_model_order():
    model = make_model("pspnet18_half", 10)
    paths = ["auxiliary/head/kernel", "final/head/kernel", "pyramid1/conv/kernel", "stage1_block01/layer1/conv/kernel",
             "stage4_block02/layer2/conv/kernel", "stem/conv/kernel"]  # fmt: skip
    assert recorded.in_order(model, paths) == [paths[i] for i in (5, 3, 4, 2, 1, 0)]
    assert recorded.ends(model, paths) == ("stem/conv/kernel", "final/head/kernel")
    assert recorded.ends(model, paths[2:4]) is None and recorded.ends(None, paths) is None
    assert recorded.in_order(None, paths) == paths


def test_conclusions_on_first_and_last_layer(tmp_path):
    folder = write_run(tmp_path / "r")
    whole = " ".join(conclusions(measure_run(recorded.find(folder))))
    assert "first and the last layer share least" in whole and "The entropy of a layer" in whole
    half = write_run(tmp_path / "h", dtype="float16")
    config = json.loads((half / "config.json").read_text())
    config["record"]["dtype"] = "float16"
    (half / "config.json").write_text(json.dumps(config))
    assert "The entropy of a layer" not in " ".join(conclusions(measure_run(recorded.find(half))))


def test_conclusions_on_equal_gradients(tmp_path):
    lines = " ".join(conclusions(measure_run(recorded.find(write_run(tmp_path / "r", nodes=3, common=1.0)), pairs=1)))
    assert "are the same but for a factor" in lines and "nan" not in lines and "standard deviation" not in lines


@pytest.mark.slow
def test_command(tmp_path, capsys):
    """Two runs of the same folder name, with two nodes and with four, of which one has residuals."""
    runs = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", nodes=4, residuals=True, common=0.3)]
    out = tmp_path / "out"
    assert main(["information", *map(str, runs), "--output", str(out), "--pairs", "2"]) == 0
    assert capsys.readouterr().out.strip() == str(out / "information.md")
    pictures = {path.name for path in out.glob("*.png")}
    each = {f"{kind}-{name}.png" for kind in ("cells", "figure3", "figure4", "similarity") for name in ("run", "run-2")}
    assert pictures == each | {"figure12-run-2.png"}
    page = (out / "information.md").read_text()
    assert all(f"({name})" in page for name in pictures) and "nan" not in page
    assert "residuals are alike" in page and "Figure 12" in page
    rows = list(csv.DictReader(gzip.decompress((out / "histograms.csv.gz").read_bytes()).decode().splitlines()))
    pairs = list(csv.DictReader(gzip.decompress((out / "pairs.csv.gz").read_bytes()).decode().splitlines()))
    assert len(rows) == 4 * 3 * len(BITS) * 2 + 2 * len(pairs) - 2 * 24
    mine = [r for r in rows if r["bits"] == "32" and r["run"] == "run"]
    for row in mine:
        entropy, conditional, mutual = (float(row[k]) for k in ("entropy", "conditional_entropy", "mutual"))
        assert mutual == pytest.approx(entropy - conditional, abs=1e-4)


@pytest.mark.parametrize(
    "change, said",
    [
        ([], "no run folder"),
        (["--layers", "nothing"], "matches nothing that"),
        (["--layers", "bias"], "no layer of 100 values or more"),
        (["--layers", "("], "is no regular expression"),
        (["--pairs", "0"], "--pairs must be at least 1"),
    ],
)
def test_wrong_option_is_one_line(change, said, tmp_path, capsys):
    run = write_run(tmp_path / "run") if change else tmp_path
    assert main(["information", str(run), "--output", str(tmp_path / "out"), *change]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1 and not (tmp_path / "out").exists()


def test_damaged_file_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    last = run / "gradients" / "step-00000015.npz"
    last.write_bytes(last.read_bytes()[:500])
    assert main(["information", str(run), "--output", str(tmp_path / "out")]) == 1
    assert "cannot read the recording" in (said := capsys.readouterr().err) and last.name in said
    diverged = {f"gradient/{layer}": np.full((2, *shape), np.nan, np.float32) for layer, shape in LAYERS.items()}
    save(run / "gradients", 15, "dense", {**diverged, "gradient/head/bias": np.ones((2, 10), np.float32)})
    assert main(["information", str(run), "--output", str(tmp_path / "out")]) == 1
    assert "is not finite; the run diverged there" in capsys.readouterr().err
    last.unlink()
    (run / "gradients").rename(run / "elsewhere")
    assert main(["information", str(run), "--output", str(tmp_path / "out")]) == 2
    assert "train with --record.every N" in capsys.readouterr().err


def test_few_bits_limit_cells():
    rows = [pair(0.0, n) for n in (300, 5000)]
    assert [few_bits(len(a)) for a, _ in rows] == [4, 6]
    for a, b in rows:
        found = histograms(a, b, [few_bits(len(a))])
        assert next(iter(found.values())).shuffled_share < 0.2
