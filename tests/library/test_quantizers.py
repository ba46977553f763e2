"""The scalar quantisers against what their papers promise, and against plain NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgc
from jgc.compress import METHODS, cast, natural, onebit, qsgd, signsgd, terngrad
from jgc.layout.pack import Layer, whole
from jgc.nodes.placement import LOCAL, SHARED
from jgc.types import State

K = 4
LAYERS = (Layer("a", 0, 700, (700,)), Layer("b", 700, 33, (33,)), Layer("c", 733, 1, (1,)))
N = 734
NOISE = {
    "gaussian": lambda r: r.normal(size=N),
    "heavy tails": lambda r: r.standard_t(2, size=N),
    "tiny": lambda r: r.normal(size=N) * 1e-20,
    "mostly zeros": lambda r: r.normal(size=N) * (r.random(N) < 0.02),
}


def vector(name: str, seed: int = 0) -> np.ndarray:
    return NOISE[name](np.random.default_rng(seed)).astype(np.float32)


def codec_of(compressor):
    ((codec, _),) = compressor.method.stages.values()
    return codec


def coded(compressor, v: np.ndarray, key: jax.Array | None = None) -> np.ndarray:
    """What one node is taken to have sent, without the exchange."""
    codec, key = codec_of(compressor), jax.random.key(0) if key is None else key
    agreed = () if codec.agree is None else (codec.agree(v, LAYERS),)
    return codec.decode(codec.encode(key, jnp.asarray(v), LAYERS, *agreed), LAYERS)


UNBIASED = {
    "qsgd, 2 bits": qsgd(bits=2),
    "qsgd, 4 bits": qsgd(bits=4, bucket=128),
    "qsgd, 3 bits, l2, by layer": qsgd(bits=3, norm="l2", bucket=0),
    "qsgd, 8 bits": qsgd(bits=8),
    "terngrad": terngrad(clip=0.0),
    "terngrad, own scales": terngrad(clip=0.0, scaler_sharing=False),
    "natural": natural(),
    "float8_e5m2": cast(format="float8_e5m2", rounding="stochastic"),
    "mxfp4, rotated": cast(format="mxfp4", rounding="stochastic", hadamard=64),
    "nvfp4": cast(format="nvfp4", rounding="stochastic"),
}


@functools.cache
def drawing(name: str):
    """`(keys [draws], v) -> f32[draws, n]`, compiled once for all vectors."""
    return jax.jit(jax.vmap(lambda key, v: coded(UNBIASED[name], v, key), in_axes=(0, None)))


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("name", UNBIASED)
def test_codes_are_unbiased(name, noise):
    v, draws = vector(noise), 500
    got = np.asarray(drawing(name)(jax.random.split(jax.random.key(1), draws), v), np.float64)
    deviation = got.std(0) / np.sqrt(draws)
    rare = 12 * np.abs(got).max() / draws  # what is drawn a few times in all has no deviation to speak of
    assert np.all(np.abs(got.mean(0) - v) <= 6 * deviation + rare)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("noise", ["gaussian", "heavy tails"])
def test_qsgds_variance_is_within_the_papers_bound(bits, noise):
    """Lemma 3.1: E |Q(v) - v|^2 <= min(n / s^2, sqrt(n) / s) |v|^2."""
    v, levels = vector(noise), 2 ** (bits - 1) - 1
    keys = jax.random.split(jax.random.key(2), 300)
    got = jax.jit(jax.vmap(lambda key: coded(qsgd(bits=bits, norm="l2", bucket=1024), v, key)))(keys)
    error = np.mean(np.sum((np.asarray(got, float) - v) ** 2, axis=1))
    bound = min(N / levels**2, np.sqrt(N) / levels) * np.sum(v.astype(float) ** 2)
    assert 0 < error <= bound


def test_naturals_variance_is_within_the_papers_bound():
    """Theorem 2.2: E |C(v) - v|^2 <= |v|^2 / 8."""
    v = vector("heavy tails")
    got = jax.jit(jax.vmap(lambda key: coded(natural(), v, key)))(jax.random.split(jax.random.key(3), 300))
    error = np.mean(np.sum((np.asarray(got, float) - v) ** 2, axis=1))
    assert 0 < error <= np.sum(v.astype(float) ** 2) / 8


def test_natural_rounds_to_adjacent_powers_of_two():
    v = np.array([1.0, -2.0, 0.0, 3.0, -3.0, 1e-45, 3e38, -3e38], np.float32)
    layers = (whole(v.size),)
    codec = codec_of(natural())
    got = np.stack([codec.decode(codec.encode(jax.random.key(i), jnp.asarray(v), layers), layers) for i in range(40)])
    assert np.all(got[:, :3] == v[:3])
    assert set(got[:, 3]) == {2.0, 4.0} and set(got[:, 4]) == {-2.0, -4.0}
    assert np.all(got[:, 6] == 2.0**127) and np.all(got[:, 7] == -(2.0**127))
    assert np.all(np.isfinite(got))


CONTRACTIONS = {
    "qsgd, 2 bits": qsgd(bits=2, error_feedback=True),
    "qsgd, 4 bits, by layer": qsgd(bits=4, bucket=0, error_feedback=True),
    "terngrad": terngrad(error_feedback=True),
    "terngrad, not clipped": terngrad(clip=0.0, error_feedback=True),
    "onebit": onebit(),
    "onebit, buckets": onebit(bucket=64),
    "scaled signs": signsgd(combine="feedback"),
    "bfloat16": cast(),
    "float16": cast(format="float16"),
    "float8_e4m3": cast(format="float8_e4m3"),
    "float8_e5m2": cast(format="float8_e5m2"),
    "mxfp8_e4m3": cast(format="mxfp8_e4m3"),
    "mxfp4": cast(format="mxfp4"),
    "mxfp4, at random": cast(format="mxfp4", rounding="stochastic"),
    "nvfp4, rotated": cast(format="nvfp4", hadamard=64),
}


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_codes_with_feedback_are_contractions(name, noise):
    v = vector(noise)
    lost = np.asarray(v - coded(CONTRACTIONS[name], v), np.float64)
    assert np.sum(lost**2) < np.sum(v.astype(np.float64) ** 2)


@pytest.mark.parametrize("bucket", [0, 64])
def test_onebit_gives_the_mean_of_each_sign(bucket):
    v = vector("gaussian")
    parts = [v[a.start : a.start + a.size] for a in LAYERS] if bucket == 0 else np.split(v, range(bucket, N, bucket))
    want = []
    for part in parts:
        means = {sign: part[(part < 0) == sign].mean() if np.any((part < 0) == sign) else 0 for sign in (True, False)}
        want.append(np.where(part < 0, means[True], means[False]))
    np.testing.assert_allclose(coded(onebit(bucket=bucket), v), np.concatenate(want), rtol=2e-6)


@pytest.mark.parametrize("name, digits", [("bfloat16", 7), ("float16", 10), ("float8_e4m3", 3), ("float8_e5m2", 2)])
def test_a_cast_rounds_to_the_nearest(name, digits):
    v = vector("gaussian")
    got = np.asarray(coded(cast(format=name), v))
    large = np.abs(v) > 0.05
    assert np.all(np.abs(got - v)[large] <= np.abs(v)[large] * 2.0 ** -(digits + 1) * 1.0001)
    assert np.any(got != v)


def test_casts_clip_what_is_out_of_range():
    big = np.zeros(N, np.float32)
    big[:2] = 1e30, -1e30
    got = np.asarray(coded(cast(format="float16", scaled=False), big))
    assert got[0] == 65504 and got[1] == -65504
    np.testing.assert_allclose(np.asarray(coded(cast(format="float16"), big))[:2], big[:2], rtol=1e-3)


def mean_of(compressor, v: np.ndarray) -> np.ndarray:
    """The aggregate of nodes that hold v f32[K, n]."""
    nodes = jgc.make_nodes(K, jax.devices()[:1])
    grads = {"w": jgc.place(jnp.asarray(v).reshape(K, 2, -1), LOCAL, nodes)}
    like = {"w": jnp.zeros(grads["w"].shape[1:])}
    state = jgc.place(compressor.init(jax.random.key(0), like, nodes), State(SHARED, LOCAL), nodes)
    step = jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes)
    return np.asarray(jax.jit(step)(jax.random.key(5), grads, state)[0]["w"]).reshape(-1)


def test_vote_is_majority_sign():
    v = np.random.default_rng(0).normal(size=(K, 100)).astype(np.float32)
    want = np.sign(np.where(v < 0, -1, 1).sum(0))  # a tie: 0
    assert np.any(want == 0)
    np.testing.assert_allclose(mean_of(signsgd(), v), 0.003 * want, rtol=1e-6)
    np.testing.assert_allclose(mean_of(signsgd(magnitude=1.0), v), want)


def test_vote_on_zeros_is_even():
    got = mean_of(signsgd(magnitude=1.0), np.zeros((K, 2000), np.float32))
    assert set(got) == {-1.0, 0.0, 1.0} and abs(got.mean()) < 0.1


@pytest.mark.parametrize("name, compressor", [("terngrad", terngrad(error_feedback=True)),
                                              ("qsgd", qsgd(bits=2, error_feedback=True))])  # fmt: skip
def test_residual_stays_bounded(name, compressor):
    codec, r = codec_of(compressor), np.zeros(N)
    for step in range(60):
        v = (r + vector("gaussian", step)).astype(np.float32)
        sent = codec.decode(codec.encode(jax.random.key(step), jnp.asarray(v), LAYERS), LAYERS)
        r = v - np.asarray(sent, np.float64)
        assert np.sqrt(np.mean(r**2)) < 5  # of gradients of 1


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e20])
def test_clipping_keeps_a_layer_of_one_value_and_layers_of_any_size(size):
    v = (vector("gaussian") * size).astype(np.float32)
    got = np.mean([coded(terngrad(), v, jax.random.key(i)) for i in range(40)], axis=0, dtype=float)
    v = v.astype(float)
    np.testing.assert_allclose(got[-1], v[-1], rtol=1e-6)
    for layer in LAYERS:
        one = slice(layer.start, layer.start + layer.size)
        assert np.linalg.norm(got[one]) > 0.5 * np.linalg.norm(v[one])


HERE = {"qsgd", "terngrad", "natural", "onebit", "signsgd", "cast"}  # unbiased or a contraction, above
ELSEWHERE = {"lgc_ring", "klt", "gradiveq", "egc", "silent"}  # in files of their own; silent sends nothing


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.lossless is None and name not in HERE | ELSEWHERE]
)
def test_other_lossy_methods_are_contractions(name):
    """What a step leaves in the residual is smaller than what it had to send."""
    nodes, compressor = jgc.make_nodes(K, jax.devices()[:1]), jgc.compress.build(METHODS[name].settings())
    grads = {"w": jax.random.normal(jax.random.key(0), (K, 30, 40))}
    state = compressor.init(jax.random.key(1), jax.tree.map(lambda x: x[0], grads), nodes)
    step = jax.jit(jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
    info = step(jax.random.key(2), grads, state)[2]
    assert np.all(info.residual_norm < 0.999 * jnp.linalg.norm(grads["w"], axis=(1, 2))) and info.residual_norm.all()


def test_terngrads_nodes_share_the_largest_scale():
    v = np.random.default_rng(0).normal(size=(K, 100)).astype(np.float32)
    shared, own = (mean_of(terngrad(clip=0.0, scaler_sharing=sharing), v) for sharing in (True, False))
    unit = np.abs(v).max() / K
    np.testing.assert_allclose(shared / unit, np.round(shared / unit), atol=1e-5)  # whole numbers of one scale
    assert np.abs(own / unit - np.round(own / unit)).max() > 1e-2


def test_nodes_draw_their_own_noise():
    v = np.tile(np.full(200, 0.3, np.float32), (K, 1))
    v[:, 0] = 1
    got = mean_of(qsgd(bits=2), v)  # each node sends 0 or 1: alike, the mean would be so too
    assert set(np.round(got * K)) > {0, 1, 2}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_qsgd_payload_has_its_bits(bits):
    nodes, n = jgc.make_nodes(K, jax.devices()[:K]), 64 * 1024
    shapes = {"w": jax.ShapeDtypeStruct((64, 1024), jnp.float32)}
    compressor = qsgd(bits=bits, bucket=512)
    wire = compressor.wire(compressor.schedule[0].value, shapes, nodes)
    up = {m.field: m.bytes for m in wire.logical if m.direction == "up"}
    assert up == {"codes": bits * n / 8, "scales": 4 * n / 512}
    assert sum(s.bytes for s in wire.physical if s.op == "all-gather") == (K - 1) * sum(up.values())


def test_the_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        jgc.compress.Qsgd().bits = 3
