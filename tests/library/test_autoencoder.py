"""LGC's autoencoder: sizes, losses and what it can learn."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgc.compress.lgc import autoencoder as ae, networks

K = 3


def _numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("mu, m", [(0, 16), (1, 16), (16, 16), (17, 32), (100, 112)])
def test_lengths_are_padded_to_a_multiple_of_16(paper_filters, mu, m):
    assert ae.padded(mu) == m
    assert ae.code_size(mu) == m // 4
    weights = jax.eval_shape(lambda: ae.init(jax.random.key(0), mu, K))
    code = jax.eval_shape(lambda w: ae.encode(w, jnp.zeros(m)), weights.encoder)
    assert code.shape == (m // 16, 4) and code.size == ae.code_size(mu)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), weights.decoders)
    assert jax.eval_shape(lambda w: ae.decode(w, jnp.zeros(code.shape), jnp.zeros(m)), one).shape == (m,)


def test_parameter_counts_are_those_of_tables_1_and_2(paper_filters):
    """Kernels are 3 wide and the last ones 1, with biases; the innovation is one more channel."""
    weights = jax.eval_shape(lambda: ae.init(jax.random.key(0), 32, K))
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    table_1 = [(3, 1, 64), (3, 64, 128), (3, 128, 256), (3, 256, 64), (1, 64, 4)]
    table_2 = [(3, 4, 4), (3, 4, 32), (3, 32, 64), (3, 64, 128), (3, 128, 32), (1, 32 + 1, 1)]
    assert count(weights.encoder) == sum(width * i * o + o for width, i, o in table_1)
    assert (round(count(weights.encoder), -3), round(count(weights.decoders) / K, -3)) == (173_000, 44_000)
    assert count(weights.decoders) == K * sum(width * i * o + o for width, i, o in table_2)


@pytest.mark.parametrize(
    "layer, flax",
    [
        (networks.Conv(5), nn.Conv(5, (1,))),
        (networks.Conv(5, stride=2), nn.Conv(5, (3,), strides=(2,))),
        (networks.ConvTranspose(5, 1), nn.ConvTranspose(5, (3,), strides=(1,))),
        (networks.ConvTranspose(5, 2), nn.ConvTranspose(5, (3,), strides=(2,))),
    ],
)
def test_convolutions_are_those_of_flax(layer, flax):
    x, key = _numbers(0, 2, 8, 3), jax.random.key(0)
    weights = flax.init(key, x)
    jax.tree.map(np.testing.assert_array_equal, layer.init(key, x), weights)  # old checkpoints have weights of Flax
    weights = jax.tree.map(lambda w: w + 0.1 * _numbers(1, *w.shape), weights)
    np.testing.assert_allclose(layer.apply(weights, x), flax.apply(weights, x), rtol=0, atol=1e-6)


def first_weights() -> ae.Weights:
    return jax.jit(lambda: ae.init(jax.random.key(0), 32, K), compiler_options={"xla_backend_optimization_level": 0})()


@pytest.fixture(scope="module")
def fresh():
    return first_weights()


@pytest.fixture(scope="module")
def different(fresh):
    """Weights with a decoder of its own for every node, nodes' values and innovations of m = 32."""
    decoders = jax.tree.map(lambda x: x + 0.1 * _numbers(1, *x.shape), fresh.decoders)
    return ae.Weights(fresh.encoder, decoders), _numbers(2, K, 32), _numbers(3, K, 32)


def test_all_decoders_start_alike(fresh):
    for x in jax.tree.leaves(fresh.decoders):
        assert np.array_equal(x, np.broadcast_to(x[0], x.shape))


@pytest.mark.parametrize("chosen", [0, 2])
def test_losses_are_formulas_5_and_6_as_means(different, chosen):
    weights, x, innovations = different
    got = jax.jit(ae.losses)(weights, x, innovations, jnp.int32(chosen))
    codes = [np.asarray(ae.encode(weights.encoder, x[k]), float) for k in range(K)]
    reconstruction, similarity = [], []
    for k in range(K):
        decoder = jax.tree.map(lambda w, k=k: w[k], weights.decoders)
        decoded = ae.decode(decoder, jnp.asarray(codes[chosen], jnp.float32), innovations[k])
        reconstruction += list((np.asarray(decoded, float) - x[k]) ** 2)
        similarity += [d**2 for other in range(K) if other != k for d in (codes[k] - codes[other]).ravel()]
    assert got.reconstruction == pytest.approx(np.mean(reconstruction), rel=1e-4)
    assert got.similarity == pytest.approx(np.mean(similarity), rel=1e-4)


def test_similarity_loss_of_one_node_is_zero(fresh):
    alone = fresh._replace(decoders=jax.tree.map(lambda x: x[:1], fresh.decoders))
    assert ae.losses(alone, _numbers(0, 1, 32), jnp.zeros((1, 32)), jnp.int32(0)).similarity == 0


def test_training_step_descends_weighted_loss(different):
    weights, x, innovations = different
    sgd = optax.sgd(0.01)
    start = ae.Trained(weights, sgd.init(weights))
    step = jax.jit(lambda t, a, b: ae.train(t, sgd, lambda w: ae.losses(w, x, innovations, jnp.int32(1)), a, b))

    def move(a, b):
        return jax.tree.map(lambda new, old: new - old, step(start, a, b)[0].weights, weights)

    reconstruction, similarity = move(1.0, 0.0), move(0.0, 1.0)
    assert any(np.any(x) for x in jax.tree.leaves(reconstruction.decoders))
    assert not any(np.any(x) for x in jax.tree.leaves(similarity.decoders))  # codes alone are to be alike
    both = jax.tree.map(lambda r, s: 2 * r + 0.25 * s, reconstruction, similarity)
    for got, want in zip(jax.tree.leaves(move(2.0, 0.25)), jax.tree.leaves(both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)
    for kind, weighted in (("reconstruction", (1.0, 0.0)), ("similarity", (0.0, 1.0))):
        trained, before = step(start, *weighted)
        assert getattr(step(trained, *weighted)[1], kind) < getattr(before, kind)


def test_decoder_uses_own_innovation(different):
    weights, x, innovations = different
    decoder, code = jax.tree.map(lambda w: w[0], weights.decoders), ae.encode(weights.encoder, x[0])
    with_it, without = ae.decode(decoder, code, innovations[0]), ae.decode(decoder, code, 0 * innovations[0])
    changed = np.abs(np.asarray(with_it - without)) > 1e-6
    assert np.array_equal(changed, np.abs(innovations[0]) > 1e-5)  # position by position: the last filter is of width 1


@pytest.mark.slow
def test_autoencoder_learns_values_common_to_nodes(paper_filters):
    """In z, signs and means alone decode to zero, so the error of that trivial code is the mean square of z."""
    m, adam = 64, optax.adam(0.002)

    def stream(key):  # slow waves that all nodes share, and a little of each node's own
        phases, own = jax.random.split(key)
        a, b = jax.random.uniform(phases, (2, 1), maxval=2 * jnp.pi)
        common = jnp.sin(2 * jnp.pi * jnp.arange(m) / 32 + a) + jnp.cos(2 * jnp.pi * jnp.arange(m) / 64 + b)
        return common + 0.1 * jax.random.normal(own, (K, m))

    @jax.jit
    def step(trained, i):
        key = jax.random.fold_in(jax.random.key(1), i)
        z, innovations = stream(key), jnp.zeros((K, m))
        return ae.train(trained, adam, lambda w: ae.losses(w, z, innovations, i % K), 1.0, 0.5)[0]

    fresh = first_weights()
    trained = ae.Trained(fresh, adam.init(fresh))  # weights do not depend on m
    for i in range(150):
        trained = step(trained, jnp.int32(i))
    z = stream(jax.random.key(2))  # not seen in training
    held_out = jax.jit(ae.losses)(trained.weights, z, jnp.zeros((K, m)), jnp.int32(0))
    assert held_out.reconstruction < 0.2 * jnp.mean(z**2)
