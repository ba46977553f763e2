"""The dense mean leaf by leaf: halves as f32, one collective for small leaves, and what the program sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgc
from jgc.compress import dense, dgc, per_layer, step_on_nodes, topk
from jgc.lab.shared.hlo import collectives
from jgc.wire.account import logical_bytes

SHAPES = {
    "large": jnp.zeros((512, 513)),
    "a": jnp.zeros((30, 4)),
    "half": jnp.zeros((64, 3), jnp.float16),
    "brain": jnp.zeros((16, 2), jnp.bfloat16),
    "steps": jnp.zeros((), jnp.int32),
    "bias": jnp.zeros(7),
}


def test_halves_travel_as_f32_and_wire_is_what_the_program_sends():
    nodes = jgc.make_nodes(4, devices=jax.devices()[:4])
    compressor, share = dense(), 2 * 3 / 4
    wire = compressor.wire("dense", SHAPES, nodes)
    sent = [one.bytes for one in wire.physical if one.field == "dense"]
    small = 4 * (120 + 192 + 32 + 7)  # bf16 is sent as f32 by XLA on CPU
    assert sorted(sent) == sorted([share * 4 * 512 * 513, share * small])
    assert logical_bytes(wire.logical, 4)["worker"]["up"] == {"dense": 4 * 512 * 513 + small}
    key, state = jax.random.key(0), compressor.init(jax.random.key(0), SHAPES, nodes)
    grads = jax.tree.map(lambda x: jnp.zeros((4, *x.shape), x.dtype), SHAPES)
    program = jax.jit(step_on_nodes(compressor.aggregate, "dense", nodes)).lower(key, grads, state).compile()
    assert sum(one.sent_bytes for one in collectives(program)) == sum(one.bytes for one in wire.physical)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("value", [60_000, 6e-8, 1e-5])
def test_half_mean_neither_overflows_nor_vanishes(value, devices):
    nodes = jgc.make_nodes(3, devices=jax.devices()[:devices])
    grads = {"a": jnp.full((3, 2, 2), value, jnp.float16)}
    compressor = dense()
    state = compressor.init(jax.random.key(0), {"a": grads["a"][0]}, nodes)
    mean, _, info = jax.jit(step_on_nodes(compressor.aggregate, "dense", nodes))(jax.random.key(0), grads, state)
    assert mean["a"].dtype == jnp.float16 and info.finite.all()
    np.testing.assert_array_equal(mean["a"], grads["a"][0])


def test_first_layer_dense_still_shares_an_all_reduce():
    nodes = jgc.make_nodes(8)
    compressor = per_layer([("^a$", dense())], default=topk(warmup_steps=5))
    sent = compressor.wire(compressor.schedule[0].value, {"a": SHAPES["a"], "large": SHAPES["large"]}, nodes).physical
    assert [one.field for one in sent] == ["flag", "dense"]


def test_half_layers_beside_another_all_reduce_are_sent_as_f32():
    nodes = jgc.make_nodes(4, devices=jax.devices()[:4])
    compressor = per_layer([("^half$", dense())], default=topk(warmup_steps=5))
    shapes = {"half": jnp.zeros((8, 8), jnp.float16), "large": SHAPES["large"]}
    wire = compressor.wire(compressor.schedule[0].value, shapes, nodes)
    up = sum(one.bytes for one in wire.logical if (one.role, one.direction) == ("worker", "up"))
    assert up == 4 * 64 + 4 * SHAPES["large"].size
    all_reduced = [one.bytes for one in wire.physical if one.field != "flag"]
    assert sum(all_reduced) == 2 * up * 3 / 4  # of an all-reduce each of 4 devices sends 2 (4 - 1) / 4


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    "method", [dense(), topk(alpha=1.0), dgc(alpha=1.0), per_layer([("a", dense())], topk(alpha=1.0))]
)
def test_leaves_of_eight_bits_are_averaged(method, dtype):
    nodes = jgc.make_nodes(2, devices_per_node=2)
    grads = {name: jnp.asarray([[1.0, -2.0], [2.0, 8.0]], dtype).reshape(2, *shape) for name, shape in
             (("a", (1, 2)), ("b", (2,)))}  # fmt: skip
    state = method.init(jax.random.key(0), jax.tree.map(lambda x: x[0], grads), nodes)
    step = step_on_nodes(method.aggregate, method.schedule[-1].value, nodes)
    mean, _, info = jax.jit(step)(jax.random.key(0), grads, state)
    assert info.finite.all() and {x.dtype.name for x in mean.values()} == {dtype}
    for x in mean.values():
        np.testing.assert_array_equal(np.asarray(x, np.float32).reshape(-1), [1.5, 3.0])
