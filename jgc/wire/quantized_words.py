"""Codes of every value in words: how they are packed, and how the mean over nodes is decoded.

    payload = encode(quantiser, key, v, layers)     # v f32[n] -> words, and scales f32[G]
    values = decode(quantiser, payload, layers)     # -> f32[n]
    mean = mean_of(quantiser, payloads, layers)     # of payloads with a leading axis [K] -> f32[n]

A quantiser says only what a code is. It is computed of the whole vector, part by part, so that
temporary arrays stay in a processor's cache, or on a TPU in blocks of its tiles
(`jgc.wire.quantized_tiles`); `plain_encode` and `plain_mean` are the reference of all three.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jgc.backend import backend, plain
from jgc.comm import narrowed
from jgc.layout.pack import Layers, values_of, whole
from jgc.types import Array, Key
from jgc.wire.bits import MANY, pack_bits, unpack_bits
from jgc.wire.scales import aligned

Payload = dict[str, Array]
_COLUMNS = 512  # values of a row
_UNROLLED = 4  # nodes whose payloads are decoded in one fused loop


class ScaleCode(NamedTuple):
    """How scales travel that are not f32."""

    write: Callable[..., Payload]  # the scales that `quantise` returns -> fields of the payload
    read: Callable[[Payload], list[Array]]  # payloads -> f32[..., G] for each scale of `value`


class Quantiser(NamedTuple):
    """A code of a few bits for every value, and the scales that groups of values share."""

    name: str  # of the codec and of the phase
    bits: int  # of a code, 1 to 32
    # (key, v f32[n], layers[, agreed]) -> codes of n values, maybe in the shape of `aligned`, and
    # scales, a tuple of f32[G]
    quantise: Callable[..., tuple[Array, tuple[Array, ...]]]
    value: Callable[..., Array]  # (codes u32, scale of each code, ...) -> f32, elementwise
    scales: int = 1  # number of scales of a group
    bucket: int = 0  # number of values that share a scale, or 0 for one group per layer
    averages: bool = False  # whether a scale is a mean, which zeros at a group's end would lower
    field: str = "codes"  # name of the codes in the payload
    float_dtype: Any = None  # None, or the codes are floats that travel in this dtype
    in_parts: bool = False  # whether codes are computed part by part; needs buckets
    # (sum over nodes, K) -> mean, elementwise
    finish: Callable[[Array, int], Array] = lambda total, nodes: total / nodes
    agree: Callable[[Array, Layers], Array] | None = None  # see `jgc.method.Codec`
    scale_code: ScaleCode | None = None  # how the scales travel; `scales` is then not read


def encode(q: Quantiser, key: Key, v: Array, layers: Layers, *agreed: Array) -> Payload:
    """The payload of v f32[n]: codes in words, and scales."""
    size = part_size(q, v.size)
    if size == v.size or plain():
        return plain_encode(q, key, v, layers, *agreed)

    def part(i, length):
        cut = lax.dynamic_slice_in_dim(v, i * size, length)
        return plain_encode(q, jax.random.fold_in(key, i), cut, (whole(length),))

    count = v.size // size
    in_rows = lax.map(lambda i: jax.tree.map(_rows, part(i, size)), jnp.arange(count))
    payload = {field: x.reshape(-1) for field, x in in_rows.items()}
    if v.size == count * size:
        return payload
    last = part(count, v.size - count * size)
    return {field: jnp.concatenate([x, last[field]]) for field, x in payload.items()}


def plain_encode(q: Quantiser, key: Key, v: Array, layers: Layers, *agreed: Array) -> Payload:
    """The reference of `encode`, computed of the whole vector."""
    codes, scales = q.quantise(key, v, layers, *agreed)
    if q.in_parts:
        # Else XLA on CPU computes codes where it packs them, in an order that it cannot vectorise.
        codes = lax.optimization_barrier(codes)
    payload = {q.field: _packed(q, codes.reshape(-1))}
    if q.scale_code is not None:
        payload |= q.scale_code.write(*scales)
    elif q.scales:
        payload["scales"] = jnp.concatenate(scales) if q.scales > 1 else scales[0]
    return payload


def decode(q: Quantiser, payload: Payload, layers: Layers) -> Array:
    """The values of a payload, f32[n]."""
    n = values_of(layers)
    if part_size(q, n) != n and not plain():
        return _mean_in_parts(q, {field: x[None] for field, x in payload.items()}, n)
    return plain_decode(q, payload, layers)


def plain_decode(q: Quantiser, payload: Payload, layers: Layers) -> Array:
    """The reference of `decode`, computed of the whole vector."""
    n = values_of(layers)
    codes, scales = _unpacked(q, payload[q.field], n), scales_of(q, payload)
    if scales:
        codes, scales = aligned(codes, scales, layers, q.bucket)
    return q.value(codes, *scales).reshape(-1)[:n]


def scales_of(q: Quantiser, payload: Payload) -> list[Array]:
    """The scales of a payload, or of all nodes' payloads: f32[..., G] each."""
    if q.scale_code is not None:
        return q.scale_code.read(payload)
    if q.scales < 2:
        return [payload["scales"]] if q.scales else []
    return jnp.split(payload["scales"], q.scales, axis=-1)


def mean_of(q: Quantiser, payloads: Payload, layers: Layers) -> Array:
    """The mean over nodes of the decoded payloads [K, ...], f32[n]."""
    n, nodes = values_of(layers), len(payloads[q.field])
    if plain():
        return plain_mean(q, payloads, layers)
    if part_size(q, n) != n:
        return _mean_in_parts(q, payloads, n)

    # A scan: all of [K, n] would not fit for a large model.
    # The barrier prevents fusion with the sum, so that all layouts give the same bits.
    def add(total, payload):
        return total + lax.optimization_barrier(plain_decode(q, payload, layers)), None

    # zeros like the codes vary over the same mesh axes
    zeros = jnp.zeros_like(payloads[q.field], jnp.float32, (n,))
    return q.finish(lax.scan(add, zeros, payloads)[0], nodes)


def plain_mean(q: Quantiser, payloads: Payload, layers: Layers) -> Array:
    """The mean over nodes of the decoded payloads [K, ...], f32[n]: decode all, add them up."""
    nodes = len(payloads[q.field])
    each = [{field: x[k] for field, x in payloads.items()} for k in range(nodes)]
    return q.finish(reduce(jnp.add, [plain_decode(q, payload, layers) for payload in each]), nodes)


# --- part by part ---------------------------------------------------------------------------------


def part_size(q: Quantiser, n: int) -> int:
    """Number of values of a part: whole buckets and whole words, or all n values.

    Example:
      >>> def of(bucket):
      ...     return Quantiser("", 4, lambda: None, lambda: None, bucket=bucket, in_parts=True)
      >>> part_size(of(512), 10**7), part_size(of(100), 10**7), part_size(of(512), 1000)
      (262144, 261600, 1000)
      >>> part_size(of(0), 10**7)
      10000000
    """
    # On a TPU the whole vector is one range of tiles: `quantized_tiles`.
    if not (q.in_parts and q.bucket) or backend() == "tpu":
        return n
    most = 2**18 if backend() == "cpu" else 2**22  # 1 MB fits a core's cache; GPUs need more
    unit = math.lcm(q.bucket, 32)
    return max(most // unit, 1) * unit if n > max(most, unit) else n


def _mean_in_parts(q: Quantiser, payloads: Payload, n: int) -> Array:
    """The mean over nodes of the decoded payloads [K, m], part by part, f32[n]."""
    nodes, size = len(payloads[q.field]), part_size(q, n)
    count = n // size
    lengths = {length: _lengths(q, length) for length in (size, n - count * size) if length}
    columns = math.gcd(size, _COLUMNS)

    def write(i, out, length):
        def cut(k, field):
            start, stop = i * lengths[size][field], lengths[length][field]
            return lax.dynamic_slice(payloads[field], (k, start), (1, stop))[0]

        def node(k):
            part = {field: cut(k, field) for field in payloads}
            x = plain_decode(q, part, (whole(length),))
            return jnp.pad(x, (0, -length % columns)).reshape(-1, columns)

        # Node by node: XLA on CPU does not fuse a sum over the first axis with its operand.
        few = min(nodes, _UNROLLED)
        total = reduce(jnp.add, [node(k) for k in range(few)])
        total = lax.fori_loop(few, nodes, lambda k, total: total + node(k), total)
        mean, row = q.finish(total, nodes), i * (size // columns)
        return lax.dynamic_update_slice_in_dim(out, mean, row, 0)

    # zeros that vary over the same devices as the payloads
    zero = 0 * jnp.sum(jax.tree.leaves(payloads)[0].reshape(-1)[:1].astype(jnp.float32))
    out = jnp.full((-(-n // columns), columns), zero)
    out = lax.fori_loop(0, count, lambda i, out: write(i, out, size), out)
    out = write(jnp.int32(count), out, n - count * size) if n > count * size else out
    return out.reshape(-1)[:n]


def _rows(x: Array) -> Array:
    """A vector in rows of a power of two: XLA on CPU vectorises what is written row by row."""
    return x.reshape(-1, math.gcd(x.size, _COLUMNS))


def _lengths(q: Quantiser, size: int) -> dict[str, int]:
    """Lengths of the arrays in the payload of a part."""
    def encoded(key, x):
        return plain_encode(q, key, x, (whole(size),))

    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    payload = jax.eval_shape(encoded, jax.random.key(0), x)
    return {field: x.size for field, x in payload.items()}


# --- words ----------------------------------------------------------------------------------------


def _packed(q: Quantiser, codes: Array) -> Array:
    """Codes as words; floats in their dtype, on a TPU as words if there are `MANY`."""
    if q.float_dtype is None:
        return pack_bits(codes, q.bits)
    if plain() or backend() != "tpu" or codes.size < MANY:
        return narrowed(codes, q.float_dtype)
    top = float(jnp.finfo(q.float_dtype).max)
    codes = jnp.clip(codes, -top, top)
    if q.float_dtype == jnp.bfloat16:
        # Its bits are the bits of an f32; libtpu 0.0.52 dies of a bitcast to 16 bits here.
        rounded = lax.reduce_precision(codes, exponent_bits=8, mantissa_bits=7)
        return pack_bits(lax.bitcast_convert_type(rounded, jnp.uint32) >> 16, q.bits)
    bits = lax.bitcast_convert_type(codes.astype(q.float_dtype), jnp.dtype(f"uint{q.bits}"))
    return pack_bits(bits, q.bits)


def _unpacked(q: Quantiser, words: Array, n: int) -> Array:
    """The inverse of `_packed`: u32[n], or f32[n] for floats."""
    if q.float_dtype is None:
        return unpack_bits(words, q.bits, n)
    if words.dtype == q.float_dtype:
        return words.astype(jnp.float32)
    return floats_of(q, unpack_bits(words, q.bits, n))


def floats_of(q: Quantiser, codes: Array) -> Array:
    """Unpacked codes u32 as `Quantiser.value` takes them: floats as f32, others unchanged."""
    if q.float_dtype is None:
        return codes
    narrow = lax.bitcast_convert_type(codes.astype(jnp.dtype(f"uint{q.bits}")), q.float_dtype)
    return narrow.astype(jnp.float32)
