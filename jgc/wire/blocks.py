"""Block formats: narrow floats, and a scale for every few consecutive values.

    format      element                            values  scale               bits a value
    mxfp8_e4m3  8 bits, up to 448                  32      power of two, E8M0  8.25
    mxfp8_e5m2  8 bits, up to 57,344               32      E8M0                8.25
    mxfp4       E2M1: 0 1/2 1 3/2 2 3 4 6, signed  32      E8M0                4.25
    nvfp4       E2M1                               16      E4M3, and an f32    4.51
                                                           of 4,096 values

With x the values of a block, a = max |x|, e the exponent of the element's largest value (E2M1: 2):

    MX     X = 2^(floor(log2 a) - e);                 codes of x / X, clipped to the element's range
    NVFP4  S = A / (6 448), A the largest of 4,096 values;  s = E4M3(a / (6 S));  codes of x / (s S)

Elements are rounded to the nearest, ties to even, or at random without bias. E8M0 is the exponent
plus 127. The last block may be shorter.

Source: Rouhani et al. 2023, "OCP Microscaling Formats (MX) Specification", version 1.0, Sections 5
and 6.3; NVIDIA 2025, "Pretraining Large Language Models with NVFP4", Appendix C.

Differs from the specifications
  1. Rounding at random must clip nothing, or it would be biased: X is doubled where a / X would
     exceed the largest element (Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8"),
     and s and S are rounded up. The messages have the same format.
  2. S of NVFP4 is that of 4,096 consecutive values, not of a tensor: layers whose gradients differ
     10,000-fold share a message. It has 16 significant bits, so that products of an element, s and
     S are exact, and decoders that fuse a product with a sum decode to the same bits.
  3. There is no code for NaN: steps with NaN or Inf are skipped before.
  4. X is at least 2^-126 (the specification: 2^-127) and S at least 2^-117, so that X and s S are
     normal f32: compiled programs replace smaller ones by 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend, plain
from jgc.layout.pack import Layers, whole
from jgc.types import Array, Key
from jgc.wire.floats import codes_of, exponent_of, power_of_two, round_to, values_of_codes
from jgc.wire.noise import noise
from jgc.wire.quantized_words import Payload, Quantiser, ScaleCode
from jgc.wire.scales import aligned, each_group, largest

E2M1, E4M3, E5M2 = (jnp.dtype(x) for x in (jnp.float4_e2m1fn, jnp.float8_e4m3fn, jnp.float8_e5m2))
_MX = {"mxfp8_e4m3": E4M3, "mxfp8_e5m2": E5M2, "mxfp4": E2M1}
BLOCK_FORMATS = (*_MX, "nvfp4")
MX_BLOCK, NV_BLOCK, NV_GROUP = 32, 16, 4096
_GROUP = NV_GROUP // NV_BLOCK  # blocks
_LARGEST = float(jnp.finfo(E2M1).max) * float(jnp.finfo(E4M3).max)  # 6 x 448
_SMALLEST = float(jnp.finfo(jnp.float32).tiny / jnp.finfo(E4M3).smallest_subnormal)  # of S
_UP = 0.0  # noise below every remainder: rounds up unless x is a value of the format


def in_blocks(name: str, at_random: bool = False, field: str = "codes") -> Quantiser:
    """The quantiser of one of `BLOCK_FORMATS`; `at_random` rounds without bias, not to the nearest.
    """
    element = _MX.get(name, E2M1)
    block = MX_BLOCK if name in _MX else NV_BLOCK
    scaled = partial(_mx, element) if name in _MX else _nv

    def quantise(key, v, layers):
        if backend() == "cpu" and not plain():
            return _row_by_row(whole_vector, key, v, layers)
        return whole_vector(key, v, layers)

    def whole_vector(key, v, layers):
        at_most = each_group(largest, jnp.abs(v), layers, block)  # f32[blocks]
        factor, scales = scaled(at_most, at_random)
        v, (factor,) = aligned(v, [factor], layers, block)
        v = round_to(v * factor, element, noise(key, v.shape) if at_random else None)
        return codes_of(v, element), scales

    def value(codes, scale):
        return values_of_codes(codes, element) * scale

    return Quantiser(
        name, jnp.finfo(element).bits, quantise, value, bucket=block, field=field, in_parts=True,
        scale_code=_E8M0 if name in _MX else _TWO_LEVELS)


def _row_by_row(quantise: Callable[..., Any], key: Key, v: Array, layers: Layers) -> Any:
    """`quantise` of rows of 4,096 values, which are whole blocks and groups, and of the rest.

    XLA on CPU would fuse all of it with the packing of codes, in an order that it cannot vectorise;
    the codes of a loop are written first.
    """
    count = v.size // NV_GROUP
    if not count:
        return quantise(key, v, layers)

    def row(i):
        cut = lax.dynamic_slice_in_dim(v, i * NV_GROUP, NV_GROUP)
        codes, scales = quantise(jax.random.fold_in(key, i), cut, (whole(NV_GROUP),))
        return codes.reshape(-1).astype(jnp.uint8), scales

    rows = jax.tree.map(lambda x: x.reshape(-1), lax.map(row, jnp.arange(count)))
    rest = v[count * NV_GROUP :]
    if not rest.size:
        return rows
    codes, scales = quantise(jax.random.fold_in(key, count), rest, (whole(rest.size),))
    last = codes.reshape(-1)[: rest.size].astype(jnp.uint8), scales
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), rows, last)


def _mx(element: Any, at_most: Array, at_random: bool) -> tuple[Array, tuple[Array, ...]]:
    """1 / X of every block, and its exponent i32."""
    top = float(jnp.finfo(element).max)
    exponent = exponent_of(at_most) - int(np.log2(top))
    if at_random:
        exponent += (at_most > top * power_of_two(jnp.maximum(exponent, -126))).astype(jnp.int32)
    exponent = jnp.clip(exponent, -126, 126)
    return power_of_two(-exponent), (exponent,)


def _nv(at_most: Array, at_random: bool) -> tuple[Array, tuple[Array, ...]]:
    """1 / (s S) of every block; s of every block and S of every group of blocks."""
    group = largest(jnp.pad(at_most, (0, -at_most.size % _GROUP)).reshape(-1, _GROUP))
    bits = lax.bitcast_convert_type(group * np.float32(1 / _LARGEST), jnp.uint32)
    bits += np.uint32(0xFF if at_random else 0)  # S rounded down would clip the largest values
    short = lax.bitcast_convert_type(bits & np.uint32(0xFFFFFF00), jnp.float32)  # 16 bits
    of_group = jnp.maximum(short, _SMALLEST)
    s = at_most * np.float32(1 / 6) / _spread(of_group, at_most.size)
    s = round_to(s, E4M3, _UP if at_random else None)
    scale = s * _spread(of_group, at_most.size)
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0), (s, of_group)


def _spread(of_group: Array, blocks: int) -> Array:
    """The value of every block's group: [..., groups] -> [..., blocks]."""
    wide = jnp.broadcast_to(of_group[..., None], (*of_group.shape, _GROUP))
    return wide.reshape(*of_group.shape[:-1], -1)[..., :blocks]


def _read_two_levels(payload: Payload) -> list[Array]:
    """s S of every block."""
    s = values_of_codes(payload["scales"].astype(jnp.uint32), E4M3)
    return [s * _spread(payload["group_scales"], s.shape[-1])]


_E8M0 = ScaleCode(
    write=lambda exponent: {"scales": (exponent + 127).astype(jnp.uint8)},
    read=lambda payload: [power_of_two(payload["scales"].astype(jnp.int32) - 127)],
)
_TWO_LEVELS = ScaleCode(
    write=lambda s, of_group: {
        "scales": codes_of(s, E4M3).astype(jnp.uint8), "group_scales": of_group},
    read=_read_two_levels,
)
