"""The tables of `jgc bench bytes` and `jgc bench step` beside the paper's, and those of `jgc bench scaling`."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from jgc.compress import METHODS
from jgc.lab.bench import message_sizes, scaling, step_time


@pytest.fixture(scope="module")
def measured():
    return message_sizes.measure("cifar10_resnet50", 0.001, "imagenet", 1000)


def test_the_papers_model_has_the_papers_size(measured):
    _, rows = measured
    assert {row.method for row in rows} == set(METHODS)
    assert {row.dense for row in rows} == {4 * 25_557_032.0}  # Table VI: 102.2 MB


def test_bytes_are_those_of_what_is_sent(measured):
    by_name = {row.method: row.up for row in measured[1]}
    assert by_name["dense"] == {"worker": {"dense": 4 * 25_557_032.0}}
    topk, lgc = by_name["topk"]["worker"], by_name["lgc_ps"]
    assert topk["values"] == pytest.approx(4 * 0.001 * 25.5e6, rel=0.01)
    assert topk["dense"] == 4 * 7 * 7 * 3 * 64  # the first layer
    assert set(lgc["leader"]) - set(lgc["worker"]) == {"signs", "code"}
    assert lgc["leader"]["positions"] == pytest.approx(topk["positions"], rel=1e-3)
    assert 8 * topk["positions"] / (topk["values"] / 4) == pytest.approx(12.0, abs=0.1)  # bits each, at 0.1 %


def test_the_paper_stands_beside_ours(measured):
    config, rows = measured
    page = message_sizes.markdown(config, rows, 0.001)
    assert "25,557,032 parameters (102.2 MB), 2 nodes" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| lgc_ps")]
    assert "5,709x / 8,616x" in line


def test_table_v_is_in_multiples_of_each_ones_own_dense_step():
    row = step_time.Row("lgc_ps", "top-k", 0.1, 0.4, 2.0)
    page = step_time.markdown(step_time.StepTimes("w", 8, 0.3, (row,), {}), "a machine")
    (line,) = [line for line in page.splitlines() if line.startswith("| lgc_ps | top-k | 0.400")]
    assert line == "| lgc_ps | top-k | 0.400 | 1.6 | 2.00 | 1.60 |"


# --- bytes as nodes are added ---------------------------------------------------------------------------------------

SMALL = {
    "Conv_0": jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.float32),
    "head": jax.ShapeDtypeStruct((8, 301), jnp.float32),
}
VALUES = 3 * 3 * 16 * 16 + 8 * 301


@pytest.fixture(scope="module")
def scaled():
    return scaling.measure(SMALL, (2, 3, 5), 0.01)


def test_a_ring_sends_its_payload_nearly_twice_and_less_than_one_unit_more_a_message(scaled):
    rings = [point for point in scaled if point.scheme.unit]
    assert len(rings) == 3 * 3
    for point in rings:
        messages = 2 * (point.nodes - 1)
        twice = Fraction(messages, point.nodes) * Fraction(point.payload)
        assert 0 <= point.sent - twice < messages * point.scheme.unit
    assert any(point.padding > 0 for point in rings)


def test_all_reduce_and_gather_fill_nothing_up_but_words(scaled):
    for point in scaled:
        if not point.scheme.unit:
            assert point.padding == 0 or (point.scheme.gathers and 0 < point.padding < 8 * (point.nodes - 1))  # words


def test_payloads_are_those_of_the_methods(scaled):
    n = VALUES
    payloads = {(point.scheme.name, point.nodes): point.payload for point in scaled}
    buckets = -(-n // scaling.BUCKET)
    for nodes in (2, 3, 5):
        assert payloads["dense, ring", nodes] == payloads["dense, psum", nodes] == 4 * n
        assert payloads["qsgd, 4 bits, ring", nodes] == 4 * -(-n // 32) * 4 + 4 * buckets  # codes in planes of 32
        assert payloads["gradiveq, ring", nodes] == payloads["gradiveq, psum", nodes] < 4 * n
    assert payloads["qsgd, 4 bits, gather", 2] == payloads["qsgd, 4 bits, ring", 2]


def test_the_page_and_the_picture_show_every_scheme(scaled, tmp_path):
    page = scaling.markdown(scaled, "small", SMALL)
    for scheme in scaling.schemes(0.01):
        assert sum(line.startswith(f"| {scheme.name} |") for line in page.splitlines()) == 1 + 3
    assert f"{VALUES:,} parameters" in page
    payload = next(point.payload for point in scaled if point.scheme.name == "qsgd, 4 bits, gather")
    crossing = int(8 * VALUES / payload) + 1  # (N - 1) P > 2 (N - 1) / N D
    assert f"qsgd, 4 bits, gather from {crossing} nodes on" in page
    scaling.draw(tmp_path / "scaling.png", scaled, "small")
    assert np.ptp(imread(tmp_path / "scaling.png")) > 0
