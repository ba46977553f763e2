"""Sizes of position codes: against exact counts, against each other, and against an encoder's real output."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgc.training.steps.positions import deflate_bytes, entropy_bound_bits
from jgc.wire.elias_fano import elias_fano_bits

N, K = 2_400_000, 2_400


@st.composite
def subsets(draw):
    n = draw(st.integers(1, 500))
    return n, np.array(sorted(draw(st.sets(st.integers(0, n - 1), max_size=50))), dtype=np.int64)


def elias_fano(positions, n):
    """The code itself, as a list of bits: what `elias_fano_bits` must give the length of."""
    low = math.floor(math.log2(n / len(positions)) + 1e-9)
    bits = [int(p) >> i & 1 for p in positions for i in range(low)]
    for high in range((n - 1 >> low) + 1):
        bits += [1] * sum(int(p) >> low == high for p in positions) + [0]
    return bits


@settings(deadline=None)
@given(st.integers(0, 3000), st.data())
def test_entropy_bound_is_the_logarithm_of_the_count(n, data):
    k = data.draw(st.integers(0, n))
    assert entropy_bound_bits(n, k) == pytest.approx(math.log2(math.comb(n, k)), abs=1e-8)


def test_entropy_bound_of_a_large_vector():
    assert entropy_bound_bits(2**31, 3) == pytest.approx(math.log2(math.comb(2**31, 3)), abs=1e-4)
    assert entropy_bound_bits(2**31, 0) == entropy_bound_bits(2**31, 2**31) == 0


@settings(deadline=None)
@given(subsets().filter(lambda case: len(case[1])))
def test_elias_fano_size_is_that_of_the_code(case):
    n, positions = case
    assert elias_fano_bits(n, len(positions)) == len(elias_fano(positions, n))


@settings(deadline=None)
@given(st.integers(1, 10**9), st.data())
def test_elias_fano_stays_within_two_bits_of_the_bound(n, data):
    k = data.draw(st.integers(1, n))
    bound = entropy_bound_bits(n, k)
    assert bound - 1e-4 <= elias_fano_bits(n, k) <= bound + 2 * k + 1 + 1e-4


@pytest.mark.parametrize(("n", "k", "bits"), [
    (1024, 8, 8 * 7 + 8 + 8), (1, 1, 2), (7, 7, 14), (1000, 3, 3 * 8 + 3 + 4), (8, 0, 0), (0, 0, 0)])
def test_elias_fano_by_hand(n, k, bits):
    assert elias_fano_bits(n, k) == bits


def test_bits_a_position_at_one_per_mille():
    """The figures of the design notes (fact 10), for random positions."""
    p = np.sort(np.random.default_rng(0).choice(N, K, replace=False))
    assert entropy_bound_bits(N, K) / K == pytest.approx(11.4, abs=0.05)
    assert elias_fano_bits(N, K) / K == pytest.approx(12.0, abs=0.05)
    assert deflate_bytes(p, N) * 8 / K == pytest.approx(25, abs=1)


def test_deflate_is_raw_over_int32_little_endian():
    p = np.flatnonzero(np.random.default_rng(0).random(40_000) < 0.05)
    packed = zlib.compress(p.astype("<i4").tobytes(), 9)
    assert deflate_bytes(p, 40_000) == len(packed) - 6  # zlib adds a header of 2 and a checksum of 4
    assert deflate_bytes(list(p), 40_000) == deflate_bytes(p, 40_000)


def test_no_positions_cost_next_to_nothing():
    assert deflate_bytes([], 5) == 2


@pytest.mark.parametrize(("call", "message"), [
    (lambda: entropy_bound_bits(3, 4), "k=4, n=3"), (lambda: elias_fano_bits(3, 4), "k=4, n=3"),
    (lambda: elias_fano_bits(3, -1), "k=-1"),
    (lambda: deflate_bytes([2, 1], 9), "increasing"), (lambda: deflate_bytes([1, 1], 9), "increasing"),
    (lambda: deflate_bytes([8, 9], 9), r"\[0, 9\)"), (lambda: deflate_bytes([-1, 3], 9), r"\[0, 9\)"),
    (lambda: deflate_bytes([1], 2**31 + 1), "2147483649"),
    (lambda: deflate_bytes([0.5], 9), "float64"),
    (lambda: deflate_bytes(np.ones((2, 2), int), 9), r"\[2, 2\]")])
def test_wrong_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
