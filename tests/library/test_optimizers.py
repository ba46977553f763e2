"""Optimisers that want the loss get it, others have a line; a run that only skips steps says so."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import nodes_of, same_bits, some_by_default

import jgc
from jgc.compress import dense, topk
from jgc.loops.optimizers import updated
from jgc.loops.skipped import IN_A_ROW, make_skip_warning

contrib = optax.contrib
PARAMS = {"w": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
BATCHES = np.random.default_rng(1).normal(size=(12, 8, 4, 6)).astype(np.float32)
LAYOUTS = ["1 device", "4 devices", "8 devices"]


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - jnp.sin(x[:, :4])) ** 2)


def _trained(optimizer, compressor=None, layout="1 device", batches=BATCHES):
    init, step = jgc.make_step(loss, compressor or dense(), optimizer, nodes_of(layout))
    state = init(jax.random.key(0), PARAMS)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def _by_hand(optimizer, batches=BATCHES, nodes=8):
    """A loop on one device, whose optimiser gets the mean over nodes of gradient and loss."""

    @jax.jit
    def step(params, state, x):
        values, grads = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, x)
        mean = jax.tree.map(lambda g: g.mean(0), grads)
        updates, state = optimizer.update(mean, state, params, value=values.mean())
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for x in batches:
        params, state = step(params, state, x[:nodes])
    return params


def _close(a, b, rtol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b)


WANT_THE_LOSS = {
    "polyak_sgd": optax.polyak_sgd(max_learning_rate=2.0),
    "momo": contrib.momo(),
    "reduce_on_plateau": optax.chain(optax.adam(0.1), contrib.reduce_on_plateau(patience=1, rtol=0.3)),
    "momo_adam": contrib.momo_adam(0.1),
    "inject_hyperparams": optax.inject_hyperparams(contrib.momo)(1.0),
    "partition": optax.partition({"a": contrib.momo(), "b": optax.adam(0.1)}, {"w": "a", "b": "b"}),
    "MultiSteps": optax.MultiSteps(contrib.momo(), 2),
    "apply_if_finite": optax.apply_if_finite(optax.polyak_sgd(2.0), 3),
}
BY_DEFAULT = [("polyak_sgd", "4 devices"), ("momo", "1 device"), ("reduce_on_plateau", "8 devices"),
              ("inject_hyperparams", "1 device"), ("MultiSteps", "1 device")]  # fmt: skip


@pytest.mark.parametrize(
    "name, layout", some_by_default([(name, layout) for name in WANT_THE_LOSS for layout in LAYOUTS], BY_DEFAULT)
)
def test_an_optimiser_that_wants_the_loss_gets_its_mean(name, layout):
    optimizer = WANT_THE_LOSS[name]
    state, _ = _trained(optimizer, layout=layout)
    _close(state.params, _by_hand(optimizer))
    # a different value of the loss gives other updates, so the mean arrives
    assert not np.allclose(state.params["w"], _by_hand(optimizer, nodes=1)["w"], atol=1e-3)


def test_in_a_chain_of_ones_own_the_mean_is_given_by_hand():
    nodes, momo = nodes_of("4 devices"), contrib.momo()
    tx = optax.chain(jgc.compress.as_optax(dense(), nodes), momo)
    params, state = jgc.place(PARAMS, jgc.SHARED, nodes), jgc.init_optax(tx, PARAMS, nodes)
    where = jgc.placements_of(state)

    def update(grads, state, params, loss):
        return tx.update(grads, state, params, value=jgc.comm.pmean(loss, nodes, "loss"))

    on_axis = jgc.on_nodes(update, nodes, (jgc.LOCAL, where, jgc.SHARED, jgc.LOCAL), (jgc.SHARED, where))
    gradients = jgc.node_grads(loss, nodes)

    @jax.jit
    def step(params, state, batch):
        losses, grads = gradients(params, batch)
        updates, state = on_axis(grads, state, params, losses)
        return optax.apply_updates(params, updates), state

    for batch in BATCHES[:4]:
        params, state = jax.block_until_ready(step(params, state, batch))
    _close(params, _by_hand(momo, BATCHES[:4]))


def test_a_plateau_of_the_mean_loss_lowers_the_rate():
    optimizer = optax.chain(optax.sgd(0.0), contrib.reduce_on_plateau(patience=1, factor=0.5))
    state, _ = _trained(optimizer, topk(alpha=0.5), batches=np.repeat(BATCHES[:1], 4, axis=0))
    assert float(state.opt_state[1].scale) == 0.5**3


def test_a_skipped_step_leaves_the_state_of_such_an_optimiser():
    init, step = jgc.make_step(loss, dense(), contrib.momo(), nodes_of("1 device"))
    first, _ = step(init(jax.random.key(0), PARAMS), BATCHES[0])
    before = jax.device_get((first.params, first.opt_state))
    bad = BATCHES[1].copy()
    bad[3] = np.nan
    after, metrics = step(first, bad)
    assert not metrics.info.finite and same_bits((after.params, after.opt_state), before)


@pytest.mark.parametrize("layout", ["1 device", "4 devices"])
def test_an_inner_optimiser_gets_its_nodes_loss(layout):
    optimizer = optax.polyak_sgd(2.0)
    local = jgc.local_steps(optimizer, optax.sgd(1.0), dense(), 4, nodes_of(layout))
    init, step = local.make_step(loss)
    state = init(jax.random.key(0), PARAMS)
    for batch in BATCHES[:4]:
        state, _ = step(state, batch)
    each = [_by_hand(optimizer, BATCHES[:4, i : i + 1]) for i in range(8)]
    _close(state.params, jax.tree.map(lambda *xs: np.mean(xs, axis=0), *each))


def test_sam_takes_no_extra_arguments():
    """Its type says that it takes any, and it takes none: it must work alone and in a chain."""
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.1))
    optimizer = optax.chain(optax.clip(1.0), contrib.sam(optax.sgd(0.1), adversary, sync_period=2))
    g = jax.tree.map(jnp.ones_like, PARAMS)
    expected = optimizer.update(g, optimizer.init(PARAMS), PARAMS)
    assert same_bits(updated(optimizer, g, optimizer.init(PARAMS), PARAMS, value=jnp.float32(1), grad=g), expected)
    _trained(optimizer, batches=BATCHES[:1])


def test_a_plain_optimiser_gets_the_same_program():
    """The loss must not enter it."""
    g, optimizer = jax.tree.map(jnp.ones_like, PARAMS), optax.adamw(0.1)
    state = optimizer.init(PARAMS)

    def plain(g, state, value):
        return optimizer.update(g, state, PARAMS)

    def with_loss(g, state, value):
        return updated(optimizer, g, state, PARAMS, value=value, grad=g)

    programs = [str(jax.make_jaxpr(f)(g, state, jnp.float32(1))) for f in (plain, with_loss)]
    assert programs[0] == programs[1]


SEARCH = "is a line search, which calls the loss of all nodes several times in a step"
REFUSED = [
    (optax.lbfgs(), "a part of the optimiser " + SEARCH),
    (optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)), SEARCH),
    (contrib.sophia(0.1), "is sophia's, which takes second derivatives of the loss, obj_fn"),
    (optax.lookahead(optax.sgd(0.1), 5, 0.5), "jgc.local_steps(inner=fast_optimizer, outer=optax.sgd(slow_step_size)"),
    (contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(0)), "dpsgd's, which wants the gradient of"),
]


@pytest.mark.parametrize("optimizer, message", REFUSED, ids=["lbfgs", "search", "sophia", "lookahead", "dpsgd"])
def test_optimisers_that_no_step_can_run_are_named_by_init(optimizer, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        jgc.make_step(loss, dense(), optimizer, nodes_of("1 device"))[0](jax.random.key(0), PARAMS)
    local = jgc.local_steps(optimizer, optax.sgd(1.0), dense(), 1, nodes_of("1 device"))
    with pytest.raises(TypeError, match=re.escape(message.replace("the optimiser", "the inner optimiser"))):
        local.make_step(loss)[0](jax.random.key(0), PARAMS)


def _wants_temperature(updates, state, params=None, *, value, temperature, **extra):
    return updates, state


def _wants_value_fn(updates, state, params=None, *, value, grad, value_fn):
    return updates, state


def _optimizer(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def test_other_arguments_that_an_optimiser_wants_are_named():
    with pytest.raises(TypeError, match=re.escape("wants 'temperature'")) as error:
        _trained(_optimizer(_wants_temperature), batches=BATCHES[:1])
    assert "a step gives value= and grad= besides gradients" in str(error.value)
    with pytest.raises(TypeError, match=re.escape("the optimiser " + SEARCH)):
        _trained(_optimizer(_wants_value_fn), batches=BATCHES[:1])
    opaque = contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
    with pytest.raises(TypeError, match=re.escape("contrib.sam works with opaque_mode=False")):
        _trained(opaque, batches=BATCHES[:1])
    init, step = jgc.local_steps(optax.sgd(0.1), contrib.momo(), dense(), 1, nodes_of("1 device")).make_step(loss)
    with pytest.raises(TypeError, match=re.escape("the outer optimiser wants 'value'")) as error:
        step(init(jax.random.key(0), PARAMS), BATCHES[0])
    assert "an outer step has no loss" in str(error.value)


# --- steps that are skipped one after the other -------------------------------------------------------------------


def _warnings_of(step, state, batches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", jgc.SkippedStepsWarning)
        for batch in batches:
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)  # a host that is far ahead warns later
    return [str(x.message) for x in caught if x.category is jgc.SkippedStepsWarning]


@pytest.mark.parametrize("layout", ["1 device", "4 devices"])
def test_a_run_that_skips_every_step_says_so_once(layout):
    init, step = jgc.make_step(loss, topk(alpha=0.5), optax.sgd(0.1), nodes_of(layout))
    state = init(jax.random.key(0), PARAMS)
    good, bad = [BATCHES[0]] * 5, [np.full_like(BATCHES[0], 1e30)] * 60
    messages = _warnings_of(step, state, good + bad)
    assert len(messages) == 1 and re.match(r"step 24 and the 19 steps before it were skipped: .* 1e15", messages[0])
    state = init(jax.random.key(0), PARAMS)
    init, step = jgc.make_step(loss, topk(alpha=0.5), optax.sgd(0.1), nodes_of(layout))
    assert not _warnings_of(step, init(jax.random.key(0), PARAMS), (bad[: IN_A_ROW - 1] + good[:1]) * 3)


def test_a_node_that_leaves_out_every_step_says_so():
    local = jgc.local_steps(optax.sgd(0.1), optax.sgd(1.0), dense(), 1000, nodes_of("4 devices"))
    init, step = local.make_step(loss)
    bad = BATCHES[0].copy()
    bad[5] = np.nan
    messages = _warnings_of(step, init(jax.random.key(0), PARAMS), [bad] * 45)
    assert len(messages) == 1 and "step 19 and the 19 steps of one node before it were skipped" in messages[0]


class _Busy:
    """The flag of a step that the device has not computed."""

    is_fully_replicated = True

    def is_ready(self):
        return False

    def addressable_data(self, i):
        raise AssertionError("reading would wait for the device")


def test_the_warning_does_not_wait_for_the_device():
    warn_of_skips = make_skip_warning()
    for step in range(100):
        warn_of_skips(step, _Busy())


def test_skipped_steps_of_two_states_are_not_in_a_row():
    warn_of_skips = make_skip_warning()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(15):
            warn_of_skips(step, jnp.bool_(False))
        for step in range(15):
            warn_of_skips(step, jnp.bool_(False))
