"""Methods trace where users have `jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"`."""

import jax
import pytest
from contract import nodes_of, some_by_default

import jgc
from jgc.compress import METHODS, build

PARAMS = {
    name: jax.ShapeDtypeStruct(shape, "float32")
    for name, shape in {"conv": (3, 3, 8, 16), "kernel": (60, 40), "bias": (16,), "scale": ()}.items()
}


@pytest.mark.parametrize("layout", some_by_default(["1 device", "4 devices"], ["4 devices"]))
@pytest.mark.parametrize("name", METHODS)
def test_every_phase_traces_with_strict_promotion(name, layout):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        sent = jgc.bytes_per_step(build(METHODS[name].settings()), PARAMS, nodes_of(layout))
    assert all(of.uncompressed > 0 for of in sent.values())
