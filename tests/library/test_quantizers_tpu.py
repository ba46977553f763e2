"""Codes of many values, part by part on CPU and in whole tiles on TPU, equal those of the plain references."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import same_bits, some_by_default

import jgc
from jgc.backend import plain_operations
from jgc.compress import step_on_nodes
from jgc.layout.pack import Layer, values_of
from jgc.wire.scales import over_groups

N = 2**20 + 1_530  # 32 values to a word: just enough words for whole tiles
PARAMS = {"a": jnp.zeros((1000, 700)), "b": jnp.zeros((11, 3)), "c": jnp.zeros((7, 41)), "d": jnp.zeros((349_786,))}
METHODS = {
    "natural": {},
    "cast": {},
    "cast, float16": {"format": "float16"},
    "cast, 8 bits": {"format": "float8_e4m3"},
    "cast, 4 bits in blocks": {"format": "mxfp4"},
    "cast, 4 bits at two levels": {"format": "nvfp4", "hadamard": 64},
    "onebit": {},
    "onebit, buckets": {"bucket": 512},
    "terngrad": {},
    "terngrad, feedback": {"error_feedback": True},
    "qsgd": {"error_feedback": True},
    "qsgd, rotated": {"error_feedback": True, "hadamard": 128},
    "qsgd, 3 bits": {"error_feedback": True, "bits": 3, "bucket": 100},
    "signsgd": {},
    "signsgd, feedback": {"combine": "feedback"},
}


def step_of(name: str):
    """Two steps of 3 nodes."""
    compressor = getattr(jgc.compress, name.split(",")[0])(**METHODS[name])
    nodes = jgc.make_nodes(3, jax.devices()[:1])
    state = compressor.init(jax.random.key(0), PARAMS, nodes)
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
    found = []
    for i in range(2):
        grads = jax.tree.map(lambda x, i=i: jax.random.normal(jax.random.key(i), (3, *x.shape)), PARAMS)
        mean, state, _ = step(jax.random.key(i), grads, state)
        found.append(mean)
    return found


TUNED = [*((name, "tpu") for name in METHODS), ("qsgd", "cpu"), ("qsgd, 3 bits", "cpu")]


@pytest.mark.parametrize("name, device", some_by_default(TUNED, [("qsgd", "cpu")]))
def test_means_equal_those_of_plain_references(name, device, monkeypatch):
    assert values_of(jgc.layout.pack.make_packing(PARAMS).layers) == N
    with plain_operations():
        want = step_of(name)
    for module in ("jgc.backend", "jgc.layout.vector"):
        monkeypatch.setattr(sys.modules[module], "backend_of", lambda nodes: device)
    got = step_of(name)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if "hadamard" in METHODS[name]:  # a last bit may move a code by a level, and with it a whole block
            assert np.isclose(a, b, rtol=2e-6, atol=1e-6).mean() > 0.999
        else:
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


SIZES = [[40_000], [1000, 30_000, 1, 2, 1021, 5000], [1024, 2048, 40_000], [7] * 6000]


@pytest.mark.parametrize("sizes", some_by_default(SIZES, SIZES[:3]))
def test_scales_on_tpu_are_those_of_each_layer(sizes, monkeypatch):
    starts = np.cumsum((0, *sizes))
    layers = tuple(Layer(str(i), int(starts[i]), size, (size,)) for i, size in enumerate(sizes))
    scales = jnp.arange(len(sizes), dtype=jnp.float32)
    monkeypatch.setattr(sys.modules["jgc.wire.scales"], "backend", lambda: "tpu")
    assert same_bits(over_groups(scales, layers, 0), np.repeat(np.arange(len(sizes), dtype=np.float32), sizes))
