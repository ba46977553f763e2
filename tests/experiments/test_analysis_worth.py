"""What a leader's values predict, on gradients whose answers are known, and `experiments worth` from end to end."""

import csv
import gzip

import numpy as np
import pytest
from test_analysis_information import write_run

from experiments.analysis import recorded
from experiments.analysis.information_rows import ALL
from experiments.analysis.recorded import Step
from experiments.analysis.worth import Setting, _of_step, measure_worth, predictions, settings
from experiments.commands import main

N = 20_000


def rows_of(x, alphas=(0.01, 1.0), draws=2, seed=0):
    step = Step(3, "dense", {"a": x.astype(np.float32), "b": 2 * x.astype(np.float32)}, {})
    found = _of_step(step, alphas, draws, np.random.default_rng(seed))
    return {(row.layer, row.alpha, row.setting): row for row in found}


def test_equal_nodes_are_predicted_exactly():
    """Exactly, by values; by signs as far as one magnitude stands for all; chance is what one of K vectors has."""
    g = np.random.default_rng(0).standard_normal(N)
    for row in rows_of(np.stack([g] * 4)).values():
        assert row.leader == pytest.approx(1) and row.innovations == pytest.approx(1)
        assert row.covered == pytest.approx(row.best)
        if row.alpha == 1:
            assert row.signs == pytest.approx(np.sqrt(2 / np.pi), abs=0.01)  # E|g| / sqrt(E g^2)
            assert row.covered == pytest.approx(1)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_independent_nodes_are_predicted_by_chance(nodes):
    """At all positions the cosine of one of K independent vectors with their mean is 1 / sqrt(K)."""
    x = np.random.default_rng(0).standard_normal((nodes, N))
    found = rows_of(x)
    row = found["a", 1.0, Setting(nodes, 1)]
    assert [row.leader, row.chance] == pytest.approx([1 / np.sqrt(nodes)] * 2, abs=0.02)
    assert found["a", 0.01, Setting(nodes, 1)].leader > row.leader  # where the leader is large it is more of the mean
    assert found["a", 0.01, Setting(nodes, 1)].covered < found["a", 0.01, Setting(nodes, 1)].best


def test_common_part_beats_chance():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(N) + rng.standard_normal((8, N))
    found = rows_of(x, draws=4)
    row = found["a", 1.0, Setting(8, 1)]
    assert row.leader == pytest.approx((1 + 1 / 8) / np.sqrt(2 * (1 + 1 / 8)), abs=0.02)
    assert row.leader > row.chance + 0.2 and row.innovations > row.leader
    two = [found["a", 1.0, Setting(2, m)].leader for m in (1, 2, 4)]
    expected = [(1 + 1 / (2 * m)) / np.sqrt((1 + 1 / m) * (1 + 1 / (2 * m))) for m in (1, 2, 4)]
    assert two == pytest.approx(expected, abs=0.02)


def test_all_layers_as_one_vector():
    """With one layer twice as large in values, not in number, cosines of both and of all are the same."""
    rng = np.random.default_rng(0)
    found = rows_of(rng.standard_normal((2, 500)) + rng.standard_normal(500), alphas=(0.1,))
    a, everything = (found[layer, 0.1, Setting(2, 1)] for layer in ("a", ALL))
    assert everything.picked == 2 * a.picked == 100
    for name in ("leader", "signs", "innovations"):
        assert getattr(everything, name) == pytest.approx(getattr(a, name), abs=0.05)


def test_predictions_by_hand():
    """Leader 3, -1: mean 2. The other node follows its signs with 1, so follows half of the deviation: 1.5, -0.5."""
    at = np.array([[3.0, -1.0], [1.5, -0.5]])
    signs, innovations = predictions(at)
    assert signs.tolist() == [1.5, -1.5]
    assert innovations.tolist() == [2.25, -0.75]
    opposite = predictions(np.array([[3.0, -1.0], [-3.0, 1.0]]))[0]
    assert opposite.tolist() == [0.0, -0.0]


def test_settings_fit_node_count():
    assert settings(2) == [Setting(2, 1)]
    assert all(s.nodes * s.merged <= 16 for s in settings(16)) and len(settings(16)) == 10
    assert Setting(22, 1) in settings(22)


def test_small_layers_have_no_row(tmp_path):
    rows = measure_worth(recorded.find(write_run(tmp_path / "r")), alphas=(0.001, 0.1))
    assert {row.layer for row in rows if row.alpha == 0.001} == {ALL}
    assert {row.layer for row in rows if row.alpha == 0.1} > {ALL, "layer2/conv/kernel"}
    assert "head/bias" not in {row.layer for row in rows}


@pytest.mark.slow
def test_command(tmp_path, capsys):
    runs = [write_run(tmp_path / "two"), write_run(tmp_path / "four", nodes=4, common=0.5)]
    out = tmp_path / "out"
    assert main(["worth", *map(str, runs), "--output", str(out), "--alpha", "0.05", "--draws", "1"]) == 0
    assert capsys.readouterr().out.strip() == str(out / "worth.md")
    names = {"worth.md", "worth.csv.gz", "worth.png", "worth-two.png", "worth-four.png"}
    assert {path.name for path in out.iterdir()} == names
    page = (out / "worth.md").read_text()
    assert "nan" not in page and all(f"({name})" in page for name in names if name.endswith("png"))
    assert "**With 2 nodes and alpha = 5.00% the correlation adds nothing**" in page
    assert "**With 4 nodes and alpha = 5.00% the correlation adds" in page and "**Batch.**" in page
    rows = list(csv.DictReader(gzip.decompress((out / "worth.csv.gz").read_bytes()).decode().splitlines()))
    assert {(row["run"], row["nodes"], row["batch_per_node"]) for row in rows} == {
        ("two", "2", "8"), ("four", "2", "8"), ("four", "2", "16"), ("four", "4", "8")
    }  # fmt: skip
    assert main(["worth", str(runs[0]), "--output", str(out), "--alpha", "0"]) == 2
    assert "--alpha must be in (0, 1]" in capsys.readouterr().err
