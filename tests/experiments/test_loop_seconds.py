"""`experiments loop`: milliseconds of train.py and of its compiled programs, and its errors."""

import re

import numpy as np
import pytest

from experiments import loop
from experiments.commands import main
from experiments.loop import FIRST, Seconds, markdown
from jgc.compress import Dense
from jgc.training.settings.config import Config, resolve


def test_page_has_the_ratio_of_each_round():
    seconds = Seconds(np.array([0.4, 0.5, 0.9]), np.array([0.4, 0.4, 0.6]))
    page = markdown(resolve(Config(Dense(), steps=FIRST + 30)), seconds, "a machine")
    assert "| train.py | 500.00 ± 125.00 |" in page and "| ratio | 1.250 ± 0.125 |" in page
    assert "rounds of 30 steps; a machine." in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "tpok"], "unknown method 'tpok': one of dense"),
        (["--method", "lgc_ps"], "--method lgc_ps has several phases; take a method with one, such as topk"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--nodes", "3"], "3 nodes do not divide a batch of"),
        (["--data-dir", "nowhere"], "without --data-dir random images are read"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["loop", *words]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(loop, "run", lambda *args, **named: 130)  # train.py returns a code
    with pytest.raises(KeyboardInterrupt):
        loop.of_run(resolve(Config(Dense(), steps=2)), None)


@pytest.mark.slow
def test_a_run_and_its_programs_are_timed(tmp_path, capsys):
    words = ["--workload", "digits_convnet5", "--method", "topk", "--nodes", "1", "--batch-size", "4", "--steps", "2"]
    assert main(["loop", *words, "--repeats", "1", "--output", str(tmp_path / "page.md")]) == 0
    ms = dict(re.findall(r"\| ([\w. ]+) \| ([\d.]+) \|", (tmp_path / "page.md").read_text()))
    assert float(ms["ratio"]) == pytest.approx(float(ms["train.py"]) / float(ms["its compiled programs"]), rel=0.02)
