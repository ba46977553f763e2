"""LGC on a ring: who leads, what is sent, what comes back, and that the ring adds up as `psum` does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import same_bits, some_by_default
from lgc_helpers import LAYERS, MU, PARAMS, K, nodes_of

import jgc
from jgc.compress import lgc_ring
from jgc.compress.lgc import autoencoder as ae
from jgc.compress.lgc.ring import draw_leader
from jgc.layout.pack import make_packing, pack
from jgc.types import State
from jgc.wire.account import logical_bytes

SHORT = {"warmup_steps": 1, "autoencoder_steps": 1, "momentum_correction": False, "alpha": 0.1}
STATE = State(jgc.SHARED, jgc.LOCAL)
PACKING = make_packing(PARAMS)


def _gradients(seed, nodes):
    random = np.random.default_rng(seed)
    return jgc.place(
        jax.tree.map(lambda x: np.float32(random.integers(-64, 65, (K, *x.shape)) / 1024), PARAMS), "local", nodes
    )


def _flat(tree):
    return np.asarray(pack(jax.tree.map(jnp.asarray, tree), PACKING))


@functools.cache
def _step(phase, layout, **settings):
    return jax.jit(jgc.compress.step_on_nodes(lgc_ring(**{**SHORT, **settings}).aggregate, phase, nodes_of(layout)))


def _run(layout="emulated", phases=("dense", "top-k", "compressed", "compressed"), **settings):
    """(gradients, state before, aggregate, state after) of every step."""
    nodes, out = nodes_of(layout), []
    init = jax.jit(lambda key: lgc_ring(**{**SHORT, **settings}).init(key, PARAMS, nodes_of("emulated")))
    state = jgc.place(jax.tree.map(np.asarray, init(jax.random.key(0))), STATE, nodes)
    for seed, phase in enumerate(phases):
        grads, key = _gradients(seed, nodes), jgc.place(jax.random.key(seed), "shared", nodes)
        mean, after, _ = _step(phase, layout, **settings)(key, grads, state)
        out.append((grads, state, mean, after))
        state = after
    return out


@functools.cache
def _emulated():
    return _run()


LAYOUTS = ("emulated", "two per device", "one per device")


@pytest.mark.slow
@pytest.mark.parametrize("layout", some_by_default(LAYOUTS, ("two per device",)))
def test_ring_and_psum_agree_bit_for_bit(layout):
    for (_, _, mean, after), (_, _, other, other_after) in zip(
        _emulated(), _run(layout, algorithm="psum"), strict=True
    ):
        assert same_bits(mean, other)
        assert same_bits(after, other_after)


def test_nodes_agree_on_randomly_rotating_leader():
    nodes = nodes_of("emulated")
    drawn = jax.jit(jax.vmap(lambda key: draw_leader(key, nodes)))(jax.random.split(jax.random.key(0), 400))
    shares = np.bincount(np.asarray(drawn), minlength=K) / 400
    assert len(shares) == K and np.all(np.abs(shares - 1 / K) < 0.1)


def test_values_are_sent_at_positions_of_current_leader():
    for seed, (grads, before, mean, _) in enumerate(_emulated()):
        if seed < 1:
            continue
        leader = int(draw_leader(jax.random.key(seed), nodes_of("emulated")))
        v = np.asarray(before.local.memory) + np.stack(
            [_flat(jax.tree.map(lambda x, i=i: x[i], grads)) for i in range(K)]
        )
        for layer, count in zip(PACKING.layers, (16, 8, 1), strict=True):
            at = slice(layer.start, layer.start + layer.size)
            largest = np.sort(np.abs(v[leader, at]))[-count]
            assert np.all(np.abs(v[leader, at][_flat(mean)[at] != 0]) >= largest)


def test_decoding_error_stays_in_residual():
    grads, before, mean, after = _emulated()[-1]
    came_in = np.stack([_flat(jax.tree.map(lambda x, i=i: x[i], grads)) for i in range(K)])
    had = (np.asarray(before.local.memory, float) + came_in).mean(0)
    np.testing.assert_allclose(had - np.asarray(after.local.memory, float).mean(0), _flat(mean), atol=2**-20)


@pytest.mark.slow
def test_only_linear_decoder_maps_mean_of_codes_to_mean():
    codes = jax.random.normal(jax.random.key(1), (K, 2, ae.CHANNELS))
    for linear, exact in ((True, True), (False, False)):
        decoder = ae.init_pair(jax.random.key(0), 32, linear).decoder
        each = np.mean([ae.decode_mean(decoder, code, linear) for code in codes], axis=0)
        assert np.allclose(ae.decode_mean(decoder, codes.mean(0), linear), each, atol=1e-6) is exact


@pytest.mark.parametrize("linear", [True, False])
def test_the_autoencoder_trains_on_the_mean_over_nodes(linear):
    z = jax.random.normal(jax.random.key(2), (K, 32))
    weights = ae.init_pair(jax.random.key(0), 32, linear)
    code = sum(ae.encode(weights.encoder, x) for x in z) / K
    by_hand = np.mean((np.mean(z, 0) - ae.decode_mean(weights.decoder, code, linear)) ** 2)
    np.testing.assert_allclose(ae.mean_losses(weights, z, linear).reconstruction, by_hand, rtol=1e-5)


@pytest.mark.parametrize("code_dtype, width", [("int32", 4), ("int16", 2)])
def test_compressed_phase_bytes_by_hand(code_dtype, width):
    wire = lgc_ring(**SHORT, code_dtype=code_dtype).wire("compressed", PARAMS, nodes_of("one per device"))
    code = width * (8 + LAYERS)  # 32 values in 8 numbers, and a mean a layer
    head = 4 * 5 + 4 + 4 * LAYERS  # positions: 75 + 25 + 32 bits in words; 25 bits of signs, a scale a layer
    table = logical_bytes(wire.logical, K)
    up = {role: sum(table[role]["up"].values()) for role in ("leader", "worker")}
    assert up == {"leader": head + code, "worker": code}
    weights = jax.eval_shape(lambda: ae.init_pair(jax.random.key(0), MU, True))
    size = sum(4 * x.size for x in jax.tree.leaves(weights))
    once = logical_bytes(wire.once, K)
    assert sum(once["worker"]["down"].values()) == size
    assert sum(once["server"]["down"].values()) == (K - 1) * size


def test_fixed_point_overflow_stays_in_residual():
    nodes = nodes_of("emulated")
    compressor = lgc_ring(**SHORT, code_dtype="int16")
    state = jax.jit(lambda key: compressor.init(key, PARAMS, nodes))(jax.random.key(0))
    grads = jax.tree.map(lambda x: x.at[0].multiply(2.0**20), _gradients(0, nodes))
    mean, after, _ = _step("compressed", "emulated", code_dtype="int16")(jax.random.key(0), grads, state)
    kept, sent = np.asarray(after.local.memory, float).mean(0), _flat(mean)
    came_in = np.stack([_flat(jax.tree.map(lambda x, i=i: x[i], grads)) for i in range(K)]).mean(0)
    assert np.all(np.isfinite(sent))
    np.testing.assert_allclose(kept + sent, came_in, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("ratio", [1e-3, 1e-6, 1e-25])
def test_a_layer_far_smaller_on_the_leader_spoils_no_other_layer(ratio):
    """Its values, in the leader's scales, must not enter the code of the layers next to it."""
    nodes, settings = nodes_of("emulated"), {"autoencoder_steps": 1}
    key = next(k for k in map(jax.random.key, range(99)) if draw_leader(k, nodes) == 0)
    grads = _gradients(0, nodes)
    state = jax.jit(lambda key: lgc_ring(**SHORT).init(key, PARAMS, nodes))(jax.random.key(0))
    even, _, _ = _step("compressed", "emulated", **settings)(key, grads, state)
    grads["b"] = grads["b"].at[0].multiply(ratio)
    mean, after, info = _step("compressed", "emulated", **settings)(key, grads, state)
    assert np.all(info.finite) and np.all(np.isfinite(after.local.memory))
    for name in ("a", "bias"):
        assert np.max(np.abs(mean[name])) < 30 * np.max(np.abs(even[name]))
    _, trained, _ = _step("top-k", "emulated", **settings)(key, grads, state)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(trained.shared))


@pytest.mark.parametrize("name, value", [("algorithm", "tree"), ("decoder", "relu"), ("code_dtype", "int8")])
def test_a_wrong_setting_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be one of .*{value}"):
        lgc_ring(**{name: value})
