"""Natural compression: round each value at random to a neighbouring power of two, without bias.

Sign and exponent of a float take 9 bits; the 23 bits of the mantissa are dropped. Adding a random
mantissa first rounds up with a probability equal to the mantissa, the relative distance from the
lower power of two.

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

MANTISSA = 23
_LARGEST = np.uint32(254 << MANTISSA)  # the bits of 2^127


def powers_of_two() -> Quantiser:
    """Sign and exponent of every value, after a random mantissa was added."""

    def quantise(key, v, layers):
        bits = lax.bitcast_convert_type(v, jnp.uint32)
        sign, magnitude = bits & np.uint32(1 << 31), bits & np.uint32((1 << 31) - 1)
        noise = jax.random.bits(key, v.shape, jnp.uint32) >> np.uint32(32 - MANTISSA)
        rounded = jnp.where(magnitude < _LARGEST, magnitude + noise, magnitude)
        return (sign | rounded) >> np.uint32(MANTISSA), ()

    def value(codes):
        return lax.bitcast_convert_type(codes << np.uint32(MANTISSA), jnp.float32)

    return Quantiser("natural", 9, quantise, value, scales=0)


@dataclasses.dataclass(frozen=True)
class Natural(Quantising):
    """Settings of `natural`."""


def natural(config: Natural | None = None, **overrides) -> Compressor:
    """Stochastic rounding to powers of two, unbiased: 9 bits for each of n values, no scales.

    Raises:
      ValueError: an unknown exchange.

    Example:
      >>> natural().schedule[0].name
      'natural'

    Source: Horvath et al. 2019, "Natural Compression for Distributed Deep Learning".
    """
    return quantized(powers_of_two(), settings_of(Natural, config, overrides))


METHOD = Entry(
    "natural", Natural, natural, "Horvath et al. 2019", lossless=None,
    citation=("horvath2019natural",),
    exempt={"conservation": "unbiased; keeps no residual"})
