"""Casts: all values in a shorter floating-point format, gathered and averaged in f32.

Values beyond a format's range are clipped to it. float8_e4m3 holds magnitudes from 2^-9 to 448, float8_e5m2 from 2^-16
to 57,344; many gradients are smaller. So `scaled` first multiplies each layer by the power of two, from 2^-100 to
2^100, that brings its largest value close to the format's. The exponents cost 4 bytes per layer.

Source: Micikevicius et al. 2018, "Mixed Precision Training", ICLR, Section 3.2 (scaling, there of the loss);
Micikevicius et al. 2022, "FP8 Formats for Deep Learning", Section 3 (the two formats, scaling by tensor).
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax import lax

from jgc import comm
from jgc.backend import backend
from jgc.compress.quantized.in_tiles import InTiles
from jgc.compress.quantized.quantize import Quantising, each_group, largest, over_groups, quantized, scalar_codec
from jgc.compress.registry import Method, settings_of
from jgc.layout.pack import values_of
from jgc.method.compose import Codec
from jgc.types import Compressor
from jgc.wire.bits import MANY, pack_bits, unpack_bits

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
    """a power of two per layer, so that its values use the format's range; bfloat16 never has one"""


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
    config = settings_of(Cast, config, overrides)
    if config.format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {config.format!r}")
    return quantized(rounded(config.format, config.scaled and config.format != "bfloat16"), config)


def rounded(name: str, scaled: bool) -> Codec:
    """All values in that format; if `scaled`, also the exponent of each layer's scale, i32."""
    dtype, top = FORMATS[name], float(jnp.finfo(FORMATS[name]).max)
    room, bits = math.frexp(top)[1] - 1, 8 * jnp.dtype(dtype).itemsize
    unsigned = jnp.dtype(f"uint{bits}")

    def factors(exponents, layers):
        return jnp.ldexp(jnp.float32(1), over_groups(exponents, layers, 0))

    def encode(key, v, layers):
        if not scaled:
            return {"values": packed(v)}
        exponents = jnp.clip(room - jnp.frexp(each_group(largest, jnp.abs(v), layers, 0))[1], -100, 100)
        return {"values": packed(v * factors(exponents, layers)), "scales": exponents}

    def packed(v):
        if backend() != "tpu" or v.size < MANY:
            return comm.narrowed(v, dtype)
        v = jnp.clip(v, -top, top)
        if dtype == jnp.bfloat16:  # its bits are those of an f32; libtpu 0.0.52 dies of 16-bit ones here
            rounded = lax.reduce_precision(v, exponent_bits=8, mantissa_bits=7)
            return pack_bits(lax.bitcast_convert_type(rounded, jnp.uint32) >> 16, bits)
        return pack_bits(lax.bitcast_convert_type(v.astype(dtype), unsigned), bits)

    def unpacked(codes):
        return lax.bitcast_convert_type(codes.astype(unsigned), dtype).astype(jnp.float32)

    def decode(payload, layers):
        values = payload["values"]
        n = values_of(layers)
        values = values.astype(jnp.float32) if values.dtype == dtype else unpacked(unpack_bits(values, bits, n))
        return values * factors(-payload["scales"], layers) if scaled else values

    def scales(rest):
        return (jnp.ldexp(jnp.float32(1), -rest["scales"]),) if scaled else ()

    tiled = InTiles("values", bits, lambda codes, *scale: math.prod(scale, start=unpacked(codes)), scales)
    return scalar_codec(name, encode, decode, tiled)


CITATION = """@inproceedings{micikevicius2018mixed,
  title = {Mixed Precision Training},
  author = {Micikevicius, Paulius and Narang, Sharan and Alben, Jonah and Diamos, Gregory and Elsen, Erich and
    Garcia, David and Ginsburg, Boris and Houston, Michael and Kuchaiev, Oleksii and Venkatesh, Ganesh and Wu, Hao},
  booktitle = {International Conference on Learning Representations},
  year = {2018},
}
@misc{micikevicius2022fp8,
  title = {{FP8} Formats for Deep Learning},
  author = {Micikevicius, Paulius and others},
  eprint = {2209.05433},
  archiveprefix = {arXiv},
  year = {2022},
}"""

METHOD = Method(
    "cast", Cast, cast, "Micikevicius et al. 2018, 2022", lossless=None,
    exempt={
        "conservation": "what rounding loses is not kept",
    },
    citation=CITATION,
)  # fmt: skip
