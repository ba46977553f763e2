"""SIGKILL in each of the three phases of the real command: the resumed run equals an uninterrupted one, bit for bit."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jgc.training.output.metrics import read
from jgc.training.run import checkpoint

pytestmark = pytest.mark.slow

STEPS = 18  # six of each phase
COMMAND = [
    *("train.py", "--method", "lgc_ps", "--nodes", "2", "--batch-size", "16", "--steps", str(STEPS)),
    *("--compressor.warmup-steps", "6", "--compressor.autoencoder-steps", "6"),
    *("--checkpoint-every", "2", "--evaluate-every", "0", "--diagnose-every", "0"),
]
KILLS = (("dense", 3), ("top-k", 9), ("compressed", 15))


def start(root, cache, run_dir, *more):
    """The command in its own process, on one device, with its own compile cache: a kill may damage the cache."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    command = [sys.executable, *COMMAND, "--run-dir", str(run_dir), *more]
    return subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def newest_step(run_dir):
    lines = read(run_dir / "metrics.jsonl")
    return lines[-1]["step"] if lines else 0


def test_kill_and_resume_in_each_phase(tmp_path, request):
    root, run_dir, whole = request.config.rootpath, tmp_path / "killed", tmp_path / "whole"
    run = start(root, tmp_path / "cache", whole)
    assert run.wait(timeout=300) == 0, run.stdout.read()
    for i, (phase, step) in enumerate(KILLS):
        run = start(root, tmp_path / "cache", run_dir, *(["--resume"] if i else []))
        deadline = time.monotonic() + 300
        while newest_step(run_dir) < step and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, run.stdout.read()
        assert read(run_dir / "metrics.jsonl")[-1]["phase"] == phase
        assert not (run_dir / "summary.json").exists()
    run = start(root, tmp_path / "cache", run_dir, "--resume")
    assert run.wait(timeout=300) == 0, run.stdout.read()
    got, expected = (checkpoint.restore(checkpoint.open_manager(path)) for path in (run_dir, whole))
    assert got.step == expected.step == STEPS
    assert got.arrays.keys() == expected.arrays.keys()
    assert [name for name, x in got.arrays.items() if x.tobytes() != expected.arrays[name].tobytes()] == []
    losses = [[(line["step"], line["loss"]) for line in read(path / "metrics.jsonl")] for path in (run_dir, whole)]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, STEPS + 1))
