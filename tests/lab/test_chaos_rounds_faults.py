"""`chaos --rounds`: faults do what their lines in the table say."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("obstore")

from jgc.lab.chaos.rounds import node as nodes
from jgc.lab.chaos.rounds.faults import FAULTS, line_of, nan_message
from jgc.lab.chaos.verdict import HANG, SILENT
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.messages import BadObject, packed_message, read_message
from jgc.rounds.names import message_name


class _Node:
    """Notes what a fault does to it."""

    def __init__(self, name, folder, words=""):
        self.name = self.label = name
        self.files = nodes.Files(folder)
        self.settings = nodes.Settings("", name, str(folder), seconds=0.01)
        self.alive, self.calls, self.words = True, [], words
        self.switch = SimpleNamespace(set=lambda mode, seconds: self.calls.append((mode, seconds)))

    def __getattr__(self, name):
        return lambda **more: self.calls.append((name, *more.values()))


def _run(tmp_path, **more):
    """A run of three nodes, and a hit that chooses the first or all."""
    three = [_Node(name, tmp_path) for name in ("paris", "oslo", "lima")]
    run = SimpleNamespace(
        nodes=three, names=[x.name for x in three], number=7, token="run", secret=b"s", digest="d",
        seconds_left=lambda: 1000.0, place=SimpleNamespace(server=None), objects={}, **more,
    )  # fmt: skip
    run.put = run.objects.__setitem__
    hit = SimpleNamespace(
        outcome=None, choose=lambda dice: three[:1], choose_all=lambda: three,
        silent=lambda what: setattr(hit, "outcome", SILENT), hang=lambda what: setattr(hit, "outcome", HANG),
    )  # fmt: skip
    return run, hit


def _driven(name, run, hit, seed=0):
    """The pauses of a fault, and how often each node was called before each of them."""
    pauses = []
    for pause in FAULTS[name](run, hit, Random(seed)):
        pauses.append((pause, [len(x.calls) for x in run.nodes]))
    return pauses


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_a_line(name):
    assert line_of(name)[0].isupper() and "\n" not in line_of(name)


@pytest.mark.parametrize("name, calls, longest", [
    ("kill", ["kill", "start"], 20), ("lost-disk", ["kill", "start"], 10), ("stop", ["pause", "go_on"], 150),
])  # fmt: skip
def test_a_node_is_killed_or_stopped_and_comes_back(tmp_path, name, calls, longest):
    lengths = []
    for seed in range(200):
        run, hit = _run(tmp_path)
        (tmp_path / "paris.rounds").touch()
        ((pause, before),) = _driven(name, run, hit, seed)
        assert [x[0] for x in run.nodes[0].calls] == calls and before == [1, 0, 0]
        assert (tmp_path / "paris.rounds").exists() == (name != "lost-disk")
        lengths.append(pause)
    assert max(lengths) <= longest < 1.2 * max(lengths)
    assert min(lengths) < 8 and (name != "stop" or min(lengths) >= 5)


def test_a_clock_is_an_hour_fast_or_slow(tmp_path):
    clocks = set()
    for seed in range(20):
        run, hit = _run(tmp_path)
        _driven("clock", run, hit, seed)
        assert [x[0] for x in run.nodes[0].calls] == ["kill", "start"]
        clocks.add(run.nodes[0].calls[1][1])
    assert clocks == {-3600.0, 3600.0}


def test_a_power_cut_kills_all_before_the_first_comes_back(tmp_path):
    run, hit = _run(tmp_path)
    pauses = _driven("power-cut", run, hit)
    assert pauses[0][1] == [1, 1, 1] and sum(pause for pause, _ in pauses) <= 5
    assert all([x[0] for x in node.calls] == ["kill", "start"] for node in run.nodes)


@pytest.mark.parametrize("name, mode, count", [
    ("unreachable", "unreachable", 1), ("silent", "silent", 1), ("full", "full", 1), ("slow", "slow", 1),
    ("half", "half", 1), ("full-server", "full", 3), ("server", "unreachable", 3),
])  # fmt: skip
def test_a_fault_of_links_sets_their_modes(tmp_path, name, mode, count):
    run, hit = _run(tmp_path)
    ((pause, _),) = _driven(name, run, hit)
    assert [node.calls for node in run.nodes[:count]] == [[(mode, pause)]] * count
    assert not any(node.calls for node in run.nodes[count:])


def test_a_server_stops_and_starts_again(tmp_path):
    calls = []
    run, hit = _run(tmp_path, in_thread=lambda work: iter([work()]))
    stop, start = (lambda name=name: calls.append(name) for name in ("stop", "start"))
    run.place.server = SimpleNamespace(stop=stop, start=start)
    _driven("server", run, hit)
    assert calls == ["stop", "start"]


SHAPES = {"words": np.zeros(20, np.uint32)}


@pytest.mark.parametrize("name", ["truncated", "repeated", "foreign"])
def test_objects_under_the_next_names_are_no_messages(tmp_path, name):
    old = packed_message("run", "paris", "life", 5, 320, "d", SHAPES, b"s")
    reasons = set()
    for seed in range(100):
        run, hit = _run(tmp_path, recent_message=lambda dice: old)
        _driven(name, run, hit, seed)
        (node,) = {x.split("/")[2].split(".")[0] for x in run.objects if x.endswith(".msg")}
        for number in (7, 8, 9):
            with pytest.raises(BadObject) as error:
                data = run.objects[message_name(number, node)]
                read_message(data, "run", node, number, SHAPES, b"s")
            reasons.add(str(error.value).split(",")[0].split(" ")[0])
        assert any(x.endswith(".here") for x in run.objects)
    expected = {"truncated": {"truncated:", "signed"}, "repeated": {"the"},
                "foreign": {"unsigned", "of", "other", "not", "truncated:"}}  # fmt: skip
    assert reasons == expected[name]


def test_the_stranger_s_message_is_valid_and_decodes_to_nan(tmp_path):
    coder = CompressorCoder(nodes.compressor(), nodes.first_params(), 0)
    run, _ = _run(tmp_path, words=coder.lengths[-1])
    data = nan_message(run)
    message = read_message(data, "run", "stranger", 7, coder.shapes(7), b"s")
    assert np.isnan(coder.decode(7, message.fields)).any()


@pytest.mark.parametrize("alive, words, outcome", [
    ((True, True), "", HANG), ((False, False), "a different process sends as paris", SILENT),
    ((True, False), "a different error", SILENT), ((True, False), "a different process sends as paris", None),
    ((False, True), "a different process sends as paris", None),
])  # fmt: skip
def test_exactly_one_twin_stops(tmp_path, alive, words, outcome):
    twin = _Node("paris", tmp_path, words)

    def until(condition, hit, what):
        run.nodes[0].alive, twin.alive = alive
        if not condition():
            hit.hang(what)
        yield 0.1

    run, hit = _run(tmp_path, twin_of=lambda node: twin, last_words=lambda node: words, until=until)
    _driven("twin", run, hit)
    assert hit.outcome == outcome and twin.calls == [("start",), ("kill",)]
    assert run.nodes[0].calls == ([] if alive[0] else [("start",)])


def test_a_newcomer_that_does_not_count_is_a_hang(tmp_path):
    guest = _Node("guest-0", tmp_path)

    def until(condition, hit, what):
        if not condition():
            hit.hang(what)
        yield 0.1

    for counted, outcome in ((0, HANG), (3, None)):
        run, hit = _run(tmp_path, newcomer=lambda: guest, counted=lambda name, c=counted: c, until=until)
        guest.alive = False
        guest.end = lambda seconds: None
        _driven("late", run, hit)
        assert hit.outcome == outcome
