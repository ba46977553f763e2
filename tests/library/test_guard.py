"""The guard: no NaN or Inf passes it, wherever it stands and however large its leaf is."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import K, every_layout, nodes_of, same_bits

import jgc
from jgc.compress import dense, topk
from jgc.layout.devices import not_finite, unusable
from jgc.types import State

SIZES = (1, 31, 4095, 4096, 4097, 10_000, 100_003)  # XLA's maximum of 4,096 values and more loses NaN on CPU


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_guard_finds_non_finite_value_anywhere(size, dtype):
    values = np.random.default_rng(size).standard_normal(size)
    found = jax.jit(not_finite)
    assert not found(jnp.asarray(values, dtype))
    assert not found(jnp.full(size, jnp.finfo(dtype).max, dtype))
    for place in {0, size // 3, size // 2, size - 1}:
        for bad in (np.nan, np.inf, -np.inf):
            assert found(jnp.asarray(values, dtype).at[place].set(bad)), (place, bad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_guard_finds_absurd_values_that_cancel(dtype):
    found = jax.jit(unusable)
    for size in (1e16, 1e20, 3e38):
        assert found([jnp.zeros(5), jnp.asarray([size, -size] * 2048, dtype)])
    assert not found([jnp.zeros(5), jnp.asarray([1e12, -1e12] * 2048, dtype)])
    assert not found([])


@every_layout
@pytest.mark.parametrize("method", [dense(), topk(alpha=0.01)], ids=["dense", "topk"])
@pytest.mark.parametrize("device", ["cpu", "gpu", "tpu"])
def test_a_large_leaf_with_nan_skips_the_step(method, layout, device, monkeypatch):
    for module in ("layout.vector", "selection.entries", "layout.devices"):
        # on TPU zeros come last, leaf by leaf
        monkeypatch.setattr(sys.modules[f"jgc.{module}"], "backend", lambda: device)
    nodes = nodes_of(layout)
    params = {"large": jnp.zeros((100, 100)), "small": jnp.zeros(3)}
    local = State(jgc.SHARED, jgc.LOCAL)
    state = jgc.place(method.init(jax.random.key(0), params, nodes), local, nodes)
    step = jax.jit(jgc.compress.step_on_nodes(method.aggregate, method.schedule[-1].value, nodes))
    grads = {"large": np.ones((K, 100, 100), np.float32), "small": np.ones((K, 3), np.float32)}
    for row, column in ((0, 0), (50, 1), (99, 99)):
        poisoned = {**grads, "large": grads["large"].copy()}
        poisoned["large"][1, row, column] = np.nan
        aggregated, after, info = step(jax.random.key(1), jgc.place(poisoned, jgc.LOCAL, nodes), state)
        assert not info.finite.any() and not any(np.any(np.asarray(x)) for x in jax.tree.leaves(aggregated))
        assert same_bits(after, state)
