"""What a step costs, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import PARAMS, every_layout, nodes_of
from hypothesis import given, strategies as st

import jgc
from jgc.compress import dense, silent
from jgc.types import Message, Sent, Wire
from jgc.wire import account

MESSAGES = (
    Message("leader", "up", "code", 10),
    Message("leader", "up", "values", 5),
    Message("worker", "up", "values", 3),
    Message("worker", "down", "values", 7.5),
    Message("leader", "down", "values", 2),
)
messages = st.builds(
    Message,
    st.sampled_from(["leader", "worker"]),
    st.sampled_from(["up", "down"]),
    st.sampled_from(["values", "positions"]),
    st.integers(0, 1000),
)


def test_server_traffic_is_sum_over_nodes():
    assert account.logical_bytes(MESSAGES, nodes=4) == {
        "leader": {"up": {"code": 10, "values": 5}, "down": {"values": 2}},
        "worker": {"up": {"values": 3}, "down": {"values": 7.5}},
        "server": {"up": {"code": 10, "values": 5 + 3 * 3}, "down": {"values": 2 + 3 * 7.5}},
    }
    assert account.step_total(MESSAGES, nodes=4, direction="up") == 24
    assert account.step_total(MESSAGES, nodes=4) == 24 + 24.5


@given(st.lists(messages), st.integers(1, 9))
def test_the_total_is_the_sum_over_nodes(sent, nodes):
    led = any(m.role == "leader" for m in sent)
    expected = sum(m.bytes * (1 if m.role == "leader" else nodes - led) for m in sent)
    assert account.step_total(sent, nodes) == expected
    ways = [account.step_total(sent, nodes, direction) for direction in ("up", "down")]
    assert sum(ways) == account.step_total(sent, nodes)


def test_physical_bytes_are_listed_by_collective():
    sent = [Sent("all-reduce", "dense", 10), Sent("all-reduce", "flag", 7), Sent("all-gather", "x", 2.5)]
    assert account.physical_bytes(sent) == {"all-reduce": 10, "other": 7, "all-gather": 2.5}


def test_compression_ratio_is_of_uplink():
    wire = Wire(MESSAGES, ())
    assert account.sent_by("leader", wire) == 15 and account.sent_by("worker", wire, "down") == 7.5
    assert account.compression_ratio("leader", wire, 150) == 10
    assert account.compression_ratio("worker", wire, 150) == 50
    without = Wire(tuple(m for m in MESSAGES if m.role == "worker"), ())
    assert account.sent_by("leader", without) == account.sent_by("worker", without) == 3
    assert account.compression_ratio("worker", Wire((), ()), 150) == float("inf")


N = sum(x.size for x in jax.tree.leaves(PARAMS) if jnp.issubdtype(x.dtype, jnp.inexact))


@pytest.mark.parametrize("algorithm", ["psum", "ring", "server"])
def test_dense_bytes_are_right_by_hand(algorithm):
    wire = dense(algorithm=algorithm).wire("dense", PARAMS, nodes_of("8 devices"))
    assert [tuple(m) for m in wire.logical] == [("worker", "up", "dense", 4 * N), ("worker", "down", "dense", 4 * N)]
    segment = 4 * -(-N // 8)
    expected = {
        "psum": {"all-reduce": 4 * N * 7 / 4},
        "ring": {"collective-permute": 7 * segment, "all-gather": 7 * segment},
        "server": {"all-gather": 7 * 4 * N},
    }[algorithm]
    assert account.physical_bytes(wire.physical) == {**expected, "other": 4 * 7 / 4}


@every_layout
def test_silent_sends_nothing(layout):
    compressor, nodes = silent(warmup_steps=5), nodes_of(layout)
    wire = compressor.wire("silent", PARAMS, nodes)
    assert wire.logical == wire.once == ()
    assert {s.field for s in wire.physical} <= {"flag"}
    assert account.sent_by("worker", compressor.wire("dense", PARAMS, nodes)) == 4 * N
    step = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, "silent", nodes))
    grads = jgc.place(jax.tree.map(lambda x: np.ones((8, *x.shape), x.dtype), PARAMS), jgc.LOCAL, nodes)
    aggregated, _, info = step(jax.random.key(0), grads, compressor.init(jax.random.key(0), PARAMS, nodes))
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(aggregated))
    assert not np.any(info.elements_sent)
