"""Means in two shots: all-to-all of codes, sums in f32, all-gather of coded means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import some_by_default
from test_comm import _integers, _nodes, _run, every_layout
from test_ring import FACTORIES, N, mean_by, stepper, vectors

import jgc
from jgc import comm
from jgc.compress import onebit, qsgd, step_on_nodes, terngrad, topk
from jgc.nodes.placement import LOCAL, SHARED

K = 4
UNBIASED = {
    "qsgd, 4 bits": {"bucket": 64},
    "qsgd, 3 bits, l2, by segment": {"bits": 3, "norm": "l2", "bucket": 0},
    "natural": {},
    "terngrad": {"clip": 0.0, "scaler_sharing": False},
}
KEEPING = {
    "qsgd, 2 bits": {"bits": 2, "bucket": 64, "error_feedback": True},
    "qsgd, 4 bits, by segment": {"bucket": 0, "error_feedback": True},
    "terngrad, kept": {"scaler_sharing": False, "error_feedback": True},
    "onebit": {},
    "onebit, buckets": {"bucket": 64},
    "bfloat16": {"error_feedback": True},
    "float8_e4m3": {"format": "float8_e4m3", "error_feedback": True},
}


def built(name: str, **settings):
    settings = {**UNBIASED, **KEEPING}[name] | {"exchange": "two_shot"} | settings
    return FACTORIES[name.partition(",")[0]](**settings)


def emulated():
    return jgc.make_nodes(K, jax.devices()[:1])


# --- the collectives ----------------------------------------------------------------------------------------------


@every_layout
def test_all_to_all_sends_row_k_to_node_k(layout):
    nodes = _nodes(layout)
    x = np.random.default_rng(0).integers(0, 99, (nodes.count, nodes.count, 2, 3)).astype(np.uint32)
    got = _run(lambda x: comm.all_to_all(x, nodes, "x"), nodes, x, outs=LOCAL)
    np.testing.assert_array_equal(got, np.swapaxes(x, 0, 1))


@every_layout
def test_all_gather_at_once_is_an_all_gather(layout):
    nodes = _nodes(layout)
    x = np.random.default_rng(0).integers(0, 99, (nodes.count, 5)).astype(np.uint32)
    got = _run(lambda x: comm.all_gather_at_once(x, nodes, "x"), nodes, x)  # SHARED: equal on all nodes
    assert all(np.array_equal(shard.data, x) for shard in got.addressable_shards)


def two_shots(nodes, encode, decode):
    """`x f32[n] -> (mean, lost)` in two shots of that code."""
    return mean_by(comm.two_shot_quantized_mean, nodes.count, nodes, encode, decode)


@every_layout
def test_lossless_code_gives_the_mean(layout):
    nodes = _nodes(layout)
    x = _integers(nodes, 13)
    mean_of = two_shots(nodes, lambda key, x: {"values": x}, lambda payload: payload["values"])
    got, lost = _run(mean_of, nodes, x, outs=(SHARED, LOCAL))
    np.testing.assert_allclose(got, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(lost, 0, atol=1e-4)  # what the division by K rounds


@every_layout
def test_two_roundings_are_conserved(layout):
    """Whole numbers rounded to multiples of 8 at random, K of them, so that means are whole numbers too."""
    nodes, coarse = _nodes(layout), 8
    x = nodes.count * _integers(nodes, 29)

    def encode(key, x):
        return {"eights": jnp.floor(x / coarse + jax.random.uniform(key, x.shape)).astype(jnp.int16)}

    mean_of = two_shots(nodes, encode, lambda payload: coarse * payload["eights"].astype(jnp.float32))
    got, lost = _run(mean_of, nodes, x, outs=(SHARED, LOCAL))
    got, lost = np.asarray(got, float), np.asarray(lost, float)
    np.testing.assert_array_equal(got, coarse * np.round(got / coarse))
    np.testing.assert_allclose(got + lost.mean(0), x.mean(0), atol=1e-3)
    width = -(-29 // nodes.count)
    local = np.arange(29) // width == np.arange(nodes.count)[:, None]
    assert np.all(np.abs(lost[~local]) < coarse)  # the first rounding's
    assert 0 < np.abs(lost[local]).max() < coarse * nodes.count  # the second one's, of the node that reduced
    assert np.abs(got - x.mean(0)).max() < 2 * coarse  # two roundings, whatever K


# --- quantisers ---------------------------------------------------------------------------------------------------


@functools.cache
def drawn(name: str, exchange: str, nodes: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The aggregate for many keys, f64[draws, N], and the mean f64[N]."""
    compressor, where = built(name, exchange=exchange), jgc.make_nodes(nodes, jax.devices()[:1])
    v = np.random.default_rng(nodes).normal(size=(nodes, N)).astype(np.float32)
    state = compressor.init(jax.random.key(0), {"w": jnp.zeros(N)}, where)
    step = step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, where)
    keys = jax.random.split(jax.random.key(1), draws)
    got = jax.jit(lambda keys, v: jax.lax.map(lambda key: step(key, {"w": v}, state)[0]["w"], keys))(keys, v)
    return np.asarray(got, np.float64), v.astype(float).mean(0)


@pytest.mark.parametrize("name", some_by_default(UNBIASED, ["qsgd, 4 bits"]))
def test_two_shots_are_unbiased(name):
    draws = 400
    got, want = drawn(name, "two_shot", K, draws)
    rare = 12 * np.abs(got).max() / draws  # as where nothing is sent on
    assert np.all(np.abs(got.mean(0) - want) <= 6 * got.std(0) / np.sqrt(draws) + rare)
    drawn_at_all = got.std(0) > 0
    off = ((got.mean(0) - want)[drawn_at_all]) / (got.std(0)[drawn_at_all] / np.sqrt(draws))
    assert np.sqrt(np.mean(off**2)) < 1.3  # all together: 1 without a bias


@pytest.mark.parametrize("nodes", some_by_default([4, 16], [4]))
def test_noise_is_twice_that_of_a_gather_whatever_the_number_of_nodes(nodes):
    """Of unrelated gradients: K - 1 of K nodes round their share, and the mean is smaller by the root of K."""
    noise = {}
    for exchange in ("gather", "two_shot"):
        got, want = drawn("qsgd, 4 bits", exchange, nodes, 400)
        noise[exchange] = np.mean((got - want) ** 2)
    assert noise["two_shot"] / noise["gather"] == pytest.approx((nodes - 1) / nodes + 1, rel=0.1)


@pytest.mark.parametrize("name", some_by_default(KEEPING, ["qsgd, 2 bits"]))
def test_residual_is_returned_and_stays_bounded(name):
    """Also with three levels, which a ring cannot have: errors of means do not enter codes again."""
    state, step = stepper(built(name), emulated())
    came_in, went_out, steps, sizes = np.zeros(N), np.zeros(N), 80, []
    for i in range(steps):
        v = vectors(i)
        got, state = step(jax.random.key(i), v, state)
        came_in, went_out = came_in + v.astype(float).mean(0), went_out + got
        sizes.append(np.sqrt(np.mean(np.asarray(state.local.memory, float) ** 2)))
    kept = np.asarray(state.local.memory, float)
    np.testing.assert_allclose(went_out + kept.mean(0), came_in, atol=2e-4)
    assert np.mean(sizes[-20:]) < 1.2 * np.mean(sizes[20:40]) and sizes[-1] < 3 * K


@pytest.mark.parametrize("name, settings", [
    ("onebit", {"bucket": 0}), ("onebit", {"bucket": 2}), ("onebit", {"bucket": 3}), ("onebit", {"bucket": 64}),
    ("terngrad", {"clip": 1.0, "scaler_sharing": False}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("exchange", ["ring", "two_shot"])
def test_scales_of_a_bucket_that_is_not_full_are_means_of_its_values(name, settings, exchange):
    """Equal magnitudes are sent exactly, also the last of 13 values, the only one of its bucket."""
    v = np.random.default_rng(0).choice([-1, 1], 13).astype(np.float32)
    nodes, compressor = emulated(), FACTORIES[name](exchange=exchange, **settings)
    state = compressor.init(jax.random.key(0), {"w": jnp.zeros(13)}, nodes)
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
    got, _, info = step(jax.random.key(0), {"w": np.tile(v, (K, 1))}, state)
    assert np.array_equal(got["w"], v) and not np.any(info.residual_norm)


@pytest.mark.parametrize("exchange", ["ring", "two_shot"])
def test_last_bucket_with_feedback_loses_less_than_its_values(exchange):
    """Of one node, whose first step codes once: a bucket of 64 with 33 values, the largest of them anywhere."""
    nodes, compressor = jgc.make_nodes(1), onebit(bucket=64, exchange=exchange)
    state = compressor.init(jax.random.key(0), {"w": jnp.zeros(97)}, nodes)
    step = jax.jit(step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes))
    for place in (64, 80, 96):
        v = np.zeros(97, np.float32)
        v[64:], v[place] = 0.01, 1
        info = step(jax.random.key(0), {"w": v[None]}, state)[2]
        assert info.residual_norm[0] < np.linalg.norm(v)


@pytest.mark.parametrize("bits", some_by_default([2, 4], [4]))
def test_as_many_bytes_as_a_ring_in_two_collectives(bits):
    nodes, n = jgc.make_nodes(8), 64 * 1024
    shapes = {"w": jax.ShapeDtypeStruct((64, 1024), jnp.float32)}
    wires = {}
    for exchange in ("ring", "two_shot"):
        compressor = qsgd(exchange=exchange, bits=bits, bucket=512)
        wires[exchange] = compressor.wire(compressor.schedule[0].value, shapes, nodes)
    assert wires["ring"].logical == wires["two_shot"].logical
    payload = bits * n / 8 + 4 * n / 512
    sent = [(s.op, s.field, s.bytes) for s in wires["two_shot"].physical if s.field != "flag"]
    assert sent == [("all-to-all", "codes+scales", payload * 7 / 8)] * 2  # elsewhere than on CPU an all-gather
    assert sum(s.bytes for s in wires["ring"].physical) == sum(s.bytes for s in wires["two_shot"].physical)


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


def test_wrong_settings_have_a_line_each():
    with pytest.raises(ValueError, match="scaler_sharing must be False with exchange 'two_shot', got True"):
        terngrad(exchange="two_shot")
    with pytest.raises(ValueError, match="exchange must be one of 'gather', 'ring', 'two_shot', got 'two-shot'"):
        qsgd(exchange="two-shot")
    with pytest.raises(TypeError, match="TopK has no setting 'exchange'; there are"):
        topk(exchange="two_shot")


@pytest.mark.parametrize("exchange", ["two_shot", "ring"])
def test_a_rotation_also_helps_where_a_segment_is_smaller_than_its_block(exchange):
    """Outliers of fifty times the rest, at the same positions on all nodes; segments of 2,500, blocks of 4,096."""
    v = np.random.default_rng(0).normal(size=(8, 20_000)).astype(np.float32)
    v[:, ::97] *= 50
    nodes, mean, error = jgc.make_nodes(8, jax.devices()[:1]), v.mean(0), {}
    for hadamard in (0, 4096):
        compressor = qsgd(exchange=exchange, hadamard=hadamard)
        state = compressor.init(jax.random.key(0), {"w": v[0]}, nodes)
        step = step_on_nodes(compressor.aggregate, compressor.schedule[0].value, nodes)
        error[hadamard] = np.linalg.norm(jax.jit(step)(jax.random.key(1), {"w": v}, state)[0]["w"] - mean)
    assert error[4096] < 0.6 * error[0]
