"""Every registered method between two real processes, as in a loop of the user's own: what one process computes."""

import os
import subprocess
import sys
from pathlib import Path

import _contract_process
import jax
import numpy as np
import pytest
from _contract import LAYOUT_EXEMPT, Case, compressor_of, history
from process_helpers import LIMIT, QUICK, free_port

from jgc.compress import METHODS

pytestmark = pytest.mark.slow

PROCESSES, DEVICES = 2, 2
# How far floats may be apart beyond `LAYOUT_EXEMPT`. XLA on CPU divides a convolution among as many threads as a
# process has devices and adds up in another order: one process with four devices and one with eight are as far apart.
AUTOENCODERS = {"lgc_ps": 1e-4, "lgc_ring": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What both processes held after every step, all methods in one go."""
    path = tmp_path_factory.mktemp("held")
    options = [str(path), str(free_port()), str(PROCESSES)]
    flags = f"{QUICK} --xla_force_host_platform_device_count={DEVICES}"
    running = [
        subprocess.Popen(
            [sys.executable, _contract_process.__file__, *options, str(process), *METHODS],
            env={**os.environ, "XLA_FLAGS": flags},
            stdout=subprocess.DEVNULL,
            stderr=(path / f"{process}.txt").open("w"),
        )
        for process in range(PROCESSES)
    ]
    try:
        codes = [r.wait(LIMIT) for r in running]
    finally:
        for r in running:
            r.kill()
    assert codes == [0] * PROCESSES, [(path / f"{process}.txt").read_text()[-3000:] for process in range(PROCESSES)]
    return path


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_compute_what_one_does(folder: Path, method: str):
    held = [dict(np.load(folder / f"{method}-{process}.npz")) for process in range(PROCESSES)]
    for phase, own in enumerate(compressor_of(method).schedule):
        _, tolerance = LAYOUT_EXEMPT.get((method, own.name), ("", AUTOENCODERS.get(method, 0.0)))
        for number, step in enumerate(history(Case(method, phase, f"{PROCESSES * DEVICES} devices"))):
            parts = {"aggregated": step.aggregated, "shared": step.after.shared, "local": step.after.local,
                     "info": step.info._replace(residual_norm=())}  # fmt: skip
            for part, tree in parts.items():
                for leaf, x in enumerate(jax.tree.leaves(tree)):
                    got = [h[f"{phase}/{number}/{part}/{leaf}"] for h in held]
                    assert_equal(tolerance, np.asarray(x), got, rows=part in ("local", "info"))


def assert_equal(tolerance: float, expected: np.ndarray, got: list[np.ndarray], rows: bool) -> None:
    """Whether every process holds its rows of what is expected, or all of it; bit for bit, or that close."""
    own = np.split(expected, PROCESSES) if rows else [expected] * PROCESSES
    for want, have in zip(own, got, strict=True):
        have = have.view(want.dtype)  # NumPy's files know no bfloat16
        assert have.shape == want.shape
        if tolerance and np.issubdtype(want.dtype, np.floating):
            np.testing.assert_allclose(have, want, rtol=0, atol=tolerance)
        else:
            assert have.tobytes() == want.tobytes()
    assert rows or len({have.tobytes() for have in got}) == 1  # bit-equal between processes in any case
