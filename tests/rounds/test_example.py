"""examples/rounds.py is short, and runs in two processes on a folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("obstore")

EXAMPLE = Path(__file__).parents[2] / "examples" / "rounds.py"
LIMIT = 300


def test_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 80


def test_two_processes_have_the_same_digests(tmp_path):
    def start(node):
        environment = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
        words = [sys.executable, EXAMPLE, tmp_path / "bucket", node, "--rounds", "4", "--steps", "5"]
        return subprocess.Popen(words, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)  # fmt: skip

    running = [start(node) for node in "ab"]
    said = [process.communicate(timeout=LIMIT)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    of_a, of_b = (re.findall(r"round (\d): .*, members a b, counted, (\w{12})\n", text) for text in said)
    assert of_a == of_b and [number for number, _ in of_a] == ["0", "1", "2", "3"]
    assert all(re.search(r"bytes up [\d,]+, down [\d,]+; requests \d+", text) for text in said)
