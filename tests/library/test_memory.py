"""Residuals and momentum correction, against a transcription of the paper's algorithm and against plain SGD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgc
from jgc.compress.sparse.scalecom import low_pass
from jgc.layout.pack import make_packing, pack
from jgc.layout.vector import compensated as compensate
from jgc.method.ages import with_ages
from jgc.method.memory import (
    accumulated,
    clip_local,
    error_feedback,
    make_memory,
    momentum_at_once,
    momentum_correction,
    momentum_only,
    no_memory,
    stored,
)
from jgc.selection.entries import Sparse
from jgc.types import Nodes

N, STEPS = 20, 12


def _gradients(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(STEPS, N)).astype(np.float32)


def _compensated(memory, local, g, complete):
    """What a node is to send of a gradient f32[n], and its state."""
    return memory.compensate(accumulated(memory, local, g, complete), g, complete)


def _largest(v: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(v), kind="stable")[:count])


@pytest.mark.parametrize("masking", [False, True])
def test_momentum_correction_is_dgc_algorithm(masking):
    """Lin et al. 2018, Algorithm 4, as it is printed: u = m u + g; v = v + u; send top of v; clear v (and u) there."""
    m, memory = np.float32(0.9), momentum_correction(0.9, masking)
    local, u, v = memory.init(N), np.zeros(N, np.float32), np.zeros(N, np.float32)
    for g in _gradients():
        u = m * u + g
        v = v + u
        mask = np.zeros(N, bool)
        mask[_largest(v, 3)] = True
        to_send, local = _compensated(memory, local, jnp.asarray(g), False)
        np.testing.assert_allclose(to_send, v, rtol=1e-5, atol=1e-6)
        positions = jnp.asarray(np.flatnonzero(mask))
        local = memory.update(local, to_send, Sparse(positions, to_send[positions]), False)
        v = np.where(mask, 0, v)
        u = np.where(mask, 0, u) if masking else u
        np.testing.assert_allclose(local.residual, v, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(local.velocity, u, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"factor_masking": True, "warmup_steps": 100}, {"warmup_steps": 3}], ids=str)
def test_lossless_momentum_correction_is_momentum_sgd(settings):
    nodes = jgc.make_nodes(4, jax.devices()[:1])
    compressor = jgc.compress.topk(alpha=1.0, momentum_correction=True, momentum=0.9, **settings)
    sgd = optax.sgd(0.1, momentum=0.9)
    params = expected = jnp.zeros((4, 5))
    state, sgd_state = compressor.init(jax.random.key(0), params, nodes), sgd.init(params)
    steps = {
        phase.value: jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, phase.value, nodes))
        for phase in compressor.schedule
    }
    for i in range(6):
        grads = jax.random.normal(jax.random.key(i), (4, 4, 5))
        phase = jgc.method.phases.phase_at(compressor.schedule, i).value
        aggregated, state, _ = steps[phase](jax.random.key(0), grads, state)
        params = params - 0.1 * aggregated
        updates, sgd_state = sgd.update(grads.mean(0), sgd_state)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at_once", [False, True])
def test_gradient_counts_for_whole_momentum_series(at_once):
    memory, g = make_memory(True, 0.5, at_once=at_once), jnp.array([1.0, -2.0])
    local, total = memory.init(2), jnp.zeros(2)
    for i in range(30):
        v, local = _compensated(memory, local, g if i == 0 else 0 * g, False)
        local = memory.update(local, v, v, False)
        total += v
    np.testing.assert_allclose(total, g / (1 - 0.5), rtol=1e-6)


def test_lossless_momentum_at_once_is_momentum_sgd():
    memories = momentum_correction(0.5), momentum_at_once(0.5)
    locals_ = [memory.init(N) for memory in memories]
    for g in _gradients():
        sent = []
        for i, memory in enumerate(memories):
            v, local = _compensated(memory, locals_[i], jnp.asarray(g), True)
            locals_[i] = memory.update(local, v, v, True)
            sent.append(v)
        assert np.array_equal(*sent)


def test_momentum_at_once_is_independent_of_phases():
    memory, rng, came_in, sent = momentum_at_once(0.75), np.random.default_rng(0), np.zeros(N), np.zeros(N)
    local = memory.init(N)
    for complete in (True, True, False, False, True, False, True):
        g = rng.normal(size=N).astype(np.float32)
        v, local = _compensated(memory, local, jnp.asarray(g), complete)
        out = v if complete else jnp.where(jnp.arange(N) % 3 == 0, v, 0)
        local = memory.update(local, v, out, complete)
        came_in, sent = came_in + g / (1 - 0.75), sent + np.asarray(out, float)
        np.testing.assert_allclose(sent + np.asarray(memory.residual(local), float), came_in, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_error_feedback_keeps_unsent_values(dtype):
    memory, residual = error_feedback(jnp.dtype(dtype)), np.zeros(N)
    local = memory.init(N)
    for g in np.round(_gradients() * 8) / 8:
        v, local = _compensated(memory, local, jnp.asarray(g), False)
        assert v.dtype == jnp.float32
        positions = jnp.asarray(_largest(np.asarray(v), 10))
        local = memory.update(local, v, Sparse(positions, v[positions]), False)
        local = stored(jax.random.key(0), local, memory.init(N))
        residual = residual + g
        residual[np.asarray(positions)] = 0
        assert local.dtype == jnp.dtype(dtype)
        assert np.array_equal(memory.residual(local).astype(float), residual)


@pytest.mark.parametrize("make", [
    error_feedback, lambda dtype: momentum_correction(0.9, dtype=dtype), lambda dtype: momentum_at_once(0.9, dtype),
    lambda dtype: low_pass(error_feedback(dtype), 0.5),
])  # fmt: skip
@pytest.mark.parametrize("sends", [True, False])
def test_bfloat16_loses_no_small_gradients(make, sends):
    """A value waits for 1,024 or 3,000 steps of one gradient, and its residual exceeds the gradient as often."""
    g = jnp.linspace(0.9, 1.1, 1024)

    def total(memory):
        def step(carry, i):
            local, sent = carry
            v, after = _compensated(memory, local, g, False)
            at = jnp.where(sends, i % g.size, g.size)[None]
            values = jnp.where(sends, v[i % g.size], 0)[None]
            after = memory.update(after, v, Sparse(at, values), False)
            return (stored(jax.random.fold_in(jax.random.key(0), i), after, local), sent + values[0]), None

        (local, sent), _ = jax.lax.scan(step, (memory.init(g.size), jnp.float32(0)), jnp.arange(3000))
        return float(sent), np.asarray(memory.residual(local).astype(jnp.float32))

    (sent, kept), (exactly_sent, exactly_kept) = total(make(jnp.bfloat16)), total(make(jnp.float32))
    np.testing.assert_allclose(sent + kept.sum(), exactly_sent + exactly_kept.sum(), rtol=0.002)
    if not sends:  # each value by itself: after 3,000 steps of errors of up to 1/256, a random walk
        np.testing.assert_allclose(kept, exactly_kept, rtol=0.3)


@pytest.mark.parametrize("make", [error_feedback, lambda dtype: momentum_correction(0.9, dtype=dtype),
                                  lambda dtype: momentum_at_once(0.9, dtype)])  # fmt: skip
def test_float16_is_no_dtype_of_a_memory(make):
    with pytest.raises(ValueError, match="residual_dtype must be one of float32, bfloat16, got 'float16'"):
        make(dtype=jnp.float16)


def test_memories_declare_residual_and_momentum():
    assert [m.owns_momentum for m in (no_memory(), error_feedback(), momentum_only(0.9))] == [False, False, True]
    assert make_memory(True, 0.9).owns_momentum and not make_memory(False, 0.9).owns_momentum
    assert no_memory().residual(no_memory().init(N)) is None and momentum_only(0.9).residual(jnp.ones(N)) is None


def test_memory_starts_from_zeros():
    for memory in (error_feedback(), momentum_correction(0.9), momentum_at_once(0.9), momentum_only(0.9)):
        assert all(not np.any(x) and x.shape == (N,) for x in jax.tree.leaves(memory.init(N)))


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_bad_momentum_is_named(momentum):
    for build in (momentum_correction, momentum_at_once, momentum_only):
        with pytest.raises(ValueError, match=rf"momentum must be in \[0, 1\), got {momentum}"):
            build(momentum)


def test_local_clipping_keeps_global_bound():
    large = {"a": jnp.full((3, 4), 10.0), "b": jnp.full(4, -10.0, jnp.bfloat16)}
    clipped = clip_local(large, max_norm=2.0, nodes=Nodes(4, 4))
    assert sum(np.sum(x.astype(float) ** 2) for x in clipped.values()) == pytest.approx(1.0, rel=1e-2)
    assert {name: x.dtype for name, x in clipped.items()} == {name: x.dtype for name, x in large.items()}
    small = jax.tree.map(lambda x: (x / 1024).astype(x.dtype), large)
    assert all(np.array_equal(clip_local(small, 2.0, Nodes(4, 4))[name], x) for name, x in small.items())
    assert not np.any(clip_local({"a": jnp.zeros(3)}, 1.0, Nodes(4, 4))["a"])
    with pytest.raises(ValueError, match="max_norm must be finite and positive, got 0"):
        clip_local(large, 0, Nodes(4, 4))


TREE = {"bias": (3,), "kernel": (4, 5), "other": (2, 3, 2)}
MEMORIES = {
    "none": no_memory(),
    "error feedback": error_feedback(),
    "error feedback, bf16": error_feedback(jnp.dtype("bfloat16")),
    "momentum correction": momentum_correction(0.9),
    "momentum correction, bf16": momentum_correction(0.9, dtype=jnp.dtype("bfloat16")),
    "momentum at once": momentum_at_once(0.9),
    "momentum at once, bf16": momentum_at_once(0.9, jnp.dtype("bfloat16")),
    "momentum only": momentum_only(0.9),
    "with ages": with_ages(momentum_correction(0.9)),
    "none, with ages": with_ages(no_memory()),
}


def _trees(seed: int, nodes: int = 1) -> dict:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(nodes, *shape)).astype(np.float32) for name, shape in TREE.items()}


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_accumulating_tree_equals_accumulating_vector(memory, complete):
    packing, locals_ = make_packing(jax.tree.map(lambda x: x[0], _trees(0))), []
    for seed in range(3):  # states as three earlier steps left them, one a node
        local, g = memory.init(packing.size), pack(jax.tree.map(lambda x: x[0], _trees(10 + seed)), packing)
        v, after = _compensated(memory, local, g, False)
        after = memory.update(after, v, Sparse(jnp.arange(4), v[:4]), False)
        locals_.append(stored(jax.random.key(seed), after, local))
    local = jax.tree.map(lambda *x: jnp.stack(x), *locals_)
    grads = _trees(1, nodes=3)

    def by_tree(local, grads):
        return compensate(memory, local, grads, packing, complete)

    def by_vector(local, grads):
        return _compensated(memory, local, pack(grads, packing), complete)

    batched = jax.jit(jax.vmap(by_tree))(local, grads)
    alone = [jax.jit(by_tree)(*jax.tree.map(lambda x, i=i: x[i], (local, grads))) for i in range(3)]
    kept = [memory.update(after, v, Sparse(jnp.arange(4), v[:4]), complete) for v, after in alone]
    kept = [stored(jax.random.key(0), one, locals_[0]) for one in kept]
    for i in range(3):
        own = jax.tree.map(lambda x, i=i: x[i], (local, grads))
        expected = by_vector(*own)
        for got in (alone[i], jax.tree.map(lambda x, i=i: x[i], batched)):
            assert jax.tree.structure(got) == jax.tree.structure(expected)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
        jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), kept[i], own[0])


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_without_values_a_step_computes_in_f32_too(memory):
    tree = {"a": jnp.zeros((0, 3)), "b": jnp.zeros(3, jnp.int32)}
    v, _ = compensate(memory, memory.init(0), tree, make_packing(tree), False)
    assert v.shape == (0,) and v.dtype == jnp.float32


@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("code", ["float16", "1bit", "mxfp4"])
def test_a_group_without_values_takes_any_code(code, residual_dtype):
    compressor = jgc.compress.dgc(value_code=code, residual_dtype=residual_dtype)
    sent = jgc.bytes_per_step(compressor, {"steps": jnp.zeros(3, jnp.int32)}, jgc.make_nodes(2, jax.devices()[:1]))
    assert not any(of.uncompressed for of in sent.values())


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_skipped_step_keeps_state_and_returns_residual(memory, complete):
    packing = make_packing(jax.tree.map(lambda x: x[0], _trees(0)))
    g = pack(jax.tree.map(lambda x: x[0], _trees(10)), packing)
    first = memory.init(packing.size)
    v, local = _compensated(memory, first, g, False)
    local = stored(jax.random.key(0), memory.update(local, v, Sparse(jnp.arange(4), v[:4]), False), first)
    bad = jax.tree.map(lambda x: jnp.full(x.shape[1:], jnp.nan), _trees(0))

    @jax.jit
    def step(local, skip):
        v, after = compensate(memory, local, bad, packing, complete, skip)
        nowhere = Sparse(jnp.full(4, packing.size), jnp.zeros(4))
        after = memory.update(after, v, jnp.zeros_like(v) if complete else nowhere, complete)
        return v, stored(jax.random.key(1), after, local)

    v, after = step(local, True)
    kept = memory.residual(local)
    assert np.array_equal(v, jnp.zeros_like(v) if kept is None else kept.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, after, local)
    assert not np.isfinite(step(local, False)[0]).any()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere gradients are absorbed in one pass, as a vector")
@pytest.mark.parametrize("name", ["topk", "scalecom", "random_k"])
def test_step_on_cpu_allocates_one_gradient_vector(name):
    nodes, shapes = jgc.make_nodes(1), {f"kernel {i}": (300, 300) for i in range(6)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    compressor = getattr(jgc.compress, name)(alpha=0.001, warmup_steps=0)
    state, grads = compressor.init(jax.random.key(0), params, nodes), jax.tree.map(lambda x: x[None], params)
    step = jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    run = jax.jit(step, donate_argnums=2, out_shardings=(None, shardings, None))
    memory = run.lower(jax.random.key(0), grads, state).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * sum(x.size for x in params.values())
    assert memory.temp_size_in_bytes < 2 * sum(x.size for x in params.values())
