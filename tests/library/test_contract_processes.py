"""Every registered method between two real processes, as in a loop of the user's own: what one process computes."""

import os
import subprocess
import sys
from pathlib import Path

import contract_process
import numpy as np
import pytest
from contract import COLLECTIVES, LAYOUT_EXEMPT, PROCESSES_EXEMPT, Case, compressor_of, history
from contract_process import LAYOUT, file_of, named
from process_helpers import LIMIT, QUICK, free_port

from jgc.compress import METHODS

pytestmark = pytest.mark.slow

PROCESSES, DEVICES = 2, 2
REPRESENTATIVES = ("topk", "scalecom", "powersgd", "lgc_ps", "qsgd", "qsgd/two-shot feedback")  # of each exchange
NAMES = (*METHODS, *COLLECTIVES)
PARAMS = [pytest.param(m, marks=[] if m in REPRESENTATIVES else [pytest.mark.exhaustive]) for m in NAMES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """What both processes held after every step, all selected methods in one go."""
    tests = [item for item in request.session.items if item.path == request.path]
    methods = [test.callspec.params["method"] for test in tests]
    path = tmp_path_factory.mktemp("held")
    options = [str(path), str(free_port()), str(PROCESSES)]
    flags = f"{QUICK} --xla_force_host_platform_device_count={DEVICES}"
    running = [
        subprocess.Popen(
            [sys.executable, contract_process.__file__, *options, str(process), *methods],
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


@pytest.mark.parametrize("method", PARAMS)
def test_two_processes_equal_one(folder: Path, method: str):
    held = [dict(np.load(file_of(folder, method, process))) for process in range(PROCESSES)]
    for phase, own in enumerate(compressor_of(method).schedule):
        _, tolerance = LAYOUT_EXEMPT.get((method, own.name), PROCESSES_EXEMPT.get(method, ("", 0.0)))
        for number, step in enumerate(history(Case(method, phase, LAYOUT))):
            for name, x in named(phase, number, step.aggregated, step.after, step.info).items():
                rows = name.split("/")[2] in ("local", "info")
                assert_equal(tolerance, np.asarray(x), [h[name] for h in held], rows)


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
