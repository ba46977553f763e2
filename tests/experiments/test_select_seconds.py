"""`experiments select`: what is compared, and how it is shown."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import select
from experiments.commands import main


def test_command_writes_every_row(tmp_path):
    page = tmp_path / "select.md"
    assert main(["select", "--sizes", "1e4", "--repeats", "2", "--output", str(page)]) == 0
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


class Cuda:
    """PyTorch with a GPU, by NumPy: counts the waits for the device."""

    __version__, waits, places = "2.11.0+cu130", 0, []
    cuda = property(lambda self: self)

    def is_available(self):
        return True

    def get_device_name(self):
        return "NVIDIA H100"

    def synchronize(self):
        self.waits += 1

    def set_num_threads(self, count):
        pass

    def from_numpy(self, values):
        return SimpleNamespace(to=lambda device: self.places.append(device) or SimpleNamespace(abs=lambda: abs(values)))

    def topk(self, values, k):
        return np.sort(values)[-k:]


def test_torch_runs_on_the_gpu_of_jax(monkeypatch):
    torch = Cuda()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert select.find_torch().device == "cpu"  # where JAX computes
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    there = select.find_torch()
    monkeypatch.undo()
    timing = select.measure(1000, 0.01, 2, there)
    assert (torch.places, torch.waits) == (["cuda"], 3)  # a round that does not count, and two
    page = select.markdown([timing], "a machine", there, "load 0")
    assert page.startswith("a machine; torch 2.11.0+cu130 on NVIDIA H100; load 0.")
    assert "| 1,000 | 10 | torch.topk |" in page


@pytest.mark.parametrize("sizes", ["0", "1.5", "many", "3e9", ""])
def test_wrong_size_is_one_line(sizes, capsys):
    assert main(["select", "--sizes", sizes]) == 2
    error = capsys.readouterr().err
    assert "--sizes must be" in error and len(error.strip().splitlines()) == 1
