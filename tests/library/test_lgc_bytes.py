"""LGC with a parameter server: what each role sends, counted by hand."""

import pytest
from contract import some_by_default
from lgc_helpers import LAYERS, MU, NO_CODE, PARAMS, SHORT, K, nodes_of

from jgc.compress import lgc_ps
from jgc.wire.account import physical_bytes

ENCODER, DECODER = 4 * 172_996, 4 * 43_734  # bytes of the weights
POSITIONS, WHERE = 4 * 5, 4 * 1  # Elias-Fano: 25 of 250 take 75 + 25 + 32 bits, 5 of 25 10 + 5 + 7, in whole words
SIGNS, CODE, MEANS, INNOVATIONS = 4, 4 * 8, 4 * LAYERS, 4 * 5  # 25 bits in whole words


@pytest.mark.parametrize("settings, phase, expected", [
    ({}, "dense", {"worker": (4 * 250, 4 * 250)}),
    ({}, "top-k", {
        "leader": (POSITIONS + 4 * MU, 4 * MU),
        "worker": (4 * MU, POSITIONS + 4 * MU),
    }),
    ({}, "compressed", {
        "leader": (POSITIONS + SIGNS + CODE + MEANS + INNOVATIONS + WHERE, 4 * MU),
        "worker": (MEANS + INNOVATIONS + WHERE, POSITIONS + SIGNS + 4 * MU + CODE + MEANS),
    }),
    ({"feedback": "paper", "send_means": False, "code_dtype": "float16"}, "compressed", {
        "leader": (POSITIONS + SIGNS + CODE // 2 + MEANS + INNOVATIONS + WHERE, 4 * MU),  # scales, one a layer
        "worker": (INNOVATIONS + WHERE, POSITIONS + SIGNS + 4 * MU),
    }),
    ({"code_dtype": "8bit"}, "compressed", {  # codes in groups of 32, and two scales
        "leader": (POSITIONS + SIGNS + 40 + MEANS + INNOVATIONS + WHERE, 4 * MU),
        "worker": (MEANS + INNOVATIONS + WHERE, POSITIONS + SIGNS + 4 * MU + 40 + MEANS),
    }),
    (NO_CODE, "compressed", {
        "leader": (POSITIONS + SIGNS + MEANS + INNOVATIONS + WHERE, 4 * MU),
        "worker": (MEANS + INNOVATIONS + WHERE, POSITIONS + SIGNS + 4 * MU),
    }),
    ({"positions": "own"}, "compressed", {
        "leader": (POSITIONS + SIGNS + CODE + MEANS + INNOVATIONS + WHERE, K * (4 * MU + POSITIONS)),
        "worker": (POSITIONS + SIGNS + MEANS + INNOVATIONS + WHERE, K * (4 * MU + POSITIONS) + CODE),
    }),
    ({"innovation_by": "layer", "innovation": 0.01}, "compressed", {  # at least one of each layer
        "leader": (POSITIONS + SIGNS + CODE + MEANS + 4 * 3 + 4, 4 * MU),
        "worker": (MEANS + 4 * 3 + 4, POSITIONS + SIGNS + 4 * MU + CODE + MEANS),
    }),
    ({"innovation": 0.00001}, "compressed", {  # Section V-B-1: of 25 values one, because there is no less
        "leader": (POSITIONS + SIGNS + CODE + MEANS + 4 + 4, 4 * MU),
        "worker": (MEANS + 4 + 4, POSITIONS + SIGNS + 4 * MU + CODE + MEANS),
    }),
    ({"positions": "own"}, "top-k", {"worker": (POSITIONS + 4 * MU, K * (POSITIONS + 4 * MU))}),
])  # fmt: skip
def test_logical_bytes_are_right_by_hand(settings, phase, expected):
    wire = lgc_ps(**{**SHORT, **settings}).wire(phase, PARAMS, nodes_of())
    got: dict = {}
    for m in wire.logical:
        up, down = got.get(m.role, (0, 0))
        got[m.role] = (up + m.bytes, down) if m.direction == "up" else (up, down + m.bytes)
    assert got == expected


def test_physical_bytes_are_right_by_hand():
    wire = lgc_ps(**SHORT).wire("compressed", PARAMS, nodes_of("devices"))
    flag = K - 1  # a byte to each other node
    broadcast = 4 * (5 + 1 + 8)  # positions, signs and code in whole words
    gathered = 4 * (5 + 1 + 3)  # innovations, their positions, means
    assert physical_bytes(wire.physical) == {
        "other": flag,
        "all-reduce": broadcast * 2 * (K - 1) / K,
        "all-gather": gathered * (K - 1),
    }


ONCE = [
    ({}, ENCODER + DECODER, DECODER),
    ({"feedback": "paper"}, ENCODER, 0),
    (NO_CODE, 0, 0),
    ({"leader": "rotating"}, ENCODER + DECODER, ENCODER + DECODER),
    ({"leader": "rotating", "feedback": "paper"}, ENCODER, ENCODER),
]


@pytest.mark.parametrize("settings, leader, worker", some_by_default(ONCE, [ONCE[0], ONCE[4]]))
def test_weights_are_sent_once_to_nodes_that_need_them(paper_filters, settings, leader, worker):
    compressor = lgc_ps(**{**SHORT, **settings})
    once = compressor.wire("compressed", PARAMS, nodes_of()).once
    assert {m.direction for m in once} == ({"down"} if leader else set())
    assert {role: sum(m.bytes for m in once if m.role == role) for role in ("leader", "worker")} == {
        "leader": leader,
        "worker": worker,
    }
    assert compressor.wire("dense", PARAMS, nodes_of()).once == compressor.wire("top-k", PARAMS, nodes_of()).once == ()
