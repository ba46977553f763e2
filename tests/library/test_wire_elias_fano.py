"""The code of positions: all of them come back, bit by bit as defined, in as many words as were promised."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgc.training.steps.positions import entropy_bound_bits
from jgc.wire.elias_fano import decode, elias_fano_bits, encode, words

LARGEST = 2**31 - 1


@st.composite
def ascending(draw, most=LARGEST, unique=False):
    """n and some positions out of it, sorted; unless `unique`, some may be there several times."""
    n = draw(st.one_of(st.integers(1, 70), st.integers(1, most)))
    ends = st.sampled_from([0, n - 1, n // 2])
    values = draw(st.lists(st.one_of(ends, st.integers(0, n - 1)), max_size=min(n, 80), unique=unique))
    return n, np.array(sorted(values), np.int32)


def by_definition(positions, n):
    """The code as a list of bits: the low parts, then for each high part a one per position and a zero to end it."""
    k = len(positions)
    low = next(low for low in range(32) if n < k << low + 1)
    bits = [int(p) >> j & 1 for p in positions for j in range(low)]
    for high in range((n - 1 >> low) + 1):
        bits += [1] * sum(int(p) >> low == high for p in positions) + [0]
    return bits


def there_and_back(positions, n):
    """The code of positions, and what comes back."""
    k = len(positions)

    @jax.jit
    def run(positions):
        code = encode(positions, n)
        return code, decode(code, n, k)

    code, back = run(jnp.asarray(positions, jnp.int32))
    assert code.dtype == jnp.uint32 and code.shape == (words(n, k),)
    assert back.dtype == jnp.int32 and back.shape == (k,)
    return np.asarray(code), np.asarray(back)


@given(ascending())
def test_all_positions_roundtrip(case):
    n, positions = case
    assert np.array_equal(there_and_back(positions, n)[1], positions)


@pytest.mark.slow
@given(ascending(most=2000))
def test_bits_match_definition(case):
    n, positions = case
    bits = by_definition(positions, n) if len(positions) else []
    code, _ = there_and_back(positions, n)
    unpacked = np.unpackbits(code.astype("<u4").view(np.uint8), bitorder="little")
    assert unpacked.tolist() == bits + [0] * (-len(bits) % 32)


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.data())
def test_random_subsets_roundtrip(n, seed, data):
    k = data.draw(st.integers(0, n))
    positions = np.sort(np.random.default_rng(seed).choice(n, k, replace=False))
    assert np.array_equal(there_and_back(positions, n)[1], positions)


@pytest.mark.parametrize(("n", "positions"), [
    (0, []), (1, []), (LARGEST, []), (1, [0]), (2, [0]), (2, [1]), (LARGEST, [0]), (LARGEST, [LARGEST - 1]),
    (2**31, [LARGEST]), (2**31, [0, LARGEST]), (LARGEST, [0, 1, LARGEST - 2, LARGEST - 1]), (97, range(97)),
    (128, range(128)), (1000, range(900, 1000)), (1000, range(600)), (33, range(1, 33)), (LARGEST, [2**30] * 33)])
def test_ends_and_full_vectors(n, positions):
    assert np.array_equal(there_and_back(list(positions), n)[1], list(positions))


@pytest.mark.parametrize("at", [0, 31, 32, 499, 999])
def test_a_position_may_fill_the_rest_of_the_buffer(at):
    positions = np.sort(np.r_[np.arange(3), np.full(200, at)])
    assert np.array_equal(there_and_back(positions, 1000)[1], positions)


def test_a_million_values_at_many_shares():
    rng = np.random.default_rng(0)
    for k in (1, 31, 32, 33, 1000, 40_000):
        positions = np.sort(rng.choice(1_000_000, k, replace=False))
        assert np.array_equal(there_and_back(positions, 1_000_000)[1], positions)


def test_size_at_one_per_mille():
    n, k = 2_400_000, 2_400
    assert words(n, k) == 897 == -(-(9 * k + k + -(-n // 2**9)) // 32)
    assert 32 * words(n, k) / k == pytest.approx(12.0, abs=0.05)
    assert entropy_bound_bits(n, k) / k == pytest.approx(11.4, abs=0.05)


@given(st.integers(0, 2**31), st.data())
def test_size_is_that_of_the_account_in_whole_words(n, data):
    k = data.draw(st.one_of(st.integers(0, min(n, 100)), st.integers(0, n)))
    assert 0 <= 32 * words(n, k) - elias_fano_bits(n, k) < 32


@given(st.integers(1, 2**31), st.data())
def test_no_other_number_of_low_bits_is_smaller(n, data):
    k = data.draw(st.one_of(st.integers(1, min(n, 100)), st.integers(1, n)))
    assert elias_fano_bits(n, k) == min(k * low + k + -(-n >> low) for low in range(32))


@pytest.mark.parametrize("n", [4096, 2**31])
def test_vmap_equals_single_rows(n):
    rng = np.random.default_rng(0)
    rows = jnp.asarray(np.sort(rng.integers(0, n, (8, 50)), axis=1), jnp.int32)
    codes = jax.jit(jax.vmap(partial(encode, n=n)))(rows)
    assert np.array_equal(codes, np.stack([encode(row, n) for row in rows]))
    assert np.array_equal(jax.jit(jax.vmap(partial(decode, n=n, k=50)))(codes), rows)


def test_no_array_of_full_size_is_allocated():
    n, k = 2**31, 1000
    jaxpr = jax.make_jaxpr(lambda p: decode(encode(p, n), n, k))(jnp.arange(k))
    assert max(sizes(jaxpr.jaxpr)) <= 10 * k


def sizes(jaxpr):
    """Numbers in all arrays of a traced function."""
    for equation in jaxpr.eqns:
        yield from (x.aval.size for x in equation.outvars)
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from sizes(value.jaxpr)


@pytest.mark.parametrize("k", [LARGEST, 2**30, 2**29 + 1, 2**28])
def test_the_largest_vectors_can_be_traced(k):
    code = jax.eval_shape(partial(encode, n=LARGEST), jax.ShapeDtypeStruct((k,), jnp.int32))
    assert code.size == words(LARGEST, k)
    assert jax.eval_shape(partial(decode, n=LARGEST, k=k), code).shape == (k,)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: words(3, 4), "k=4, n=3"), (lambda: words(2**31 + 1, 1), "2147483649"),
    (lambda: encode(jnp.arange(4), 3), "k=4, n=3"),
    (lambda: decode(jnp.zeros(2, jnp.uint32), 64, 3), r"is u32\[1\], got \[2\]")])
def test_wrong_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
