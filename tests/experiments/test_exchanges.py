"""`experiments exchanges`: errors of the mean by exchange, against NumPy's, and its page."""

import jax
import numpy as np
import pytest

from experiments.commands import main
from experiments.exchanges import Case, gradients, measure


def test_error_of_a_cast_is_that_of_its_roundings():
    """Casts draw nothing: each node rounds once, in two shots but for its share, and the mean once more."""
    (row,) = measure(Case("cast:format=bfloat16", 4), [0.0], values=64, draws=2)
    g = np.asarray(gradients(4, 0.0, 64))

    def rounded(x):
        return np.asarray(jax.numpy.asarray(x, "bfloat16"), np.float32)

    mean, gathered = g.mean(0), rounded(g).mean(0)
    local = np.arange(64) // 16 == np.arange(4)[:, None]
    for name, got in {"gather": gathered, "two_shot": rounded(np.where(local, g, rounded(g)).mean(0))}.items():
        assert row.errors[name] == pytest.approx(np.linalg.norm(got - mean) / np.linalg.norm(mean), rel=1e-3)
    assert row.sent == {"gather": 3 * 128, "ring": 6 * 32, "two_shot": 6 * 32}


def test_gradients_have_a_share_in_common():
    g = np.asarray(gradients(3, 0.25, 50_000), float)
    np.testing.assert_allclose(np.cov(g), 0.25 + 0.75 * np.eye(3), atol=0.02)


def test_page_has_a_row_for_each_case(capsys):
    arguments = ["--methods", "qsgd:bits=8:bucket=16", "--nodes", "2", "--common", "0", "1", "--values", "64"]
    assert main(["exchanges", *arguments, "--draws", "2"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| qsgd")]
    assert [row.split("|")[2].strip() for row in rows] == ["0%", "100%"]


@pytest.mark.parametrize("options, words", [
    (["--methods", "topk"], "exchanges of codes are settings of cast, "),
    (["--methods", "terngrad"], "scaler_sharing must be False with exchange 'ring', got True"),
    (["--methods"], "--methods must name at least one method"),
    (["--output", "."], "--output must be a Markdown file, got '.', a folder"),
    (["--nodes", "1"], "--nodes must be at least 2, got 1"),
    (["--draws", "0"], "--draws must be at least 1, got 0"),
    (["--common", "2"], "--common must be shares from 0 to 1, got 2"),
])  # fmt: skip
def test_wrong_options_have_one_line(options, words, capsys):
    assert main(["exchanges", *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and words in lines[0]
