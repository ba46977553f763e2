"""States whose vectors lie in rows of 128 values, as on TPU, against vectors f32[n]: the same steps."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import same_bits, some_by_default

import jgc
from jgc.compress import step_on_nodes
from jgc.layout.devices import in_form
from jgc.method.whole_step import PLACEMENTS

PARAMS = {"w": jnp.zeros((37, 41)), "b": jnp.zeros(9)}  # 1,526 values: 522 of the second tile are filled up
N = 1526
METHODS = {
    "topk": {"alpha": 0.02},
    "topk, corrected": {"alpha": 0.02, "momentum_correction": True, "factor_masking": True, "track_age": True},
    "topk, chunks": {"alpha": 1 / 16, "selection": "chunks", "residual_dtype": "bfloat16"},
    "scalecom": {"alpha": 0.02, "beta": 0.5},
    "egc": {"ratio": 20.0},
    "threshold_v": {"threshold": 2.0},
    "onebit": {},
    "dgc": {"alpha": 0.02},
}


def _states(name: str, monkeypatch):
    """A compressor, and its first state as on CPU and as on TPU."""
    compressor = getattr(jgc.compress, name.split(",")[0])(**METHODS[name])
    nodes = jgc.make_nodes(2, jax.devices()[:1])
    flat = compressor.init(jax.random.key(0), PARAMS, nodes)
    monkeypatch.setattr(sys.modules["jgc.layout.vector"], "backend_of", lambda nodes: "tpu")
    return compressor, nodes, flat, compressor.init(jax.random.key(0), PARAMS, nodes)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_default(METHODS, ("topk, corrected",)))
def test_steps_of_states_in_tiles_equal_those_of_vectors(name, monkeypatch):
    compressor, nodes, flat, tiles = _states(name, monkeypatch)
    assert {x.shape for x in jax.tree.leaves(tiles.local.memory)} == {(2, 16, 128)}
    phase = compressor.schedule[-1].value
    step = jax.jit(step_on_nodes(compressor.aggregate, phase, nodes))
    for i in range(4):
        grads = jax.tree.map(lambda x, i=i: jax.random.normal(jax.random.key(i), (2, *x.shape)), PARAMS)
        if i == 2:  # all nodes skip this step
            grads["b"] = grads["b"].at[1, 3].set(jnp.nan)
        of_flat, of_tiles = step(jax.random.key(i), grads, flat), step(jax.random.key(i), grads, tiles)
        assert same_bits(of_flat[0], of_tiles[0]) and bool(of_tiles[2].finite.all()) == (i != 2)
        np.testing.assert_allclose(of_flat[2].residual_norm, of_tiles[2].residual_norm, rtol=1e-5)
        flat, tiles = of_flat[1], of_tiles[1]
        for a, b in zip(jax.tree.leaves(flat.local.memory), jax.tree.leaves(tiles.local.memory), strict=True):
            assert same_bits(a, b.reshape(2, -1)[:, :N]) and not b.reshape(2, -1)[:, N:].any()
    own = [jax.tree.map(lambda x: x[1], state.local) for state in (flat, tiles)]
    assert same_bits(*(jgc.residual(compressor, local, PARAMS) for local in own))
    diagnose = jgc.on_nodes(
        lambda grads, state: jgc.diagnose(compressor, phase, jax.random.key(0), grads, state, nodes),
        nodes, ins=(jgc.nodes.placement.LOCAL, PLACEMENTS), outs=jgc.nodes.placement.SHARED,
    )  # fmt: skip
    grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), PARAMS)
    assert diagnose(grads, flat).keys() == diagnose(grads, tiles).keys()


def test_saved_vectors_fit_the_other_device():
    saved = np.arange(2 * N, dtype=np.float32).reshape(2, N)
    tiles = in_form(saved, (2, 16, 128))
    assert tiles.shape == (2, 16, 128) and not tiles.reshape(2, -1)[:, N:].any()
    assert same_bits(in_form(tiles, (2, N)), saved) and in_form(saved, (2, N)) is saved
    assert in_form(saved, (2, 24, 128)) is saved and in_form(tiles, (2, 900)) is tiles
    assert in_form(saved, (3, 16, 128)) is saved and in_form(saved[0, 0], ()).shape == ()
