"""What a step does besides training: `prepare`, `mean_aux`, `lower`, `gradients`, `diagnose`, halves of local steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from make_step_process import compilations

import jgc
from jgc.compress import dense, topk
from jgc.lab.shared.hlo import collectives

K = 2
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 40), "b": jnp.ones(3)}


def loss(params, batch):
    out = jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(jnp.sin(params["b"]) * jnp.mean(batch))
    return out, {"mean": jnp.mean(batch), "rows": jnp.mean(batch[:, :2], axis=0)}


def value(params, batch):
    return loss(params, batch)[0]


def batch_of(i):
    return np.random.default_rng(i).standard_normal((K, 4, 40)).astype(np.float32)


def nodes_on(devices):
    return jgc.make_nodes(K, devices=jax.devices()[:devices])


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("devices", [1, 2])
def test_prepare_acts_on_local_gradients(devices):
    """Decay and clipping of each node, by hand; `gradients` shows what enters the compressor."""
    seen = optax.chain(optax.add_decayed_weights(0.1), optax.clip_by_global_norm(0.5))

    def prepare(grads, params):
        return seen.update(grads, seen.init(params), params)[0]

    init, step = jgc.make_step(value, dense(), optax.sgd(1.0), nodes_on(devices), prepare=prepare)
    state, batch = init(jax.random.key(0), PARAMS), batch_of(0)
    by_hand = [prepare(jax.grad(value)(PARAMS, batch[k]), PARAMS) for k in range(K)]
    entering = jax.device_get(step.gradients(state, batch))
    after, _ = step(state, batch)
    for name, p in PARAMS.items():
        for k in range(K):
            np.testing.assert_allclose(entering[name][k], by_hand[k][name], rtol=1e-5, atol=1e-7)
        mean = sum(g[name] for g in by_hand) / K
        np.testing.assert_allclose(after.params[name], p - mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_prepare_may_loop_from_a_value_of_the_gradients(devices):
    def prepare(grads, params):
        zero = 0 * jnp.sum(grads["w"])  # JAX refuses 0.0 on two devices
        turns = jax.lax.fori_loop(0, 3, lambda _, total: total + jnp.sum(grads["w"] ** 2), zero)
        return jax.tree.map(lambda g: g / (1 + turns), grads)

    init, step = jgc.make_step(value, dense(), optax.sgd(1.0), nodes_on(devices), prepare=prepare)
    entering = step.gradients(init(jax.random.key(0), PARAMS), batch_of(0))
    for k in range(K):
        by_hand = prepare(jax.grad(value)(PARAMS, batch_of(0)[k]), PARAMS)
        np.testing.assert_allclose(entering["w"][k], by_hand["w"], rtol=1e-5)


def test_prepare_is_checked():
    nodes = nodes_on(1)
    with pytest.raises(TypeError, match=r"prepare must be a function .* GradientTransformation.*tx.update"):
        jgc.make_step(value, dense(), optax.sgd(1.0), nodes, prepare=optax.clip_by_global_norm(1.0))
    init, step = jgc.make_step(
        value, dense(), optax.sgd(1.0), nodes, prepare=lambda grads, params: {"w": grads["w"]}
    )
    with pytest.raises(TypeError, match=r"prepare must return.*'b' was float32.*and is not there"):
        step(init(jax.random.key(0), PARAMS), batch_of(0))


@pytest.mark.parametrize("devices", [1, 2])
def test_mean_aux_travels_with_the_metrics(devices):
    settings = loss, topk(alpha=0.1), optax.sgd(0.1), nodes_on(devices)
    (init, apart), (_, together) = (
        jgc.make_step(*settings, has_aux=True, mean_aux=mean) for mean in (False, True)
    )
    state, batch = init(jax.random.key(0), PARAMS), batch_of(0)
    counts = [
        len(collectives(step.lower(state, batch).compile())) for step in (apart, together)
    ]
    assert counts[0] == counts[1]
    each, mean = apart(init(jax.random.key(0), PARAMS), batch)[1], together(state, batch)[1]
    np.testing.assert_allclose(mean.loss, each.loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(each.aux), jax.tree.leaves(mean.aux), strict=True):
        np.testing.assert_allclose(b, np.mean(a, axis=0), rtol=1e-5, atol=1e-7)


def test_mean_aux_needs_aux():
    with pytest.raises(ValueError, match=r"mean_aux=True averages aux.*has_aux=True"):
        jgc.make_step(value, dense(), optax.sgd(1.0), nodes_on(1), mean_aux=True)


def test_split_programs_take_the_same_steps_and_compile_gradients_once():
    arguments = value, topk(alpha=0.1, warmup_steps=2), optax.adam(0.1), nodes_on(2)
    (init, whole), (_, split) = jgc.make_step(*arguments), jgc.make_step(*arguments, split=True)
    a, b = (init(jax.random.key(0), PARAMS) for _ in range(2))
    with compilations() as compiled:
        for i in range(4):
            b, of_split = split(b, batch_of(i))
    programs = [name for name in compiled if name in ("jit(gradients)", "jit(update)", "gradients", "update")]
    assert len(programs) == 3, compiled  # gradients, and an update in each of two phases
    with compilations("gradients") as again:
        split.diagnose(b, batch_of(4))
    assert not again
    for i in range(4):
        a, of_whole = whole(a, batch_of(i))
    for x, y in zip(jax.tree.leaves((a.params, of_whole)), jax.tree.leaves((b.params, of_split)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("split", [False, True])
def test_lowered_step_is_compiled_once(split):
    compressor = topk(alpha=0.1, warmup_steps=1)
    init, step = jgc.make_step(value, compressor, optax.sgd(0.1), nodes_on(2), split=split)
    state = init(jax.random.key(0), PARAMS)
    for i, name in enumerate(("dense", "top-k")):
        assert step.upcoming(state)[0].name == name
        compiled = step.lower(state, batch_of(i)).compile()
        wire = compressor.wire(step.upcoming(state)[0].value, PARAMS, nodes_on(2))
        metrics = 2 * (K - 1) / K * 4 * 4  # an all-reduce of four values
        sent = sum(c.sent_bytes for c in collectives(compiled))
        assert sent == sum(s.bytes for s in wire.physical) + metrics
        with compilations("update") as again:
            state, _ = step(state, batch_of(i))
        assert not again
        assert state.phase.name == name and state.step == i + 1


def test_diagnose_changes_nothing():
    settings = value, topk(alpha=0.1), optax.sgd(0.1), nodes_on(2)
    (init, step), (_, plain) = jgc.make_step(*settings), jgc.make_step(*settings)
    state, other = (init(jax.random.key(0), PARAMS) for _ in range(2))
    for i in range(3):
        figures = step.diagnose(state, batch_of(i))
        assert 0 < figures["true_cosine"] <= 1 and figures["positions"].ndim == 1
        state, _ = step(state, batch_of(i))
        other, _ = plain(other, batch_of(i))
    equal(state._replace(key=()), other._replace(key=()))
    with pytest.raises(TypeError, match="step takes the LoopState"):
        step.diagnose(state.params, batch_of(0))


@pytest.mark.parametrize("overlap", [0, 1])
def test_halves_of_a_local_step_make_a_step(overlap):
    compressor = topk(alpha=0.2, warmup_steps=1)
    local = jgc.local_steps(
        optax.sgd(0.05), optax.sgd(0.7, momentum=0.9), compressor, 2, nodes_on(2), overlap=overlap
    )
    (init, step), (_, halves) = local.make_step(value), local.make_step(value)
    state, other = (init(jax.random.key(0), PARAMS) for _ in range(2))
    for i in range(6):
        state, metrics = step(state, batch_of(i))
        other, seen = halves.inner(other, batch_of(i))
        if local.due(other.step).exchange is None:
            with pytest.raises(ValueError, match=f"no exchange is due after {other.step} steps"):
                halves.diagnose(other)
        else:
            phase, _ = halves.upcoming(other)
            grads = jax.tree.map(lambda a, b: a - b, other.params, other.own)
            equal(halves.pseudo_gradients(other), grads)
            figures = halves.diagnose(other)
            assert 0 < figures["true_cosine"] <= 1 + 1e-6
            assert collectives(halves.lower_exchange(other).compile())
        other, seen = halves.exchange(other, seen)
        equal(state._replace(key=()), other._replace(key=()))
        assert (seen.exchanged, other.phases) == (metrics.exchanged, state.phases)
        if seen.exchanged is not None:
            assert other.phases[0] == phase
    assert collectives(halves.lower(other, batch_of(0)).compile()) == ()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_restored_state_may_begin_with_its_exchange(devices):
    local = jgc.local_steps(optax.sgd(0.05), optax.sgd(0.7), topk(alpha=0.2, warmup_steps=0), 2, nodes_on(devices))
    (init, step), (_, restored) = local.make_step(value), local.make_step(value)
    state, _ = step(init(jax.random.key(0), PARAMS), batch_of(0))
    state, metrics = step.inner(state, batch_of(1))
    saved = jgc.from_arrays(jax.tree.map(np.array, jgc.as_arrays(state)))
    assert collectives(restored.lower_exchange(saved).compile()) == collectives(step.lower_exchange(state).compile())
    other, seen = restored.exchange(saved, metrics)
    state, metrics = step.exchange(state, metrics)
    equal(state._replace(key=()), other._replace(key=()))
    assert seen.exchanged == metrics.exchanged == 0
    equal(step(state, batch_of(2))[0].own, restored(other, batch_of(2))[0].own)
