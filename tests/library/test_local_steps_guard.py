"""`jgc.local_steps` with one bad gradient, and with a node whose parameters cannot be exchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import every_layout, nodes_of, same_bits, some_by_default
from jax.sharding import NamedSharding, PartitionSpec as P

import jgc
from jgc.compress import dense, topk
from jgc.loops.spikes import fresh, largest_after, limits_of

NODES, EVERY, STEPS = 2, 5, 150
BAD_STEP = 7

# --- one bad batch ----------------------------------------------------------------------------------------------------

WEIGHTS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
PARAMS = {"w": np.zeros((8, 4), np.float32), "b": np.zeros(4, np.float32)}

INNER = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.02, momentum=0.9),
    "adamw": optax.adamw(0.05),
    "lion": optax.lion(0.02),
    "muon": optax.contrib.muon(0.05),
}
SETTINGS = {
    "plain": {},
    "overlap": {"overlap": 2},
    "merge": {"overlap": 2, "merge": 0.5},
    "fragments": {"fragments": 2, "overlap": 2, "merge": 0.5},
}
FACTORS = [1e12, 1e13, 1e14, 1e15, 1e17, 1e22, 3e38, np.nan, np.inf]


def batch_of(step):
    """A linear regression; the nodes' biases differ, so a node that no longer counts shows in the mean."""
    random = np.random.default_rng(100 + step)
    x = random.normal(size=(NODES, 16, 8)).astype(np.float32)
    noise = 0.1 * random.normal(size=(NODES, 16, 4)).astype(np.float32)
    y = x @ WEIGHTS + noise + np.array([1.0, -1.0], np.float32)[:, None, None]
    return jax.tree.map(jnp.asarray, {"x": x, "y": y, "factor": np.ones((NODES, 1), np.float32)})


BATCHES = [batch_of(step) for step in range(STEPS)]


def regression(params, batch):
    return batch["factor"][0] * jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def train(init, step, factor, bad_step):
    """The end error, which nodes used their gradient in every step, and the exchanges that were refused."""
    state, used, refused = init(jax.random.key(0), PARAMS), [], 0
    for i, batch in enumerate(BATCHES):
        if i == bad_step:
            batch = batch | {"factor": batch["factor"].at[0].set(factor)}
        state, metrics = step(state, batch)
        used.append(metrics.finite)
        if metrics.info is not None:
            refused += ~metrics.info.finite[0]
    error = np.sum((state.params["w"] - WEIGHTS) ** 2) + np.sum(np.square(state.params["b"]))
    return np.sqrt(error), np.stack(used), int(refused)


CASES = [(setting, name, at) for setting in SETTINGS for name in INNER for at in (BAD_STEP, STEPS - 30)]
CHOSEN = [("merge", "adamw", BAD_STEP)]


@pytest.mark.parametrize("setting, name, bad_step", some_by_default(CASES, CHOSEN))
def test_one_bad_batch_changes_the_end_error_by_less_than_half(setting, name, bad_step):
    nodes = jgc.make_nodes(NODES, devices=jax.devices()[:1])
    local = jgc.local_steps(INNER[name], optax.sgd(1.0), dense(), EVERY, nodes, **SETTINGS[setting])
    init, step = local.make_step(regression)
    error, used, _ = train(init, step, 1.0, bad_step)
    assert used.all()
    want = np.ones((STEPS, NODES), bool)
    want[bad_step, 0] = False
    for factor in FACTORS:
        bad, used, refused = train(init, step, factor, bad_step)
        assert bad < 1.5 * error, factor
        np.testing.assert_array_equal(used, want)
        assert refused == 0


def used_of(norms):
    """Which gradients one node uses, from their norms."""
    largest, used = jnp.zeros(1), []
    for norm in np.float32(norms):
        norms = jnp.array([norm])
        usable = norms < limits_of(largest)
        largest = largest_after(largest, norms, usable)
        used.append(bool(usable[0]))
    return used


def test_a_spike_is_left_out_and_larger_gradients_are_soon_used():
    spikes = [1.0, 3.0, 1e5, 1e12, 2.0, 1e14, 1.0]
    assert used_of(spikes) == [norm < 1e12 for norm in spikes]
    assert used_of([1e-9] + 10 * [0.5]) == [True] + 3 * [False] + 7 * [True]  # 1e-9 to 1 are nine powers, SPIKE is six
    assert used_of([1e-9, 0.5] * 5) == [True, False] * 3 + [True, True] * 2  # also where small ones come in between
    rare = ([1.0] * 49 + [1e12]) * 12  # one bad batch in fifty does not wear the rule out
    assert used_of(rare) == [norm == 1 for norm in rare]
    assert used_of([0.0, 0.0, 5.0]) == [True] * 3  # zeros are no measure
    assert used_of([1e14, 1e15, 9e14, np.inf, np.nan, 1.0]) == [True, False, True, False, False, True]


# --- a node that cannot be exchanged ----------------------------------------------------------------------------------


def linear(params, batch):
    """A loss whose gradient is the mean of the batch's examples."""
    return sum(jnp.vdot(p, g.mean(0)) for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True))


def gradients(step, count=8, examples=1):
    """Equal examples of multiples of 2^-10, whose sums are exact, [count, examples, ...]."""
    random = np.random.default_rng(step)
    each = {name: random.integers(-64, 65, (count, 1, *x.shape)) / 1024 for name, x in PARAMS.items()}
    return {name: np.repeat(x, examples, 1).astype(np.float32) for name, x in each.items()}


@pytest.mark.parametrize("bad", some_by_default([np.nan, np.inf, 1e17], [1e17]))
@pytest.mark.parametrize("overlap", some_by_default([0, 1], [0]))
def test_refused_exchange_resets_the_node_and_counts_every_step_once(overlap, bad):
    """What the nodes moved = what the shared parameters moved + the mean residual, without what the node lost."""
    count, lost, rate, every = 8, 5, 0.25, 2
    inner = optax.sgd(optax.constant_schedule(rate), momentum=0.0)
    local = jgc.local_steps(inner, optax.sgd(1.0), topk(alpha=0.3), every, nodes_of("4 devices"), overlap=overlap)
    init, step = local.make_step(linear)
    state, moved = init(jax.random.key(0), PARAMS), jax.tree.map(lambda x: np.zeros((count, *x.shape)), PARAMS)
    for i in range(10):
        if i == 5:
            since = jax.tree.map(lambda p, own: p - own[lost], state.params, state.own)
            before = host(state)
            state = state._replace(own=state.own | {"b": state.own["b"].at[lost, 0].set(bad)})
        state, metrics = step(state, gradients(i))
        moved = jax.tree.map(lambda m, g: m + rate * g[:, 0], moved, gradients(i))
        if metrics.exchanged is None:
            assert metrics.reset is None
            continue
        assert bool(metrics.info.finite[0]) == (i != 5)
        assert metrics.reset.tolist() == [i == 5 and k == lost for k in range(count)]
        if i == 5:
            after = host(state)
            assert same_bits(after.compressor, before.compressor) and same_bits(after.params, before.params)
            assert same_bits(jax.tree.map(lambda x: x[lost], after.own), before.params)
            trace, schedule = after.inner
            assert not any(np.any(x[lost]) for x in jax.tree.leaves(trace)) and schedule.count.tolist() == [6] * count
            assert any(np.any(x[0]) for x in jax.tree.leaves(trace))
            for name, x in moved.items():  # what it moved since the exchange before is lost, in this step, too
                x[lost] -= since[name] + rate * gradients(i)[name][lost, 0]
    if overlap:  # the last steps wait
        return
    local_states = [jax.tree.map(lambda x, k=k: x[k], state.compressor[0].local) for k in range(count)]
    residuals = [jgc.residual(local.parts.method(), node, PARAMS) for node in local_states]
    for name in PARAMS:
        residual = np.mean([node[name] for node in residuals], 0)
        shared = PARAMS[name] - np.asarray(state.params[name])
        np.testing.assert_allclose(shared + residual, moved[name].mean(0), atol=1e-6)


def host(state):
    return jax.tree.map(np.array, state._replace(key=jax.random.key_data(state.key), phases=(), step=0))


def test_devices_of_a_node_judge_its_whole_gradient_and_reset_together():
    """Each device's share has a norm below 1e15; only the whole gradient of node 0 reaches it."""
    nodes = jgc.from_mesh(jax.make_mesh((2, 4), ("dcn", "fsdp")), slow="dcn", fast="fsdp")
    specs = {"w": P("fsdp", None), "b": P()}
    divided = {name: jax.device_put(x, NamedSharding(nodes.mesh, specs[name])) for name, x in PARAMS.items()}
    init, step = jgc.local_steps(optax.adam(0.01), optax.sgd(1.0), dense(), 2, nodes).make_step(linear)
    state, batch = init(jax.random.key(0), divided), gradients(0, 2, 4)
    # a device holds two rows of four values: 0.6e15 is the norm of its share on node 0
    batch["w"][:] = np.array([0.6e15, 0.4e15], np.float32).reshape(2, 1, 1, 1) / np.sqrt(8)
    state, metrics = step(state, batch)
    assert metrics.finite.tolist() == [False, True]
    np.testing.assert_allclose(metrics.grad_norm, [1.2e15, 0.8e15], rtol=1e-5)
    own = np.array(state.own["w"])
    assert not np.any(own[0]) and np.all(own[1])
    own[1, 7, 0] = np.inf  # on one device of node 1
    shardings = jax.tree.map(lambda x: x.sharding, state[2:])
    state = state._replace(own=state.own | {"w": jax.device_put(own, state.own["w"].sharding)})
    state, metrics = step(state, gradients(1, 2, 4))
    assert not metrics.info.finite.any() and metrics.reset.tolist() == [False, True]
    assert jax.tree.map(lambda x: x.sharding, state[2:]) == shardings
    (adam, _), own = host(state).inner, host(state).own
    assert adam.count.tolist() == [1, 0] and np.any(adam.nu["w"][0]) and not np.any(adam.nu["w"][1])
    assert same_bits(jax.tree.map(lambda x: x[1], own), PARAMS) and np.any(own["w"][0])
    state, _ = step(state, gradients(2, 2, 4))
    state, metrics = step(state, gradients(3, 2, 4))
    assert metrics.info.finite.all() and not metrics.reset.any() and np.any(state.params["w"])


def test_a_fresh_state_keeps_rates_that_were_set():
    optimizer, params = optax.inject_hyperparams(optax.adam)(0.1), jnp.ones(3)
    state = optimizer.update(params, optimizer.init(params), params)[1]
    state.hyperparams["learning_rate"] = jnp.float32(0.02)
    state = fresh(optimizer, params, state)
    assert state.hyperparams["learning_rate"] == jnp.float32(0.02) and state.count == 1
    assert not np.any(state.inner_state[0].mu) and state.inner_state[0].count == 0


@pytest.mark.parametrize("optimizer", [
    optax.scale_by_schedule(optax.constant_schedule(-0.1)),
    optax.GradientTransformation(jnp.zeros_like, lambda g, s, p=None: (-0.1 * g, s + 1)),
], ids=["schedule", "array"])  # fmt: skip
def test_a_fresh_state_may_be_one_leaf(optimizer):
    init, step = jgc.local_steps(optimizer, optax.sgd(1.0), dense(), 1, jgc.make_nodes(2)).make_step(
        lambda w, x: jnp.mean(w * x))  # fmt: skip
    state, _ = step(init(jax.random.key(0), jnp.ones(3)), np.ones((2, 4, 3), np.float32))
    np.testing.assert_allclose(state.params, 1 - 0.1 / 3, rtol=1e-6)


def test_a_fresh_state_keeps_counts_of_schedules():
    """Of weight decay, of noise, and of gradients that are accumulated; moments and their count start anew."""
    params, decay = jnp.ones(3), optax.linear_schedule(1.0, 0.0, 9)
    noisy = optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.adamw(decay, weight_decay=decay))
    optimizer = optax.MultiSteps(optax.inject_hyperparams(lambda rate: noisy)(decay), 2)
    before = optimizer.init(params)
    for _ in range(3):
        before = optimizer.update(params, before, params)[1]
    state = fresh(optimizer, params, before)
    assert (state.mini_step, state.gradient_step) == (1, 1) and not np.any(state.acc_grads)
    noise, (moments, decayed, rate) = state.inner_opt_state.inner_state
    assert state.inner_opt_state.count == noise.count == decayed.count == rate.count == 1
    assert state.inner_opt_state.hyperparams_states["rate"].count == 1
    assert moments.count == 0 and not np.any(moments.mu)


# --- random keys of the inner optimiser -------------------------------------------------------------------------------


def noise_of(layout):
    """`init` and `step` of nodes whose inner steps are noise alone."""
    inner = optax.noisy_sgd(0.1, eta=1.0, gamma=0.0, key=jax.random.key(3))
    local = jgc.local_steps(inner, optax.sgd(1.0), dense(), 2, nodes_of(layout))
    return local.make_step(lambda params, batch: 0 * jnp.sum(params["w"]) + 0 * jnp.sum(batch))


@every_layout
def test_inner_optimisers_draw_different_noise_on_each_node(layout):
    init, step = noise_of(layout)
    state = init(jax.random.key(0), {"w": jnp.zeros(50)})
    want = [jax.random.key_data(jax.random.fold_in(jax.random.key(3), k)) for k in range(8)]
    np.testing.assert_array_equal(jax.random.key_data(state.inner[0].rng_key), want)
    state, _ = step(state, jnp.zeros((8, 1)))
    assert abs(np.corrcoef(state.own["w"]) - np.eye(8)).max() < 0.6


def test_a_node_that_restarts_draws_new_noise():
    init, step = noise_of("1 device")
    state, keys, batch = init(jax.random.key(0), {"w": jnp.zeros(50)}), set(), jnp.zeros((8, 1))
    for i in range(4):
        if i == 1:
            state = state._replace(own={"w": state.own["w"].at[5, 0].set(jnp.nan)})
        keys |= set(map(tuple, jax.random.key_data(state.inner[0].rng_key).tolist()))
        state, metrics = step(state, batch)
        assert i != 1 or metrics.reset.tolist() == [k == 5 for k in range(8)]
    assert len(keys) == 4 * 8
