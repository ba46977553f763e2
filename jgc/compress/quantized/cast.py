"""Casts: all values in a shorter floating-point format, gathered and averaged in f32.

Values beyond a format's range are clipped to it. float8_e4m3 holds magnitudes from 2^-9 to 448,
float8_e5m2 from 2^-16 to 57,344; many gradients are smaller. So `scaled` first multiplies each
layer by the power of two, from 2^-100 to 2^100, that brings its largest value close to the
format's. The powers cost 4 bytes per layer.

Source: Micikevicius et al. 2018, "Mixed Precision Training", ICLR, Section 3.2 (scaling, there of
the loss); Micikevicius et al. 2022, "FP8 Formats for Deep Learning", Section 3 (the two formats,
scaling by tensor).
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from jgc.compress.quantized.quantize import Quantising, quantized
from jgc.compress.registry import Method, settings_of
from jgc.types import Compressor
from jgc.wire.quantized_words import Quantiser
from jgc.wire.scales import each_group, largest, over_groups

FORMATS = {
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float8_e4m3": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
}


def rounded(name: str, scaled: bool) -> Quantiser:
    """Every value in that format; if `scaled`, also each layer's power of two."""
    dtype = jnp.dtype(FORMATS[name])
    room = math.frexp(float(jnp.finfo(dtype).max))[1] - 1  # exponent of the largest power of two

    def quantise(key, v, layers):
        if not scaled:
            return v, ()
        exponents = jnp.frexp(each_group(largest, jnp.abs(v), layers, 0))[1] - room
        exponents = jnp.clip(exponents, -100, 100)
        up, down = (jnp.ldexp(jnp.float32(1), sign * exponents) for sign in (-1, 1))
        return v * over_groups(up, layers, 0), (down,)

    def value(x, *scale):
        return math.prod(scale, start=x)

    bits = 8 * dtype.itemsize
    return Quantiser(name, bits, quantise, value, int(scaled), field="values", float_dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Cast(Quantising):
    """Settings of `cast`."""

    format: Literal["bfloat16", "float16", "float8_e4m3", "float8_e5m2"] = "bfloat16"
    """floating-point format in which values are sent"""
    scaled: bool = True
    """a power of two per layer, so that its values use the format's range; bfloat16 never has
    one"""


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
      Micikevicius et al. 2018, "Mixed Precision Training", ICLR; 2022, "FP8 Formats for Deep
      Learning".
    """
    config = settings_of(Cast, config, overrides)
    if config.format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {config.format!r}")
    return quantized(rounded(config.format, config.scaled and config.format != "bfloat16"), config)


CITATION = """@inproceedings{micikevicius2018mixed,
  title = {Mixed Precision Training},
  author = {Micikevicius, Paulius and Narang, Sharan and Alben, Jonah and Diamos, Gregory and
    Elsen, Erich and
    Garcia, David and Ginsburg, Boris and Houston, Michael and Kuchaiev, Oleksii and Venkatesh,
    Ganesh and Wu, Hao},
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
