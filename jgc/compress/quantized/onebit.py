"""1-bit SGD: the sign of every value and two scales per layer, with error feedback.

    v = r + g;  send sign(v);  Q(v) = the mean of the layer's values of that sign;  r = v - Q(v)

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech, Sections 3.1 and 3.2.

Differs from the paper
  1. Two scales per layer, or per `bucket` of consecutive values; the paper has two per column of a
     weight matrix.
  2. All nodes gather all codes. In the paper each node adds up a part of the gradient, quantises
     the sum with a second residual, and sends the result, as `exchange="two_shot"` does.
     `exchange="ring"` quantises sums at every hop.
  3. No AdaGrad and no warm start in full precision; they belong to the paper's training recipe.
"""

import dataclasses

import jax.numpy as jnp

from jgc.compress.quantized.quantize import Quantising, quantized
from jgc.compress.registry import Entry, settings_of
from jgc.types import Compressor
from jgc.wire.quantized_words import Quantiser
from jgc.wire.scales import check_bucket, each_group, summed


def signs_and_means(bucket: int) -> Quantiser:
    """Sign of every value; per group, the mean magnitude of its values of either sign."""
    check_bucket(bucket)

    def quantise(key, v, layers):
        def mean_of(chosen):
            sums = each_group(summed, jnp.where(chosen, jnp.abs(v), 0), layers, bucket)
            counts = each_group(summed, chosen.astype(jnp.float32), layers, bucket)
            return sums / jnp.maximum(counts, 1)

        negative = v < 0
        return negative, (mean_of(~negative), mean_of(negative))

    def value(negative, plus, minus):
        return jnp.where(negative > 0, -minus, plus)

    return Quantiser(
        "1 bit", 1, quantise, value, scales=2, bucket=bucket, averages=True, field="signs")


@dataclasses.dataclass(frozen=True)
class OneBit(Quantising):
    """Settings of `onebit`."""

    error_feedback: bool = True
    """add the quantisation error to the next gradient; the method depends on it"""
    bucket: int = 0
    """consecutive values that share two scales; 0 for two scales per layer"""


def onebit(config: OneBit | None = None, **overrides) -> Compressor:
    """Signs with error feedback: one bit for each of n values and two f32 for each layer.

    Raises:
      ValueError: a negative bucket, an unknown exchange.

    Example:
      >>> onebit().schedule[0].name
      '1 bit'

    Source: Seide, Fu, Droppo, Li, Yu 2014, "1-Bit Stochastic Gradient Descent", Interspeech.
    """
    config = settings_of(OneBit, config, overrides)
    return quantized(signs_and_means(config.bucket), config)


METHOD = Entry("onebit", OneBit, onebit, "Seide et al. 2014", lossless=None,
               citation=("seide2014onebit",))
