"""`python -m jgc doctor`: a line on each thing, in one process and in two, and exit code 1 where something is wrong."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from process_helpers import LIMIT, free_port

from jgc import comm
from jgc.lab.commands import main
from jgc.lab.doctor import collectives, places
from jgc.nodes.layouts import make_nodes
from jgc.training.processes import distributed
from jgc.training.processes.distributed import Team


def test_all_is_well(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collectives, "SIZES", (1, 40))
    assert main(["doctor", "--run-dir", str(tmp_path / "a" / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok     ") for line in lines)
    said = "\n".join(lines)
    for text in ("versions: jgc ", "devices: process 0 of 1 has 8 x cpu", "descriptors: ", "data: digits", "GB free"):
        assert text in said
    assert len([line for line in lines if "MB of a node in" in line]) == len(collectives.KINDS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", collectives.KINDS, ids=lambda kind: f"{kind.name}, {kind.dtype}")
def test_one_wrong_value_is_found(kind, monkeypatch):
    """Whichever collective it is, and on whichever node."""
    monkeypatch.setattr(collectives, "SIZES", (3,))
    nodes = make_nodes(4, jax.devices()[:4])

    def wrong(x, nodes):
        right = kind.call(x, nodes)
        return right.at[-1].add((comm.axis.node_index(nodes) == 2).astype(right.dtype))

    said, _ = collectives.check(kind._replace(call=wrong), nodes)
    assert said.startswith("wrong for 4 values of a node: device 2 has ") and ", should be " in said


def test_wrong_value_is_said(monkeypatch, capsys):
    kind = collectives.KINDS[0]
    broken = kind._replace(call=lambda x, nodes: kind.call(x, nodes) + 1)
    monkeypatch.setattr(collectives, "KINDS", (broken, collectives.KINDS[1]))
    monkeypatch.setattr(collectives, "SIZES", (1,))
    assert main(["doctor"]) == 1
    said = capsys.readouterr()
    assert "WRONG  all-reduce of float32: wrong for 8 values of a node: device 0 has " in said.out
    assert "ok     all-reduce of int32: right" in said.out
    assert said.err.startswith("error: 1 of ") and len(said.err.splitlines()) == 1


def test_a_collective_that_fails_is_said_and_the_others_are_tried(monkeypatch, capsys):
    def fails(x, nodes):
        raise jax.errors.JaxRuntimeError("INTERNAL: the link is down")

    monkeypatch.setattr(collectives, "KINDS", (collectives.KINDS[0]._replace(call=fails), collectives.KINDS[1]))
    monkeypatch.setattr(collectives, "SIZES", (1,))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "WRONG  all-reduce of float32: wrong for 8 values of a node: INTERNAL: the link is down" in said
    assert "ok     all-reduce of int32: right" in said


def test_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collectives, "KINDS", ())
    (tmp_path / "file").touch()
    monkeypatch.setattr(places.resource, "getrlimit", lambda which: (100, 1000))
    words = ["--workload", "ptb_lstm", "--data-dir", str(tmp_path), "--run-dir", str(tmp_path / "file" / "run")]
    assert main(["doctor", *words]) == 1
    out = capsys.readouterr().out
    assert "WRONG  descriptors: 100 of a process, should be at least 512 (ulimit -n)" in out
    assert "WRONG  data: " in out and f"WRONG  run folder: cannot write {tmp_path / 'file' / 'run'}" in out


@pytest.mark.slow
@pytest.mark.parametrize("folders", [("run", "run"), ("run", "another")], ids=["well", "folders"])
def test_two_processes(tmp_path, folders, request):
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "jgc", "doctor", "--run-dir", str(tmp_path / folder), "--distributed.coordinator",
             f"127.0.0.1:{port}", "--distributed.num-processes", "2", "--distributed.process-id", f"{i}"],
            cwd=request.config.rootpath, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")},
        )
        for i, folder in enumerate(folders)
    ]  # fmt: skip
    said = [r.communicate(timeout=LIMIT) for r in running]
    codes, out = [r.returncode for r in running], said[0][0]
    assert said[1][0] == "" and "devices: process 1 of 2 has 1 x cpu of 2 in all" in out
    assert len([line for line in out.splitlines() if "MB of a node in" in line]) == len(collectives.KINDS)
    wrong = [line for line in out.splitlines() if line.startswith("WRONG")]
    if folders[0] == folders[1]:
        assert (codes, wrong, said[0][1], said[1][1]) == ([0, 0], [], "", "")
    else:
        assert codes == [1, 1] and all(err.startswith("error: 1 of ") for _, err in said)
        assert wrong == [f"WRONG  run folder: process 1: {tmp_path / 'another'} is not the folder of process 0, or not "
                         "on a shared file system: No such file or directory"]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("own, others, wrong", [
    ("127.0.1.1", ["a", "b"], True), ("10.0.0.1", ["a", "b"], False), ("127.0.1.1", ["a", "a"], False),
])  # fmt: skip
def test_own_name_on_loopback_is_wrong_where_there_are_other_hosts(own, others, wrong, monkeypatch):
    team = Team(0, 2)
    team.meeting = SimpleNamespace(gather=lambda name, value: others)
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", (own, 0))])
    said, found = places.address(team)
    assert found == f"a is {own}" and (said.startswith("a stands for 127.0.1.1 on that host: ") == wrong)


def test_gloo_that_reaches_its_own_host_says_why():
    text = "UNKNOWN: Gloo context initialization failed: timed out connecting: remote=[{}]:9100"
    assert distributed._line(RuntimeError(text.format("127.0.1.1"))).endswith("not to 127.0.1.1 (/etc/hosts)")
    assert distributed._line(RuntimeError(text.format("10.0.0.1"))).endswith("]:9100")


def test_values_differ_between_nodes():
    for kind in collectives.KINDS:
        assert len({row.tobytes() for row in collectives.values(kind, 4, 1000)}) == 4
        for nodes in (4, 127, 300, 1000):
            x = collectives.values(kind, nodes, 1000)
            assert "all-reduce" not in kind.name or np.array_equal(x.astype(np.int64).sum(0), x.sum(0, dtype=x.dtype))
