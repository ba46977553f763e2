"""Processes on a folder and on a real SeaweedFS (extra `rounds-test`): examples/rounds.py, killed and back."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import member
import numpy as np
import pytest

from jgc.lab.shared.seaweed import Seaweed, find_weed
from jgc.training.errors import UserError

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "rounds.py"
LIMIT = 300


def _start(bucket, node, cwd, rounds=12, quorum=2, **environment):
    clean = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"}
    environment = clean | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"} | environment
    return subprocess.Popen(
        [sys.executable, EXAMPLE, str(bucket), node, "--rounds", str(rounds), "--quorum", str(quorum)],
        env=environment, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _digests(text):
    return dict(re.findall(r"round (\d+): .*, (\w{12})$", text, re.MULTILINE))


def _ends(process):
    text = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, text[-3000:]
    return text


def test_a_killed_process_comes_back(tmp_path):
    a, b = (_start(tmp_path / "bucket", node, tmp_path, rounds=60) for node in "ab")
    while not list(tmp_path.glob("bucket/rounds/00000003/close")):
        assert a.poll() is None and b.poll() is None
        time.sleep(0.05)
    b.send_signal(signal.SIGKILL)
    b.wait()
    b = _start(tmp_path / "bucket", "b", tmp_path, rounds=60)
    of_a, of_b = _digests(_ends(a)), _digests(_ends(b))
    both = of_a.keys() & of_b.keys()
    assert len(both) >= 10 and all(of_a[i] == of_b[i] for i in both)


@pytest.fixture
def server(tmp_path):
    """An S3 server with an empty bucket, as environment variables."""
    if find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install 'jgc[rounds-test]'")
    with Seaweed(tmp_path) as seaweed:
        yield seaweed.environment()


def test_two_servers_run_on_one_machine_and_one_that_ends_is_said_at_once(server, tmp_path):
    (tmp_path / "second").mkdir()
    with Seaweed(tmp_path / "second") as second:
        assert second.process is not None and second.process.poll() is None
    second.process = subprocess.Popen([sys.executable, "-c", ""])
    second.process.wait()
    with pytest.raises(UserError, match=r"SeaweedFS does not answer; its log is .*weed.log"):
        second._make_bucket(seconds=1e9)


def test_three_processes_on_a_real_server(server, tmp_path):
    nodes = [_start("s3://runs/one", node, tmp_path, rounds=15, quorum=3, **server) for node in "abc"]
    digests = [_digests(_ends(process)) for process in nodes]
    both = set.intersection(*(set(x) for x in digests))
    assert len(both) == 15 and all(len({x[i] for x in digests}) == 1 for i in both)


@pytest.mark.parametrize("count", [4])
def test_a_hundred_rounds_of_four_processes_are_local_steps(count, server, tmp_path):
    """One of them runs on the Python of JGC_OTHER_PYTHON, with a different JAX, if that is set."""
    rounds, other = 100, os.environ.get("JGC_OTHER_PYTHON", sys.executable)
    pythons = [other, *[sys.executable] * (count - 1)]
    environment = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"} | server
    processes = [
        subprocess.Popen(
            [python, member.__file__, "s3://runs/hundred", f"n{i}", str(count), str(rounds), tmp_path / f"{i}.json"],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) for i, python in enumerate(pythons)
    ]  # fmt: skip
    for process in processes:
        _ends(process)
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(count)]
    print([{k: x[k] for k in x if k not in ("rounds", "theta")} for x in found])
    first = found[0]["rounds"]
    assert [x[0] for x in first] == list(range(rounds)) and all(x[2] and x[3] == count for x in first)
    assert all(x["rounds"] == first and x["theta"] == found[0]["theta"] for x in found)
    expected = member.as_local_steps(count, rounds)
    for name, x in expected.items():
        np.testing.assert_allclose(found[0]["theta"][name], x, atol=2e-5)
