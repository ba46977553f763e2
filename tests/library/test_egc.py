"""EGC against a plain NumPy transcription of Algorithm 1, and what a node keeps of what it did not send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default

import jgc
from jgc.compress import egc, step_on_nodes
from jgc.compress.sparse import entropy
from jgc.compress.sparse.egc import Egc
from jgc.layout.pack import make_packing, whole
from jgc.wire import elias_fano

K = 4
RANDOM = np.random.default_rng(0)
LAYERS = {
    "normal": RANDOM.normal(size=2000),
    "heavy-tailed": RANDOM.standard_cauchy(size=3000),
    "one-sided": RANDOM.exponential(size=1500),
    "constant": np.full(500, 0.25),
    "zero": np.zeros(300),
    "two values": np.array([1.0] * 3 + [-2.0] * 97),
    "tiny": 1e-30 * RANDOM.normal(size=400),
    "of one value": np.array([3.0]),
}


# --- Algorithm 1 in NumPy, line by line ---------------------------------------------------------------------------


def estimate_number(g, i, interval, low):  # lines 15 to 22
    return np.sum((g >= low + np.float32(i - 1) * interval) & (g < low + np.float32(i) * interval))


def algorithm_1(g, ratio, bins, literal):
    """Entropy in bits, values asked for, threshold."""
    high, low = g.max(), g.min()
    interval = np.abs(high - low) / np.float32(bins)
    h = np.array([estimate_number(g, i, interval, low) for i in range(1, bins + 1)], np.float64)
    if not literal:
        if high == low:
            h = np.array([g.size] + [0] * (bins - 1), np.float64)
        else:
            h[-1] = g.size - h[:-1].sum()
    if h.sum() == 0:  # p = 0 / 0
        return np.nan, 0, np.nan
    p = h / h.sum()
    bits = -sum(x * np.log2(x) for x in p if x > 0)
    count = max(1, round(bits / ratio * g.size))
    descending = np.sort(g if literal else np.abs(g))[::-1]
    return bits, count, descending[count - 1]


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("bins", some_by_default([2, 3, 16], [3]))
@pytest.mark.parametrize("name", LAYERS)
def test_entropy_share_and_threshold_are_those_of_algorithm_1(name, bins, literal):
    g, ratio = LAYERS[name].astype(np.float32), 64.0
    bits, count, threshold = algorithm_1(g, ratio, bins, literal)
    layers, slots = (whole(g.size),), (max(1, round(np.log2(bins) / ratio * g.size)),)
    v = jnp.asarray(g)

    got = entropy.entropies(v, layers, bins, closed=not literal)  # compiled whole it is 3e-4 off where it is near 0
    largest = np.abs(g[np.argsort(-np.abs(g), kind="stable")[: slots[0]]])

    @jax.jit
    def limited(got, v, largest):
        wanted = entropy.wanted(got, layers, ratio, slots)
        if literal:
            return wanted, entropy.literal_thresholds(v, layers, wanted, slots)
        return wanted, entropy.thresholds(largest, entropy.ranks(largest, slots), wanted, slots)

    wanted, limits = limited(got, v, largest)
    np.testing.assert_allclose(got, [bits], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(wanted, [count])
    np.testing.assert_array_equal(limits, np.float32([threshold]))


@pytest.mark.parametrize("bins", [2, 4, 256])
def test_the_entropy_is_at_most_that_of_equal_bins(bins):
    equal = jnp.arange(256.0)
    assert float(entropy.entropy_bits(equal, bins)) == pytest.approx(np.log2(bins), abs=1e-5)
    assert float(entropy.entropy_bits(jnp.exp(equal / 32), bins)) < np.log2(bins)


@pytest.mark.parametrize("bins", [2, 3, 16])
def test_entropy_is_finite_for_values_of_extreme_range(bins):
    values = np.linspace(-1, 1, 400).astype(np.float32) ** 3
    assert float(entropy.entropy_bits(3e38 * values, bins)) == pytest.approx(algorithm_1(values, 64.0, bins, False)[0])


# --- the method ---------------------------------------------------------------------------------------------------

SHAPES = {"a": (40, 25), "b": (30, 10)}
PARAMS = jax.tree.map(lambda shape: jnp.zeros(shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
N = 1300
PLAIN = {"momentum_correction": False, "ratio": 50.0}


def vector(tree):
    return np.concatenate([np.asarray(tree[name]).reshape(*tree[name].shape[:-2], -1) for name in SHAPES], axis=-1)


def gradients(seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=(K, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def play(settings, seeds):
    """Aggregates f32[n], states and infos of sparse steps."""
    method, nodes = egc(**settings), jgc.make_nodes(K, jax.devices()[:1])
    step = jax.jit(step_on_nodes(method.aggregate, "entropy", nodes))
    state, out = method.init(jax.random.key(0), PARAMS, nodes), []
    for seed in seeds:
        aggregated, state, info = step(jax.random.key(1), gradients(seed), state)
        out.append((vector(aggregated), state, info))
    return out


def reference(v, settings, thresholds=None):
    """What each node sends of v [K, n], and thresholds [K, 2]."""
    literal, ratio, bins = settings.get("literal", False), settings["ratio"], settings.get("bins", 2)
    sent, limits, used, reaching = np.zeros_like(v), np.zeros((K, 2), np.float32), np.zeros(K), np.zeros(K)
    for node in range(K):
        for i, at in enumerate((slice(0, 1000), slice(1000, N))):
            g = v[node, at]
            room = g.size if literal else round(np.log2(bins) / ratio * g.size)  # Algorithm 1 has no bound
            largest = np.argsort(-np.abs(g), kind="stable")[:room]
            if thresholds is None:
                _, count, limits[node, i] = algorithm_1(g, ratio, bins, literal)
                if not literal:
                    largest = largest[:count]
            else:
                limits[node, i] = thresholds[node, i]
            goes = np.abs(g) > limits[node, i] if literal else (np.abs(g) >= limits[node, i]) & (g != 0)
            chosen = [at.start + j for j in largest if goes[j]]
            sent[node, chosen] = v[node, chosen]
            used[node] += len(chosen)
            reaching[node] += goes.sum()
    return sent, limits, used, reaching - used


@pytest.mark.parametrize("settings", [
    {}, {"bins": 4}, {"literal": True}, {"measure_every": 2}, {"measure_every": 2, "literal": True},
])  # fmt: skip
def test_steps_are_those_of_the_algorithm_with_residuals(settings):
    settings, kept, limits = PLAIN | settings, np.zeros((K, N), np.float32), None
    for step, (aggregated, state, info) in enumerate(play(settings, range(4))):
        v = kept + vector(gradients(step))
        due = step % settings.get("measure_every", 1) == 0
        sent, limits, used, overflow = reference(v, settings, None if due else limits)
        kept = v - sent
        np.testing.assert_allclose(aggregated, sent.mean(0), atol=1e-6)
        np.testing.assert_allclose(state.local.memory, kept, atol=1e-6)
        np.testing.assert_array_equal(state.local.per_node, limits)
        np.testing.assert_array_equal(info.elements_sent, used)
        np.testing.assert_array_equal(info.overflow, overflow)
        kept = np.asarray(state.local.memory)


@pytest.mark.parametrize("shift, expected", [(0.0, 2 * 26), (-100.0, N)])
def test_literal_algorithm_sends_all_that_algorithm_1_sends(shift, expected):
    """A signed selection of t n values (2 % of 1000 and of 300), then all with that magnitude: of a symmetric layer
    twice t n, of a layer whose values are all negative every one, for so is its threshold."""
    method, nodes = egc(**PLAIN, literal=True), jgc.make_nodes(K, jax.devices()[:1])
    step = jax.jit(step_on_nodes(method.aggregate, "entropy", nodes))
    grads = jax.tree.map(lambda x: x + np.float32(shift), gradients(0))
    aggregated, _, info = step(jax.random.key(1), grads, method.init(jax.random.key(0), PARAMS, nodes))
    sent, _, used, _ = reference(vector(grads), PLAIN | {"literal": True})
    np.testing.assert_allclose(vector(aggregated), sent.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(info.elements_sent, used)
    assert abs(used.mean() - expected) < 8 and not info.overflow.any()


def test_zeros_do_not_reach_old_threshold():
    method, nodes = egc(**PLAIN, measure_every=2), jgc.make_nodes(K, jax.devices()[:1])
    step = jax.jit(step_on_nodes(method.aggregate, "entropy", nodes))
    zeros = jax.tree.map(lambda x: jnp.zeros((K, *x.shape)), PARAMS)
    state = method.init(jax.random.key(0), PARAMS, nodes)
    for _ in range(2):  # measured, then by the old threshold, 0
        aggregated, state, info = step(jax.random.key(0), zeros, state)
        assert not vector(aggregated).any() and not info.overflow.any()
    assert not info.elements_sent.any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("size", [4, 10_000])
def test_non_finite_values_have_no_entropy(wrong, closed, size):
    values = jnp.tile(jnp.array([1.0, 2.0, 7.0, -3.0]), size // 4).at[size // 2].set(wrong)
    layers = (whole(size),)
    bits = entropy.entropies(values, layers, 2, closed)
    assert np.isnan(bits).all() and entropy.wanted(bits, layers, 4.0, (1,)).tolist() == [0]


def test_non_finite_residual_is_sent():
    """The loss then shows it; kept back, the layer would wait for ever and nothing would say so."""
    method, nodes = egc(**PLAIN), jgc.make_nodes(K, jax.devices()[:1])
    step = jax.jit(step_on_nodes(method.aggregate, "entropy", nodes))
    state = method.init(jax.random.key(0), PARAMS, nodes)
    state = state._replace(local=state.local._replace(memory=jnp.full_like(state.local.memory, np.inf)))
    aggregated, _, info = step(jax.random.key(1), gradients(0), state)
    assert np.all(info.elements_sent == 2)  # equal values, also where they are infinite
    assert np.isinf(vector(aggregated)).sum() == 2


def test_old_threshold_overflows_buffer():
    """What `measure_every` says: what does not fit is counted, and stays."""
    (_, _, first), (_, _, second) = play(PLAIN | {"measure_every": 10}, range(2))
    assert np.all(first.overflow == 0) and np.all(second.overflow > 0)
    assert np.all(second.elements_sent <= 26)  # 2 % of 1000 and of 300


def test_payload_has_size_of_largest_entropy():
    method, nodes = egc(**PLAIN), jgc.make_nodes(K, jax.devices()[:1])
    sizes = {(m.direction, m.field): m.bytes for m in method.wire("entropy", PARAMS, nodes).logical}
    assert sizes["up", "values"] == 4 * 26 and sizes["down", "values"] == (K - 1) * 4 * 26
    assert sizes["up", "positions"] == 4 * elias_fano.words(N, 26)
    assert [m.bytes for m in egc(**PLAIN, warmup_steps=1).wire("dense", PARAMS, nodes).logical] == [4 * N, 4 * N]


def test_equal_values_send_one():
    method, nodes = egc(**PLAIN), jgc.make_nodes(K, jax.devices()[:1])
    step = jax.jit(step_on_nodes(method.aggregate, "entropy", nodes))
    ones = jax.tree.map(lambda x: jnp.ones((K, *x.shape)), PARAMS)
    aggregated, _, info = step(jax.random.key(0), ones, method.init(jax.random.key(0), PARAMS, nodes))
    assert np.flatnonzero(vector(aggregated)).tolist() == [0, 1000]  # ties to the first
    assert np.all(info.elements_sent == 2) and np.all(info.overflow == 0)


def test_min_values_above_the_layers_size_means_all():
    method, nodes = egc(**PLAIN, min_values=2**31), jgc.make_nodes(K, jax.devices()[:1])
    layers = make_packing(PARAMS).layers
    assert method.wire("entropy", PARAMS, nodes) == egc(**PLAIN, min_values=5000).wire("entropy", PARAMS, nodes)
    most = tuple(layer.size for layer in layers)
    assert tuple(entropy.wanted(jnp.ones(len(layers)), layers, 1024.0, most, 2**31)) == most


@pytest.mark.parametrize("settings, message", [
    ({"bins": 1}, "bins must be at least 2, got 1"),
    ({"bins": 2000}, "bins must be at most 1024, got 2000"),
    ({"bins": 8, "ratio": 2.0}, r"ratio must be at least log2\(bins\) = 3"),
    ({"ratio": float("nan")}, "ratio must be at least"),
    ({"measure_every": 0}, "measure_every must be at least 1 step, and below 2..31, got 0"),
    ({"bins": 2.5}, "bins must be a whole number, got 2.5"),
    ({"measure_every": 1.5}, "measure_every must be a whole number, got 1.5"),
    ({"measure_every": 2**31}, "measure_every must be at least 1 step, and below 2..31, got 2147483648"),
    ({"min_values": 2.5}, "min_values must be a whole number, got 2.5"),
    ({"value_code": "8bit"}, "value_code must be one of 'float32', 'float16', 'bfloat16', got '8bit'"),
])  # fmt: skip
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        egc(Egc(), **settings)
