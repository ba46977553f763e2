"""`jgc bench select`: what is compared, and how it is shown."""

import numpy as np
import pytest

from jgc.lab.bench import select
from jgc.lab.commands import main


def test_command_writes_every_row(tmp_path):
    page = tmp_path / "select.md"
    assert main(["bench", "select", "--sizes", "1e4", "--repeats", "2", "--output", str(page)]) == 0
    text = page.read_text()
    for name in (select.OURS, select.CHUNKS, select.TOP_K, select.APPROXIMATE, select.READ):
        assert sum(line.startswith(f"| 10,000 | 10 | {name} |") for line in text.splitlines()) == 1
    assert ("| 10,000 | 10 | torch.topk |" in text) == (select.find_torch() is not None)


def test_page_without_torch():
    twice = {select.OURS: np.array([1.0, 2.0]), select.TOP_K: np.array([2.0, 4.0]), select.READ: np.array([0.5, 1.0])}
    page = select.markdown([select.Timing(10, 1, twice)], "a machine", None, "load 0")
    assert "`torch.topk` is left out: torch is not installed" in page
    (line,) = [line for line in page.splitlines() if select.OURS in line]
    assert line.endswith("| - | 0.50 | 2.00 |")


def test_ratios_pair_rounds():
    """A machine that slows down in the second round slows down all alike."""
    rounds = {select.OURS: np.array([1.0, 9.0, 9.0]), select.TORCH: np.array([2.0, 18.0, 18.0])}
    page = select.markdown([select.Timing(10, 1, rounds)], "a machine", None, "load 0")
    assert "| 0.50 | - | - |" in page


@pytest.mark.parametrize("sizes", ["0", "1.5", "many", "3e9", ""])
def test_wrong_size_is_one_line(sizes, capsys):
    assert main(["bench", "select", "--sizes", sizes]) == 2
    error = capsys.readouterr().err
    assert "--sizes must be" in error and len(error.strip().splitlines()) == 1
