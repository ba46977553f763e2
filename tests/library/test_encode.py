"""Messages as values: encode and decode against the step that gathers, and what a lost message leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import nodes_of, same_bits, some_by_default

import jgc
from jgc.compress import dense, per_layer, stacked, step_on_nodes, topk

K = 4
PARAMS = {"head": {"kernel": jnp.zeros((30, 40)), "bias": jnp.zeros(9)}, "w": jnp.zeros((3, 17, 5)),
          "steps": jnp.zeros((), jnp.int32)}  # fmt: skip
METHODS = {
    "topk": lambda: topk(alpha=0.05, value_code="2bit"),
    "chunks": lambda: topk(alpha=1 / 8, selection="chunks", chunk=16, residual_dtype="bfloat16"),
    "dgc": lambda: jgc.compress.dgc(alpha=0.05, factor_masking=True),
    "dense": dense,
    "qsgd": lambda: jgc.compress.qsgd(bits=3),
    "onebit": jgc.compress.onebit,
    "signsgd": jgc.compress.signsgd,
    "cast": jgc.compress.cast,
    "silent": jgc.compress.silent,
    "layers": lambda: per_layer([("bias", dense())], default=stacked("^w$", topk(alpha=0.1))),
}


def _gradients(seed: int):
    def of(x):
        draw = np.random.default_rng([seed, x.size]).normal(size=(K, *x.shape))
        return jnp.asarray(draw, x.dtype)

    return jax.tree.map(of, PARAMS)


def _of_node(tree, k: int):
    return jax.tree.map(lambda x: x[k], tree)


@pytest.mark.parametrize("name", some_by_default(METHODS, ("topk", "layers")))
def test_a_step_is_encode_gather_decode(name):
    compressor, nodes = METHODS[name](), jgc.make_nodes(K, jax.devices()[:1])
    phase = compressor.schedule[-1].value
    state = compressor.init(jax.random.key(0), PARAMS, nodes)
    each = [jgc.State(state.shared, _of_node(state.local, k)) for k in range(K)]
    step = jax.jit(step_on_nodes(compressor.aggregate, phase, nodes))
    encode = jax.jit(lambda key, g, s, k: jgc.encode(compressor, phase, key, g, s, k, K))
    decode = jax.jit(lambda messages: jgc.decode(compressor, phase, messages, PARAMS))
    for i in range(3):
        key, grads = jax.random.key(i), _gradients(i)
        mean, state, _ = step(key, grads, state)
        messages, each, usable = zip(*(encode(key, _of_node(grads, k), each[k], k) for k in range(K)), strict=True)
        assert all(usable) and {x.dtype for x in messages} == {jnp.dtype("uint32")}
        if name == "onebit":  # its scales are sums, which XLA takes in a different order for several nodes at once
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), decode(messages), mean)
            break
        assert same_bits(decode(messages), mean)
        assert all(same_bits(each[k].local, _of_node(state.local, k)) for k in range(K))


@pytest.mark.parametrize("name", ["topk", "qsgd"])
def test_a_message_has_the_bytes_that_a_device_gathers(name):
    compressor, nodes = METHODS[name](), nodes_of("8 devices")
    phase = compressor.schedule[-1].value
    state = compressor.init(jax.random.key(0), PARAMS, nodes)
    one = jgc.State(state.shared, _of_node(state.local, 0))
    message, *_ = jax.eval_shape(
        lambda g, s: jgc.encode(compressor, phase, jax.random.key(0), g, s, 0, 8), PARAMS, one
    )
    sent = compressor.wire(phase, PARAMS, nodes)
    (gathered,) = (x.bytes for x in sent.physical if x.op == "all-gather")
    assert gathered == 7 * 4 * message.size
    up = sum(m.bytes for m in sent.logical if m.direction == "up")
    assert 0 <= 4 * message.size - up < 4 * len(sent.logical)


@pytest.mark.slow
def test_a_message_that_was_not_counted_returns_to_the_residual():
    grads = _of_node(_gradients(0), 0)
    compressor = topk(alpha=0.1, value_code="1bit")
    state = compressor.init(jax.random.key(0), PARAMS, jgc.make_nodes(1))
    state = jgc.State(state.shared, _of_node(state.local, 0))
    key = jax.random.key(1)
    message, after, _ = jgc.encode(compressor, "top-k", key, grads, state, 0, K)
    back = jgc.unsend(compressor, "top-k", key, message, after, PARAMS, 0)
    kept = jgc.residual(compressor, back.local, PARAMS)
    assert set(kept) == {"head/kernel", "head/bias", "w"}
    np.testing.assert_allclose(kept["w"], grads["w"], atol=1e-6)


def test_zeros_of_a_message_that_was_not_counted_keep_their_velocity():
    compressor, grads, key = jgc.compress.dgc(alpha=1.0, value_code="mxfp4"), jnp.array([1.0, 1e-9]), jax.random.key(0)
    state = compressor.init(key, grads, jgc.make_nodes(1))
    state = jgc.State(state.shared, _of_node(state.local, 0))
    message, after, _ = jgc.encode(compressor, "top-k", key, grads, state, 0, 1)
    back = jgc.unsend(compressor, "top-k", key, message, after, grads, 0)
    np.testing.assert_allclose(back.local.memory.velocity, [0, 1e-9])
    np.testing.assert_allclose(back.local.memory.residual, grads)


def test_unusable_gradients_change_nothing():
    compressor, grads = topk(alpha=0.1), {"w": jnp.full((4, 5), jnp.nan)}
    state = compressor.init(jax.random.key(0), {"w": grads["w"]}, jgc.make_nodes(1))
    state = jgc.State(state.shared, _of_node(state.local, 0))
    _, after, usable = jgc.encode(compressor, "top-k", jax.random.key(0), grads, state, 0, 1)
    assert not usable and same_bits(after, state)


def test_what_is_no_value_is_named():
    state, key = jgc.State((), ()), jax.random.key(0)
    params = {"w": jnp.zeros((4, 5))}
    ring = jgc.compress.qsgd(exchange="ring")
    for method, name in ((jgc.compress.powersgd(), "low rank"), (jgc.compress.terngrad(), "ternary"), (ring, "qsgd")):
        phase = method.schedule[-1].value
        line = rf"the method with the phase '{name}.* communicates before .* qsgd\(exchange='gather'\)"
        with pytest.raises(ValueError, match=line):
            jgc.encode(method, phase, key, params, state, 0, 1)
    with pytest.raises(ValueError, match="at least one message, got none"):
        jgc.decode(topk(), "top-k", [], params)
    with pytest.raises(ValueError, match=r"messages must be u32\[2\], got uint32\[3\]"):
        jgc.decode(topk(), "top-k", [jnp.zeros(3, jnp.uint32)], params)
