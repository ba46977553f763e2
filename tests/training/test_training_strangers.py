"""Strangers at the coordinator's port change nothing: neither the run, nor its memory and descriptors."""

import contextlib
import json
import os
import resource
import socket
import threading
import time

import pytest

from jgc.lab.chaos.strangers import BAD_IDS, LINES, joining, shout
from jgc.training.processes import hub as hubs
from jgc.training.processes.hub import Hub, listen
from jgc.training.processes.meeting import Meeting, connect

TOKEN = "a secret of the run"


def serve(processes=2, token=TOKEN):
    listener = listen("127.0.0.1", 0)
    return Hub(listener, processes, timeout=20, connect_timeout=60, token=token), listener.getsockname()[1]


def join(port, process, processes=2, token=TOKEN):
    """A member in a thread: joining waits for the others."""
    found, ended = [], []

    def begin():
        found.append(Meeting(connect("127.0.0.1", port, 20), process, processes, 20, ended.append, token))

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    return thread, found, ended


def both(port):
    joining = [join(port, i) for i in range(2)]
    for thread, *_ in joining:
        thread.join(30)
    return [found[0] for _, found, _ in joining], [ended for *_, ended in joining]


def gathers(members, tag):
    """Whether all members still hear each other."""
    for i, member in enumerate(members):
        member.post(tag, i)
    return all(member.wait(tag, 30) == [0, 1] for member in members)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_strangers_change_nothing(moment):
    hub, port = serve()
    if moment == "after":
        members, ended = both(port)
    before = descriptors()
    for _ in range(50):
        for line in LINES.values():
            shout(port, line)
    assert hub._over == "" and not hub._unknown and descriptors() <= before + 8
    if moment == "before":
        assert hub._members == {}
        members, ended = both(port)
    assert gathers(members, "news") and ended == [[], []]


def test_strange_ids_are_refused_even_with_the_token():
    hub, port = serve()
    for process, of in BAD_IDS:
        shout(port, joining(process, of, TOKEN))
    assert hub._members == {} and hub._over == ""
    assert gathers(both(port)[0], "news")


def test_mute_and_slow_connections_are_bounded(monkeypatch):
    """They hold neither a place nor memory for long, and a process that comes meanwhile gets in."""
    monkeypatch.setattr(hubs, "HELLO", 3.0)
    hub, port = serve()
    mute = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * hubs.WAITING)]
    slow, over = mute[-1], time.monotonic() + 30
    members, ended = both(port)
    assert len(hub._unknown) <= hubs.WAITING and gathers(members, "news") and ended == [[], []]
    with contextlib.suppress(OSError):
        while time.monotonic() < over:
            slow.sendall(b"x")
            time.sleep(0.5)
    assert time.monotonic() < over and not hub._unknown
    for connection in mute:
        connection.close()


def test_no_relay_before_all_have_come_nor_after_jax_has_started():
    service = socket.create_server(("127.0.0.1", 0))
    hub, port = serve()
    hub.jax_port = service.getsockname()[1]
    line = json.dumps({"jgc": "relay", "token": TOKEN}).encode() + b"\n"
    service.settimeout(1)
    shout(port, line)
    with pytest.raises(TimeoutError):
        service.accept()
    members, _ = both(port)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(line + b"hello")
        assert service.accept()[0].recv(5) == b"hello"
    hub.relays_left = 0
    shout(port, line)
    with pytest.raises(TimeoutError):
        service.accept()
    assert gathers(members, "news")


def test_no_descriptors_left_for_a_while():
    _, port = serve()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.create_connection(("127.0.0.1", port))
    spare = [socket.socket() for _ in range(2)]  # the two that will knock
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), hard))
    try:
        for one in spare:
            one.connect(("127.0.0.1", port))
        time.sleep(0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert gathers(both(port)[0], "news")
    for one in (waiting, *spare):
        one.close()


def test_wrong_token_is_told():
    _, port = serve(processes=1)
    _, _, ended = join(port, 0, 1, token="another")
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "a different JGC_RUN_TOKEN" in ended[0]
