"""PowerSGD that sends P and Q in turn: a transcription of ACP-SGD's algorithm, its phases, and what it costs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_powersgd import MATRICES, PARAMS, K, gram_schmidt, kept_by, mean_of, play, random_gradients, start_of

import jgc
from jgc.backend import plain_operations
from jgc.compress import dense, per_layer, powersgd, step_on_nodes
from jgc.compress.low_rank.acp_sgd import EVEN, ODD, sends_p
from jgc.compress.low_rank.factors import make_plan
from jgc.layout.pack import make_packing
from jgc.method.phases import phase_after, phase_at

LAYERS = make_packing(PARAMS).layers
NAMES = [LAYERS[matrix.layer].name for matrix in make_plan(LAYERS, 1).matrices]


def in_turn(compressor, steps, state=None):
    """(aggregated, state) of steps in the phases that the compressor names."""
    out, phase, nodes = [], phase_at(compressor.schedule, 0), jgc.make_nodes(K, jax.devices()[:1])
    state = state or start_of(compressor)
    for i, grads in enumerate(steps):
        phase = phase_after(compressor, phase, i, state, nodes)
        out += play(compressor, [grads], state, phase=compressor.schedule.index(phase))
        state = out[-1][1]
    return out


def algorithm(steps, p, q, phases):
    """ACP-SGD's, in f64: what is aggregated in each step, and what each node keeps."""
    p, q = ({name: np.asarray(x, np.float64) for name, x in factors.items()} for factors in (p, q))
    kept, out = {name: np.zeros((K, *shape)) for name, shape in MATRICES.items()}, []
    for grads, is_p in zip(steps, phases, strict=True):
        result = {}
        for name, shape in MATRICES.items():
            delta = grads[name].reshape(K, *shape) + kept[name]
            if is_p[name]:
                basis = gram_schmidt(q[name])
                own = [m @ basis @ basis.T for m in delta]
                p[name] = np.mean([m @ basis for m in delta], axis=0)
                result[name] = p[name] @ basis.T
            else:
                basis = gram_schmidt(p[name])
                own = [basis @ basis.T @ m for m in delta]
                q[name] = np.mean([m.T @ basis for m in delta], axis=0)
                result[name] = basis @ q[name].T
            kept[name] = delta - np.stack(own)
        out.append((result, {name: x.copy() for name, x in kept.items()}))
    return out


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_steps_are_those_of_the_papers_algorithm(rank):
    compressor, steps = powersgd(rank=rank, alternate=True), [random_gradients(seed) for seed in range(5)]
    state = start_of(compressor)
    turns = [dict(zip(NAMES, sends_p(make_plan(LAYERS, rank), (EVEN, ODD)[i % 2]), strict=True)) for i in range(5)]
    assert turns[0] != turns[1] == turns[3]
    p, q = (dict(zip(NAMES, factors, strict=True)) for factors in state.shared)
    want = algorithm(steps, p, q, turns)
    offsets = {layer.name: (layer.start, layer.start + layer.size) for layer in LAYERS}
    for (got, after), (aggregated, kept), grads in zip(in_turn(compressor, steps, state), want, steps, strict=True):
        for name in MATRICES:
            np.testing.assert_allclose(got[name].ravel(), aggregated[name].ravel(), atol=2e-5)
            start, end = offsets[name]
            np.testing.assert_allclose(kept_by(after)[:, start:end], kept[name].reshape(K, -1), atol=2e-5)
        np.testing.assert_allclose(got["bias"], mean_of(grads)["bias"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.exhaustive)])
def test_tuned_steps_equal_those_of_the_plain_reference(device, monkeypatch):
    compressor, nodes = powersgd(rank=3, alternate=True), jgc.make_nodes(K, jax.devices()[:1])
    state, grads = start_of(compressor), random_gradients(0)

    def step():
        return jax.jit(step_on_nodes(compressor.aggregate, EVEN, nodes))(jax.random.key(0), grads, state)

    with plain_operations():
        want = step()
    monkeypatch.setattr(sys.modules["jgc.backend"], "backend_of", lambda nodes: device)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(step()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_factors_converge_to_the_best_approximation():
    grads, compressor = random_gradients(1), powersgd(rank=2, alternate=True)
    state = start_of(compressor)
    for i in range(200):
        got, after = play(compressor, [grads], state, phase=i % 2)[0]
        state = state._replace(shared=after.shared)  # nothing is kept
    for name, shape in MATRICES.items():
        u, s, v = np.linalg.svd(mean_of(grads)[name].reshape(shape), full_matrices=False)
        best = (u[:, :2] * s[:2]) @ v[:2]
        assert np.linalg.norm(got[name].reshape(shape) - best) < 1e-2 * s[0]


@pytest.mark.parametrize("common", [0.0, 0.3])
def test_residuals_are_as_large_as_those_of_powersgd_of_half_the_rank(common):
    """Both send as many bytes: two factors of r columns in two steps, and of r / 2 columns in each."""
    params, nodes = {"w": jnp.zeros((32, 64))}, jgc.make_nodes(K, jax.devices()[:1])
    rng = np.random.default_rng(0)
    grads = (rng.normal(size=(120, K, 32, 64)) + common * rng.normal(size=(32, 64))).astype(np.float32)

    def residual(**settings):
        compressor, norms = powersgd(**settings), []
        state = compressor.init(jax.random.key(0), params, nodes)
        steps = [jax.jit(step_on_nodes(compressor.aggregate, phase.value, nodes)) for phase in compressor.schedule]
        for i, x in enumerate(grads):
            _, state, _ = steps[i % len(steps)](jax.random.key(i), {"w": x}, state)
            norms.append(np.linalg.norm(kept_by(state).mean(0)))
        return np.mean(norms[40:])

    alternate, half = residual(rank=4, alternate=True), residual(rank=2)
    assert alternate == pytest.approx(half, rel=0.1)
    assert alternate > 1.25 * residual(rank=4)


def test_factors_recover_after_zero_gradients_and_those_of_lower_rank():
    zero, full, compressor = random_gradients(0, scale=0.0), random_gradients(2), powersgd(rank=4, alternate=True)
    flat, rng = random_gradients(0), np.random.default_rng(0)
    for name, (rows, cols) in MATRICES.items():
        one = np.multiply.outer(rng.integers(-4, 5, rows), rng.integers(-4, 5, cols))  # exactly of rank one
        flat[name] = np.broadcast_to(one.reshape(PARAMS[name].shape), flat[name].shape).astype(np.float32)
    ran = in_turn(compressor, [zero, zero, *[flat] * 12, full, full])
    assert not any(np.any(x) for x in jax.tree.leaves(ran[1][0]))
    lengths = [np.linalg.norm(x, axis=0) for x in jax.tree.leaves(ran[-1][1].shared)]
    np.testing.assert_allclose(lengths, np.ones((4, 4)), rtol=1e-5)
    for name, shape in MATRICES.items():
        assert all(np.linalg.matrix_rank(got[name].reshape(shape), tol=1e-3) == 4 for got, _ in ran[-2:])


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_step_has_one_all_reduce_and_steps_are_alike(layers):
    params = {f"layer {i}": jnp.zeros((18 + i, 6)) for i in range(layers)} | {"bias": jnp.zeros(5)}
    compressor, nodes = powersgd(rank=2, alternate=True), jgc.make_nodes(8)
    rows, cols = sum(18 + i for i in range(layers)), 6 * layers
    sizes = []
    for phase in (EVEN, ODD):
        wire = compressor.wire(phase, params, nodes)
        (sent,) = [s for s in wire.physical if s.field != "flag"]
        up = {m.field: m.bytes for m in wire.logical if m.direction == "up"}
        assert (sent.op, sent.field, sent.bytes) == ("all-reduce", "dense+factors", 2 * 7 / 8 * sum(up.values()))
        assert up["dense"] == 20
        sizes.append(up["factors"])
    assert sum(sizes) == 8 * (rows + cols)  # together what powersgd sends in one step
    assert abs(sizes[0] - sizes[1]) <= 8 * (18 + layers - 6)  # by one layer at most


def quadratic(params, batch):
    return sum(jnp.sum((x - jnp.mean(batch)) ** 2) for x in jax.tree.leaves(params)) / 2


def test_a_loop_takes_the_phases_in_turn_with_two_programs_and_copies_no_state():
    compressor, nodes = powersgd(alternate=True, warmup_steps=2), jgc.make_nodes(K, jax.devices()[:1])
    init, step = jgc.make_step(quadratic, compressor, optax.sgd(0.1), nodes)
    state, names = init(jax.random.key(0), PARAMS), []
    for _ in range(6):
        coming = step.upcoming(state)[1]
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, (coming, state.compressor)), strict=True))
        state, metrics = step(state, jnp.ones((K, 3)))
        names.append(state.phase.name)
    assert names == ["dense", "dense", EVEN, ODD, EVEN, ODD] and metrics.info.finite
    assert len(step._loop.programs) == 3


def test_rules_of_layers_see_each_pair_of_phases_once():
    compressor = per_layer([("bias", dense())], default=powersgd(alternate=True))
    nodes, phase, seen = jgc.make_nodes(K, jax.devices()[:1]), None, []
    state = compressor.init(jax.random.key(0), PARAMS, nodes)
    for i in range(6):
        phase = phase_after(compressor, phase or phase_at(compressor.schedule, 0), i, state, nodes)
        seen.append(phase)
    assert len(set(seen)) == 2 and seen[0::2] == seen[:1] * 3 and seen[1::2] == seen[1:2] * 3
    assert set(seen) == set(compressor.schedule)


@pytest.mark.slow
def test_shards_of_a_node_are_compressed_in_turn():
    mesh = jax.make_mesh((2, 2), ("dcn", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    nodes = jgc.from_mesh(mesh, slow=("dcn",), fast=("fsdp",))
    where = {"conv": P(None, None, None, "fsdp"), "dense": P("fsdp")}
    params = {k: jax.device_put(x, NamedSharding(mesh, where.get(k, P()))) for k, x in PARAMS.items()}
    compressor = powersgd(rank=1, alternate=True)
    init, step = jgc.make_step(quadratic, compressor, optax.sgd(0.5), nodes)
    state = init(jax.random.key(0), params)
    for _ in range(6):
        state, metrics = step(state, jnp.ones((2, 4)))
    assert metrics.info.finite and float(metrics.loss) < 0.1 * float(quadratic(PARAMS, jnp.ones(3)))
    assert state.phase.name == ODD


def test_it_needs_a_warm_start():
    with pytest.raises(ValueError, match="warm_start must be True with alternate=True, got False"):
        powersgd(alternate=True, warm_start=False)
