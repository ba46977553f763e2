"""Casts: all values in a shorter floating-point format, gathered and averaged in f32.

The formats' own range is kept: values beyond it become its largest. The 8-bit formats reach from about 1e-5 to a few
hundred, and gradients lie below: `scaled` first multiplies each layer by the power of two that brings its largest value
close to the format's own, 4 bytes a layer; the power is between 2^-100 and 2^100.

Source: Micikevicius et al. 2018, "Mixed Precision Training", ICLR, Section 3.2 (scaling, there of the loss);
Micikevicius et al. 2022, "FP8 Formats for Deep Learning", Section 3 (the two formats, scaling by tensor).
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from jgc.compress.quantized.quantize import Quantising, each_group, largest, over_groups, quantized, scalar_codec
from jgc.compress.registry import Method
from jgc.method.compose import Codec
from jgc.types import Compressor

FORMATS = {
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float8_e4m3": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
}


@dataclasses.dataclass(frozen=True)
class Cast(Quantising):
    """Settings of `cast`."""

    format: Literal["bfloat16", "float16", "float8_e4m3", "float8_e5m2"] = "bfloat16"
    """floating-point format in which values are sent"""
    scaled: bool = True
    """a power of two for each layer, so that its values use the format's range; bfloat16 needs and has none"""


def cast(config: Cast | None = None, **overrides) -> Compressor:
    """All n values in 8 or 16 bits, rounded to the nearest.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: an unknown format or exchange.

    Example:
      >>> cast(format="float16").schedule[0].name
      'float16'

    References:
      Micikevicius et al. 2018, "Mixed Precision Training", ICLR; 2022, "FP8 Formats for Deep Learning".
    """
    config = dataclasses.replace(config or Cast(), **overrides)
    if config.format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {config.format!r}")
    return quantized(rounded(config.format, config.scaled and config.format != "bfloat16"), config)


def rounded(name: str, scaled: bool) -> Codec:
    """All values in that format, with the exponent of each layer's scale if it has one."""
    dtype, top = FORMATS[name], float(jnp.finfo(FORMATS[name]).max)
    room = math.frexp(top)[1] - 1

    def factors(exponents, layers):
        return jnp.ldexp(jnp.float32(1), over_groups(exponents, layers, 0))

    def encode(key, v, layers):
        if not scaled:
            return {"values": jnp.clip(v, -top, top).astype(dtype)}
        exponents = jnp.clip(room - jnp.frexp(each_group(largest, jnp.abs(v), layers, 0))[1], -100, 100)
        return {"values": jnp.clip(v * factors(exponents, layers), -top, top).astype(dtype), "scales": exponents}

    def decode(payload, layers):
        values = payload["values"].astype(jnp.float32)
        return values * factors(-payload["scales"], layers) if scaled else values

    return scalar_codec(name, encode, decode)


METHOD = Method(
    "cast", Cast, cast, "Micikevicius et al. 2018, 2022", lossless=None,
    exempt={
        "conservation": "what rounding loses is not kept",
    },
)  # fmt: skip
