"""A warning where the gradient of a convolution lies in a loop or branch on CPU."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import nodes_of
from jax import lax

import jgc
from jgc.compress import dense
from jgc.nodes.slow_loops import convolutions_in_loops

PARAMS = {"w": np.ones((3, 3, 2, 2), np.float32)}
BATCH = np.ones((8, 4, 6, 6, 2), np.float32)


def _layer(params, x):
    return lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _loss(params, x):
    return jnp.mean(_layer(params, x) ** 2)


def _scanned(params, x, turns=4, remat=False, **settings):
    one = jax.checkpoint(_loss) if remat else _loss
    parts = x.reshape(turns, -1, *x.shape[1:])
    return lax.scan(lambda total, part: (total + one(params, part), None), 0 * jnp.sum(x), parts, **settings)[0] / turns


def _in_a_jit(params, x):
    return jax.jit(_scanned)(params, x)


def _branch(params, x):
    return lax.cond(jnp.sum(x) > 0, lambda: _loss(params, x), lambda: 0 * jnp.sum(x))


def _mapped(params, x):
    return jnp.mean(lax.map(lambda example: _loss(params, example[None]), x))


def _by_hand(params, x):
    return sum(jax.checkpoint(_loss)(params, part) for part in x.reshape(4, 1, *x.shape[1:])) / 4


def _product(params, x):
    return lax.scan(lambda t, part: (t + jnp.mean(part @ params["w"][0, 0]), None), 0 * jnp.sum(x), x)[0]


def _frozen(params, x):
    return _scanned(jax.tree.map(lax.stop_gradient, params), x) + jnp.mean(params["w"])


LOOPS = {
    "scan": (_scanned, "a scan of 4 turns"),
    "checkpoint": (lambda p, x: _scanned(p, x, remat=True), "a scan of 4 turns"),
    "partly unrolled": (lambda p, x: _scanned(p, x, unroll=2), "a scan of 4 turns"),
    "inside jit": (_in_a_jit, "a scan of 4 turns"),
    "map": (_mapped, "a scan of 4 turns"),
    "cond": (_branch, "a branch of a conditional"),
}
OTHERS = {
    "outside": _loss,
    "Python loop": _by_hand,
    "unrolled": lambda p, x: _scanned(p, x, unroll=True),
    "one turn": lambda p, x: _scanned(p, x, turns=1),
    "product": _product,
    "not differentiated": _frozen,
}


def _messages(loss, layout="1 device"):
    gradients = jgc.node_grads(loss, nodes_of(layout))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", jgc.SlowLoopWarning)
        jax.eval_shape(gradients, PARAMS, BATCH)
    return [str(x.message) for x in caught if x.category is jgc.SlowLoopWarning]


@pytest.mark.parametrize("layout", ["1 device", "4 devices"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_gradient_in_a_loop_is_warned_of_once(name, layout):
    loss, loop = LOOPS[name]
    messages = _messages(loss, layout)
    assert len(messages) == 1 and f"the gradient of a convolution lies in {loop}, where" in messages[0]


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_not_warned_of(name):
    assert not _messages(OTHERS[name])


def test_other_backends_are_not_warned_of(monkeypatch):
    monkeypatch.setattr("jgc.nodes.gradients.backend_of", lambda nodes: "gpu")
    assert not _messages(_scanned)


def test_make_step_warns():
    init, step = jgc.make_step(_scanned, dense(), optax.sgd(0.1), jgc.make_nodes(1))
    state = init(jax.random.key(0), PARAMS)
    with pytest.warns(jgc.SlowLoopWarning, match="lax.scan.*unroll=True"):
        step(state, BATCH[:1])


def test_forward_convolutions_in_loops_are_counted():
    traced = jax.make_jaxpr(_scanned)(PARAMS, BATCH[0])
    assert [x.loop for x in convolutions_in_loops(traced)] == ["a scan of 4 turns"]
    assert not convolutions_in_loops(jax.make_jaxpr(_loss)(PARAMS, BATCH[0]))
