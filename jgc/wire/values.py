"""Codes for the values of a sparse payload: floats of some width, or a few bits per value.

    "float32"                        unchanged
    "float16", "bfloat16"            rounded; values beyond the dtype's range are clipped to it
    "8bit", "4bit", "2bit", "1bit"   a sign and one of L = 2^(bits - 1) magnitudes s (l + 1/2) / L
    "2bit-codebook"                  one of four values, two of either sign, listed in f32
    "mxfp8_e4m3", "mxfp8_e5m2",      floats of 8 or 4 bits with a scale for 32 or 16 values, of
    "mxfp4", "nvfp4"                 any layers (`jgc.wire.blocks`); rounded to the nearest

With codes of a few bits each layer has two scales s > 0: one for its positive and one for its
negative values. The level l of a value is its magnitude over the largest of that layer and sign,
rounded down to a multiple of 1 / L. Then s minimises the squared error, so the error never exceeds
the values in norm; with 1 bit, the decoded magnitude is the mean. The sender's residual keeps the
error. The codebook divides a layer's values of one sign into the smaller and the larger, by Lloyd's
algorithm, and lists the mean of either: the smallest value that top-k selects is far from 0, where
levels s / 4 and 3 s / 4 have half of their range. For the largest 10 % of normal values "2bit" has
4 times the squared error of "1bit", and the codebook a third of it.

Source: Strom 2015, Seide et al. 2014 (1 bit), Lin et al. 2018 (once positions are coded, values
dominate the payload). Least squares instead of means, for 2 bits and more, is ours. The codebook:
Lloyd 1982; SparseLoCo (Sarfi et al. 2025) has one of bins of equal width.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jgc.comm import narrowed
from jgc.layout.pack import whole
from jgc.types import Array
from jgc.wire import quantized_words
from jgc.wire.bits import pack_bits, unpack_bits
from jgc.wire.blocks import BLOCK_FORMATS, in_blocks
from jgc.wire.sums import group_ids, range_maxima, range_sums

ValueCode = Literal[
    "float32", "float16", "bfloat16", "8bit", "4bit", "2bit", "1bit", "2bit-codebook",
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4",
]  # fmt: skip
CODEBOOK = "2bit-codebook"
WITH_ZERO = ("float16", *BLOCK_FORMATS)  # decode small values to 0; bfloat16 has float32's range
LLOYD = 4  # iterations; the error then falls by less than 1 % with each


def encode_values(code: ValueCode, x: Array, counts: tuple[int, ...]) -> dict[str, Array]:
    """Encode values f32[mu], `counts` of each layer, into a payload.

    "values" are [mu] of a float dtype, or u32 words. Codes of a few bits also have "scales", f32[2
    * layers], or the codebooks, f32[4 * layers]; block formats the blocks' scales, u8 or f8.
    """
    if code in BLOCK_FORMATS:
        q = in_blocks(code, field="values")
        # the key is not used: to the nearest
        return quantized_words.encode(q, jax.random.key(0), x, (whole(x.size),))
    if not code.endswith("bit") and code != CODEBOOK:
        return {"values": x if code == x.dtype else narrowed(x, code)}
    magnitudes = jnp.abs(x)
    sign, group = _sign(x < 0), _group(x < 0, counts)
    largest = jnp.maximum(range_maxima(magnitudes, counts, sign, 2), 0)  # -inf without values
    # in [0, 1], so that sums of squares do not overflow
    share = magnitudes / jnp.where(largest > 0, largest, 1)[group]
    if code == CODEBOOK:
        return _by_codebook(x < 0, share, largest, sign, group, counts)
    bits = int(code[:-3])
    levels = 2 ** (bits - 1)
    level = jnp.minimum((share * levels).astype(jnp.uint32), levels - 1)
    unit = _unit(level, levels)
    used = range_sums(unit**2, counts, sign, 2)  # 0 for a group without values
    fit = range_sums(share * unit, counts, sign, 2) / jnp.where(used > 0, used, 1)
    codes = level + jnp.where(x < 0, jnp.uint32(levels), jnp.uint32(0))
    scales = jnp.minimum(largest * fit, jnp.finfo(jnp.float32).max)
    return {"values": pack_bits(codes, bits), "scales": scales}


def decode_values(code: ValueCode, payload: dict[str, Array], counts: tuple[int, ...]) -> Array:
    """The inverse of `encode_values` up to its rounding error, f32[mu]."""
    if code in BLOCK_FORMATS:
        q = in_blocks(code, field="values")
        return quantized_words.decode(q, payload, (whole(sum(counts)),))
    if code == CODEBOOK:
        codes = unpack_bits(payload["values"], 2, sum(counts))
        negative = codes >= 2
        # 2 * group, plus 1 for the larger of a group's two values
        size = payload["scales"][2 * _group(negative, counts) + (codes % 2).astype(jnp.int32)]
        return jnp.where(negative, -size, size)
    if not code.endswith("bit"):
        return payload["values"].astype(jnp.float32)
    bits = int(code[:-3])
    levels = 2 ** (bits - 1)
    codes = unpack_bits(payload["values"], bits, sum(counts))
    negative = codes >= levels
    size = payload["scales"][_group(negative, counts)] * _unit(codes % levels, levels)
    return jnp.where(negative, -size, size)


def _group(negative: Array, counts: tuple[int, ...]) -> Array:
    """Index of the scale of each value: 2 * layer, plus 1 for negative values, i32[mu]."""
    return group_ids(counts, _sign(negative), 2)


def _sign(negative: Array) -> Array:
    """1 for a negative value, else 0, i32[mu]."""
    return negative.astype(jnp.int32)


def _by_codebook(
    negative: Array, share: Array, largest: Array, sign: Array, group: Array,
    counts: tuple[int, ...],
) -> dict[str, Array]:  # fmt: skip
    """Codes of 2 bits, sign and class of a magnitude; "scales" are the means of the classes."""

    def means(upper):
        """The mean of either class of every group, f32[groups, 2]; 0 for a class without values."""
        half = 2 * sign + upper
        count = range_sums(jnp.ones_like(share), counts, half, 4)
        return (range_sums(share, counts, half, 4) / jnp.maximum(count, 1)).reshape(-1, 2)

    least = -range_maxima(-share, counts, sign, 2)
    # Not 1 / 2: all may be above it, and then stay there.
    upper = (share > ((least + 1) / 2)[group]).astype(jnp.int32)
    for _ in range(LLOYD):
        upper = (share > jnp.mean(means(upper), axis=1)[group]).astype(jnp.int32)
    codes = upper.astype(jnp.uint32) + jnp.where(negative, jnp.uint32(2), jnp.uint32(0))
    return {"values": pack_bits(codes, 2), "scales": (largest[:, None] * means(upper)).reshape(-1)}


def _unit(level: Array, levels: int) -> Array:
    return (level.astype(jnp.float32) + 0.5) / levels
