"""Casts: all values in a shorter floating-point format, or in a block format; averaged in f32.

Values beyond a format's range are clipped to it. float8_e4m3 holds magnitudes from 2^-9 to 448,
float8_e5m2 from 2^-16 to 57,344; many gradients are smaller. So `scaled` first multiplies each
layer by the power of two, from 2^-100 to 2^100, that brings its largest value close to the
format's: 4 bytes per layer. Block formats (`jgc.wire.blocks`) have a scale for every 16 or 32
values.

Source: Micikevicius et al. 2018, "Mixed Precision Training", ICLR, Section 3.2 (scaling, there of
the loss); Micikevicius et al. 2022, "FP8 Formats for Deep Learning", Section 3 (the two formats,
scaling by tensor); Rouhani et al. 2023, "OCP Microscaling Formats (MX) Specification"; NVIDIA 2025,
"Pretraining Large Language Models with NVFP4".

Differs from the papers
  1. Gradients are sent in these formats, and added up in f32. The papers compute in them.
  2. The block formats differ from their specifications: see `jgc.wire.blocks`.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from jgc.compress.quantized.quantize import Quantising, quantized
from jgc.compress.registry import Entry, check_idle, settings_of
from jgc.types import Compressor
from jgc.wire.blocks import BLOCK_FORMATS, in_blocks
from jgc.wire.floats import round_to
from jgc.wire.noise import noise
from jgc.wire.quantized_words import Quantiser
from jgc.wire.scales import each_group, largest, over_groups

Format = Literal["bfloat16", "float16", "float8_e4m3", "float8_e5m2",
                 "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4"]  # fmt: skip


def rounded(name: str, scaled: bool, at_random: bool = False) -> Quantiser:
    """Every value in that format; if `scaled`, also each layer's power of two."""
    dtype = jnp.dtype("float8_e4m3fn" if name == "float8_e4m3" else name)
    room = math.frexp(float(jnp.finfo(dtype).max))[1] - 1  # exponent of the largest power of two

    def narrow(key, v):  # to the nearest by the conversion itself
        return round_to(v, dtype, noise(key, v.shape)) if at_random else v

    def quantise(key, v, layers):
        if not scaled:
            return narrow(key, v), ()
        exponents = jnp.frexp(each_group(largest, jnp.abs(v), layers, 0))[1] - room
        exponents = jnp.clip(exponents, -100, 100)
        up, down = (jnp.ldexp(jnp.float32(1), sign * exponents) for sign in (-1, 1))
        return narrow(key, v * over_groups(up, layers, 0)), (down,)

    def value(x, *scale):
        return math.prod(scale, start=x)

    bits = 8 * dtype.itemsize
    return Quantiser(name, bits, quantise, value, int(scaled), field="values", float_dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Cast(Quantising):
    """Settings of `cast`."""

    format: Format = "bfloat16"
    """floating-point format in which values are sent; mxfp8, mxfp4 and nvfp4 are block formats"""
    scaled: bool = True
    """a power of two per layer, for the format's range; not for bfloat16 and block formats"""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """nearest: least error; stochastic: up or down at random, unbiased"""


def cast(config: Cast | None = None, **overrides) -> Compressor:
    """All n values in 16, 8 or 4 bits, rounded to the nearest or at random.

    mxfp8 takes 8.25 bits a value, mxfp4 4.25, nvfp4 4.51, their scales included.

    Raises:
      ValueError: an unknown format, rounding or exchange, `scaled=False` with a block format, a
        size of `hadamard` that does not fit.

    Example:
      >>> cast(format="float16").schedule[0].name
      'float16'
      >>> cast(format="mxfp4", hadamard=64, error_feedback=True).schedule[0].name
      'mxfp4'

    Source: Micikevicius et al. 2018, ICLR, and 2022; Rouhani et al. 2023 (MX); NVIDIA 2025 (NVFP4).
    """
    config = settings_of(Cast, config, overrides)
    at_random = config.rounding == "stochastic"
    if config.format in BLOCK_FORMATS:
        check_idle(config, f"with format {config.format!r}, whose blocks have scales", "scaled")
        return quantized(in_blocks(config.format, at_random), config)
    scaled = config.scaled and config.format != "bfloat16"
    return quantized(rounded(config.format, scaled, at_random), config)


METHOD = Entry(
    "cast", Cast, cast, "Micikevicius et al. 2018, 2022; Rouhani et al. 2023; NVIDIA 2025",
    lossless=None, exempt={"conservation": "the rounding error is lost"},
    citation=("micikevicius2018mixed", "micikevicius2022fp8", "rouhani2023microscaling",
                    "nvidia2025nvfp4"))
