"""One writer a run folder: the lock is refused, given back, taken over, and lost, in one line each."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tiny import tiny_model
from training_helpers import tiny_config

from jgc.training.errors import UserError
from jgc.training.run import lock, loop, setup
from jgc.training.run.lock import sole_writer

HOLD = """
import sys, time
from pathlib import Path
from jgc.training.run.lock import sole_writer
with sole_writer(Path(sys.argv[1]), print, print):
    print("held", flush=True)
    time.sleep(1000)
"""


def never(line):
    raise AssertionError(line)


def held_elsewhere(folder):
    """A different process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_second_writer_refused_by_name(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    other = held_elsewhere(folder)
    try:
        line = (
            rf"run is in use by process {other.pid} on \S+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d.*: wait for its end"
        )
        with pytest.raises(UserError, match=line), sole_writer(folder, never, never):
            pass
        os.kill(other.pid, signal.SIGSTOP)  # stopped is not dead
        with pytest.raises(UserError, match=line), sole_writer(folder, never, never):
            pass
    finally:
        other.kill()
        other.wait()
    said = []
    with sole_writer(folder, said.append, never):  # its owner is dead
        assert [line for line in said if f"over from process {other.pid} on" in line and "dead" in line] == said != []


def test_zombie_is_dead(tmp_path):
    (tmp_path / "file").touch()
    other = held_elsewhere(tmp_path)
    other.kill()  # and not waited for
    deadline, said = time.monotonic() + 30, []
    while not said and time.monotonic() < deadline:
        try:
            with sole_writer(tmp_path, said.append, never):
                pass
        except UserError:
            time.sleep(0.1)
    assert len(said) == 1
    other.wait()


def test_given_back(tmp_path):
    (tmp_path / "file").touch()
    for _ in range(3):
        with sole_writer(tmp_path, never, never):
            pass
    assert [path.name for path in tmp_path.glob(".*")] == [".lock-3.free"]


def test_nothing_left_of_a_run_that_did_not_start(tmp_path):
    with sole_writer(tmp_path / "a" / "run", never, never):
        pass
    assert not (tmp_path / "a" / "run").exists()


def foreign(folder, seconds_ago=0.0):
    """The lock of a process on a different host."""
    path = folder / ".lock-7"
    path.write_text(json.dumps(lock.Holder("far", 12, "2026-01-01 00:00:00", "far", "99")._asdict()))
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


def test_foreign_holder(tmp_path, monkeypatch):
    """On a different host a process is known by its touches alone."""
    monkeypatch.setattr(lock, "STALE", 3.0)
    path, said, over = foreign(tmp_path), [], threading.Event()

    def touch():
        while not over.wait(0.5):
            os.utime(path)

    threading.Thread(target=touch, daemon=True).start()
    with pytest.raises(UserError, match="in use by process 12 on far"), sole_writer(tmp_path, said.append, never):
        pass
    over.set()
    time.sleep(0.6)
    with sole_writer(tmp_path, said.append, never):
        assert [path.name for path in tmp_path.glob(".lock*")] == [".lock-8"]
    assert ["signs of life of process 12 on far" in line for line in said] == [True, True, False]
    assert "over from process 12 on far" in said[-1]


def test_stale_foreign_holder_is_not_waited_for(tmp_path):
    foreign(tmp_path, lock.STALE + 10)
    began, said = time.monotonic(), []
    with sole_writer(tmp_path, said.append, never):
        assert time.monotonic() - began < 5
    assert len(said) == 1 and "took" in said[0]


def test_unreadable_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 1.0)
    (tmp_path / ".lock-2").write_text("{")
    said = []
    with sole_writer(tmp_path, said.append, never):
        assert "an unknown process" in said[-1]


def test_lost_lock_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "TOUCH", 0.1)
    lost, noticed = [], threading.Event()
    with sole_writer(tmp_path, never, lambda line: (lost.append(line), noticed.set())):
        os.rename(tmp_path / ".lock-1", tmp_path / "taken")
        assert noticed.wait(30)
    assert "a different process has taken" in lost[0]


def compete(folder, start, results):
    start.wait()
    try:
        with sole_writer(folder, lambda line: None, never):
            results.put(("began", time.monotonic()))
            time.sleep(0.3)
            results.put(("ended", time.monotonic()))
    except UserError:
        results.put(("refused", time.monotonic()))


@pytest.mark.slow
def test_one_of_many_at_once(tmp_path):
    """Eight processes at the same moment, over a dead one's lock: never two inside."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    path = tmp_path / ".lock-5"
    path.write_text(json.dumps(lock.Holder("here", 2**22 + 1, "then", lock._space(), "1")._asdict()))
    processes = [context.Process(target=compete, args=(tmp_path, start, results)) for _ in range(8)]
    for process in processes:
        process.start()
    time.sleep(8)  # until all have imported
    start.set()
    for process in processes:
        process.join(60)
    events = []
    while not results.empty():
        events.append(results.get())
    inside = most = 0
    for what, _ in sorted(events, key=lambda event: event[1]):
        inside += {"began": 1, "ended": -1, "refused": 0}[what]
        most = max(most, inside)
    assert most == 1 and len([1 for what, _ in events if what != "ended"]) == 8


@pytest.mark.slow
def test_second_run_in_one_folder(tmp_path, monkeypatch):
    """`run` itself: refused while a different holds the folder, and all the same afterwards."""
    monkeypatch.setattr(setup, "make_model", tiny_model)
    folder = tmp_path / "run"
    config = tiny_config(folder, steps=2)
    folder.mkdir()
    other = held_elsewhere(folder)
    with pytest.raises(UserError, match=f"in use by process {other.pid}"):
        loop.run(config)
    assert not (folder / "config.json").exists()
    other.kill()
    other.wait()
    assert loop.run(config) == 0
    with pytest.raises(UserError, match="already holds a run"):
        loop.run(config)
