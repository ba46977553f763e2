"""A process that must end does so, whatever becomes of its last words."""

import os
import subprocess
import sys

import pytest

DIE = """
import threading
from jgc.training.processes.meeting import die
threading.Thread(target=die, args=("the run is over",)).start()
threading.Event().wait()  # as in a collective that never returns
"""
FAIL = """
import types
import jax
from jgc.training.settings.cli import in_company
jax.distributed = types.SimpleNamespace(is_initialized=lambda: True)
import atexit, threading
atexit.register(lambda: threading.Event().wait())  # as JAX's shutdown waits for the other processes

def action():
    raise {error}

in_company(action)
"""


def ended(code, pipe):
    """The exit code of a program whose standard error and output are one end of a pipe."""
    reading, writing = os.pipe()
    if pipe == "closed":
        os.close(reading)
    else:
        os.set_blocking(writing, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writing, stderr=writing)
    try:
        return process.wait(60)
    finally:
        process.kill()


@pytest.mark.parametrize("pipe", ["closed", "full"])
def test_die_whatever_printing_does(pipe):
    assert ended(DIE, pipe) == 1


@pytest.mark.parametrize("pipe", ["closed", "full"])
@pytest.mark.parametrize("error, code", [("ValueError('a defect')", 1), ("OSError('a disk')", 1)])
def test_failure_in_company_whatever_printing_does(pipe, error, code):
    assert ended(FAIL.format(error=error), pipe) == code
