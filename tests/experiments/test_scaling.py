"""`experiments scaling`: payloads, padding and crossings of a small model, and its page."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from experiments import scaling

SMALL = {
    "Conv_0": jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.float32),
    "head": jax.ShapeDtypeStruct((8, 301), jnp.float32),
}
VALUES = 3 * 3 * 16 * 16 + 8 * 301


@pytest.fixture(scope="module")
def scaled():
    return scaling.measure(SMALL, (2, 3, 5), 0.01)


def test_ring_padding_is_below_one_unit(scaled):
    rings = [point for point in scaled if point.scheme.unit]
    assert len(rings) == 3 * 3
    for point in rings:
        messages = 2 * (point.nodes - 1)
        twice = Fraction(messages, point.nodes) * Fraction(point.payload)
        assert 0 <= point.sent - twice < messages * point.scheme.unit
    assert any(point.padding > 0 for point in rings)


def test_no_padding_without_ring(scaled):
    for point in scaled:
        if not point.scheme.unit:
            assert point.padding == 0 or (point.scheme.gathers and 0 < point.padding < 8 * (point.nodes - 1))  # words


def test_payloads_by_hand(scaled):
    n = VALUES
    payloads = {(point.scheme.name, point.nodes): point.payload for point in scaled}
    buckets = -(-n // scaling.BUCKET)
    for nodes in (2, 3, 5):
        assert payloads["uncompressed, ring", nodes] == payloads["uncompressed, all-reduce", nodes] == 4 * n
        assert payloads["QSGD, 4 bits, ring", nodes] == 4 * -(-n // 32) * 4 + 4 * buckets  # codes in planes of 32
        assert payloads["GradiVeQ, ring", nodes] == payloads["GradiVeQ, all-reduce", nodes] < 4 * n
    assert payloads["QSGD, 4 bits, gather", 2] == payloads["QSGD, 4 bits, ring", 2]


def test_page_shows_every_scheme(scaled, tmp_path):
    page = scaling.markdown(scaled, "small", SMALL)
    for scheme in scaling.schemes(0.01):
        assert sum(line.startswith(f"| {scheme.name} |") for line in page.splitlines()) == 1 + 3
    assert f"{VALUES:,} parameters" in page
    payload = next(point.payload for point in scaled if point.scheme.name == "QSGD, 4 bits, gather")
    crossing = int(8 * VALUES / payload) + 1  # (N - 1) P > 2 (N - 1) / N D
    assert f"QSGD, 4 bits, gather from {crossing} nodes on" in page
    scaling.draw(tmp_path / "scaling.png", scaled, "small")
    assert np.ptp(imread(tmp_path / "scaling.png")) > 0
