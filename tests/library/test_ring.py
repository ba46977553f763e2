"""Rings in which codes are decoded, added to and encoded again at every hop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import same_bits, some_by_default
from test_comm import _integers, _nodes, _run, every_layout

import jgc
from jgc import comm
from jgc.compress import cast, natural, onebit, qsgd, step_on_nodes, terngrad
from jgc.compress.quantized.quantize import segment_size
from jgc.nodes.placement import LOCAL, SHARED
from jgc.types import State

K, N = 4, 734
UNBIASED = {
    "qsgd, 4 bits": {"exchange": "ring", "bucket": 64},
    "qsgd, 3 bits, l2, by segment": {"exchange": "ring", "bits": 3, "norm": "l2", "bucket": 0},
    "natural": {"exchange": "ring"},
    "terngrad": {"exchange": "ring", "clip": 0.0, "scaler_sharing": False},
}
KEEPING = {
    "qsgd, 3 bits": {"exchange": "ring", "bits": 3, "bucket": 64, "error_feedback": True},
    "qsgd, 4 bits, by segment": {"exchange": "ring", "bucket": 0, "error_feedback": True},
    "onebit": {"exchange": "ring"},
    "onebit, buckets": {"exchange": "ring", "bucket": 64},
    "bfloat16": {"exchange": "ring", "error_feedback": True},
    "float8_e4m3": {"exchange": "ring", "format": "float8_e4m3", "error_feedback": True},
    "mxfp4": {"exchange": "ring", "format": "mxfp4", "error_feedback": True},
    "nvfp4": {"exchange": "ring", "format": "nvfp4", "hadamard": 32, "error_feedback": True},
}
FACTORIES = {"qsgd": qsgd, "natural": natural, "terngrad": terngrad, "onebit": onebit, "bfloat16": cast,
             "float8_e4m3": cast, "mxfp4": cast, "nvfp4": cast}  # fmt: skip


def built(name: str):
    return FACTORIES[name.partition(",")[0]](**{**UNBIASED, **KEEPING}[name])


def vectors(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(K, N)).astype(np.float32)


def stepper(compressor, nodes):
    """The first state, and a step `(key, v f32[K, N], state) -> (aggregated f32[N], state)`."""
    like = {"w": jnp.zeros((2, N // 2))}
    state = jgc.place(compressor.init(jax.random.key(0), like, nodes), State(SHARED, LOCAL), nodes)
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))

    def run(key, v, state):
        grads = jgc.place({"w": np.asarray(v).reshape(K, 2, -1)}, LOCAL, nodes)
        aggregated, state, _ = step(jgc.place(key, SHARED, nodes), grads, state)
        return np.asarray(aggregated["w"]).reshape(-1), state

    return state, run


def emulated():
    return jgc.make_nodes(K, jax.devices()[:1])


# --- the collective -----------------------------------------------------------------------------------------------


def mean_by(collective, segments, nodes, encode, decode):
    """`x f32[n] -> (mean, lost)` of a collective that takes x in segments."""

    def mean_of(x):
        cut = jnp.pad(x, (0, -x.size % segments)).reshape(segments, -1)
        mean, lost = collective(jax.random.key(3), cut, encode, decode, nodes)
        return mean.reshape(-1)[: x.size], lost.reshape(-1)[: x.size]

    return mean_of


def ringing(nodes, encode, decode):
    """`x f32[n] -> (mean, lost)` of a ring with that code."""
    return mean_by(comm.ring_quantized_mean, comm.ring_size(nodes), nodes, encode, decode)


@every_layout
def test_lossless_code_equals_plain_ring(layout):
    nodes = _nodes(layout)
    x = _integers(nodes, 13)
    around = ringing(nodes, lambda key, x: {"values": x}, lambda payload: payload["values"])
    got, lost, ring = _run(
        lambda x: (*around(x), comm.ring_mean(x, nodes, "x")), nodes, x, outs=(SHARED, LOCAL, SHARED)
    )
    assert same_bits(got, ring) and not np.any(lost)


def test_ring_of_a_matrix_is_refused():
    nodes = jgc.make_nodes(2, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"takes a vector, got float32\[2, 3\]: flatten it first"):
        _run(lambda x: comm.ring_mean(x, nodes, "x"), nodes, jnp.zeros((2, 2, 3)))


@every_layout
@pytest.mark.parametrize("more", [-1, 1, K])
def test_rows_that_are_not_one_a_place_are_refused(layout, more):
    nodes = _nodes(layout)
    x = np.zeros((nodes.count, comm.ring_size(nodes) + more, 3), np.float32)
    around = (lambda key, x: {"values": x}, lambda payload: payload["values"])
    places = rf"x must have a row for each of the {comm.ring_size(nodes)} places .*ring_size\), got {x.shape[1]}"
    with pytest.raises(ValueError, match=places):
        _run(lambda x: comm.ring_quantized_mean(jax.random.key(0), x, *around, nodes), nodes, x)
    x = np.zeros((nodes.count, nodes.count + more, 3), np.float32)
    rows = f"x must have a row for each of the {nodes.count} nodes, got {x.shape[1]}"
    with pytest.raises(ValueError, match=rows):
        _run(lambda x: comm.two_shot_quantized_mean(jax.random.key(0), x, *around, nodes), nodes, x)
    with pytest.raises(ValueError, match=rows):
        _run(lambda x: comm.all_to_all(x, nodes, "x"), nodes, x, outs=LOCAL)


@every_layout
def test_ring_conserves_gradients(layout):
    """Whole numbers rounded to multiples of 8 at random: nothing else is rounded, nor by sharing what is lost."""
    nodes, coarse = _nodes(layout), 8
    places = comm.ring_size(nodes)
    sharing = nodes.count // places
    x = sharing * _integers(nodes, 29)

    def encode(key, x):
        return {"eights": jnp.floor(x / coarse + jax.random.uniform(key, x.shape)).astype(jnp.int16)}

    around = ringing(nodes, encode, lambda payload: coarse * payload["eights"].astype(jnp.float32))
    got, lost = _run(around, nodes, x, outs=(SHARED, LOCAL))
    sums, lost = np.asarray(got, float) * nodes.count, np.asarray(lost, float)
    np.testing.assert_allclose(sums, coarse * np.round(sums / coarse), atol=1e-3)  # codes of sums, on every node
    np.testing.assert_allclose(np.round(sums) + lost.sum(0), x.sum(0), atol=1e-3)
    assert 0 < np.abs(lost).max() < coarse / sharing
    assert np.abs(sums - x.sum(0)).max() < coarse * places
    if places > 1:
        assert len({tuple(own) for own in lost}) == places  # every place drew its own
    shards = [np.asarray(shard.data) for shard in got.addressable_shards]
    assert all(same_bits(shards[0], other) for other in shards)


# --- quantisers ---------------------------------------------------------------------------------------------------


@functools.cache
def drawn(name: str, exchange: str, draws: int) -> np.ndarray:
    """The aggregate for many keys, f64[draws, N]."""
    settings = {**UNBIASED[name], "exchange": exchange}
    compressor, nodes = FACTORIES[name.partition(",")[0]](**settings), emulated()
    state, v = compressor.init(jax.random.key(0), {"w": jnp.zeros((2, N // 2))}, nodes), vectors()
    step = step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes)
    grads = {"w": jnp.asarray(v).reshape(K, 2, -1)}
    keys = jax.random.split(jax.random.key(1), draws)
    got = jax.jit(lambda keys: jax.lax.map(lambda key: step(key, grads, state)[0]["w"], keys))(keys)
    return np.asarray(got, np.float64).reshape(draws, -1)


@pytest.mark.parametrize("name", some_by_default(UNBIASED, ["natural"]))
def test_ring_of_codes_is_unbiased(name):
    draws = 500
    got, want = drawn(name, "ring", draws), vectors().astype(float).mean(0)
    rare = 12 * np.abs(got).max() / draws  # as where nothing is sent on
    assert np.all(np.abs(got.mean(0) - want) <= 6 * got.std(0) / np.sqrt(draws) + rare)
    drawn_at_all = got.std(0) > 0
    off = ((got.mean(0) - want)[drawn_at_all]) / (got.std(0)[drawn_at_all] / np.sqrt(draws))
    assert np.sqrt(np.mean(off**2)) < 1.3  # all together: 1 without a bias


def test_noise_grows_with_the_hops():
    """Sums of h nodes have scales of about sqrt(h): (1 + ... + K) / K^2 against K / K^2."""
    ring, gather = (np.mean(drawn("qsgd, 4 bits", exchange, 500).var(0)) for exchange in ("ring", "gather"))
    assert ring / gather == pytest.approx((K + 1) / 2, rel=0.3)


@pytest.mark.parametrize("bits", some_by_default([2, 4, 8], [4]))
def test_qsgd_is_as_near_to_the_mean_as_its_levels_at_every_hop(bits):
    v = np.clip(vectors(), -1, 1)
    state, step = stepper(qsgd(exchange="ring", bits=bits), emulated())
    got, _ = step(jax.random.key(2), v, state)
    bound = (K + 1) / 2 / (2 ** (bits - 1) - 1)  # the sum of h nodes is at most h: (1 + ... + K) / K levels
    assert 0 < np.abs(got - v.astype(float).mean(0)).max() <= bound


@pytest.mark.parametrize("format, digits", some_by_default([("bfloat16", 7), ("float16", 10)], [("bfloat16", 7)]))
def test_a_cast_is_as_near_to_the_mean_as_its_digits_at_every_hop(format, digits):
    v = np.clip(vectors(), -1, 1)
    state, step = stepper(cast(exchange="ring", format=format), emulated())
    got, _ = step(jax.random.key(2), v, state)
    bound = (K + 1) / 2 * 2.0 ** -(digits + 1) * 1.01
    assert 0 < np.abs(got - v.astype(float).mean(0)).max() <= bound


MESHES = ("natural", "terngrad", "onebit, buckets", "float8_e4m3", "nvfp4")


@pytest.mark.parametrize("name", some_by_default(MESHES, ["terngrad"]))
def test_mesh_and_emulation_agree_bit_for_bit(name):
    ends = []
    for nodes in (emulated(), jgc.make_nodes(K)):
        state, step = stepper(built(name), nodes)
        for i in range(2):
            got, state = step(jax.random.key(i), vectors(i), state)
        ends.append((got, jax.tree.map(np.asarray, state)))
    assert same_bits(*ends)


@pytest.mark.parametrize("name", some_by_default(KEEPING, ["qsgd, 3 bits"]))
def test_residual_is_returned_and_stays_bounded(name):
    state, step = stepper(built(name), emulated())
    came_in, went_out, steps = np.zeros(N), np.zeros(N), 40
    for i in range(steps):
        v = vectors(i)
        got, state = step(jax.random.key(i), v, state)
        came_in, went_out = came_in + v.astype(float).mean(0), went_out + got
    kept = np.asarray(state.local.memory, float)
    np.testing.assert_allclose(went_out + kept.mean(0), came_in, atol=1e-4)
    assert np.sqrt(np.mean(kept**2)) < 5 * K  # of gradients of 1, in sums of up to K nodes


@pytest.mark.parametrize("bits", some_by_default([2, 4], [4]))
def test_node_sends_payload_less_than_twice(bits):
    nodes, n = jgc.make_nodes(K), 64 * 1024
    compressor = qsgd(exchange="ring", bits=bits, bucket=512)
    wire = compressor.wire(compressor.schedule[0].value, {"w": jax.ShapeDtypeStruct((64, 1024), jnp.float32)}, nodes)
    up, down = ({m.field: m.bytes for m in wire.logical if m.direction == way} for way in ("up", "down"))
    assert up == down == {"codes": bits * n / 8, "scales": 4 * n / 512}
    payload = sum(up.values())
    sent = [(s.op, s.field, s.bytes) for s in wire.physical if s.field != "flag"]
    hops = [("collective-permute", "codes+scales", payload / K)] * (K - 1)
    assert sent == [*hops, ("all-gather", "codes+scales", payload / K * (K - 1))]


@pytest.mark.parametrize("places", [1, 3, 8])
@pytest.mark.parametrize("bucket", [0, 1, 32, 512])
@pytest.mark.parametrize("n", [0, 1, 100, 513, 10_000])
def test_segments_cover_values_in_whole_buckets(n, bucket, places):
    size = segment_size(n, places, bucket)
    assert places * size >= n and (size - max(bucket, 1)) * places < n
    if 0 < bucket <= size:
        assert size % bucket == 0


def test_terngrads_sums_share_no_scale():
    with pytest.raises(ValueError, match="scaler_sharing must be False with exchange 'ring', got True"):
        terngrad(exchange="ring")


@pytest.mark.parametrize("name", some_by_default(["qsgd, 4 bits", "onebit"], ["onebit"]))
def test_empty_tree_and_single_value(name):
    nodes, compressor = emulated(), built(name)
    for like in ({"none": jnp.zeros((0, 3))}, {"one": jnp.zeros(())}):
        grads = jax.tree.map(lambda x: jnp.ones((K, *x.shape)), like)
        state = compressor.init(jax.random.key(0), like, nodes)
        step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
        got, _, _ = step(jax.random.key(0), grads, state)
        for x in jax.tree.leaves(got):
            np.testing.assert_allclose(x, 1, rtol=0.3)
        assert compressor.wire(compressor.schedule[-1].value, like, nodes).logical
