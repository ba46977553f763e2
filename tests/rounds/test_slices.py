"""A node of two processes with two devices each, which meets a node of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("obstore")

import slice_member

import jgc.rounds
from jgc.lab.chaos.processes import free_port

pytestmark = pytest.mark.slow
LIMIT = 300


def _slice(bucket, **options):
    """Its two processes."""
    port, devices = free_port(), {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    return [
        subprocess.Popen(
            [sys.executable, slice_member.__file__, str(bucket), str(port), str(i), json.dumps(options)], text=True,
            env=os.environ | devices, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) for i in range(2)
    ]  # fmt: skip


def _ends(processes):
    texts = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts[0][1][-2000:] + texts[1][1][-2000:]
    lines = [next(x for x in out.splitlines() if x.startswith("{")) for out, _ in texts]  # Gloo prints, too
    return [json.loads(line) for line in lines]


def _alone(bucket, **options):
    """The node of this process."""
    arguments = {"compressor": slice_member.method(), "quorum": 2, "grace": 60} | options
    node = jgc.rounds.join(bucket, node="alone", params=slice_member.params(), **arguments)
    tree, digests = node.params, []
    for i in range(slice_member.COUNT):
        tree, outcome = node.exchange(jax.jit(slice_member.moved, static_argnums=1)(tree, 100 + i), tokens=20)
        digests += [outcome.digest] if outcome else []
    node.leave()
    return node, [*digests, node.last.digest] if options.get("overlap") else digests


@pytest.mark.parametrize("options", [{}, {"overlap": 1}], ids=["plain", "overlap"])
def test_a_slice_is_a_node_like_others(options, tmp_path):
    processes = _slice(tmp_path / "bucket", **options)
    node, digests = _alone(tmp_path / "bucket", **options)
    first, second = _ends(processes)
    assert first | {"token": None} == second | {"token": None} and first["digests"] == digests
    assert first["run"] == node.run and first["number"] == node.number == slice_member.COUNT
    np.testing.assert_array_equal(np.float32(first["w"]), node.params["w"])
    np.testing.assert_array_equal(np.float32(first["b"]), np.float32(node.params["b"]))
    assert first["count"] == 3 and first["payload"] == node.payload_bytes(2) and first["up"] > 3 * first["payload"]
    assert (tmp_path / "bucket-disk").exists()  # of the first process


@pytest.mark.parametrize("options, error", [
    ({"quorum": 0}, "ValueError: quorum must"),
    ({"names": ["slice", "other"]}, "ValueError: the processes of one jax.distributed job are one node"),
    ({"seed": 5}, "RoundsError: "),
], ids=["argument", "names", "another run's settings"])  # fmt: skip
def test_all_processes_of_a_slice_raise_the_same_error(options, error, tmp_path):
    if "seed" in options:
        arguments = {"compressor": slice_member.method(), "quorum": 2, "grace": 60}
        jgc.rounds.join(tmp_path / "bucket", node="first", params=slice_member.params(), **arguments).leave()
    first, second = _ends(_slice(tmp_path / "bucket", **options))
    assert first["error"].startswith(error) and second["error"].startswith(error)
    assert Path(tmp_path / "bucket").exists() == ("seed" in options)
