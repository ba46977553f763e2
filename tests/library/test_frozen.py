"""Parameters that are not trained, the last argument of `step`: LoRA's base weights, a target network."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import some_by_default
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from make_step_process import compilations

import jgc

WIDTH, WORDS, RANK, STEPS = 8, 12, 2, 3
LAYOUTS = ["8 nodes on 1", "8 nodes on 4", "8 nodes on 8", "2 x 4 whole", "2 x 4 divided"]
CHOSEN = ["8 nodes on 4", "2 x 4 divided"]  # by default


def _random(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5).astype(np.float32)


BASE = {
    "embedding": _random(0, WORDS, WIDTH),
    "layers": [{name: _random(10 * i + j, WIDTH, WIDTH) for j, name in enumerate("qkvo")} for i in (1, 2)],
}
ADAPTERS = [{name: {"a": _random(50 + 10 * i + j, WIDTH, RANK), "b": np.full((RANK, WIDTH), 0.1, np.float32)}
             for j, name in enumerate("qv")} for i in (1, 2)]  # fmt: skip


def lora(adapters, words, base):
    """The next word by a transformer of two layers, whose q and v have adapters."""
    x = base["embedding"][words]
    for layer, adapter in zip(base["layers"], adapters, strict=True):
        w = layer | {name: layer[name] + own["a"] @ own["b"] for name, own in adapter.items()}
        scores = jnp.einsum("btd,bsd->bts", x @ w["q"], x @ w["k"]) / WIDTH**0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
        x = x + jax.nn.softmax(scores) @ (x @ w["v"]) @ w["o"]
    logits = x[:, :-1] @ base["embedding"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]))


def words_of(step: int, count: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, WORDS, size=(count, 4, 5))


def temporal_difference(params, batch, target):
    """Learns a value function against a target network, with a discount that changes from step to step."""
    value, later = (jnp.tanh(batch[name] @ own["w"]) @ own["v"]
                    for name, own in (("x", params), ("next", target["network"])))  # fmt: skip
    return jnp.mean((value - batch["reward"] - target["discount"] * later) ** 2)


VALUES = {"w": _random(3, 4, WIDTH), "v": _random(4, WIDTH)}


def transitions_of(step: int, count: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(3, count, 8, 4)).astype(np.float32)
    return {"x": x[0], "next": x[1], "reward": x[2, ..., 0]}


def _nodes(layout: str) -> jgc.Nodes:
    if layout.startswith("2 x 4"):
        mesh = jax.make_mesh((2, 4), ("host", "chip"), axis_types=(AxisType.Auto,) * 2)
        return jgc.from_mesh(mesh, slow="host", fast="chip")
    count, _, _, devices = layout.split()
    return jgc.make_nodes(int(count), devices=jax.devices()[: int(devices)])


def _placed(tree, nodes: jgc.Nodes, layout: str):
    """Divided over the devices of a node, along the last axis."""
    if "divided" not in layout:
        return tree

    def divide(x):
        fits = np.ndim(x) and x.shape[-1] % 4 == 0
        return jax.device_put(x, NamedSharding(nodes.mesh, P(*[None] * (np.ndim(x) - 1), "chip") if fits else P()))

    return jax.tree.map(divide, tree)


def _plain(loss, params, batches, frozen_of):
    """The same by one program for all examples of all nodes."""
    optimizer = optax.adam(0.01)
    state, gradient = optimizer.init(params), jax.jit(jax.grad(loss))
    for i in range(STEPS):
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches(i))
        updates, state = optimizer.update(gradient(params, batch, frozen_of(i, params)), state)
        params = optax.apply_updates(params, updates)
    return params


def _run(loss, params, batches, frozen_of, layout, loop="make_step"):
    nodes = _nodes(layout)
    if loop == "make_step":
        init, step = jgc.make_step(loss, jgc.compress.dense(), optax.adam(0.01), nodes)
    else:  # one step each, then the mean: Adam has a state for each node, so this run differs from `_plain`
        local = jgc.local_steps(optax.adam(0.01), optax.sgd(1.0), jgc.compress.dense(), 1, nodes)
        init, step = local.make_step(loss)
    state = init(jax.random.key(0), _placed(params, nodes, layout))
    for i in range(STEPS):
        state, _ = step(state, batches(i), _placed(frozen_of(i, state.params), nodes, layout))
    return state.params


def _close(params, expected):
    for x, y in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", some_by_default(LAYOUTS, CHOSEN))
def test_lora_trains_as_in_a_plain_loop_and_compiles_once(layout):
    def words(step):
        return words_of(step, _nodes(layout).count)

    expected = _plain(lora, ADAPTERS, words, lambda i, params: BASE)
    with compilations("update") as compiled:
        trained = _run(lora, ADAPTERS, words, lambda i, params: BASE, layout)
    assert len(compiled) == 1
    _close(trained, expected)


@pytest.mark.parametrize("layout", some_by_default(LAYOUTS, CHOSEN))
def test_a_target_network_that_every_step_replaces_compiles_once(layout):
    def batches(step):
        return transitions_of(step, _nodes(layout).count)

    def target(i, params):  # the network of the step before, which the step donates
        return {"network": jax.tree.map(jnp.copy, params), "discount": np.float32(0.9 + 0.01 * i)}

    expected = _plain(temporal_difference, VALUES, batches, target)
    with compilations("update") as compiled:
        trained = _run(temporal_difference, VALUES, batches, target, layout)
    assert len(compiled) == 1
    _close(trained, expected)


@pytest.mark.parametrize("layout", some_by_default(["8 nodes on 4", "2 x 4 divided"], ["2 x 4 divided"]))
def test_local_steps_take_them(layout):
    nodes = _nodes(layout)
    emulated = _nodes(f"{nodes.count} nodes on 1")
    runs = [_run(lora, ADAPTERS, lambda step: words_of(step, nodes.count), lambda i, params: BASE, name, "local_steps")
            for name in (layout, f"{emulated.count} nodes on 1")]  # fmt: skip
    _close(*runs)


def test_divided_base_weights_under_whole_adapters():
    nodes = _nodes("2 x 4 divided")
    base = _placed(BASE, nodes, "2 x 4 divided")
    init, step = jgc.make_step(lora, jgc.compress.dense(), optax.adam(0.01), nodes)
    state = init(jax.random.key(0), ADAPTERS)
    for i in range(STEPS):
        state, _ = step(state, words_of(i, 2), base)
    assert not base["embedding"].is_deleted()  # never donated
    _close(state.params, _plain(lora, ADAPTERS, lambda i: words_of(i, 2), lambda i, params: BASE))


def test_with_a_model_state_frozen_comes_last():
    def loss(params, batch, state, frozen):
        return params["w"] * frozen + 0 * jnp.sum(batch), {"seen": state["seen"] + frozen}

    init, step = jgc.make_step(loss, jgc.compress.dense(), optax.sgd(1.0), _nodes("8 nodes on 1"))
    state, metrics = step(init(jax.random.key(0), {"w": jnp.ones(())}, {"seen": jnp.zeros(())}), jnp.ones((8, 1)), 3.0)
    assert float(metrics.loss) == 3 and float(state.params["w"]) == -2 and state.model_state["seen"].tolist() == [3] * 8


def test_numbers_and_numpy_arrays_may_change_in_place():
    init, step = jgc.make_step(lambda p, b, f: jnp.sum(p * f["rate"]) + 0 * jnp.sum(b), jgc.compress.dense(),
                               optax.sgd(1.0), _nodes("8 nodes on 1"))  # fmt: skip
    state, frozen = init(jax.random.key(0), jnp.zeros(1)), {"rate": np.ones(1, np.float32)}
    for rate in (1.0, 10.0):
        frozen["rate"][:] = rate
        state, _ = step(state, jnp.ones((8, 1)), frozen)
    assert state.params.tolist() == [-11]


def test_node_grads_take_them():
    nodes = _nodes("8 nodes on 4")
    run = jax.jit(jgc.node_grads(lora, nodes, frozen=jgc.SHARED))
    value, grads = run(ADAPTERS, words_of(0, 8), BASE)
    expected = [jax.value_and_grad(lora)(ADAPTERS, words, BASE) for words in words_of(0, 8)]
    np.testing.assert_allclose(value, [loss for loss, _ in expected], rtol=1e-5)
    _close(jax.tree.map(lambda g: g[5], grads), expected[5][1])


@pytest.mark.parametrize(
    "frozen, message",
    [
        (None, "the loss is called with (params, batch), and does not fit: missing"),
        ({"w": "text"}, "the leaf 'w' is not an array but the str 'text'"),
    ],
)
def test_a_missing_or_wrong_argument_is_named(frozen, message):
    init, step = jgc.make_step(lora, jgc.compress.dense(), optax.sgd(0.1), _nodes("8 nodes on 1"))
    with pytest.raises(TypeError) as error:
        step(init(jax.random.key(0), ADAPTERS), words_of(0, 8), frozen)
    assert message in str(error.value)
    assert frozen or "in step, step(state, batch, frozen)" in str(error.value)


def test_a_leaf_that_a_step_has_donated_is_named():
    init, step = jgc.make_step(temporal_difference, jgc.compress.dense(), optax.sgd(0.1), _nodes("8 nodes on 4"))
    state = init(jax.random.key(0), VALUES)
    before = state.params
    target = {"network": jax.tree.map(jnp.copy, before), "discount": 0.9}
    state, _ = step(state, transitions_of(0, 8), target)
    with pytest.raises(ValueError, match="the leaf 'network/v' of frozen was donated to an earlier step: give a copy"):
        step(state, transitions_of(1, 8), {"network": before, "discount": 0.9})


HOLDING = [("8 nodes on 4", False), ("2 x 4 whole", False), ("2 x 4 whole", True)]


@pytest.mark.parametrize("layout, divided", some_by_default(HOLDING, HOLDING[2:]))
def test_a_closure_may_hold_an_array_of_the_mesh(layout, divided):
    nodes = _nodes(layout)
    spec = P(None, "chip") if divided else P()
    table = jax.device_put(BASE["embedding"], NamedSharding(nodes.mesh, spec))
    run = jax.jit(jgc.node_grads(lambda p, words: jnp.mean((table[words] @ table.T @ p) ** 2), nodes))
    w, words = _random(7, WORDS), words_of(0, nodes.count)
    value, grads = run(w, words)
    plain = jax.value_and_grad(lambda p, words: jnp.mean((BASE["embedding"][words] @ BASE["embedding"].T @ p) ** 2))
    for i in range(nodes.count):
        expected = plain(w, words[i])
        np.testing.assert_allclose(value[i], expected[0], rtol=1e-5)
        np.testing.assert_allclose(grads[i], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", some_by_default(["8 nodes on 1", "8 nodes on 4", "2 x 4 whole"], CHOSEN[:1]))
def test_a_closure_may_hold_an_array_of_ones_own_jit(layout):
    nodes = _nodes(layout)
    table = BASE["embedding"] if nodes.mesh is None else jgc.place(BASE["embedding"], jgc.SHARED, nodes)

    def loss(p, words, table):
        return jnp.mean((table[words] @ p) ** 2)

    @jax.jit
    def gradient(p, table, words):
        return jgc.node_grads(lambda p, words: loss(p, words, 2 * table), nodes)(p, words)[1]

    w, words = _random(7, WIDTH), words_of(0, nodes.count)
    expected = [jax.grad(loss)(w, of_node, 2 * BASE["embedding"]) for of_node in words]
    np.testing.assert_allclose(gradient(w, table, words), expected, rtol=1e-5, atol=1e-6)


def test_indexing_an_array_of_the_mesh_under_divided_parameters_is_named():
    nodes = _nodes("2 x 4 divided")
    table, w = (_placed(x, nodes, "2 x 4 divided") for x in (BASE["embedding"], _random(7, WIDTH)))
    run = jgc.node_grads(lambda p, words: jnp.mean(table[words] @ p), nodes, placements=jgc.placements_of(w))
    with pytest.raises(ValueError, match="nor where parameters are sharded within a node: give it to the step"):
        run(w, words_of(0, 2))
