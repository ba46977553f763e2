"""Several real processes on one machine: the result of a single process, and one-line errors."""

import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from process_helpers import LIMIT, free_port, start, start_all, wait_for_step
from text_helpers import write_text

from jgc.training.errors import UserError
from jgc.training.output.metrics import read
from jgc.training.processes.distributed import difference
from jgc.training.processes.meeting import connect

pytestmark = pytest.mark.slow

COMMON = "--batch-size 24 --evaluate-every 3 --diagnose-every 0"
SPARSE = f"--method topk --compressor.alpha 0.1 --compressor.warmup-steps 2 {COMMON} --nodes 4"
DENSE = f"--method dense {COMMON}"
LGC = (
    f"--method lgc_ps --compressor.alpha 0.1 --compressor.warmup-steps 1 --compressor.autoencoder-steps 1 "
    f"{COMMON} --nodes 2 --steps 3"
)
TEXT = (
    "--method dense --workload ptb_lstm --data-dir {data} --data.window 9 --batch-size 8 --nodes 4 "
    "--steps 10 --evaluate-every 3 --diagnose-every 0"
)
LONG = f"{DENSE} --nodes 2 --steps 100000 --checkpoint-every 2 --log-every 1000 --evaluate-every 0"


@pytest.fixture(autouse=True)
def in_root(request, monkeypatch):
    """The folder in which train.py is started."""
    monkeypatch.chdir(request.config.rootpath)


def finish(running):
    for r in running:
        code, output = r.end()
        assert code == 0, output
    for r in running[1:]:
        assert r.output.read_text() == ""  # process 0 alone prints


def held(folder, devices):
    """The parameters, checked to be bit-equal on all devices of all processes."""
    files = sorted(folder.iterdir())
    assert len(files) == devices
    all_of_them = [np.load(file) for file in files]
    for other in all_of_them[1:]:
        assert [x for x in other.files if other[x].tobytes() != all_of_them[0][x].tobytes()] == []
    return all_of_them[0]


def assert_close(a, b):
    assert a.files == b.files
    for name in a.files:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6)


def losses(run_dir):
    return [line["loss"] for line in read(run_dir / "metrics.jsonl")]


def train(tmp_path, name, count, options, **environment):
    """A whole run of `count` processes: its folder, and a folder with the state of each device."""
    dump = tmp_path / f"{name}-held"
    dump.mkdir()
    running = start_all(
        tmp_path, name, count, f"{options} --run-dir {tmp_path / name}", JGC_TEST_DUMP=str(dump), **environment
    )
    return running, tmp_path / name, dump


@pytest.mark.parametrize("options", [f"{DENSE} --nodes 4 --steps 4", LGC, TEXT], ids=["baseline", "lgc_ps", "text"])
def test_two_processes_equal_one(tmp_path, options):
    options = options.format(data=write_text(tmp_path / "data"))
    one, two = (train(tmp_path, f"{count}", count, options) for count in (1, 2))
    for running, *_ in (one, two):
        finish(running)
    assert_close(held(two[2], 2), held(one[2], 1))
    np.testing.assert_allclose(losses(two[1]), losses(one[1]), rtol=1e-5)


def test_clean_exit(tmp_path, request):
    """Processes of other tests are forked and end by os._exit: JAX's shutdown would wait for dead processes."""
    code = "import sys, process_helpers as p; p.child(sys.argv[2:], sys.argv[1], {})"
    options = f"{DENSE} --nodes 2 --steps 2 --run-dir {tmp_path / 'run'} --distributed.num-processes 2"
    options += f" --distributed.coordinator 127.0.0.1:{free_port()} --distributed.process-id"
    outputs = [tmp_path / f"{i}.txt" for i in range(2)]
    env = {**os.environ, "PYTHONPATH": f"{request.config.rootpath}/tests:{request.config.rootpath}"}
    running = []
    for i, output in enumerate(outputs):
        output.touch()
        running.append(subprocess.Popen([sys.executable, "-c", code, output, *options.split(), f"{i}"], env=env))
    assert [r.wait(LIMIT) for r in running] == [0, 0], [output.read_text() for output in outputs]


def test_resume_with_fewer_processes(tmp_path):
    """One process, two with two devices each, and four resumed as two give the same run."""
    two_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    whole = train(tmp_path, "whole", 1, f"{SPARSE} --steps 6")
    devices = train(tmp_path, "devices", 2, f"{SPARSE} --steps 6", **two_devices)
    four = train(tmp_path, "four", 4, f"{SPARSE} --steps 4")
    for running, *_ in (whole, devices, four):
        finish(running)
    held(four[2], 4)
    for file in four[2].iterdir():
        file.unlink()
    again = start_all(
        tmp_path, "again", 2, f"{SPARSE} --steps 6 --resume --run-dir {four[1]}", JGC_TEST_DUMP=str(four[2])
    )
    finish(again)
    expected = held(whole[2], 1)
    assert_close(held(devices[2], 4), expected)
    assert_close(held(four[2], 2), expected)
    np.testing.assert_allclose(losses(four[1]), losses(whole[1]), rtol=1e-5)


def test_killed_process(tmp_path):
    run_dir, options = tmp_path / "run", LONG.replace("--nodes 2", "--nodes 3")
    running = start_all(tmp_path, "killed", 3, f"{options} --run-dir {run_dir}")
    wait_for_step(run_dir, 5, running)
    running[1].process.kill()
    first, third = running[0].error(), running[2].error()
    assert re.match(r"error: process 1 died; go on, with all processes, by: python train.py .* --resume$", first)
    assert re.match(r"error: process 2 ends: process 1 died; go on, with all processes, by: .*process-id 2 ", third)
    done = read(run_dir / "metrics.jsonl")[-1]["step"]
    options = options.replace("100000", str(done + 4)).replace("--nodes 3", "--nodes 2")
    finish(start_all(tmp_path, "resumed", 2, f"{options} --run-dir {run_dir} --resume"))
    assert [line["step"] for line in read(run_dir / "metrics.jsonl")] == list(range(1, done + 5))


def test_killed_coordinator(tmp_path):
    run_dir = tmp_path / "run"
    running = start_all(tmp_path, "coordinator", 2, f"{LONG} --run-dir {run_dir}")
    wait_for_step(run_dir, 5, running)
    running[0].process.kill()
    assert "process 1 ends: process 0, the coordinator, died; go on" in running[1].error()


def test_killed_coordinator_of_a_mute_process(tmp_path):
    run_dir = tmp_path / "run"
    running = start_all(tmp_path, "mute", 2, f"{LONG} --run-dir {run_dir}", JGC_CHAOS_MUTE="1")
    wait_for_step(run_dir, 5, running)
    running[0].process.kill()
    running[1].process.join(30)
    assert running[1].process.exitcode == 1, running[1].end()


def test_flipped_bit_of_one_process(tmp_path):
    options = f"{DENSE} --nodes 3 --steps 100 --checkpoint-every 4 --check-replicas-every 3"
    options += f" --run-dir {tmp_path / 'run'}"
    port = free_port()
    where = f"--distributed.coordinator 127.0.0.1:{port} --distributed.num-processes 3 --distributed.process-id"
    flip = {"JGC_CHAOS_FLIP": "5 0 1 params.middle.kernel"}
    running = [start(tmp_path, f"flip-{i}", f"{options} {where} {i}", **(flip if i == 2 else {})) for i in range(3)]
    what = r"process 2, device \d+ holds other values of params.middle.kernel than 2 other devices"
    for r in running:
        assert re.search(rf"^error: stopped at step 6: {what}; all agreed at the checkpoint of step 4 in", r.error())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]


def with_one_stopped(folder, process):
    """Two processes in the middle of a run, one of them stopped; the timeout is 5 s."""
    run_dir = folder / "run"
    running = start_all(folder, "stopped", 2, f"{LONG} --run-dir {run_dir} --distributed.timeout 5")
    wait_for_step(run_dir, 5, running)
    os.kill(running[process].process.pid, signal.SIGSTOP)
    return running


def test_stopped_process(tmp_path):
    running = with_one_stopped(tmp_path, 1)
    assert re.search(r"error: process 1 (has been silent for|has not come to the end of step)", running[0].error())
    os.kill(running[1].process.pid, signal.SIGCONT)
    assert "process 1 ends: process 1 has" in running[1].error()  # what it was told while it could not hear


def test_stopped_process_0(tmp_path):
    running = with_one_stopped(tmp_path, 0)
    assert re.search(r"error: process 1 ends: process 0 has been silent for \d+ s", running[1].error())
    os.kill(running[0].process.pid, signal.SIGCONT)
    assert "error: process 1 died" in running[0].error()


def test_hung_process(tmp_path):
    options = f"{DENSE} --nodes 2 --steps 100000 --run-dir {tmp_path / 'run'} --distributed.timeout 4"
    port = free_port()
    running = [
        start(
            tmp_path,
            f"hang-{i}",
            f"{options} --distributed.coordinator 127.0.0.1:{port} --distributed.num-processes 2 "
            f"--distributed.process-id {i}",
            **({"JGC_TEST_HANG": "4"} if i else {}),
        )
        for i in range(2)
    ]
    assert "error: process 1 has not come to the end of step 4, " in running[0].error()
    assert "process 1 ends: process 1 has not come to the end of step 4, " in running[1].error()


def test_a_slow_process_is_waited_for_between_exchanges(tmp_path):
    """XLA itself waits 30 s at the first collective, here that of the comparison after two local steps."""
    port = free_port()
    options = f"{DENSE} --nodes 2 --steps 6 --local.every 6 --check-replicas-every 2 --run-dir {tmp_path / 'run'}"
    of_each = [f"{options} --distributed.coordinator 127.0.0.1:{port} --distributed.num-processes 2 "
               f"--distributed.process-id {i}" for i in range(2)]  # fmt: skip
    finish([start(tmp_path, f"slow-{i}", line, **({"JGC_TEST_SLOW": "40"} if i else {}))
            for i, line in enumerate(of_each)])  # fmt: skip
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 6


def test_signal_stops_all_processes(tmp_path):
    run_dir = tmp_path / "run"
    running = start_all(tmp_path, "signal", 2, f"{LONG} --run-dir {run_dir}", JGC_RUN_TOKEN="a secret")
    wait_for_step(run_dir, 5, running)
    os.kill(running[1].process.pid, signal.SIGTERM)
    (code, output), (other, quiet) = (r.end() for r in running)
    assert (code, other, quiet) == (143, 143, ""), output
    stopped = int(re.search(r"SIGTERM: saved after step (\d+)", output)[1])
    assert stopped == read(run_dir / "metrics.jsonl")[-1]["step"]
    assert (run_dir / "checkpoints" / str(stopped)).is_dir()


REFUSED = {
    "settings": ({"own": {1: "--seed 5"}}, "process 1 has --seed 5, process 0 has 0"),
    "count": (
        {"own": {1: "--distributed.num-processes 3"}},
        "process 1 was started with --distributed.num-processes 3, process 0 with 2",
    ),
    "identity": ({"own": {1: "--distributed.process-id 0"}}, None),
    "missing": ({"count": 1, "of": 2}, "1 of 2 processes came in 2 s; missing: process 1"),
    "nodes": ({"own": {0: "--nodes 3", 1: "--nodes 3"}}, "3 nodes do not divide among 2 processes; use 2 or 4 nodes"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_mismatched_processes(tmp_path, wrong):
    settings, line = REFUSED[wrong]
    options = f"{DENSE} --nodes 2 --steps 3 --run-dir {tmp_path / 'run'} --distributed.connect-timeout 2"
    options = options.replace("connect-timeout 2", "connect-timeout 30") if wrong != "missing" else options
    if wrong == "missing":
        options += f" --distributed.coordinator 127.0.0.1:{free_port()} --distributed.num-processes 2"
        running = [start(tmp_path, wrong, f"{options} --distributed.process-id 0")]
    elif wrong == "identity":
        options = options.replace("connect-timeout 30", "connect-timeout 3")
        running = start_all(tmp_path, wrong, 2, options, own=settings["own"])
        lines = sorted(r.error() for r in running)  # whichever is first takes the port
        assert "1 of 2 processes came" in lines[0] and "cannot open port" in lines[1]
        return
    else:
        running = start_all(tmp_path, wrong, 2, options, own=settings["own"])
    for r in running:
        assert line in r.error()
    assert not (tmp_path / "run").exists()


def test_mismatched_versions_and_programs(tmp_path):
    options = f"{DENSE} --nodes 2 --steps 3 --run-dir {tmp_path / 'run'}"
    for name, value, said in (
        ("JGC_TEST_JAX", "9.9.9", r"process 1 has jax 9\.9\.9, process 0 has \d+\.\d+\.\d+"),
        ("JGC_TEST_RANDOM", "1", r"process 1 has a first state of checksum \d+, process 0 has \d+: JAX_ variables"),
        ("JGC_TEST_PROGRAM", "1", r"process 1 has a program of the step, StableHLO of checksum \w+, process 0 has"),
    ):
        port = free_port()
        where = f"--distributed.coordinator 127.0.0.1:{port} --distributed.num-processes 2 --distributed.process-id"
        running = [
            start(tmp_path, f"{name}-{i}", f"{options} {where} {i}", **({name: value} if i else {})) for i in range(2)
        ]
        for r in running:
            assert re.search(said, r.error())


def test_common_failure(tmp_path):
    options = f"{DENSE} --nodes 2 --steps 30 --learning-rate 1e30 --run-dir {tmp_path / 'run'}"
    for r in start_all(tmp_path, "nan", 2, options):
        assert re.search(r"^error: stopped at step \d+: .*NaN", r.error())


def test_self_connected_port(monkeypatch):
    def to_itself(address, timeout):
        connection = socket.socket()
        connection.bind(("127.0.0.1", 0))
        connection.connect(connection.getsockname())
        return connection

    monkeypatch.setattr(socket, "create_connection", to_itself)
    with pytest.raises(UserError, match=r"no coordinator at 127.0.0.1:40000 within 0.5 s"):
        connect("127.0.0.1", 40000, 0.5)


def test_unreachable_coordinator(tmp_path):
    options = f"{DENSE} --nodes 2 --steps 3 --distributed.num-processes 2 --distributed.connect-timeout 2"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        where = f"{options} --distributed.coordinator 127.0.0.1:{port}"
        taken = start(tmp_path, "taken", f"{where} --distributed.process-id 0")
        assert f"process 0 cannot open port {port} on this host" in taken.error()
    absent = start(tmp_path, "absent", f"{where} --distributed.process-id 1")
    assert f"no coordinator at 127.0.0.1:{port} within 2 s (Connection refused)" in absent.error()


@pytest.mark.parametrize(
    "options, said",
    [
        ("--distributed.coordinator h:1 --distributed.process-id 0", "--distributed.num-processes N is missing"),
        ("--distributed.num-processes 2 --distributed.process-id 0", "--distributed.coordinator HOST:PORT is missing"),
        (
            "--distributed.coordinator h:1 --distributed.num-processes 2 --distributed.process-id 2",
            "--distributed.process-id must be from 0 to 1, got 2",
        ),
        (
            "--distributed.coordinator h --distributed.num-processes 2 --distributed.process-id 0",
            "must be HOST:PORT, got 'h'",
        ),
        ("--distributed.timeout 0", "--distributed.timeout must be from 1 to 1000000 seconds, got 0"),
        ("--distributed.auto --distributed.process-id 0", "leave out one of them"),
        ("--distributed.auto", "JAX finds none of Slurm, Kubernetes, Cloud TPU and Open MPI here"),
    ],
)
def test_bad_options(options, said, capsys, monkeypatch):
    from jax._src.clusters import ClusterEnv

    from jgc.training.settings import cli

    monkeypatch.setattr(ClusterEnv, "_cluster_types", [])
    assert cli.main(f"{DENSE} --steps 3 {options}".split()) != 0
    assert said in capsys.readouterr().err


def test_difference_of_missing_value():
    assert difference([{"a": 1}, {"a": 1}, {"a": 1, "b": 2}]) == "process 2 has b 2, process 0 has absent"
    assert difference([{"a": 1}, {"a": 1}]) == ""
