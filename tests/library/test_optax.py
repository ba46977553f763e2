"""Methods as optax transforms."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import every_layout, nodes_of, same_bits, some_by_default

import jgc
from jgc.compress import as_optax, dense, lgc_ps, per_layer, topk

PARAMS = {"w": jnp.zeros((6, 4)), "b": jnp.zeros(3)}
STEPS = 6


def _gradients():
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.integers(-64, 65, (STEPS, 8, *x.shape)) / 64, x.dtype), PARAMS)


def _at(grads, i: int, nodes):
    return jgc.place(jax.tree.map(lambda g: g[i], grads), jgc.LOCAL, nodes)


def _on_axis(tx, state, nodes):
    placements = jgc.placements_of(state)
    return jax.jit(jgc.on_nodes(tx.update, nodes, ins=(jgc.LOCAL, placements), outs=(jgc.SHARED, placements)))


@contextmanager
def _compilations():
    """The programs that XLA compiles inside the block."""
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    compiled: list[str] = []
    yield compiled
    compiled += [event for event in events if "backend_compile" in event]


TWO = [dense(), topk(alpha=0.1)]


@every_layout
def test_chain_applies_optimiser_to_node_mean(layout):
    nodes, grads = nodes_of(layout), _gradients()
    tx, plain = optax.chain(as_optax(dense(), nodes), optax.trace(0.9)), optax.trace(0.9)
    state, plain_state = tx.init(PARAMS), plain.init(PARAMS)
    state = jgc.place(state, jgc.placements_of(state), nodes)
    update = _on_axis(tx, state, nodes)
    for i in range(3):
        updates, state = update(_at(grads, i, nodes), state)
        expected, plain_state = plain.update(jax.tree.map(lambda g, i=i: g[i].mean(0), grads), plain_state)
        for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


@every_layout
@pytest.mark.parametrize("switched", [False, True])
def test_a_skipped_step_can_leave_the_optimiser_as_it_is(layout, switched):
    """Adam with decay would go on at zeros; NaN on all nodes alike makes `apply_if_finite` wait."""
    nodes, grads = nodes_of(layout), _gradients()
    compressor = topk(alpha=0.25, warmup_steps=1 if switched else 0)

    def chain(**settings):
        tx = optax.chain(as_optax(compressor, nodes, switched=switched, **settings),
                         optax.apply_if_finite(optax.adamw(0.1), 5))  # fmt: skip
        placements = jgc.placements_of(jgc.init_optax(tx, PARAMS, nodes))
        update = jgc.on_nodes(tx.update, nodes, (jgc.LOCAL, placements, jgc.SHARED), (jgc.SHARED, placements))
        return jgc.init_optax(tx, PARAMS, nodes), jax.jit(update)

    params = jgc.place(jax.tree.map(jnp.ones_like, PARAMS), jgc.SHARED, nodes)
    bad = jax.tree.map(lambda g: g[1].at[3].set(jnp.nan), grads)
    state, update = chain(nan_if_skipped=True)
    _, first = update(_at(grads, 0, nodes), state, params)
    updates, second = update(jgc.place(bad, jgc.LOCAL, nodes), first, params)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    assert same_bits(second[1].inner_state, first[1].inner_state) and int(second[1].total_notfinite) == 1
    assert same_bits(second[0].compressor, first[0].compressor)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(update(_at(grads, 2, nodes), second, params)[0]))
    state, update = chain()
    _, first = update(_at(grads, 0, nodes), state, params)
    updates, second = update(jgc.place(bad, jgc.LOCAL, nodes), first, params)
    assert all(np.any(x) for x in jax.tree.leaves(updates)) and int(second[1].total_notfinite) == 0


@every_layout
def test_placed_state_does_not_recompile(layout):
    nodes = nodes_of(layout)
    tx = as_optax(topk(alpha=0.1), nodes)
    state = tx.init(PARAMS)
    grads = [_at(_gradients(), i, nodes) for i in range(3)]
    update = _on_axis(tx, state, nodes)
    _, state = update(grads[0], state)
    with _compilations() as compiled:
        for i in (1, 2):
            _, state = update(grads[i], state)
    assert not compiled


@every_layout
def test_switched_under_scan_equals_one_transform_per_phase(layout):
    nodes, grads = nodes_of(layout), _gradients()
    compressor = topk(alpha=0.25, warmup_steps=2, momentum_correction=True, momentum=0.5)
    switched = as_optax(compressor, nodes, switched=True)
    state = switched.init(PARAMS)
    placements = jgc.placements_of(state)

    def scanned(grads, state):  # grads: [STEPS, ...] of one node
        def body(state, g):
            updates, state = switched.update(g, state)
            return state, updates

        return jax.lax.scan(body, state, grads)

    by_node = jgc.place(jax.tree.map(lambda g: jnp.swapaxes(g, 0, 1), grads), jgc.LOCAL, nodes)
    on_axis = jgc.on_nodes(scanned, nodes, ins=(jgc.LOCAL, placements), outs=(placements, jgc.SHARED))
    last, updates = jax.jit(on_axis)(by_node, state)

    per_phase = {p.value: as_optax(compressor, nodes, phase=p.value) for p in compressor.schedule}
    state = per_phase["dense"].init(PARAMS)
    steps = {value: _on_axis(tx, state, nodes) for value, tx in per_phase.items()}
    for i in range(STEPS):
        expected, state = steps["dense" if i < 2 else "top-k"](_at(grads, i, nodes), state)
        assert same_bits(jax.tree.map(lambda u, i=i: u[i], updates), expected)
    assert same_bits(last.compressor, state.compressor) and int(last.step) == int(state.step) == STEPS


@every_layout
@pytest.mark.parametrize("compressor", some_by_default(TWO, TWO[1:]), ids=["dense", "topk"])
def test_transform_outside_node_axis_is_an_error(compressor, layout):
    tx = as_optax(compressor, nodes_of(layout))
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(RuntimeError, match=r"outside the node axis.*silently wrong.*jgc\.node_grads.*on_nodes"):
            update(PARAMS, state)


def test_updates_use_distinct_keys():
    nodes, keys = nodes_of("1 device"), []
    compressor = dense()

    def aggregate(phase, key, grads, state, nodes):
        keys.append(jax.random.key_data(key))
        return compressor.aggregate(phase, key, grads, state, nodes)

    tx = as_optax(compressor._replace(aggregate=aggregate), nodes)
    state = tx.init(PARAMS)
    placements = jgc.placements_of(state)
    with jax.disable_jit():
        update = jgc.on_nodes(tx.update, nodes, ins=(jgc.LOCAL, placements), outs=(jgc.SHARED, placements))
        for i in range(2):
            _, state = update(_at(_gradients(), i, nodes), state)
    assert not np.array_equal(*keys)


def test_kinds_of_state_mark_local_parts():
    nodes = nodes_of("1 device")
    state = optax.chain(as_optax(topk(alpha=0.1), nodes), optax.adam(0.1)).init(PARAMS)
    placements = jax.tree.leaves(jgc.placements_of(state))
    assert placements.count(jgc.LOCAL) == 1 and len(placements) == len(jax.tree.leaves(state))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, r"has the phases \['dense', 'top-k'\]: give phase=, or switched=True"),
        ({"phase": "topk"}, r"phase must be one of \['dense', 'top-k'\], got 'topk'"),
        ({"phase": "dense", "switched": True}, r"give phase= or switched=True, not both \(phase='dense'\)"),
    ],
    ids=str,
)
def test_missing_or_unknown_phase_is_an_error_when_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        as_optax(topk(alpha=0.1, warmup_steps=2), nodes_of("1 device"), **arguments)


def test_switched_refuses_a_method_whose_transition_changes_the_state():
    def doubled(old, new, state, nodes):
        return jax.tree.map(lambda x: 2 * x, state)

    compressor = topk(alpha=0.1, warmup_steps=2)
    tx = as_optax(compressor._replace(transition=doubled), nodes_of("1 device"), switched=True)
    with pytest.raises(ValueError, match="transition from 'dense' to 'top-k' changes the state"):
        tx.init(PARAMS)
    for kept in (compressor, per_layer([("w", dense())], default=compressor)):
        as_optax(kept, nodes_of("1 device"), switched=True).init(PARAMS)


def test_a_method_with_a_shared_state_is_a_transform_in_every_phase():
    nodes, grads = nodes_of("1 device"), _gradients()
    compressor = lgc_ps(alpha=0.5, warmup_steps=1, autoencoder_steps=1, innovation=0.2)
    state = jax.eval_shape(as_optax(compressor, nodes, phase="dense").init, PARAMS)
    for phase in compressor.schedule:
        placements = jgc.placements_of(state)
        update = as_optax(compressor, nodes, phase=phase.value).update
        on_axis = jgc.on_nodes(update, nodes, ins=(jgc.LOCAL, placements), outs=(jgc.SHARED, placements))
        updates, after = jax.eval_shape(on_axis, _at(grads, 0, nodes), state)
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
