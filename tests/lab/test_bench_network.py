"""The network benchmark: plans, rows, figures and taking up; with root and iproute2 also a run on real namespaces."""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgc
from jgc import comm
from jgc.lab.bench.network import methods, models, plot, results, tables
from jgc.lab.bench.network.figures import Interval, median, of_cells
from jgc.lab.bench.network.jax_local import build_rounds, take_round
from jgc.lab.bench.network.namespaces import (
    HEADERS,
    _bucket,
    address,
    check_rate,
    inside,
    network,
    remove_leftovers,
    why_not,
)
from jgc.lab.bench.network.plan import plan_of
from jgc.lab.bench.network.rounds import _lacking
from jgc.lab.shared.stopping import go_on, stoppable
from jgc.nodes.axis import on_nodes
from jgc.nodes.layouts import NODE, from_mesh, make_nodes
from jgc.nodes.placement import LOCAL, SHARED
from jgc.training.errors import UserError

SETTINGS = {"model": "resnet18", "batch": 2, "machine": "a machine", "parameters": 1000, "tensors": 3}


def made_up(counts=(2, 4)):
    """Results of two methods of jgc's, a plain one and one of PyTorch's, at two rates."""
    found = {"settings": SETTINGS, "cells": {}, "methods": {}, "versions": {"jax": "jax 0"}}
    for hosts in counts:
        for rate in ("100mbit", "unlimited"):
            for framework in ("jax", "torch"):
                own = results.cell(found, hosts, rate, f"computation_{framework}")
                for _ in range(3):
                    results.add_step(own, "computation", {"seconds": 1.0, "cpu": 0.9})
            for method, sent in (("topk", 500.0), ("twenty_lines", 1000.0), ("ddp_f32", 4000.0)):
                cell = results.cell(found, hosts, rate, method)
                for _ in range(3):
                    results.add_step(cell, "alone", {"seconds": 1.1, "cpu": 1.0})
                    results.add_step(cell, "full", {"seconds": 1.5, "cpu": 1.2})
                tx = (sent + HEADERS) * (hosts - 1) * 3
                counted = {"tx_bytes": tx, "rx_bytes": tx, "tx_packets": 3 * (hosts - 1), "rx_packets": 3 * (hosts - 1)}
                results.add_counts(cell, 3, [dict.fromkeys(counted, 0)] * hosts, [counted] * hosts)
                physical = 490.0 * (hosts - 1) if method == "topk" else None
                found["methods"][f"{hosts}/{method}"] = {"physical": physical, "compiled": physical, "audit": ""}
    return found


# --- what a command line asks for ------------------------------------------------------------------------------------


def test_plan_of():
    plan = plan_of(["2,4"], ["1Gbit", "unlimited"], ["topk", "ddp_f32"], 20, "resnet18", 2)
    assert plan.hosts == (2, 4) and plan.rates == ("1gbit", "unlimited") and plan.methods == ("topk", "ddp_f32")
    assert [plan_of(["2"], ["1gbit"], [], 20, name).batch for name in ("resnet18", "ptb_gpt")] == [2, 8]


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"hosts": ["1"]}, "--hosts"), ({"hosts": ["many"]}, "many"), ({"rates": ["fast"]}, "'fast'"),
     ({"methods": ["topkk"]}, "did you mean topk"), ({"methods": ["topk:alfa=1"]}, "alpha"),
     ({"methods": ["topk:alpha=x"]}, "'x'"), ({"methods": ["topk:alpha=5"]}, "alpha"),
     ({"delay_ms": -1}, "--delay-ms must be from 0 to 1000, got -1"), ({"steps": 0}, "--steps"),
     ({"congestion": "fast"}, "cubic"), ({"model": "vgg"}, "'vgg'"), ({"methods": ["topk:every=0"]}, "at least 1 step"),
     ({"methods": ["diloco"]}, "diloco:every=30"), ({"methods": ["ddp_f32:every=30"]}, "no local steps"),
     ({"methods": ["dgc:every=30"]}, "owns a momentum"), ({"methods": ["sparseloco:every=30:alfa=1"]}, "alpha"),
     ({"methods": ["gradiveq:phase=code"]}, "dense, sampling, compressed"), ({"methods": ["topk:phase="]}, "must be"),
     ({"methods": ["topk:phase=dense:every=3"]}, "last phase")],
)  # fmt: skip
def test_wrong_plan_is_one_line(changed, said):
    good = {"hosts": ["2"], "rates": ["1gbit"], "methods": [], "steps": 20, "model": "resnet18", "batch": 2}
    with pytest.raises(UserError) as caught:
        plan_of(**(good | changed))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_default_rows():
    from jgc import compress

    at_four = [row.name for row in methods.rows([], 4, torch=True)]
    assert set(compress.METHODS) < set(at_four) and set(methods.PLAIN_TORCH) < set(at_four)
    assert len(methods.rows([], 2, torch=True)) < len(at_four)
    assert not set(methods.PLAIN_TORCH) & {row.name for row in methods.rows([], 4, torch=False)}
    of_gpts = methods.rows([], 4, torch=True, text=True)
    assert [row.every for row in of_gpts[:3]] == [30] * 3 and {row.every for row in of_gpts[3:]} == {None}


def test_a_row_of_an_earlier_phase():
    from jgc import compress

    ring = "gradiveq:phase=sampling:algorithm=ring"
    compressor = compress.build(methods.settings(ring))
    assert methods.phase_of(ring, compressor) == compressor.schedule[1]
    assert methods.phase_of("gradiveq:algorithm=ring", compressor) == compressor.schedule[-1]
    assert methods.settings(ring).algorithm == "ring"


def test_bucket_size():
    assert check_rate("Unlimited") == "unlimited"
    words = _bucket("10gbit")
    assert float(words[words.index("burst") + 1]) == 10e9 / 8 * 0.0005
    assert int(_bucket("1mbit")[4]) >= 10 * 1514


# --- taking up -------------------------------------------------------------------------------------------------------


def test_results_round_trip(tmp_path):
    found = made_up()
    results.save(tmp_path, found)
    assert results.load(tmp_path, {"model": "resnet18", "batch": 2}) == {**found, "session": 1}
    with pytest.raises(UserError, match="batch 2, not 8"):
        results.load(tmp_path, {"model": "resnet18", "batch": 8})


def test_only_missing_steps_run():
    found, plan = made_up(), plan_of(["2"], ["100mbit"], ["topk"], 3, "resnet18", 2)
    row = methods.rows(["topk"], 2, torch=False)[0]
    assert results.missing(found, 2, "100mbit", "topk", 5) == 2
    assert not _lacking(found, 2, "100mbit", row, plan)
    assert _lacking(found, 2, "100mbit", row, plan._replace(steps=4))
    assert _lacking(found, 2, "1gbit", row, plan) and _lacking(found, 8, "100mbit", row, plan)


def test_slow_method_takes_few_steps():
    found, plan = made_up(), plan_of(["2"], ["100mbit"], ["topk"], 20, "resnet18", 2)._replace(slow_steps=3)
    row = methods.rows(["topk"], 2, torch=False)[0]
    assert _lacking(found, 2, "100mbit", row, plan)
    found["cells"]["2/100mbit/topk"]["tx_bytes"] = 3 * 100e6  # 24 seconds a step
    assert not _lacking(found, 2, "100mbit", row, plan)


def test_round_with_many_bytes_is_slow():
    found, plan = made_up(), plan_of(["2"], ["100mbit"], ["topk:every=10"], 20, "resnet18", 2)._replace(slow_steps=3)
    row = methods.rows(["topk:every=10"], 2, torch=False)[0]
    cell = found["cells"]["2/100mbit/topk:every=10"] = {**found["cells"]["2/100mbit/topk"], "method": row.name}
    cell["tx_bytes"] = 3 * 1e6  # a step's: 0.08 seconds, a round's: 0.8
    assert _lacking(found, 2, "100mbit", row, plan)
    cell["tx_bytes"] = 3 * 2e6
    assert not _lacking(found, 2, "100mbit", row, plan)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_parts_of_step_add_up():
    row = of_cells(made_up(), 4, "100mbit")[0]
    assert row.computation + row.compression + row.communication == pytest.approx(row.step.middle)
    assert row.added.middle == pytest.approx(0.5) and row.cpu == pytest.approx(0.3)
    assert row.sent == pytest.approx(1500) and row.headers == pytest.approx(3 * HEADERS)
    assert row.floor == pytest.approx((1500 + 3 * HEADERS) / 12.5e6)
    assert row.of_twenty == pytest.approx(0.5)
    assert of_cells(made_up(), 4, "unlimited")[0].floor is None


def test_interval_shrinks_with_steps():
    random = np.random.default_rng(1)
    few, many = (median(list(random.normal(1.0, 0.1, n)), [0.5] * 10) for n in (5, 500))
    for one in (few, many):
        assert one.low <= one.middle <= one.high
    assert many.high - many.low < few.high - few.low
    assert median([2.0]) == Interval(2.0, 2.0, 2.0)


def test_page_shows_every_row(tmp_path):
    found = made_up()
    found["methods"]["4/topk"]["audit"] = "Wire.physical 1 B, the compiled program 2 B"
    found["methods"]["4/klt"] = {"error": "cannot build klt"}
    pictures = plot.draw(tmp_path, found)
    page = tables.page(found, pictures)
    assert [p.name for p in pictures if p.is_file()] == ["added-2-hosts.png", "added-4-hosts.png"]
    assert page.count("## ") == 6 and page.count("| PyTorch DDP f32 |") == 3 * 4 + 1
    assert "(differs)" in page and "cannot build klt" in page
    assert "3.00 times" in page and "1.50 times" in page  # a gather's and a ring's growth from 2 to 4 hosts


def test_figures_of_rounds():
    found = made_up(counts=(4,))
    for name, seconds in (("no_exchange:every=10", 0.8), ("topk:every=10", 0.84)):
        cell = results.cell(found, 4, "100mbit", name)
        for _ in range(5):
            results.add_step(cell, "full", {"seconds": seconds, "cpu": 0.5})
        counted = dict.fromkeys(("tx_bytes", "rx_bytes", "tx_packets", "rx_packets"), 0)
        results.add_counts(cell, 50, [counted] * 4, [{**counted, "tx_bytes": 6000}] * 4)
    found["methods"]["4/topk:every=10"] = {"physical": 1000.0, "compiled": 1000.0, "collectives": {"all-gather 8": 20}}
    found["framing"] = {"4": {"all-gather 8": 7.0}}
    row = next(row for row in of_cells(found, 4, "100mbit") if row.method == "topk:every=10")
    assert row.added.middle == pytest.approx(0.04) and row.over.middle == pytest.approx(1.05)  # of the rounds without
    assert (row.steps, row.physical, row.framing, row.sent) == (5, 100.0, 14.0, 120.0)  # of a step
    assert row.each.middle == pytest.approx(0.84 / (4 * 2)) and row.sent_each == 60.0  # 2 images a host
    assert row.compression is None
    one = next(row for row in of_cells(found, 4, "100mbit") if row.method == "topk")
    assert one.over.middle == 1.5 and one.computation == 1.0
    page = tables.page(found, [])
    assert "| jgc topk, H = 10 | 5 | 105000.0 [105000.0, 105000.0] | 1.050 [1.050, 1.050] | 60 |" in page
    told = next(x for x in tables.summary(found) if x["method"] == "topk:every=10")
    assert told["seconds_an_image"] == row.each and told["bytes_an_image"] == 60.0


# --- local steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparseloco:every=3", "no_exchange:every=3"])
def test_rounds_are_those_of_the_library(name):
    nodes = make_nodes(2, devices=jax.devices()[:2])
    params = jgc.place({"w": jnp.linspace(-1, 1, 80).reshape(16, 5)}, jgc.SHARED, nodes)
    batches = [np.random.default_rng(i).normal(size=(2, 4, 16)).astype(np.float32) for i in range(6)]

    def loss(params, x):
        return jnp.mean((x @ params["w"] - x[:, :5]) ** 2)

    placed = [jgc.place(x, jgc.BATCH, nodes) for x in batches]
    rounds, order = build_rounds(name, nodes, params, loss, placed[0]), iter(placed)
    if rounds.exchange is not None:
        assert rounds.audit == "" and rounds.physical == rounds.compiled > 0
    init, step = methods.local_of(name, nodes).make_step(loss)
    state = init(jax.random.key(0), params)
    for i in range(6):
        state, _ = step(state, placed[i])
        if (i + 1) % rounds.every == 0:
            rounds = take_round(rounds, lambda: next(order), i)
    np.testing.assert_array_equal(rounds.arrays.own["w"], state.own["w"])
    np.testing.assert_array_equal(rounds.arrays.params["w"], state.params["w"])
    assert np.any(np.asarray(state.own["w"][0]) != np.asarray(params["w"]))


@pytest.mark.parametrize("name", ["ptb_gpt", "convnet5"])
def test_models_agree_between_frameworks(name):
    """The same number of parameters, and with the same parameters the same logits of a GPT."""
    torch = pytest.importorskip("torch")
    from jgc.lab.bench.network.torch_model import model_of_task

    task, random = models.task_named(name), np.random.default_rng(0)
    shapes, module = models.shapes_of(task), model_of_task(task)
    leaves = list(module.parameters())
    assert sum(p.numel() for p in leaves) == sum(x.size for x in jax.tree.leaves(shapes))
    assert len(leaves) == len(jax.tree.leaves(shapes))
    if not task.window:
        return
    params = jax.tree.map(lambda x: 0.1 * random.standard_normal(x.shape, np.float32), shapes)
    blocks = {f"block{i:02d}": f"blocks.{i - 1}" for i in range(1, 5)}
    theirs = dict(module.named_parameters())
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        words = [blocks.get(key.key, key.key) for key in path if key.key not in ("attention", "mlp")][:-1]
        with torch.no_grad():
            theirs[".".join([*words, "weight"])].copy_(torch.from_numpy(x.T if path[-1].key == "kernel" else x))
    tokens, _ = models.random_batch(task, 2, random)
    ours = models.module_of(task).apply({"params": params}, tokens)
    np.testing.assert_allclose(module(torch.from_numpy(tokens).long()).detach().numpy(), ours, rtol=2e-3, atol=2e-3)


# --- collectives replaced by local copies -----------------------------------------------------------------------------


def test_local_copies_keep_shapes_and_account():
    mesh = jax.sharding.Mesh(jax.devices()[:1], (NODE,))
    nodes = from_mesh(mesh, (NODE,))._replace(count=4)

    def one(x):
        return comm.all_gather(x, nodes, "a"), comm.pmean(x, nodes, "b"), comm.ring_mean(x, nodes, "c")

    with comm.local_copies(), comm.ledger() as sent:
        gathered, _, ring = on_nodes(one, nodes, (LOCAL,), SHARED)(jnp.arange(6.0)[None])
    assert gathered.shape == (4, 6) and ring.shape == (6,)
    np.testing.assert_array_equal(gathered, np.tile(np.arange(6.0), (4, 1)))
    assert sum(s.bytes for s in sent if s.field == "a") == 3 * 24 and sum(s.bytes for s in sent if s.field == "b") == 36


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit),
                                               (signal.SIGINT, KeyboardInterrupt)])  # fmt: skip
def test_lost_signal_raises_again(number, raised, request):
    request.addfinalizer(functools.partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored
    before = signal.getsignal(number)
    with pytest.raises(raised), stoppable():
        go_on()
        with contextlib.suppress(BaseException):  # as a callback of the garbage collector does
            signal.raise_signal(number)
        go_on()
    assert signal.getsignal(number) is before


def test_second_signal_is_ignored():
    cleaned = False
    with pytest.raises(KeyboardInterrupt), stoppable():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            cleaned = True
    assert cleaned


@pytest.mark.parametrize("content", ["[]", "{}", "no json", '{"settings": [], "cells": {}, "methods": {}}'])
def test_wrong_results_file_is_one_line(content, tmp_path):
    (tmp_path / results.NAME).write_text(content)
    with pytest.raises(UserError, match="is not a file of bench network"):
        results.load(tmp_path, {})


def test_computation_of_own_sessions():
    found = made_up()
    own, cell = (found["cells"][f"2/100mbit/{name}"] for name in ("computation_jax", "topk"))
    for _ in range(9):
        results.add_step(own, "computation", {"seconds": 0.5, "cpu": 0.4}, session=1)
    row = next(row for row in of_cells(found, 2, "100mbit") if row.method == "topk")
    assert row.computation == 1.0 and row.added.middle == 0.5 and row.cpu == pytest.approx(0.3)
    for _ in range(3):
        results.add_step(cell, "full", {"seconds": 1.0, "cpu": 0.7}, session=1)
    row = next(row for row in of_cells(found, 2, "100mbit") if row.method == "topk")
    assert row.computation == 0.5 and results.sessions(cell, "full") == [0, 0, 0, 1, 1, 1]


def test_interval_draws_blocks():
    slow_and_fast = [1.0, 2.0] * 4
    within, between = median([x for x in slow_and_fast for _ in range(4)]), median(slow_and_fast * 4)
    assert (between.high - between.low) < (within.high - within.low) == 1.0
    assert median([1.0, 1.0, 1.0, 1.0, 3.0])[1:] == (1.0, 3.0)  # the last block is a shorter one


def test_framing_sums_collectives():
    found = made_up()
    found["methods"]["2/topk"]["collectives"] = {"all-reduce 4": 2, "all-gather 488": 1}
    assert of_cells(found, 2, "100mbit")[0].framing is None  # not measured
    found["framing"] = {"2": {"all-reduce 4": 10.0, "all-gather 488": 7.0}}
    row = next(row for row in of_cells(found, 2, "100mbit") if row.method == "topk")
    assert row.framing == 27.0 and row.sent == 500.0
    assert "(outside 5 %)" not in tables.bytes_table([row])  # 473 B of 490
    assert "(outside 5 %)" in tables.bytes_table([row._replace(framing=100.0)])
    assert next(row for row in of_cells(found, 4, "100mbit") if row.method == "topk").framing is None


# --- the real thing --------------------------------------------------------------------------------------------------

needs_namespaces = pytest.mark.skipif(
    shutil.which("ip") is None or os.geteuid() != 0 or why_not() is not None,
    reason="needs root, iproute2 and the right to make network namespaces",
)


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "jgc", "bench", "network", "--short", "--run-dir", str(folder)]


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"jgc{pid}-")]


@pytest.mark.skipif(os.geteuid() == 0, reason="says what root is needed for")
def test_needs_root(tmp_path):
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1 and "root" in done.stderr


@needs_namespaces
@pytest.mark.slow
def test_delayed_packets_take_as_long_as_asked(tmp_path):
    """A TCP connection needs a packet there and one back."""
    serve = "import socket; s = socket.create_server(('10.77.0.1', 9999)); print('up', flush=True); s.accept()"
    connect = ("import socket, time; t = time.monotonic(); socket.create_connection(('10.77.0.1', 9999), 10); "
               "print(time.monotonic() - t)")  # fmt: skip
    with network(2, tmp_path, delay=0.1) as net:
        with subprocess.Popen(net.command(0, [sys.executable, "-c", serve]), stdout=subprocess.PIPE) as server:
            assert server.stdout.readline() == b"up\n"
            done = subprocess.run(net.command(1, [sys.executable, "-c", connect]), capture_output=True, check=True)
        assert float(done.stdout) >= 0.2
    assert not namespaces(os.getpid())


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cubic", "reno"])
def test_hosts_have_the_congestion_control_that_was_asked_for(name, tmp_path):
    with network(2, tmp_path, congestion=name) as net:
        with inside(net.name(0)):
            server = socket.create_server((address(0), 9999))
        with inside(net.name(1)):
            client = socket.create_connection((address(0), 9999), 10)
        with server, client, server.accept()[0] as accepted:
            for end in (client, accepted):
                got = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert got.rstrip(b"\0").decode() == name


@needs_namespaces
@pytest.mark.slow
def test_short_run_matches_wire(tmp_path):
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert not namespaces(process.pid)
    found = json.loads((tmp_path / results.NAME).read_text())
    told = found["methods"]["2/topk"]
    assert told["audit"] == "" and told["physical"] == told["compiled"] > 0
    for hosts, rate in tables.cells_of(found):
        for row in of_cells(found, hosts, rate):
            assert row.sent > 0.95 * (row.physical or 0) and row.step.middle > 0
            if row.physical:  # 1.000 as a rule; a lost packet is sent again
                assert row.framing and (row.sent - row.framing) / row.physical == pytest.approx(1, abs=0.05)
    assert (tmp_path / "network.md").is_file() and (tmp_path / "added-2-hosts.png").is_file()
    again = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "compiling" not in again.stderr


def heed_signals() -> None:
    """What a shell starts in the background ignores Ctrl-C, what nohup starts a closed terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_stopped_run_cleans_up(tmp_path, number):
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "TMPDIR": str(tmp_path)},
                               preexec_fn=heed_signals)  # fmt: skip
    while len(namespaces(process.pid)) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate()
    if number == signal.SIGKILL:
        remove_leftovers()
    assert process.returncode != 0, said
    assert not namespaces(process.pid)
