"""Block formats and rotations, bit for bit against `ml_dtypes` and NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jgc
from jgc.backend import plain_operations
from jgc.compress import cast, qsgd, terngrad, topk
from jgc.layout.pack import whole
from jgc.wire import quantized_words
from jgc.wire.blocks import BLOCK_FORMATS, in_blocks
from jgc.wire.floats import codes_of, round_to, values_of_codes
from jgc.wire.hadamard import _signs, rotate, rotate_back

F32, E2M1, E4M3, E5M2 = np.float32, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
ELEMENTS = {"mxfp8_e4m3": (E4M3, 8, 448), "mxfp8_e5m2": (E5M2, 15, 57344), "mxfp4": (E2M1, 2, 6)}
N = 9_000  # three groups of NVFP4, and a last block that is not full


def vectors() -> dict[str, np.ndarray]:
    r = np.random.default_rng(0)
    mixed = r.standard_t(2, N) * np.repeat(2.0 ** r.integers(-110, 40, N // 100), 100)
    mixed[:64] = 0
    return {
        "heavy tails": r.standard_t(2, N).astype(F32),
        "blocks of all sizes": mixed.astype(F32),
        "multiples of a quarter": (r.integers(-32, 33, N) / 4).astype(F32),  # ties
        "mostly zeros": (r.normal(size=N) * (r.random(N) < 0.01)).astype(F32),
        "fewer than a block": r.normal(size=13).astype(F32),
        "single": F32([-7]),
        "tiny": (r.normal(size=N) * 2.0**-105).astype(F32),
        "near the smallest f32": (r.uniform(1, 8, N) * r.choice([-1, 1], N) * 2.0**-122).astype(F32),
    }


VECTORS = vectors()


def blocks_of(v: np.ndarray, size: int) -> np.ndarray:
    return np.pad(v, (0, -v.size % size)).reshape(-1, size)


def numpys_mx(v: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Section 6.3 of the OCP specification: bits of elements, E8M0 of blocks, decoded values."""
    dtype, most, top = ELEMENTS[name]
    x = blocks_of(v, 32)
    largest = np.abs(x).max(1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1, -127) - most
    exponent = np.maximum(exponent, -126)  # the smallest normal f32
    scale = np.ldexp(1.0, exponent)[:, None]
    element = np.clip(x / scale, -top, top).astype(F32).astype(dtype)
    decoded = (element.astype(float) * scale).astype(F32)
    return element.view(np.uint8).reshape(-1)[: v.size], exponent + 127, decoded.reshape(-1)[: v.size]


def numpys_nv(v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bits of elements, E4M3 of blocks, and decoded values, with f32 scales of 16 significant bits."""
    x = blocks_of(v, 16)
    largest = np.abs(x).max(1)
    group = blocks_of(largest, 256).max(1) * F32(1 / 2688)
    group = (group.view(np.uint32) & np.uint32(0xFFFFFF00)).view(F32)
    group = np.repeat(np.maximum(group, F32(2.0**-117)), 256)[: largest.size]
    s = np.clip(largest * F32(1 / 6) / group, 0, 448).astype(E4M3)
    scale = s.astype(F32) * group
    factor = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    element = np.clip(x * factor[:, None], -6, 6).astype(E2M1)
    decoded = element.astype(F32) * scale[:, None]
    return element.view(np.uint8).reshape(-1)[: v.size], s.view(np.uint8), decoded.reshape(-1)[: v.size]


@functools.cache
def coded(name: str, at_random: bool, n: int):
    """`(key, v) -> (codes of n values as f32 or u32, payload, decoded values)`, compiled."""
    q, layers = in_blocks(name, at_random), (whole(n),)

    @jax.jit
    def run(key, v):
        payload = quantized_words.encode(q, key, v, layers)
        codes = quantized_words._unpacked(q, payload["codes"], n)
        return codes, payload, quantized_words.decode(q, payload, layers)

    return run


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_codes_and_scales_match_numpy_bit_for_bit(name, vector):
    v = VECTORS[vector]
    codes, payload, decoded = coded(name, False, v.size)(jax.random.key(0), v)
    bits, scales, values = numpys_nv(v) if name == "nvfp4" else numpys_mx(v, name)
    assert np.array_equal(codes, bits)
    assert np.array_equal(np.asarray(payload["scales"]).view(np.uint8), scales)
    normal = (np.abs(values) >= np.finfo(F32).tiny) | (values == 0)
    assert np.array_equal(np.asarray(decoded)[normal].view(np.uint32), values[normal].view(np.uint32))
    assert np.abs(decoded)[~normal].max(initial=0) < np.finfo(F32).tiny


@pytest.mark.parametrize("dtype", [E2M1, E4M3, E5M2, ml_dtypes.bfloat16, np.float16])
def test_rounding_to_the_nearest_is_the_cast(dtype):
    unsigned = np.uint16 if np.dtype(dtype).itemsize == 2 else np.uint8
    count = 16 if dtype == E2M1 else 2 ** (8 * np.dtype(dtype).itemsize)
    values = np.sort(np.arange(count).astype(unsigned).view(dtype).astype(F32))
    values = values[np.isfinite(values)]
    near = np.concatenate([values, values[1:] / 2 + values[:-1] / 2])
    near = np.concatenate([near, np.nextafter(near, F32(np.inf)), np.nextafter(near, F32(-np.inf))])
    near = near[(np.abs(near) > 1e-33) | (near == 0)].clip(values[0], values[-1])
    got = np.asarray(jax.jit(lambda x: round_to(x, dtype))(near))
    assert got.tobytes() == near.astype(dtype).astype(F32).tobytes()


@pytest.mark.parametrize("dtype", [E2M1, E4M3, E5M2])
def test_bits_of_elements_are_those_of_ml_dtypes(dtype):
    codes = np.arange(16 if dtype == E2M1 else 256, dtype=np.uint32)
    values = codes.astype(np.uint8).view(dtype).astype(F32)
    codes, values = codes[np.isfinite(values)], values[np.isfinite(values)]
    assert np.asarray(values_of_codes(codes, dtype)).tobytes() == values.tobytes()
    assert np.array_equal(codes_of(values, dtype), codes)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_random_rounding_takes_the_two_values_around_and_their_mean(name):
    """Also of the largest value of a block, which rounding to the nearest may clip."""
    v, draws = VECTORS["heavy tails"][:512], 800
    got = jax.vmap(lambda key: coded(name, True, v.size)(key, v)[2])(jax.random.split(jax.random.key(1), draws))
    got = np.asarray(got, float)
    low, high = got.min(0), got.max(0)
    assert np.all((got == low) | (got == high)) and np.mean(low < high) > 0.5
    largest = np.repeat(np.abs(v).reshape(-1, 16).max(1), 16)
    rare = 12 * largest / 2 / draws  # what is drawn a few times in all: steps are at most half the largest value
    assert np.all(np.abs(got.mean(0) - v) <= 6 * got.std(0) / np.sqrt(draws) + rare)


def test_nvfp4_rounded_at_random_clips_no_largest_value():
    """A group's scale has 16 bits: rounded down, it would be too small for the value from which it comes."""
    top = (2688 * np.linspace(1, 2, 2**18)[:: 2**12]).astype(F32)  # of 64 groups, with last bits of all sorts
    _, payload, decoded = coded("nvfp4", True, 2**18)(jax.random.key(0), np.repeat(top, 4096))
    group = (top * F32(1 / 2688)).view(np.uint32) + np.uint32(0xFF) & np.uint32(0xFFFFFF00)
    assert np.array_equal(np.asarray(payload["group_scales"]).view(np.uint32), group)
    assert np.all(decoded.reshape(64, -1).max(1) >= top * (1 - 2.0**-22))  # each is rounded up at least once


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_long_vectors_are_coded_part_by_part_as_at_once(name):
    n = 2**18 + 4_321
    v = jax.random.normal(jax.random.key(0), (n,)) * jnp.exp(jax.random.normal(jax.random.key(1), (n,)))
    q = in_blocks(name)
    assert quantized_words.part_size(q, n) < n

    def mean(v):
        payload = quantized_words.encode(q, jax.random.key(0), v, (whole(n),))
        both = {field: jnp.stack([x, x]) for field, x in payload.items()}
        return quantized_words.mean_of(q, both, (whole(n),))

    got = jax.jit(mean)(v)
    with plain_operations():
        want = jax.jit(lambda v: mean(v))(v)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("method, bytes_of", [
    (cast(format="mxfp8_e4m3"), {"codes": 157 * 32, "scales": 157}),
    (cast(format="mxfp4", hadamard=64), {"codes": 157 * 16, "scales": 157}),
    (cast(format="nvfp4"), {"codes": 157 * 16, "scales": 313, "group_scales": 8}),
    (topk(alpha=0.02, value_code="mxfp4"), {"values": 64, "scales": 4}),
])  # fmt: skip
def test_messages_have_their_bytes(method, bytes_of):
    nodes = jgc.make_nodes(4, jax.devices()[:4])
    wire = method.wire(method.schedule[-1].value, {"w": jax.ShapeDtypeStruct((50, 100), jnp.float32)}, nodes)
    up = {m.field: m.bytes for m in wire.logical if m.direction == "up" and m.field != "positions"}
    assert up == bytes_of
    sent = sum(s.bytes for s in wire.physical if s.op == "all-gather")
    fields = [m.bytes for m in wire.logical if m.direction == "up"]
    assert sent == 3 * sum(-(-b // 4) * 4 for b in fields)  # whole words of each field


# --- rotations ------------------------------------------------------------------------------------


def numpys_rotation(v: np.ndarray, m: int) -> np.ndarray:
    h = np.array([[1.0]])
    while len(h) < m:
        h = np.block([[h, h], [h, -h]])
    count = v.size // m * m
    blocks = (v[:count].reshape(-1, m) * _signs(m)[:, 0]) @ h / 2.0 ** np.ceil(np.log2(m) / 2)
    return np.concatenate([blocks.reshape(-1), v[count:]])


@pytest.mark.parametrize("m", [2, 32, 64])
@pytest.mark.parametrize("n", [1, 64, 1000, 5000])
def test_rotation_is_hadamards_and_comes_back(m, n):
    v = (np.random.default_rng(0).integers(-64, 65, n) / 1024).astype(F32)  # sums are exact
    turned = jax.jit(rotate, static_argnums=1)(v, m)
    np.testing.assert_array_equal(turned, numpys_rotation(v, m).astype(F32))
    np.testing.assert_array_equal(jax.jit(rotate_back, static_argnums=1)(turned, m), v)


def test_signs_are_of_both_signs_and_the_first_of_longer_blocks():
    assert 400 < (_signs(1024) > 0).sum() < 624 and set(_signs(1024).flat) == {-1, 1}
    assert np.array_equal(_signs(1024)[:64], _signs(64))


def test_rotation_spreads_outliers_over_a_block():
    """Of normal values, one in 500 of them a hundred times as large, integers of 4 bits lose less after a rotation."""
    r = np.random.default_rng(0)
    v = (r.normal(size=2**14) * np.where(r.random(2**14) < 0.002, 100, 1)).astype(F32)
    layers, lost = (whole(v.size),), {}
    for hadamard in (0, 512):
        ((codec, _),) = qsgd(hadamard=hadamard, error_feedback=True).method.stages.values()
        got = jax.jit(lambda v, c=codec: c.decode(c.encode(jax.random.key(0), v, layers), layers))(v)
        lost[hadamard] = np.mean((got - v)[np.abs(v) < 10] ** 2)
    assert lost[512] < 0.5 * lost[0]


def test_nodes_agree_on_scales_of_rotated_values():
    """TernGrad's shared scale is the largest rotated value: the rotated mean has whole numbers of it."""
    nodes, compressor = jgc.make_nodes(2, jax.devices()[:1]), terngrad(hadamard=64, clip=0.0, error_feedback=True)
    grads = {"w": jax.random.normal(jax.random.key(0), (2, 128))}
    state = compressor.init(jax.random.key(0), {"w": grads["w"][0]}, nodes)
    step = jgc.compress.step_on_nodes(compressor.aggregate, compressor.schedule[0].value, nodes)
    mean = jax.jit(step)(jax.random.key(0), grads, state)[0]["w"]
    unit = np.abs(np.stack([numpys_rotation(g, 64) for g in np.asarray(grads["w"])])).max() / 2
    levels = numpys_rotation(np.asarray(mean), 64) / unit
    np.testing.assert_allclose(levels, np.round(levels), atol=1e-5)
    assert set(np.round(levels)) >= {-1, 0, 1}


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make, message", [
    (lambda: cast(format="mxfp6"), "format must be one of 'bfloat16', .*'nvfp4', got 'mxfp6'"),
    (lambda: cast(format="mxfp4", rounding="up"), "rounding must be one of 'nearest', 'stochastic', got 'up'"),
    (lambda: cast(format="mxfp4", scaled=False), "scaled=False does nothing with format 'mxfp4'"),
    (lambda: cast(format="mxfp4", hadamard=48), "hadamard must be a power of two, 2 to 65536, or 0 for none, got 48"),
    (lambda: qsgd(bucket=100, hadamard=64), "hadamard must divide the 100 values of a scale .*, got 64"),
    (lambda: topk(value_code="mxfp6"), "value_code must be one of .*'mxfp4', 'nvfp4', got 'mxfp6'"),
])  # fmt: skip
def test_settings_that_do_not_fit_have_one_line(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
