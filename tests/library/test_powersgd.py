"""PowerSGD against NumPy's SVD and a transcription of the paper's Algorithms 1 and 2, and what it costs."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgc
from jgc.backend import plain_operations
from jgc.compress import powersgd, step_on_nodes
from jgc.compress.low_rank.powersgd import low_rank, make_plan, random_factors
from jgc.layout.matrices import orthonormal, unit
from jgc.layout.pack import make_packing, pack
from jgc.types import Compressor, State
from jgc.wire.account import logical_bytes

K = 4
PARAMS = {
    "bias": jnp.zeros(6),
    "conv": jnp.zeros((3, 3, 4, 8)),
    "dense": jnp.zeros((12, 10)),
    "tiny": jnp.zeros((2, 2)),
}
MATRICES = {"conv": (36, 8), "dense": (12, 10)}  # at ranks up to 4; the others go uncompressed


def random_gradients(seed: int, scale: float = 1.0, nodes: int = K) -> dict[str, np.ndarray]:
    """Gradients of all nodes, [nodes, ...]."""
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=(nodes, *x.shape))).astype(np.float32) for name, x in PARAMS.items()}


def mean_of(grads: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, np.float64).mean(0) for name, x in grads.items()}


made = functools.cache(powersgd)  # what two tests share is compiled once


@functools.cache
def program(compressor: Compressor, nodes: int, phase: int):
    where = jgc.make_nodes(nodes, jax.devices()[:1])
    step = step_on_nodes(compressor.aggregate, compressor.schedule[phase].value, where)
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})  # half the compile time


@functools.cache
def start_of(compressor: Compressor, nodes: int = K) -> State:
    where = jgc.make_nodes(nodes, jax.devices()[:1])
    return jax.jit(lambda key: compressor.init(key, PARAMS, where))(jax.random.key(0))


def play(compressor: Compressor, steps: list[dict], state: State | None = None, phase: int = -1) -> list[Any]:
    """(aggregated, state) of each step."""
    nodes, out = len(steps[0]["bias"]), []
    state = state or start_of(compressor, nodes)
    for i, grads in enumerate(steps):
        aggregated, state, info = program(compressor, nodes, phase)(jax.random.key(i), grads, state)
        assert info.finite.all()
        out.append((jax.tree.map(np.asarray, aggregated), state))
    return out


def unpacked(vector: np.ndarray) -> dict[str, np.ndarray]:
    """f32[n] as the layers' flat values."""
    packing = make_packing(PARAMS)
    return {layer.name: np.asarray(vector)[layer.start : layer.start + layer.size] for layer in packing.layers}


def kept_by(state: State) -> np.ndarray:
    """The residuals of all nodes, [K, n]: one array for each layer, in order."""
    return np.concatenate([np.asarray(x).reshape(len(x), -1) for x in state.local.memory], axis=1)


def gram_schmidt(p: np.ndarray) -> np.ndarray:
    out = p.copy()
    for i in range(p.shape[1]):
        for j in range(i):
            out[:, i] -= (out[:, j] @ out[:, i]) * out[:, j]
        out[:, i] /= np.linalg.norm(out[:, i])
    return out


def algorithms_1_and_2(steps: list[dict], q: dict[str, np.ndarray]) -> list[dict]:
    """The paper's, in f64: what is aggregated in each step, and what node 0 keeps."""
    q, out = {name: np.asarray(x, np.float64) for name, x in q.items()}, []
    kept = {name: np.zeros((K, *shape)) for name, shape in MATRICES.items()}
    for grads in steps:
        result = {name: mean_of(grads)[name] for name in PARAMS if name not in MATRICES}
        for name, shape in MATRICES.items():
            delta = grads[name].reshape(K, *shape) + kept[name]
            p = gram_schmidt(np.mean([m @ q[name] for m in delta], axis=0))
            own = [m.T @ p for m in delta]
            q[name] = np.mean(own, axis=0)
            kept[name] = np.stack([m - p @ x.T for m, x in zip(delta, own, strict=True)])
            result[name] = p @ q[name].T
        out.append((result, {name: x.copy() for name, x in kept.items()}))
    return out


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_steps_are_those_of_the_papers_algorithms(rank):
    compressor, steps = made(rank=rank), [random_gradients(seed) for seed in range(4)]
    state = start_of(compressor)
    names = [layer.name for layer in make_packing(PARAMS).layers if layer.name in MATRICES]
    want = algorithms_1_and_2(steps, dict(zip(names, state.shared, strict=True)))
    for (got, after), (aggregated, kept) in zip(play(compressor, steps, state), want, strict=True):
        for name, value in aggregated.items():
            np.testing.assert_allclose(got[name].ravel(), value.ravel(), atol=2e-5)
        for node in range(K):
            ours = unpacked(kept_by(after)[node])
            for name, value in kept.items():
                np.testing.assert_allclose(ours[name], value[node].ravel(), atol=2e-5)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("rank", [1, 3])
def test_tuned_steps_equal_those_of_the_plain_reference(rank, device, monkeypatch):
    compressor, state, nodes = powersgd(rank=rank), start_of(made(rank=rank)), jgc.make_nodes(K, jax.devices()[:1])

    def step():
        return jax.jit(step_on_nodes(compressor.aggregate, "low rank", nodes))(jax.random.key(0), grads, state)

    grads = random_gradients(0)
    with plain_operations():
        want = step()
    monkeypatch.setattr(sys.modules["jgc.backend"], "backend_of", lambda nodes: device)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(step()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["psum", "ring"])
def test_many_nodes_equal_one_node_with_their_mean(algorithm):
    """Also with what they keep: it is linear in the gradients."""
    compressor, steps = made(rank=2, algorithm=algorithm), [random_gradients(seed) for seed in range(3)]
    alone = [{name: x[None].astype(np.float32) for name, x in mean_of(grads).items()} for grads in steps]
    for (ours, after), (theirs, whole) in zip(play(compressor, steps), play(compressor, alone), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)
        np.testing.assert_allclose(np.mean(kept_by(after), axis=0), kept_by(whole)[0], atol=1e-5)


def test_error_feedback_conserves_gradients():
    steps, had = [random_gradients(seed) for seed in range(5)], np.zeros(make_packing(PARAMS).size)
    for grads, (got, state) in zip(steps, play(made(rank=2), steps), strict=True):
        mean, aggregated = (np.asarray(pack(tree, make_packing(PARAMS))) for tree in (mean_of(grads), got))
        had = had + mean - aggregated
        np.testing.assert_allclose(np.mean(kept_by(state), axis=0), had, atol=1e-5)
        assert not np.any(unpacked(kept_by(state)[0])["biases and norms"])


def test_uncompressed_layers_get_exact_mean():
    grads = random_gradients(0)
    got = play(made(rank=4), [grads])[0][0]
    for name in ("bias", "tiny"):
        np.testing.assert_allclose(got[name], mean_of(grads)[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_warm_start_converges_to_best_approximation(rank):
    grads, compressor = random_gradients(1), made(rank=rank)
    state, found = start_of(compressor), []
    for _ in range(150):
        got, after = play(compressor, [grads], state)[0]
        state, found = state._replace(shared=after.shared), [*found, got]  # nothing is kept
    for name, shape in MATRICES.items():
        u, s, v = np.linalg.svd(mean_of(grads)[name].reshape(shape), full_matrices=False)
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        first, last = (np.linalg.norm(found[i][name].reshape(shape) - best) / s[0] for i in (0, -1))
        assert last < 1e-2 < first


def test_cold_start_draws_new_factors():
    compressor, grads = made(warm_start=False, error_feedback=False), random_gradients(1)
    (one, state), (other, _) = play(compressor, [grads, grads])
    (again, _), *_ = play(compressor, [grads])
    assert state.shared == ()
    np.testing.assert_array_equal(one["conv"], again["conv"])
    assert np.abs(one["conv"] - other["conv"]).max() > 0.01


@pytest.mark.parametrize("scale", [1e-25, 1e13])
def test_result_scales_with_gradients(scale):
    steps = [random_gradients(seed) for seed in range(3)]
    scaled = [jax.tree.map(lambda x: (x * np.float32(scale)), grads) for grads in steps]
    for (got, _), (small, _) in zip(*(play(made(rank=2), s) for s in (steps, scaled)), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(b / np.float32(scale), a, atol=1e-4), got, small)


def test_factors_recover_after_zero_gradients():
    zero, grads = random_gradients(0, scale=0.0), random_gradients(1)
    compressor = made(rank=2)
    *_, (nothing, after), (got, _) = play(compressor, [zero, zero, grads])
    assert not any(np.any(x) for x in jax.tree.leaves(nothing))
    assert all(np.all(np.isfinite(q)) and np.any(q) for q in after.shared)
    jax.tree.map(np.testing.assert_array_equal, got, play(compressor, [grads])[0][0])


def test_lower_rank_gradient_is_lossless_and_keeps_rank():
    compressor, rng, flat = made(rank=4), np.random.default_rng(0), random_gradients(0)
    for name, (rows, cols) in MATRICES.items():
        one = np.multiply.outer(rng.integers(-4, 5, rows), rng.integers(-4, 5, cols))  # exactly of rank one
        flat[name] = np.broadcast_to(one.reshape(PARAMS[name].shape), flat[name].shape).astype(np.float32)
    *_, (got, state) = play(compressor, [flat] * 3)
    for name in MATRICES:
        np.testing.assert_allclose(got[name], mean_of(flat)[name], atol=1e-4)
    full, start = random_gradients(2), start_of(compressor)
    for name, shape in MATRICES.items():
        ranks = [
            np.linalg.matrix_rank(play(compressor, [full], begin)[0][0][name].reshape(shape), tol=1e-3)
            for begin in (state._replace(local=start.local), start)
        ]
        assert ranks == [4, 4]


# --- matrices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 3.0, 9.0], ids=["well conditioned", "1e3", "1e9"])
def test_orthonormal_columns_keep_their_span(spread):
    rng = np.random.default_rng(2)
    u, v = (np.linalg.qr(rng.normal(size=(n, 6)))[0] for n in (50, 6))
    p = ((u * 10.0 ** -np.linspace(0, spread, 6)) @ v.T).astype(np.float32)
    got = np.asarray(jax.jit(orthonormal)(p), float)
    np.testing.assert_allclose(got.T @ got, np.diag(np.diag(got.T @ got).round()), atol=1e-5)
    np.testing.assert_allclose(got @ (got.T @ p), p, atol=1e-5 * np.linalg.norm(p))


def test_dependent_columns_become_zero():
    p = np.random.default_rng(3).normal(size=(20, 5)).astype(np.float32)
    p[:, 1], p[:, 3] = 0, p[:, 0] - p[:, 2]
    got = np.asarray(jax.jit(orthonormal)(p))
    np.testing.assert_allclose(got.T @ got, np.diag([1.0, 0, 1, 0, 1]), atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-20, 1.0, 1e36])
def test_columns_of_any_size_have_length_one_or_are_zero(size):
    x = np.float32(size) * np.array([[1, 0], [1, 0], [-2, 0]], np.float32)
    want = [1.0 if size else 0.0, 0.0]
    np.testing.assert_allclose(np.linalg.norm(unit(jnp.asarray(x)), axis=0), want, rtol=1e-5)


def test_factors_of_full_rank_hold_the_whole_matrix():
    """Such layers go uncompressed; the algorithm itself must be exact there all the same."""
    packing = make_packing({"a": jnp.zeros((9, 5))})
    plan, v = make_plan(packing.layers, 1), jnp.asarray(np.random.default_rng(4).normal(size=(9, 5)), jnp.float32)
    start = random_factors(jax.random.key(0), plan, 5)
    (mean,), *_ = jax.jit(lambda v: low_rank(plan, [v], start, lambda parts, kind: list(parts)))(v)
    np.testing.assert_allclose(mean, v, atol=1e-5)


@pytest.mark.parametrize("shape, rank, factors", [((6, 3), 1, True), ((6, 3), 2, False), ((4, 4), 2, False),
                                                  ((3, 3, 2, 8), 5, True), ((1, 50), 1, False)])  # fmt: skip
def test_layers_are_factored_where_factors_are_smaller(shape, rank, factors):
    plan = make_plan(make_packing({"a": jnp.zeros(shape)}).layers, rank)
    assert (len(plan.matrices), len(plan.dense)) == ((1, 0) if factors else (0, 1))
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    assert factors == ((rows + cols) * rank < rows * cols)


# --- what it costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_step_has_two_all_reduces(layers):
    params = {f"layer {i}": jnp.zeros((8 + i, 6)) for i in range(layers)} | {"bias": jnp.zeros(5)}
    wire = powersgd(rank=2).wire("low rank", params, jgc.make_nodes(8))
    rows, cols = sum(8 + i for i in range(layers)), 6 * layers
    sent = {(s.op, s.field): s.bytes for s in wire.physical if s.field != "flag"}
    share = 2 * 7 / 8  # of a ring of 8
    assert sent == {("all-reduce", "dense+factors"): share * 4 * (2 * rows + 5),
                    ("all-reduce", "factors"): share * 4 * 2 * cols}  # fmt: skip
    want = {"factors": 8.0 * (rows + cols), "dense": 20.0}
    assert logical_bytes(wire.logical, 8)["worker"] == {"up": want, "down": want}


def test_step_without_factored_layers_has_one_all_reduce():
    wire = powersgd(rank=100).wire("low rank", PARAMS, jgc.make_nodes(8))
    assert [s.field for s in wire.physical] == ["flag", "dense+factors"]
    assert {m.field for m in wire.logical} == {"dense"}


def test_warm_up_is_uncompressed_and_keeps_factors():
    compressor, grads = powersgd(warmup_steps=3), random_gradients(0)
    assert [(phase.name, phase.start) for phase in compressor.schedule] == [("dense", 0), ("low rank", 3)]
    got, state = play(compressor, [grads], phase=0)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, mean_of(grads))
    jax.tree.map(np.testing.assert_array_equal, state.shared, start_of(compressor).shared)
    assert not np.any(kept_by(state))


def test_optimiser_owns_momentum():
    assert not powersgd().owns_momentum


@pytest.mark.parametrize("bad, words", [({"rank": 0}, "rank must be at least 1, got 0"),
                                        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
                                        ({"algorithm": "tree"}, "one of 'psum', 'ring', got 'tree'")])  # fmt: skip
def test_bad_settings_are_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        powersgd(**bad)
