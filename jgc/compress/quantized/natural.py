"""Natural compression: round each value at random to one of the two powers of two around it,
without bias.

Sign and exponent of a float take 9 bits, and the 23 bits of the mantissa are dropped. Adding a
random mantissa first rounds up with a probability equal to the mantissa, the relative distance from
the lower power of two.

Source: Horvath et al. 2019, "Natural Compression for Distributed Deep Learning", Section 2,
definition 1.

Differs from the paper
  1. Nodes send powers of two and get their exact mean; the paper's server compresses the downlink,
     too.
  2. Values above 2^127 are rounded down to it: the next power of two is infinite.
  3. `error_feedback` is a setting that the paper does not have.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.compress.quantized.quantize import Quantising, quantized
from jgc.compress.registry import Entry, settings_of
from jgc.types import Compressor
from jgc.wire.quantized_words import Quantiser

BITS, MANTISSA = 9, 23
_LARGEST = np.uint32(254 << MANTISSA)  # the bits of 2^127


def powers_of_two() -> Quantiser:
    """Sign and exponent of every value; a random mantissa is added before its mantissa is
    dropped."""

    def quantise(key, v, layers):
        bits = lax.bitcast_convert_type(v, jnp.uint32)
        sign, magnitude = bits & np.uint32(1 << 31), bits & np.uint32((1 << 31) - 1)
        noise = jax.random.bits(key, v.shape, jnp.uint32) >> np.uint32(32 - MANTISSA)
        rounded = jnp.where(magnitude < _LARGEST, magnitude + noise, magnitude)
        return (sign | rounded) >> np.uint32(MANTISSA), ()

    def value(codes):
        return lax.bitcast_convert_type(codes << np.uint32(MANTISSA), jnp.float32)

    return Quantiser("natural", BITS, quantise, value, scales=0)


@dataclasses.dataclass(frozen=True)
class Natural(Quantising):
    """Settings of `natural`."""


def natural(config: Natural | None = None, **overrides) -> Compressor:
    """Stochastic rounding to powers of two, unbiased: 9 bits for each of n values, no scales.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: an unknown exchange.

    Example:
      >>> natural().schedule[0].name
      'natural'

    References:
      Horvath, Ho, Horvath, Sahu, Canini, Richtarik 2019, "Natural Compression for Distributed Deep
      Learning".
    """
    config = settings_of(Natural, config, overrides)
    return quantized(powers_of_two(), config)


CITATION = r"""@misc{horvath2019natural,
  title = {Natural Compression for Distributed Deep Learning},
  author = {Horv{\'a}th, Samuel and Ho, Chen-Yu and Horv{\'a}th, {\v{L}}udov{\'i}t and Sahu, Atal
    Narayan and
    Canini, Marco and Richt{\'a}rik, Peter},
  eprint = {1905.10988},
  archiveprefix = {arXiv},
  year = {2019},
}"""

METHOD = Entry(
    "natural", Natural, natural, "Horvath et al. 2019", lossless=None,
    exempt={
        "conservation": "unbiased, and what is lost is not kept",
    },
    citation=CITATION,
)  # fmt: skip
