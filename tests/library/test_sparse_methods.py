"""What is peculiar to each sparse method, against NumPy and by counting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from contract import some_by_default

import jgc
from jgc.compress import METHODS, dgc, ef21, gradient_dropping, random_k, scalecom, step_on_nodes, threshold_v
from jgc.training.steps.diagnose import host_figures
from jgc.types import Compressor, Info, State

K = 4
PARAMS = {"a": jnp.zeros((5, 8)), "b": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}  # 40, 12 and 4 values
SIZES = (40, 12, 4)
STARTS = (0, 40, 52)
N = sum(SIZES)
SPARSE = [name for name, method in METHODS.items() if ".sparse." in method.factory.__module__]
STRATEGIC = [name for name, method in METHODS.items() if hasattr(method.settings, "strategy")]


def vectors(seed: int) -> np.ndarray:
    """Gradients f32[K, n] in the order in which they are packed, no two magnitudes alike."""
    return np.random.default_rng(seed).normal(size=(K, N)).astype(np.float32)


def as_tree(v: np.ndarray) -> dict:
    return {"a": v[..., :40].reshape(-1, 5, 8), "b": v[..., 40:52].reshape(-1, 3, 4), "bias": v[..., 52:]}


def as_vector(tree: dict) -> np.ndarray:
    return np.concatenate([np.asarray(tree[name]).reshape(-1) for name in ("a", "b", "bias")])


def play(compressor: Compressor, gradients: list[np.ndarray], phase: int = -1) -> list[tuple[np.ndarray, State, Info]]:
    """Aggregates f32[n], states and infos of steps in one phase; the key is the same in all of them."""
    nodes = jgc.make_nodes(K, jax.devices()[:1])
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[phase].value, nodes))
    state, out = compressor.init(jax.random.key(0), PARAMS, nodes), []
    for g in gradients:
        aggregated, state, info = step(jax.random.key(1), as_tree(g), state)
        out.append((as_vector(aggregated), state, info))
    return out


def top(v: np.ndarray, count: int, start: int = 0, size: int = N) -> np.ndarray:
    """Positions of the largest magnitudes of a range of v."""
    return start + np.argsort(-np.abs(v[start : start + size]))[:count]


def top_of_layers(v: np.ndarray, alpha: float) -> np.ndarray:
    return np.concatenate([top(v, max(1, round(alpha * n)), at, n) for at, n in zip(STARTS, SIZES, strict=True)])


# --- strategies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIC)
def test_the_three_strategies(name):
    def phases(strategy, **settings):
        compressor = METHODS[name].factory(strategy=strategy, alpha=0.001, **settings)
        return [(phase.value, phase.start) for phase in compressor.schedule]

    last = "random-k" if name == "random_k" else "top-k"
    assert phases("warmup", warmup_steps=10) == [("dense", 0), (last, 10)]
    assert phases("fixed", warmup_steps=10) == phases("exponential", warmup_steps=0) == [(last, 0)]
    ramp = [((last, 0.25), 0), ((last, 0.0625), 10), ((last, 0.015625), 20), ((last, 0.004), 30), (last, 40)]
    assert phases("exponential", warmup_steps=40) == ramp


def test_sparse_methods_share_strategies():
    assert set(STRATEGIC) == {"topk", "learned_topk", "dgc", "gradient_dropping", "scalecom", "random_k"}
    assert {name: METHODS[name].settings().strategy for name in STRATEGIC} == {
        name: "exponential" if name == "dgc" else "warmup" for name in STRATEGIC
    }


def test_ramp_stages_send_at_least_alpha():
    def starts(**settings):
        return [(phase.value, phase.start) for phase in dgc(**settings).schedule]

    assert starts(alpha=0.05, warmup_steps=10) == [(("top-k", 0.25), 0), (("top-k", 0.0625), 5), ("top-k", 10)]
    assert starts(alpha=0.5) == [("top-k", 0)]
    assert starts(alpha=0.001, warmup_steps=1) == [(("top-k", 0.004), 0), ("top-k", 1)]


@pytest.mark.parametrize("name", STRATEGIC)
def test_a_stage_sends_its_share_and_its_bytes(name):
    compressor = METHODS[name].factory(strategy="exponential", alpha=0.1, warmup_steps=1)
    count = 14 if name == "gradient_dropping" else 10 + 3 + 1  # a quarter, of all and of each layer
    (aggregated, _, info), *_ = play(compressor, [np.tile(vectors(0)[:1], (K, 1))], phase=0)
    assert np.count_nonzero(aggregated) == count and np.all(info.elements_sent == count)
    up = [m for m in compressor.wire(compressor.schedule[0].value, PARAMS, jgc.make_nodes(K, jax.devices()[:1])).logical
          if (m.role, m.direction, m.field) == ("worker", "up", "values")]  # fmt: skip
    assert [m.bytes for m in up] == [4 * count]


# --- deep gradient compression ------------------------------------------------------------------------------------


@pytest.mark.parametrize("masking", [True, False])
def test_dgc_matches_paper_algorithm(masking):
    gradients, clip, momentum = [vectors(seed) for seed in range(4)], 6.0, 0.5
    compressor = dgc(alpha=0.1, momentum=momentum, clip_norm=clip, factor_masking=masking)
    u, v, clipped = np.zeros((K, N)), np.zeros((K, N)), 0
    for g, (aggregated, state, _) in zip(gradients, play(compressor, gradients), strict=True):
        norms = np.linalg.norm(g, axis=1, keepdims=True)
        clipped += np.sum(norms > clip / np.sqrt(K))
        u = momentum * u + g * np.minimum(1, clip / np.sqrt(K) / norms)
        v = v + u
        mean = np.zeros(N)
        for node in range(K):
            at = top_of_layers(v[node], 0.1)
            mean[at] += v[node, at] / K
            v[node, at] = 0
            u[node, at] *= not masking
        np.testing.assert_allclose(aggregated, mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state.local.memory.residual, v, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state.local.memory.velocity, u, rtol=1e-4, atol=1e-6)
    assert clipped == 4 * K


@pytest.mark.parametrize("method, code", [("dgc", "mxfp4"), ("topk", "float16"), ("egc", "float16"),
                                          ("learned_topk", "nvfp4"), ("dgc", "4bit")])  # fmt: skip
def test_values_that_a_code_makes_zero_keep_their_velocity(method, code):
    """They stay in the residual: factor masking concerns values that were sent."""
    share = {"ratio": 1.0, "warmup_steps": 0} if method == "egc" else {"alpha": 1.0, "strategy": "fixed"}
    clipping = {"clip_norm": 0.0} if method == "dgc" else {}
    g = vectors(0)
    g[:, 7:20] = 1e-9
    compressor = getattr(jgc.compress, method)(
        **share, **clipping, momentum_correction=True, factor_masking=True, value_code=code)  # fmt: skip
    (_, state, _), = play(compressor, [g])
    unsent = np.asarray(state.local.memory.residual) == g
    assert np.all(unsent[:, 7:20] == (code != "4bit"))
    np.testing.assert_array_equal(state.local.memory.velocity, np.where(unsent, g, 0))


def test_dgc_does_not_clip_small_gradients():
    gradients = [vectors(0)]
    large = 2 * np.sqrt(K) * np.linalg.norm(gradients[0], axis=1).max()
    plain, bounded = (play(dgc(alpha=0.1, clip_norm=norm), gradients)[0][0] for norm in (0.0, large))
    np.testing.assert_array_equal(plain, bounded)


# --- gradient dropping --------------------------------------------------------------------------------------------


def test_gradient_dropping_sends_the_largest_of_all():
    gradients = [vectors(seed) * np.repeat((1, 10, 0.1), SIZES).astype(np.float32) for seed in range(3)]
    kept = np.zeros((K, N))
    for g, (aggregated, state, info) in zip(gradients, play(gradient_dropping(alpha=0.1), gradients), strict=True):
        v, mean = kept + g, np.zeros(N)
        for node in range(K):
            at = top(v[node], 6)
            mean[at] += v[node, at] / K
            v[node, at] = 0
        kept = v
        np.testing.assert_allclose(aggregated, mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.local.memory, kept, rtol=1e-5, atol=1e-6)
        assert np.all(info.elements_sent == 6)  # 10 % of 56
    assert np.count_nonzero(aggregated[:40]) == 0


# --- ScaleCom -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_scalecom_rotates_its_leader_and_filters_its_memory(beta):
    gradients = [vectors(seed) for seed in range(K + 2)]
    memory = np.zeros((K, N))
    for step, (g, (aggregated, state, _)) in enumerate(
        zip(gradients, play(scalecom(alpha=0.1, beta=beta), gradients), strict=True)
    ):
        v, sent = memory + g, np.zeros((K, N))
        at = top_of_layers(v[step % K], 0.1)
        sent[:, at] = v[:, at]
        memory = (1 - beta) * memory + beta * (v - sent)
        np.testing.assert_allclose(aggregated, sent.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state.local.memory, memory, rtol=1e-4, atol=1e-6)
        assert state.shared == step + 1


def test_scalecom_filters_nothing_before_it_compresses():
    """With momentum at once the velocity lies where the residual does, and goes on through uncompressed steps."""
    settings = {"warmup_steps": 9, "momentum_correction": True, "momentum_at_once": True, "momentum": 0.9}
    played = play(scalecom(alpha=0.1, beta=0.3, **settings), [np.ones((K, N), np.float32)] * 3, phase=0)
    np.testing.assert_allclose([aggregated[0] for aggregated, *_ in played], [1, 1.9, 2.71], rtol=1e-6)


def test_scalecom_counts_the_leaders_positions_and_everyones_values():
    wire = scalecom(alpha=0.1).wire("top-k", PARAMS, jgc.make_nodes(K, jax.devices()[:1]))
    assert {m[:3]: m.bytes for m in wire.logical} == {
        ("leader", "up", "positions"): 4,  # 4 + 1 + 1 positions: 32 bits
        ("leader", "up", "values"): 24,
        ("worker", "up", "values"): 24,
        ("leader", "down", "values"): 24,
        ("worker", "down", "positions"): 4,
        ("worker", "down", "values"): 24,
    }


# --- random-k -----------------------------------------------------------------------------------------------------


def test_random_k_draws_the_same_positions_on_all_nodes_and_new_ones_in_every_step():
    steps = play(random_k(alpha=0.1), [np.ones((K, N), np.float32)] * 300)
    waited = np.ones(N)  # gradients accumulated at each position, the same on all nodes
    drawn = []
    for aggregated, state, info in steps:
        at = np.flatnonzero(aggregated)
        assert [np.sum((at >= lo) & (at < hi)) for lo, hi in ((0, 40), (40, 52), (52, 56))] == [4, 1, 1]
        np.testing.assert_array_equal(aggregated[at], waited[at])  # only so where all K nodes sent it
        waited = np.where(aggregated != 0, 1, waited + 1)
        np.testing.assert_array_equal(state.local.memory, np.tile(waited - 1, (K, 1)))
        assert np.all(info.elements_sent == 6)
        drawn.append(aggregated != 0)
    share = np.mean(drawn, axis=0)
    assert np.all(np.abs(share - np.repeat((0.1, 1 / 12, 0.25), SIZES)) < 0.1) and share.min() > 0.02
    assert len({tuple(at) for at in drawn}) > 290
    assert len({int(at[:10].sum()) for at in drawn}) > 1  # the four ranges of ten do not start at the same place always


def test_random_k_sends_no_positions():
    wire = random_k(alpha=0.1).wire("random-k", PARAMS, jgc.make_nodes(K))
    assert {m.field for m in wire.logical} == {"values"} == {s.field for s in wire.physical} - {"flag"}


# --- threshold-v --------------------------------------------------------------------------------------------------


def test_threshold_v_sends_what_exceeds_the_threshold_and_counts_what_does_not_fit():
    gradients, threshold, slots = [vectors(seed) for seed in range(3)], 1.2, (8, 2, 1)
    compressor = threshold_v(threshold=threshold, capacity=0.2)
    kept, overflow, unused = np.zeros((K, N)), 0, 0
    for g, (aggregated, state, info) in zip(gradients, play(compressor, gradients), strict=True):
        v, mean = kept + g, np.zeros(N)
        for node in range(K):
            at = np.concatenate([top(v[node], *where) for where in zip(slots, STARTS, SIZES, strict=True)])
            at = at[np.abs(v[node, at]) > threshold]
            mean[at] += v[node, at] / K
            missed = np.sum(np.abs(v[node]) > threshold) - len(at)
            assert info.elements_sent[node] == len(at) and info.overflow[node] == missed
            overflow, unused = overflow + missed, unused + sum(slots) - len(at)
            v[node, at] = 0
        kept = v
        np.testing.assert_allclose(aggregated, mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.local.memory, kept, rtol=1e-5, atol=1e-6)
    assert overflow and unused  # both happened


def test_threshold_v_masks_no_velocity_of_unsent_values():
    settings = {"momentum_correction": True, "factor_masking": True, "capacity": 0.2}
    g = vectors(0)
    (_, state, info), = play(threshold_v(threshold=100.0, **settings), [g])
    assert not np.any(info.elements_sent)
    np.testing.assert_allclose(state.local.memory.velocity, g, rtol=1e-6)


def test_threshold_v_counts_its_whole_buffer():
    wire = threshold_v(capacity=0.2).wire("threshold", PARAMS, jgc.make_nodes(K, jax.devices()[:1]))
    assert {m.field: m.bytes for m in wire.logical if m.direction == "up"} == {"values": 44, "positions": 8}


@pytest.mark.parametrize("name", some_by_default(SPARSE, ("topk", "threshold_v")))
# what some methods send, and what they leave their slots empty for
@pytest.mark.parametrize("size", some_by_default([1.0, 1e-9], [1e-9]))
def test_positions_that_diagnose_finds_can_be_coded(name, size):
    nodes, compressor = jgc.make_nodes(K, jax.devices()[:1]), METHODS[name].factory()
    phase, state = compressor.schedule[-1].value, compressor.init(jax.random.key(0), PARAMS, nodes)
    look = jgc.on_nodes(
        lambda key, grads, state: jgc.diagnose(compressor, phase, key, grads, state, nodes), nodes,
        ins=(jgc.SHARED, jgc.LOCAL, jgc.State(jgc.SHARED, jgc.LOCAL)), outs=jgc.SHARED,
    )  # fmt: skip
    found = look(jax.random.key(1), as_tree(jnp.asarray(size * vectors(0))), state)
    assert all(x >= 0 for name, x in host_figures(jax.device_get(found)).items() if "position" in name)


# --- EF21 and DeMo ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [1.0, 0.25])
def test_ef21_is_its_algorithm(eta):
    gradients, counts = [vectors(seed) for seed in range(4)], (4, 1, 1)
    u, estimate, shared = np.zeros((K, N)), np.zeros((K, N)), np.zeros(N)
    for g, (aggregated, state, _) in zip(gradients, play(ef21(alpha=0.1, eta=eta), gradients), strict=True):
        u = (1 - eta) * u + eta * g
        for node in range(K):
            difference = u[node] - estimate[node]
            at = np.concatenate([top(difference, *where) for where in zip(counts, STARTS, SIZES, strict=True)])
            estimate[node, at] += difference[at]
            shared[at] += difference[at] / K
        np.testing.assert_allclose(aggregated, shared, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.local.memory.gradient, estimate, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(shared, estimate.mean(0), atol=1e-6)  # the estimate is the mean of the nodes' own


def test_demo_sends_largest_dct_coefficients_of_decaying_momentum():
    """By SciPy's DCT, on a matrix of 2 x 2 chunks of which those at the edges are filled up with zeros."""
    rng, beta, side, k = np.random.default_rng(0), 0.9, 8, 5
    nodes = jgc.make_nodes(K, jax.devices()[:1])
    compressor = jgc.compress.demo(decay=beta, chunk=side, k=k, sign=False)
    params = {"w": jnp.zeros((12, 10))}
    state = compressor.init(jax.random.key(0), params, nodes)
    step = jax.jit(step_on_nodes(compressor.aggregate, "dct", nodes))
    m = np.zeros((K, 16, 16))
    for _ in range(3):
        g = np.pad(rng.normal(size=(K, 12, 10)), ((0, 0), (0, 4), (0, 6)))
        m, mean = beta * m + g, np.zeros((16, 16))
        for node in range(K):
            for i, j in ((0, 0), (0, 8), (8, 0), (8, 8)):
                chunk = m[node, i : i + side, j : j + side]
                q = scipy.fft.dctn(chunk, norm="ortho")
                q[np.abs(q) < np.sort(np.abs(q).ravel())[-k]] = 0
                sent = scipy.fft.idctn(q, norm="ortho")
                mean[i : i + side, j : j + side] += sent / K
                chunk -= sent
        m[:, 12:], m[:, :, 10:] = 0, 0  # beyond the edges there is nothing to keep
        aggregated, state, info = step(jax.random.key(0), {"w": jnp.asarray(g[:, :12, :10], jnp.float32)}, state)
        np.testing.assert_allclose(aggregated["w"], mean[:12, :10], atol=1e-5)
        np.testing.assert_allclose(state.local.memory.reshape(K, 12, 10), m[:, :12, :10], atol=1e-5)
        assert np.all(info.elements_sent == 4 * k)


# --- alike --------------------------------------------------------------------------------------------------------


