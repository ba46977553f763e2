"""Learned bases of `klt` against NumPy, and what a step makes of gradients that have something in common."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgc
from jgc.backend import plain_operations
from jgc.compress import klt, step_on_nodes
from jgc.compress.low_rank import klt_bases
from jgc.layout.eigenvectors import eigh
from jgc.layout.pack import make_packing, pack
from jgc.method.memory import Corrected
from jgc.types import State
from jgc.wire.account import logical_bytes

K = 4
PARAMS = {"bias": jnp.zeros(6), "conv": jnp.zeros((3, 3, 4, 8)), "dense": jnp.zeros((10, 5))}
N = 9 * 4 * 8 + 50 + 6
PLAIN = {"momentum_correction": False}


def one_direction(shape: tuple[int, ...]) -> np.ndarray:
    """A layer of rank one: one coefficient in its own bases."""
    rng, out = np.random.default_rng(3), np.ones(())
    for size in shape if len(shape) < 3 else (9, *shape[2:]):
        out = np.multiply.outer(out, rng.normal(size=size))
    return out.reshape(shape)


DIRECTION = {name: one_direction(x.shape) for name, x in PARAMS.items()}


def in_common(steps: int, noise: float, seed: int = 0) -> list[dict]:
    """Steps of all nodes' gradients [K, ...]: one direction, stronger or weaker, and noise."""
    rng = np.random.default_rng(seed)

    def node_gradients():
        strength = rng.normal() + 2
        return {
            name: (strength * d + noise * rng.normal(size=(K, *d.shape))).astype(np.float32)
            for name, d in DIRECTION.items()
        }

    return [node_gradients() for _ in range(steps)]


def flat(tree: dict) -> np.ndarray:
    return np.asarray(pack(tree, make_packing(PARAMS)))


def mean_of(grads: dict) -> np.ndarray:
    return flat(jax.tree.map(lambda x: jnp.asarray(x).mean(0), grads))


def play(compressor, steps: list[dict], state: State | None = None, phase: int = -1) -> list[tuple[np.ndarray, State]]:
    """Aggregates f32[n] and states of steps in one phase."""
    nodes = jgc.make_nodes(K, jax.devices()[:1])
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[phase].value, nodes))
    state, out = state or compressor.init(jax.random.key(0), PARAMS, nodes), []
    for grads in steps:
        aggregated, state, _ = step(jax.random.key(1), grads, state)
        out.append((flat(aggregated), state))
    return out


@functools.cache
def learned(**settings) -> State:
    """The state after 20 uncompressed steps."""
    return play(klt(**PLAIN, warmup_steps=20, **settings), in_common(20, 0.3), phase=0)[-1][1]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_bases_are_the_eigenvectors_of_the_means_moments():
    steps = in_common(20, 0.3)
    state = play(klt(**PLAIN, warmup_steps=20, decay=0.9), steps, phase=0)[-1][1]
    state = play(klt(**PLAIN, warmup_steps=20, decay=0.9), in_common(1, 0.3, 5), state)[-1][1]
    moment = np.zeros((8, 8))
    for i, grads in enumerate(steps):  # the layer `conv` comes first, its last mode are the outputs
        a = grads["conv"].mean(0).reshape(-1, 8)
        moment += 0.9 ** (19 - i) * a.T @ a
    (ours,) = (np.asarray(u) for u in state.shared.bases[0] if u.shape == (8, 8))
    np.testing.assert_allclose(ours.T @ ours, np.eye(8), atol=1e-5)
    np.testing.assert_allclose(ours.T @ moment @ ours, np.diag(np.linalg.eigvalsh(moment)), atol=1e-4 * moment.max())


def test_coefficients_of_most_energy_are_kept():
    state = play(klt(**PLAIN, share=0.1), in_common(1, 0.3, 5), learned(share=0.1))[-1][1]
    before = learned(share=0.1).shared.moments
    energies = []
    for moments in before:
        values = [np.linalg.eigvalsh(m) if m.ndim == 2 else np.asarray(m) for m in moments]
        whole = values[0].sum()
        energy = np.array(whole)
        for value in values:
            energy = np.multiply.outer(energy, np.maximum(value, 0) / whole)
        energies.append(energy.ravel())
    want = np.sort(np.concatenate(energies))[::-1][: len(state.shared.kept)]
    got = np.sort(np.concatenate(energies)[np.asarray(state.shared.kept)])[::-1]
    np.testing.assert_allclose(got, want, rtol=1e-3)
    assert len(state.shared.kept) == round(0.1 * N)


@pytest.mark.slow
def test_common_part_needs_few_coefficients():
    few = {"share": 0.03, "alpha": 1e-6, "min_values": 1, "code_dtype": "int32"}
    grads = in_common(1, 0.3, 7)
    with_bases = play(klt(**PLAIN, **few), grads, learned(**few))[0][0]
    without = play(klt(**PLAIN, **few), grads)[0][0]
    assert cosine(with_bases, mean_of(grads[0])) > 0.99 > 0.7 > cosine(without, mean_of(grads[0]))


@pytest.mark.parametrize("code_dtype, tolerance", [("int8", 0.1), ("int16", 1e-3), ("int32", 1e-5)])
def test_all_coefficients_give_mean_to_integer_precision(code_dtype, tolerance):
    grads = in_common(1, 0.3, 7)
    every = {"share": 1.0, "alpha": 1e-6, "code_dtype": code_dtype}
    got = play(klt(**PLAIN, **every), grads, learned(share=1.0))[0][0]
    error = np.linalg.norm(got - mean_of(grads[0])) / np.linalg.norm(mean_of(grads[0]))
    assert error < tolerance


def test_coarse_integers_conserve_gradients():
    grads = in_common(3, 0.3, 8)
    grads[1]["conv"][2] *= 1e3  # makes the steps coarse for all nodes
    had = np.zeros(N)
    steps = play(klt(**PLAIN, share=0.2, alpha=0.05), grads, learned(share=0.2))
    for one, (got, state) in zip(grads, steps, strict=True):
        had = had + mean_of(one) - got
        kept = np.asarray(state.local.memory).mean(0)
        np.testing.assert_allclose(kept, had, atol=1e-5 * max(1, np.abs(had).max()))


def test_bases_are_new_every_refresh_steps():
    def changes(refresh):
        steps = play(klt(**PLAIN, refresh=refresh), in_common(7, 1.0, 9), learned())
        bases = [np.concatenate([np.ravel(u) for us in state.shared.bases for u in us]) for _, state in steps]
        return [i for i in range(1, 7) if not np.array_equal(bases[i - 1], bases[i])]

    assert changes(3) == [3, 6]
    assert changes(0) == []


def test_long_modes_are_not_transformed():
    state = learned(max_mode=8)
    conv, dense, bias = state.shared.bases
    assert [u.shape for u in conv] == [(0,), (4, 4), (8, 8)]
    assert [u.shape for u in dense] == [(0,), (5, 5)]
    assert [u.shape for u in bias] == [(0,)]
    assert [m.shape for m in state.shared.moments[1]] == [(10,), (5, 5)]


def test_bytes_by_hand():
    compressor, nodes = klt(**PLAIN, share=0.1, alpha=0.02, code_dtype="int16"), jgc.make_nodes(K, jax.devices()[:1])
    wire = compressor.wire("compressed", PARAMS, nodes)
    k, mu = round(0.1 * N), 6 + 1 + 1
    gathered = {"scales": 2 * 6, "values": 4 * mu, "positions": 4 * 2}  # groups of 1, 2, 4, 8, 16 and 3
    table = logical_bytes(wire.logical, K)["worker"]
    assert k == 34 and table["up"] == {"coefficients": 2 * k} | gathered
    assert table["down"] == {"coefficients": 2 * k} | {kind: 3 * size for kind, size in gathered.items()}


def test_momentum_correction_matches_other_methods():
    state = play(klt(), in_common(1, 0.3))[0][1]
    assert isinstance(state.local.memory, Corrected)
    assert klt().owns_momentum and not klt(momentum_correction=False).owns_momentum


def test_too_many_nodes_for_the_integers_is_an_error():
    nodes = jgc.make_nodes(19, jax.devices()[:1])
    with pytest.raises(ValueError, match="int8 leaves a node of 19 the integers up to 6, too coarse below 7"):
        klt(**PLAIN).init(jax.random.key(0), PARAMS, nodes)  # not only after the warm-up


def test_momentum_at_once_gives_common_part_uncompressed_momentum():
    """With every coefficient sent and no noise to speak of: u = m u + g, as SGD has it."""
    grads, m = in_common(6, 0.0), 0.5
    settings = {"share": 1.0, "code_dtype": "int32", "momentum": m, "momentum_at_once": True}
    compressor = klt(**settings, warmup_steps=1)
    u = np.zeros(N)
    for one, (got, _) in zip(grads, play(compressor, grads), strict=True):
        u = m * u + mean_of(one)
        np.testing.assert_allclose(got, u, atol=1e-4 * np.abs(u).max())


@pytest.mark.parametrize("bad", [{"warmup_steps": 0}, {"factor_masking": True}], ids=str)
def test_settings_without_effect_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        klt(**bad)


def test_groups_double_from_the_coefficient_of_most_energy_on():
    energies = np.random.default_rng(0).permutation(300).astype(np.float32)
    got = np.asarray(klt_bases.grouped(jnp.asarray(energies)))
    want = np.floor(np.log2(300 - energies)).astype(int)  # 299 has rank 1
    assert np.array_equal(got, want)
    assert klt_bases.group_count(300) == want.max() + 1
    tied = klt_bases.grouped(jnp.asarray([0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert tied.tolist() == [1, 0, 1, 1, 1, 1, 1, 1]  # equal energies share the earliest group


def test_eigenvectors_on_tpu_are_those_of_the_plain_reference(monkeypatch):
    rng = np.random.default_rng(0)
    matrices = [x @ x.T for x in (jnp.asarray(rng.normal(size=(r, 9)), jnp.float32) for r in (3, 5, 3))]
    with plain_operations():
        want = eigh(matrices)
    monkeypatch.setattr(sys.modules["jgc.layout.eigenvectors"], "backend", lambda: "tpu")
    monkeypatch.setattr(sys.modules["jgc.layout.eigenvectors"].lax.linalg, "eigh", by_qr)
    for (values, vectors), (got, columns) in zip(want, eigh(matrices), strict=True):
        np.testing.assert_allclose(got, values, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.abs(np.sum(vectors * columns, 0)), 1, atol=1e-4)  # up to their signs


def by_qr(matrix, implementation):
    """JAX has Jacobi's iterations on TPU alone."""
    values, vectors = jnp.linalg.eigh(matrix)
    return vectors, values
