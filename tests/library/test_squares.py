"""The sum of squares over many arrays: every value counts once, in all ways of reading them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgc.layout import devices
from jgc.layout.devices import squared_norm, squares_of_new

SHAPES = [(4096, 128), (4099, 128), (4096, 128), (3, 3, 512, 128), (300, 257), (5, 7), (31,), (), (70_000,),
          (2, 40_000)]  # fmt: skip


@pytest.fixture(params=["cpu", "tpu", "gpu"])
def backend(request, monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: request.param)


def arrays_of(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("shapes", [SHAPES, [], [()], [(64, 8)], [(129, 8)] * 19, [(200_001,)],
                                    [(1 + i % 70, 3) for i in range(150)]])  # fmt: skip
def test_every_value_counts_once(shapes, backend):
    arrays = arrays_of(shapes)
    exact = sum(int(np.square(x).sum(dtype=np.float64)) for x in arrays)
    assert float(jax.jit(squared_norm)(arrays)) == exact  # small integers: no sum rounds


@pytest.mark.parametrize("shapes", [SHAPES, [(7,)] * 150, []], ids=["many sizes", "150 of one size", "none"])
def test_every_value_of_new_arrays_counts_once(shapes, backend):
    arrays = arrays_of([shape for shape in shapes if shape])
    exact = sum(int(np.square(x).sum(dtype=np.float64)) for x in arrays)
    assert float(jax.jit(squares_of_new)(arrays)) == exact


def test_nan_and_overflow_anywhere_are_seen(backend):
    found = jax.jit(squared_norm)
    for i, shape in enumerate(SHAPES):
        for place in {0, int(np.prod(shape)) // 2, int(np.prod(shape)) - 1}:
            for bad in (np.nan, np.inf, 3e38):
                arrays = arrays_of(SHAPES)
                arrays[i].reshape(-1)[place] = bad
                result = found(arrays)
                assert jnp.isnan(result) if np.isnan(bad) else jnp.isposinf(result)
