"""The recipes of the page on one's own loop, word for word, against `make_step` or a plain loop."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jgc

PAGE = Path(__file__).parents[2] / "docs" / "your_loop.md"
COUNTS = np.array([32, 5, 17, 0, 32, 32, 9, 1])


@pytest.fixture
def page(monkeypatch):
    """A function that runs the cells of the page with these words in them, on four devices; returns their names."""
    whole = jgc.make_nodes
    monkeypatch.setattr(jgc, "make_nodes", lambda count: whole(count, jax.devices()[:4]))
    cells = re.findall(r"```\{code-cell\}\n(.*?)```", PAGE.read_text(), flags=re.S)
    names: dict = {}

    def run(*words, steps=60):
        for word in words:
            (cell,) = [cell for cell in cells if word in cell]
            exec(compile(cell.replace("range(60)", f"range({steps})"), str(PAGE), "exec"), names)
        return names

    return run


def _loop(own_loss, batch_of, steps, compressor=None, optimizer=None):
    """The state of `make_step` after some steps, on one device."""
    nodes = jgc.Nodes(8, 8)
    compressor, optimizer = compressor or jgc.compress.topk(alpha=0.25), optimizer or optax.adam(0.1)
    init, step = jgc.make_step(own_loss, compressor, optimizer, nodes)
    state = init(jax.random.key(0), {"w": jnp.zeros((16, 1))})
    for i in range(steps):
        state, _ = step(state, batch_of(i))
    return state


def test_evaluation_is_that_of_all_examples(page):
    names = page("import jax, jax.numpy", "def evaluate", steps=3)
    batch = jax.tree.map(np.concatenate, names["batch_of"](1000))
    params, nodes = names["state"].params, names["nodes"]
    value = names["evaluate"](params, jgc.place(names["batch_of"](1000), "batch", nodes))
    np.testing.assert_allclose(value, names["loss"](jax.device_get(params), batch), rtol=1e-5)


def test_train_state_and_nnx_optimizer_equal_make_step(page):
    names = page("import jax, jax.numpy", "TrainState", steps=5)
    want = _loop(names["loss"], names["batch_of"], 5).params["w"]
    np.testing.assert_allclose(names["trained"].params["w"], want, rtol=1e-5, atol=1e-7)
    page("nnx.Optimizer(", steps=5)
    np.testing.assert_allclose(names["linear"].kernel[...], want, rtol=1e-5, atol=1e-7)


def test_a_restored_train_state_and_nnx_optimizer_go_on_equally(page, tmp_path):
    names = page("import jax, jax.numpy", "TrainState", steps=3)
    page("nnx.Optimizer(", steps=3)
    batch = jgc.place(names["batch_of"](3), "batch", names["nodes"])
    trained, linear, optimizer, memory = (names[name] for name in ("trained", "linear", "optimizer", "memory"))
    saved = {"trained": trained, "nnx": nnx.state((linear, optimizer)), "memory": memory}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "3", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        again = checkpointer.restore(tmp_path / "3", saved)

    gradient = names["gradients"](nnx.state(linear), memory, batch)[1]
    optimizer.update(linear, gradient)
    want = linear.kernel[...]
    nnx.update((linear, optimizer), again["nnx"])
    gradient = names["gradients"](nnx.state(linear), again["memory"], batch)[1]
    optimizer.update(linear, gradient)
    np.testing.assert_array_equal(linear.kernel[...], want)
    after = [x.apply_gradients(grads={"w": want}).params["w"] for x in (trained, again["trained"])]
    np.testing.assert_array_equal(*after)


@pytest.mark.slow
def test_unequal_nodes_train_on_the_mean_of_all_examples(page):
    names = page("import jax, jax.numpy", "def weighted", steps=1)
    batch = names["unequal"](0)
    valid = np.arange(32) < COUNTS[:, None]
    assert valid.sum() == 128 and np.count_nonzero(batch["weight"]) == 128
    x, y = (batch[name][valid] for name in ("x", "y"))  # without padding
    value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(jnp.ones((16, 1)) / 3)
    losses, grads = jgc.node_grads(names["weighted"], names["nodes"])({"w": jnp.ones((16, 1)) / 3}, batch)
    np.testing.assert_allclose(losses.mean(), value, rtol=1e-5)
    np.testing.assert_allclose(grads["w"].mean(0), grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_keys_of_the_model_state_differ_between_nodes(page, monkeypatch):
    monkeypatch.setattr(jgc, "make_step", partial(jgc.make_step, unroll=False))  # compiles in a quarter of the time
    names = page("import jax, jax.numpy", "def loss_of_model", steps=2)
    keys = [x for x in jax.tree.leaves(names["state"].model_state) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert keys and all(len(np.unique(jax.random.key_data(x), axis=0)) == 8 for x in keys)
    names = page("def loss_with_seeds", steps=2)
    mean, seeds = names["state"].model_state
    words = jax.device_get(jax.random.key_data(seeds))
    assert len(np.unique(words, axis=0)) == 8 and mean.shape == (8,)
    first = [jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(np.uint32([0, 3])), k)) for k in range(8)]
    assert (words - np.asarray(first)).tolist() == [[0, 2]] * 8  # every node's seed has counted on


def test_schedule_free_in_local_steps_is_evaluated_by_the_mean_of_z(page):
    names = page("import jax, jax.numpy", "def evaluate", "schedule_free_adamw", steps=20)
    state, b1 = names["state"], 0.9
    z = np.mean(state.inner.z["w"], 0)
    np.testing.assert_allclose(
        names["average"]["w"], (np.asarray(state.params["w"]) - (1 - b1) * z) / b1, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(state.params["w"], np.mean(state.own["w"], 0), rtol=1e-5)
