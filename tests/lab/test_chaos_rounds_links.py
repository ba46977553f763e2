"""`chaos --rounds`: links, by a wrapper of a folder and by a relay, do what their modes say."""

import http.client
import http.server
import queue
import threading
import time

import pytest

pytest.importorskip("obstore")

from jgc.lab.chaos.rounds import links
from jgc.lab.chaos.rounds.links import FaultyBucket, Relay, Switch
from jgc.rounds import BucketError, open_bucket


@pytest.fixture
def switch(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "SLOW", 0.2)
    return Switch(tmp_path / "link.json")


def test_a_mode_ends_after_its_seconds(switch):
    assert switch.get() == ("", 0.0)
    switch.set("full", 0.1)
    assert switch.get()[0] == "full"
    time.sleep(0.12)
    assert switch.get() == ("", 0.0)


@pytest.fixture
def bucket(switch):
    return FaultyBucket(open_bucket("memory:///"), switch)


def test_an_unreachable_folder_answers_no_request(bucket, switch):
    switch.set("unreachable", 60)
    requests = (
        lambda: bucket.create("a", b"1"), lambda: bucket.get(["a"]), lambda: bucket.list("rounds"),
        lambda: bucket.delete(["a"]),
    )  # fmt: skip
    for request in requests:
        with pytest.raises(BucketError, match="refused"):
            request()
    assert bucket.counts.create == bucket.counts.get == 0


def test_a_full_folder_refuses_writes_only(bucket, switch):
    bucket.create("a", b"1")
    switch.set("full", 60)
    with pytest.raises(BucketError, match="full"):
        bucket.create("b", b"2")
    assert bucket.get(["a", "b"]) == [b"1", None]


def test_half_of_the_writes_of_a_folder_fail_and_half_of_those_are_carried_out(bucket, switch):
    switch.set("half", 60)
    failed = []
    for i in range(8):
        try:
            assert bucket.create(f"{i}", b"1")
        except BucketError:
            failed.append(i)
    assert failed == [1, 3, 5, 7]
    assert [i for i in range(8) if bucket.get([f"{i}"]) != [None]] == [0, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("mode, seconds", [("slow", 60), ("silent", 0.2)])
def test_a_slow_and_a_silent_folder_answer_later(bucket, switch, mode, seconds):
    switch.set(mode, seconds)
    began = time.monotonic()
    assert bucket.create("a", b"1")
    assert time.monotonic() - began >= 0.19


class _Handler(http.server.BaseHTTPRequestHandler):
    """Notes the bytes that a PUT has and should have."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        length = int(self.headers["Content-Length"])
        self.server.puts.put((len(self.rfile.read(length)), length))
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.puts = queue.Queue()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def ask(server, switch):
    """Send a request by the relay, on a new connection, and return the status of its answer."""
    relay = Relay(server.server_port, switch)

    def ask(method, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=30)
        try:
            connection.request(method, "/runs/a", body=body)
            return connection.getresponse().status
        finally:
            connection.close()

    yield ask
    relay.close()


BODY = bytes(300_000)  # several pieces of `links.CHUNK`


def test_a_relay_passes_requests_on(ask, server):
    assert ask("PUT", BODY) == 200 and server.puts.get(timeout=30) == (len(BODY), len(BODY))
    assert ask("GET") == 200


def test_an_unreachable_relay_answers_no_request(ask, switch, server):
    switch.set("unreachable", 60)
    for method in ("GET", "PUT"):
        with pytest.raises(OSError):
            ask(method, BODY if method == "PUT" else None)
    assert server.puts.empty()


def test_a_full_relay_refuses_writes_only(ask, switch, server):
    switch.set("full", 60)
    assert ask("PUT", b"short") == 507 and ask("GET") == 200 and server.puts.empty()


@pytest.mark.parametrize("body", [b"x" * 100, BODY], ids=["short", "long"])
def test_half_of_the_writes_by_a_relay_fail_and_half_of_those_are_carried_out(ask, switch, server, body):
    switch.set("half", 60)
    whole = (len(body), len(body))
    for i in range(4):
        if i % 2 == 0:
            assert ask("PUT", body) == 200 and server.puts.get(timeout=30) == whole
            continue
        with pytest.raises(OSError):  # no answer
            ask("PUT", body)
        came, length = server.puts.get(timeout=30)
        assert length == len(body)
        assert came == length if i == 3 else 0 < came < length


@pytest.mark.parametrize("mode, seconds", [("slow", 60), ("silent", 0.2)])
def test_a_slow_and_a_silent_relay_answer_later(ask, switch, mode, seconds):
    switch.set(mode, seconds)
    began = time.monotonic()
    assert ask("GET") == 200
    assert time.monotonic() - began >= 0.19
