"""Scan-stacked leaves [L, ...] as L layers: the same as a tree in which the layers are leaves of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import nodes_of, same_bits, settings_of, some_by_default
from flax import nnx

import jgc
from jgc.compress import build, dense, per_layer, powersgd, stacked, topk
from jgc.lab.shared.hlo import collectives, table
from jgc.types import State

L = 3
PARAMS = {
    "blocks": {"bias": jnp.zeros((L, 6)), "count": jnp.zeros((L, 2), jnp.int32), "kernel": jnp.zeros((L, 8, 16))},
    "embedding": jnp.zeros((12, 8)),
    "head": {"bias": jnp.zeros(5), "kernel": jnp.zeros((16, 5))},
}
METHODS = ("topk", "powersgd", "dgc", "qsgd", "ef21", "scalecom")
VARIANTS = (*METHODS, "dgc/chunks")


def apart(tree):
    """The tree with a tuple of layers in place of each stacked leaf [..., L, ...]; gradients have K before it."""

    def layers(x, whole):
        axis = x.ndim - whole.ndim
        return tuple(jnp.take(x, i, axis) for i in range(L))

    blocks = {name: layers(x, PARAMS["blocks"][name]) for name, x in tree["blocks"].items() if name != "count"}
    return {**tree, "blocks": {**tree["blocks"], **blocks}}


def gradients(seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.integers(-64, 65, (8, *x.shape)) / 64, x.dtype), PARAMS)


def run(compressor, params, every, layout="1 device", phase=-1):
    nodes, value = nodes_of(layout), compressor.schedule[phase].value
    state = jgc.place(compressor.init(jax.random.key(0), params, nodes), State(jgc.SHARED, jgc.LOCAL), nodes)
    step = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, value, nodes))
    for grads in every:
        aggregated, state, info = step(jax.random.key(0), jgc.place(grads, jgc.LOCAL, nodes), state)
    return aggregated, state, info, step.lower(jax.random.key(0), grads, state).compile()


@functools.cache
def both(name, layout="1 device"):
    """Three steps with stacked leaves, and with the layers as leaves of their own."""
    method = build(settings_of(name))
    every = [gradients(seed) for seed in range(3)]
    split = run(stacked("^blocks/", method), PARAMS, every, layout)
    return split, run(method, apart(PARAMS), [apart(grads) for grads in every], layout)


@pytest.mark.parametrize(
    "name, layout",
    some_by_default(
        [*((name, "1 device") for name in VARIANTS), ("topk", "4 devices")],
        [("topk", "4 devices"), ("powersgd", "1 device")],
    ),
)
def test_stacked_leaf_equals_leaves_of_its_layers(name, layout):
    (mean, state, info, _), (apart_mean, apart_state, apart_info, _) = both(name, layout)
    assert same_bits(apart(mean), apart_mean)
    assert same_bits(state, apart_state)
    assert same_bits(info, apart_info)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_by_default(METHODS, ("topk",)))
def test_bytes_residuals_and_diagnostics_are_those_of_the_layers(name):
    method, nodes = build(settings_of(name)), nodes_of("4 devices")
    split, value = stacked("^blocks/", method), method.schedule[-1].value
    assert split.wire(value, PARAMS, nodes) == method.wire(value, apart(PARAMS), nodes)
    (_, state, *_), (_, apart_state, *_) = both(name)
    own, apart_own = (jax.tree.map(lambda x: x[0], s.local) for s in (state, apart_state))
    residual, expected = jgc.residual(split, own, PARAMS), jgc.residual(method, apart_own, apart(PARAMS))
    assert bool(residual) == bool(expected)
    for path, x in residual.items():
        names = [f"{path}/{i}" for i in range(L)] if path in ("blocks/bias", "blocks/kernel") else [path]
        assert np.array_equal(x, np.stack([expected[n] for n in names]) if len(names) > 1 else expected[path])

    def diagnosed(compressor, grads, state):
        def one(grads, state):
            return jgc.diagnose(compressor, value, jax.random.key(0), grads, state, emulated)

        emulated = nodes_of("1 device")
        placements = ("local", State(jgc.SHARED, jgc.LOCAL))
        return jgc.on_nodes(one, emulated, ins=placements, outs="shared")(grads, state)

    ours, theirs = diagnosed(split, gradients(), state), diagnosed(method, apart(gradients()), apart_state)
    assert same_bits(ours, theirs)


def test_powersgd_has_factors_of_every_layer():
    state = stacked("kernel", powersgd(rank=2)).init(jax.random.key(0), PARAMS, nodes_of("1 device"))
    assert [q.shape for q in state.shared][:L] == [(16, 2)] * L


def test_top_k_selects_in_every_layer():
    grads = {"kernel": gradients()["blocks"]["kernel"].at[:, 1:].multiply(0.001)}
    counts = [
        [np.count_nonzero(x) for x in run(method, {"kernel": PARAMS["blocks"]["kernel"]}, [grads])[0]["kernel"]]
        for method in (topk(alpha=1 / 128), stacked("kernel", topk(alpha=1 / 128)))
    ]
    assert counts[0][1:] == [0, 0] and all(count > 0 for count in counts[1])


@pytest.mark.slow
def test_combinators_nest_and_share_one_collective():
    rules, rest = [("^head/", topk(alpha=0.5))], topk(alpha=0.1)
    around = per_layer([*rules, ("^blocks/", stacked("^blocks/", rest))], rest)
    inside = stacked("^blocks/", per_layer([*rules, ("^blocks/", rest)], rest))
    (mean, *_, compiled), (again, *_) = (run(both, PARAMS, [gradients()], "4 devices") for both in (around, inside))
    assert {op: total.times for op, total in table(collectives(compiled)).items()} == {"all-gather": 1, "all-to-all": 1}
    assert same_bits(mean, again)
    twice = stacked("^blocks/kernel", stacked("^blocks/bias", rest))
    assert same_bits(run(twice, PARAMS, [gradients()])[0], run(stacked("^blocks/", rest), PARAMS, [gradients()])[0])


def test_one_layer_can_go_another_way():
    first_dense = stacked("^blocks/", per_layer([("^blocks/kernel/0$", dense())], default=topk(alpha=0.05)))
    grads = gradients()
    mean, state, *_ = run(first_dense, PARAMS, [grads])
    assert np.array_equal(mean["blocks"]["kernel"][0], grads["blocks"]["kernel"].mean(0)[0])
    assert np.count_nonzero(mean["blocks"]["kernel"][1]) < 128
    residual = jgc.residual(first_dense, jax.tree.map(lambda x: x[0], state.local), PARAMS)
    assert residual["blocks/kernel"].shape == (L, 8, 16)
    assert not residual["blocks/kernel"][0].any() and residual["blocks/kernel"][1].any()


@pytest.mark.slow
def test_stacked_in_optax_and_in_nnx():
    module = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda x: jnp.stack([x] * L), nnx.state(module, nnx.Param))
    nodes = nodes_of("1 device")
    tx = optax.chain(jgc.compress.as_optax(stacked(".", topk(alpha=0.1)), nodes), optax.sgd(1.0))
    state = tx.init(params)
    placements = jgc.placements_of(state)
    update = jgc.on_nodes(tx.update, nodes, ins=("local", placements), outs=("shared", placements))
    updates, _ = update(jax.tree.map(lambda x: jnp.ones((8, *x.shape)), params), state)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert [np.count_nonzero(x) for x in updates["kernel"].get_value()] == [2, 2, 2]


def test_a_bare_array_is_a_stack():
    grads = jnp.arange(8 * 2 * 20.0).reshape(8, 2, 4, 5)
    mean, *_ = run(stacked("", topk(alpha=0.1)), jnp.zeros((2, 4, 5)), [grads])
    assert [np.count_nonzero(x) for x in mean] == [2, 2]


@pytest.mark.parametrize(
    "rule, message",
    [
        ("^layers/", r"'\^layers/' matches no parameter to stack; there are blocks/bias, blocks/count, blocks/kernel"),
        ("bias", r"two, got head/bias \[5\]: give a pattern that leaves it out"),
        ("(", r"the pattern '\(' is not a regular expression"),
    ],
)  # fmt: skip
def test_wrong_patterns(rule, message):
    with pytest.raises(ValueError, match=message):
        stacked(rule, topk()).init(jax.random.key(0), PARAMS, nodes_of("1 device"))
