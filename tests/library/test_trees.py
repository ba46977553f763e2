"""Trees of all sorts through every method: nnx.State, None, integers, nothing to compress at all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import settings_of, some_by_default
from flax import nnx

import jgc
from jgc.compress import METHODS, dense, topk
from jgc.types import State

K = 4


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.norm, self.dropout = nnx.Linear(6, 5, rngs=rngs), nnx.LayerNorm(5, rngs=rngs), nnx.Dropout(0.5)


TREES = {
    "nnx.State": lambda: nnx.state(Network(nnx.Rngs(0)), nnx.Param),
    "a bare array": lambda: jnp.zeros((4, 5)),
    "a list with a tuple": lambda: [jnp.zeros((4, 5)), (jnp.zeros(3), None)],
    "other dtypes": lambda: {"a": jnp.zeros((4, 5), jnp.float16), "b": jnp.zeros(3, bool), "c": jnp.zeros(2, jnp.int8)},
    "None": lambda: {"a": None},
    "integers": lambda: {"a": jnp.zeros(3, jnp.int32)},
    "nothing": dict,
    "empty arrays": lambda: {"a": jnp.zeros((0, 4)), "b": jnp.zeros(0)},
}
LAST = [(name, len(jgc.compress.build(settings_of(name)).schedule) - 1) for name in METHODS]
SKELETON = ("dense", "topk", "powersgd")  # one exchange, its own, two collectives
PHASES = [
    pytest.param(name, i, marks=[] if name in SKELETON and i == last else [pytest.mark.exhaustive])
    for name, last in LAST
    for i in range(last + 1)
]


@functools.cache
def _nodes():
    return jgc.make_nodes(K, jax.devices()[:1])


def _ones(tree):
    return jax.tree.map(lambda x: jnp.ones((K, *x.shape), x.dtype), tree)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name, phase", PHASES)
def test_every_phase_accepts_every_tree(name, phase, tree):
    params, compressor = TREES[tree](), jgc.compress.build(settings_of(name))
    value = compressor.schedule[phase].value
    state = jax.eval_shape(lambda key: compressor.init(key, params, _nodes()), jax.random.key(0))
    step = jgc.compress.step_on_nodes(compressor.aggregate, value, _nodes())
    aggregated, after, _ = jax.eval_shape(step, jax.random.key(0), _ones(params), state)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(aggregated) == shapes(params)
    assert shapes(after) == shapes(state)
    if not any(jnp.issubdtype(x.dtype, jnp.inexact) and x.size for x in jax.tree.leaves(params)):
        assert sum(m.bytes for m in compressor.wire(value, params, _nodes()).logical if m.field == "values") == 0


AVERAGED = [(name, last) for name, last in LAST if name in ("dense", "topk")]


@pytest.mark.parametrize("name, phase", some_by_default(AVERAGED, AVERAGED[-1:]))
@pytest.mark.parametrize("tree", TREES)
def test_gradients_of_every_tree_are_averaged(name, phase, tree):
    params, compressor = TREES[tree](), jgc.compress.build(settings_of(name, **METHODS[name].lossless))
    grads = jax.tree.map(lambda x: x * jnp.arange(K).reshape(K, *[1] * (x.ndim - 1)).astype(x.dtype), _ones(params))
    step = jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[phase].value, _nodes())
    aggregated, _, info = jax.jit(step)(jax.random.key(0), grads, compressor.init(jax.random.key(0), params, _nodes()))
    assert jax.tree.structure(aggregated) == jax.tree.structure(params)
    for got in jax.tree.leaves(aggregated):
        assert np.all(np.asarray(got, float) == (1.5 if jnp.issubdtype(got.dtype, jnp.inexact) else 0))
    assert info.finite.all() and not info.residual_norm.any()


def test_layers_of_an_nnx_module_are_named_by_attributes():
    params = TREES["nnx.State"]()
    compressor = jgc.compress.per_layer([("^first/kernel", jgc.compress.dense())], default=jgc.compress.topk(alpha=0.1))
    grads = _ones(params)
    step = jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[0].value, _nodes())
    aggregated, _, _ = jax.jit(step)(jax.random.key(0), grads, compressor.init(jax.random.key(0), params, _nodes()))
    assert np.all(aggregated["first"]["kernel"].get_value() == 1)  # dense
    assert np.count_nonzero(aggregated["norm"]["scale"].get_value()) < 5


@pytest.mark.slow
@pytest.mark.parametrize("phase", some_by_default([1, 2], [2]), ids=["top-k", "compressed"])
def test_lgc_aggregates_a_network_of_first_and_last_layer_alone(phase):
    params = {"Conv_0": {"kernel": jnp.zeros((3, 4))}, "head": {"kernel": jnp.zeros((4, 2))}}
    shared = {"momentum_correction": True, "warmup_steps": 200}
    rules = [("^Conv_0/", dense(momentum_correction=True)), ("^head/", topk(alpha=1.0, **shared))]
    compressor = jgc.compress.per_layer(rules, default=jgc.compress.lgc_ps(alpha=1.0))
    init = jax.jit(lambda: compressor.init(jax.random.key(0), params, _nodes()),
                   compiler_options={"xla_backend_optimization_level": 0})  # fmt: skip
    step = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[phase].value, _nodes()))
    aggregated, after, info = step(jax.random.key(0), _ones(params), init())
    assert all(np.all(x == 1) for x in jax.tree.leaves(aggregated))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after))
    assert info.finite.all() and isinstance(after, State)
