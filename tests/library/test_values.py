"""How values are written, in floats of some width or in a few bits each."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgc import compress
from jgc.compress.sparse.topk import selected
from jgc.layout.pack import whole
from jgc.method.exchange import payload_sizes
from jgc.nodes.layouts import make_nodes
from jgc.selection.selector import make_selector
from jgc.wire.values import ValueCode, decode_values, encode_values

CODES = get_args(ValueCode)
BITS = {"8bit": 8, "4bit": 4, "2bit": 2, "1bit": 1}
COUNTS = (5, 1, 12)
vectors = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=18, max_size=18)


@functools.cache
def coded(code, counts):
    return jax.jit(lambda x: decode_values(code, encode_values(code, x, counts), counts))


def there_and_back(code, x, counts=COUNTS):
    return np.asarray(coded(code, counts)(x))


def numpys(x, counts, bits):
    """The code of a few bits, layer by layer and sign by sign, in f64."""
    out, levels, start = np.zeros(len(x)), 2 ** (bits - 1), 0
    for count in counts:
        for negative in (False, True):
            at = start + np.flatnonzero((x[start : start + count] < 0) == negative)
            size = np.abs(x[at].astype(np.float64))
            if at.size and size.max() > 0:
                unit = (np.minimum(np.floor(size / size.max() * levels), levels - 1) + 0.5) / levels
                out[at] = (size @ unit) / (unit @ unit) * unit * (-1 if negative else 1)
        start += count
    return out


@pytest.mark.parametrize("code", BITS)
def test_codes_of_few_bits_match_numpy(code):
    x = np.random.default_rng(0).standard_t(2, 18).astype(np.float32)
    np.testing.assert_allclose(there_and_back(code, x), numpys(x, COUNTS, BITS[code]), rtol=1e-5)


@pytest.mark.parametrize("code", CODES)
def test_the_largest_floats_stay_finite(code):
    x = np.tile(np.float32([3.4e38, -3.4e38, 1.8e38]), 6)
    got = there_and_back(code, x)
    assert np.all(np.isfinite(got)) and np.array_equal(np.sign(got), np.sign(x))


@pytest.mark.parametrize("code", CODES)
@given(values=vectors)
def test_value_codes_do_not_increase_residual(code, values):
    x = np.array(values, np.float32)
    got = there_and_back(code, x)
    assert np.all(np.isfinite(got))
    left, whole = np.sum((got - x).astype(np.float64) ** 2), np.sum(x.astype(np.float64) ** 2)
    assert left <= whole * (1 + 1e-5)


@pytest.mark.parametrize("code, most", [("float32", 0), ("float16", 2**-11), ("bfloat16", 2**-8), ("8bit", 1 / 128)])
def test_wider_codes_are_nearly_exact(code, most):
    x = np.random.default_rng(1).uniform(0.5, 1, 18).astype(np.float32)
    assert np.max(np.abs(there_and_back(code, x) - x) / x) <= most


@pytest.mark.parametrize("code", CODES)
def test_zeros_and_empty_vectors_roundtrip(code):
    assert there_and_back(code, np.zeros(18, np.float32)).tolist() == [0.0] * 18
    assert there_and_back(code, np.zeros(0, np.float32), ()).shape == (0,)


@pytest.mark.parametrize("code, values, scales", [
    ("float32", 4 * 1000, 0), ("float16", 2 * 1000, 0), ("bfloat16", 2 * 1000, 0), ("8bit", 1024, 8), ("1bit", 128, 8),
    ("2bit-codebook", 256, 16), ("mxfp8_e4m3", 1024, 32), ("mxfp4", 512, 32), ("nvfp4", 512, 63),
])  # fmt: skip
def test_values_cost_their_width(code, values, scales):
    sizes = payload_sizes(selected(make_selector(0.01), code), (whole(100_000),))
    assert (sizes["values"], sizes.get("scales", 0)) == (values, scales)
    assert 8 * sizes["positions"] / 1000 < 8.1 + 1  # log2(100) + 2 bits at most, in whole words


def test_codebook_has_the_means_of_four_classes():
    """Two clusters of either sign are exact, one of five values is its mean, and magnitudes far from 0 cost little."""
    x = np.float32([1, 9, -2, 9, -7, 1, 3, 3, 3, 3, 3])
    np.testing.assert_allclose(there_and_back("2bit-codebook", x, (6, 5)), x, rtol=1e-6)
    x = np.abs(np.random.default_rng(3).normal(size=4000)).astype(np.float32)
    x = np.sort(x)[-400:]  # as top-k selects
    codebook, uniform = (np.mean((there_and_back(code, x, (400,)) - x) ** 2) for code in ("2bit-codebook", "2bit"))
    assert codebook < 0.2 * uniform
    low, high = x[x < np.mean(x)], x[x >= np.mean(x)]
    by_mean = (np.var(low) * low.size + np.var(high) * high.size) / 400
    assert codebook < by_mean  # Lloyd's classes are better than those that the mean divides


def test_codebook_has_two_magnitudes_where_none_is_small():
    """Magnitudes in [0.6, 1], uniform: two classes of half the width have a quarter of the error of one."""
    x = np.random.default_rng(4).uniform(0.6, 1, 1000).astype(np.float32)
    codebook, one = (np.mean((there_and_back(code, x, (1000,)) - x) ** 2) for code in ("2bit-codebook", "1bit"))
    assert codebook < 0.26 * one


def test_unknown_value_code_is_named():
    with pytest.raises(ValueError, match=r"value_code must be one of 'float32', .*codebook', .*'nvfp4', got '3bit'"):
        compress.topk(value_code="3bit")


@pytest.mark.parametrize("code", CODES)
def test_rounding_error_stays_in_residual(code):
    nodes = make_nodes(4, devices=jax.devices()[:1])
    method = compress.topk(alpha=0.1, value_code=code)
    params = {"w": jnp.zeros(200)}
    grads = {"w": jax.random.normal(jax.random.key(0), (4, 200))}
    state = jax.jit(lambda key: method.init(key, params, nodes))(jax.random.key(1))
    step = jax.jit(compress.step_on_nodes(method.aggregate, method.schedule[-1].value, nodes))
    mean, state, _ = step(jax.random.key(2), grads, state)
    kept = state.local.memory
    np.testing.assert_allclose(mean["w"] + kept.mean(0), grads["w"].mean(0), atol=1e-6)


def test_mean_of_many_values_is_their_mean():
    x = jnp.asarray(np.random.default_rng(0).exponential(size=2**22).astype(np.float32))
    decoded = decode_values("1bit", encode_values("1bit", x, (x.size,)), (x.size,))
    assert float(decoded[0]) == pytest.approx(float(np.asarray(x).mean(dtype=np.float64)), rel=1e-5)
