"""Sums and largest values of ranges, as a GPU and as other backends reduce them, against NumPy in f64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgc.wire import sums
from jgc.wire.sums import group_ids, range_maxima, range_sums

BACKENDS = ("cpu", "gpu")
RANGES = [
    (3, 4),
    (0, 5, 0, 1),
    (1,),
    (0,),
    (),
    (700, 1, 33, 64, 2),  # blocks of 32 values
    (5, 70_000),  # also more values than are added one by one
]


@pytest.fixture(params=BACKENDS)
def on(request, monkeypatch):
    """The code for a backend, run on CPU."""
    monkeypatch.setattr(sums, "backend", lambda: request.param)
    return request.param


def reference(reduce, x, counts, part, parts):
    ids = np.asarray(group_ids(counts, part, parts))
    return np.array([reduce(x[ids == i]) for i in range(parts * len(counts))])


def values(counts, parts, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=sum(counts)).astype(np.float32)
    return x, random.integers(0, parts, x.size).astype(np.int32) if parts > 1 else None


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("counts", RANGES, ids=str)
def test_ranges_equal_numpy(counts, parts, on):
    x, part = values(counts, parts)
    total, largest = jax.jit(lambda x, part: [f(x, counts, part, parts) for f in (range_sums, range_maxima)])(x, part)
    exact = reference(lambda own: own.sum(dtype=np.float64), x, counts, part, parts)
    np.testing.assert_allclose(total, exact, rtol=0, atol=1e-6 * np.abs(x).sum())
    np.testing.assert_array_equal(largest, reference(lambda own: own.max(initial=-np.inf), x, counts, part, parts))


def test_ranges_of_nodes_under_vmap_are_those_of_each(on):
    counts, nodes = (40, 0, 9), 3
    x, part = np.stack([values(counts, 2, i)[0] for i in range(nodes)]), values(counts, 2)[1]
    for reduce in (range_sums, range_maxima):
        each = functools.partial(reduce, counts=counts, part=part, parts=2)
        batched, single = jax.jit(lambda x, each=each: (jax.vmap(each)(x), jnp.stack([each(row) for row in x])))(x)
        np.testing.assert_array_equal(batched, single)


def test_nan_and_infinity_stay_in_their_range(on):
    x = np.float32([1, np.nan, 2, np.inf, 3])
    single, pair = jax.jit(lambda x: (range_sums(x, (1,) * 5), range_sums(x, (2, 3))))(x)
    np.testing.assert_array_equal(single, x)
    np.testing.assert_array_equal(pair, [np.nan, np.inf])


def test_sums_of_many_values_do_not_stagnate(on):
    n = 2**24 + 2**20
    total = jax.jit(lambda: range_sums(jnp.ones(n), (n,), jnp.arange(n, dtype=jnp.int32) % 2, 3))()
    assert total.tolist() == [n / 2, n / 2, 0]  # exact up to 2^24 each, where one by one stops


@pytest.mark.parametrize("reduce", [range_sums, range_maxima])
def test_no_scatter_where_a_scatter_is_atomic(reduce, monkeypatch):
    monkeypatch.setattr(sums, "backend", lambda: "gpu")
    x, part = values((50, 7), 2)
    program = str(jax.make_jaxpr(lambda x, part: reduce(x, (50, 7), part, 2))(x, part))
    assert "scatter" not in program and "reduce_" in program
