"""QSGD: each value in a few bits, rounded up or down at random, without bias.

For a bucket v f32[d] with norm |v|, with s = 2^(bits - 1) - 1 levels:

    Q(v_i) = |v| sign(v_i) l_i / s
    l_i = floor(s |v_i| / |v|), plus one with the probability of the remainder

Source: Alistarh et al. 2017, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS, Section 3.1 and Lemma 3.1; buckets and scaling by the maximum: the sections on
experiments.

Differs from the paper
  1. Codes have a fixed width, sign included, and are packed into 32-bit words. The length of the
     paper's Elias codes depends on the values.
  2. The default `norm="max"`, the largest magnitude of a bucket, is that of the paper's
     experiments; "l2" is that of its theory.
  3. Buckets are cut from the whole flat vector, so one can span two layers.
  4. `error_feedback` is ours. The error of random rounding to few levels can exceed the values, and
     its residual would grow without bound: with feedback, values are scaled by the maximum and
     rounded to the nearest level.
  5. Random numbers for rounding are a hash of the position and of two words of the step's key
     (`noise`): 24 bits each, in an eighth of the time of JAX's.
  6. `exchange="ring"`, the baseline of the GradiVeQ paper, quantises the sum at every hop, and
     "two_shot" the mean of each node's share; the QSGD paper has neither.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jgc.compress.quantized.quantize import Quantising, quantized
from jgc.compress.registry import Entry, settings_of
from jgc.types import Array, Compressor
from jgc.wire.noise import noise
from jgc.wire.quantized_words import Quantiser
from jgc.wire.scales import aligned, check_bucket, each_group, fraction, largest, root_mean_square

Norm = Literal["max", "l2"]


def levels_of(bits: int, bucket: int, norm: Norm, nearest: bool = False) -> Quantiser:
    """Sign and level of every value, rounded at random or to the nearest; a scale a bucket."""
    s, sign_bit = 2 ** (bits - 1) - 1, 2 ** (bits - 1)
    norm_of = largest if norm == "max" else euclidean

    def quantise(key, v, layers):
        norms = each_group(norm_of, jnp.abs(v), layers, bucket)  # |v| of every bucket
        v, (norm,) = aligned(v, [norms], layers, bucket)
        level = s * fraction(jnp.abs(v), norm)
        low = jnp.floor(level)
        up = 0.5 if nearest else noise(key, v.shape)
        level = (low + (up < level - low).astype(jnp.float32)).astype(jnp.int32)
        return jnp.where(v < 0, level + sign_bit, level), (norms,)

    # level (norm / s), not level / s norm: jit of JAX 0.10.2 moves the constant to the norm in some
    # layouts, and nodes with different versions of JAX must decode to the same bits
    def value(codes, norm):
        codes = codes.astype(jnp.int32)
        level = codes & (sign_bit - 1)
        return jnp.where(codes >= sign_bit, -level, level).astype(jnp.float32) * (norm / s)

    return Quantiser(f"qsgd, {bits} bits", bits, quantise, value, bucket=bucket, in_parts=True)


def euclidean(x: Array) -> Array:
    """The Euclidean norm of magnitudes along the last axis; tiny squares do not underflow."""
    return root_mean_square(x) * jnp.sqrt(jnp.float32(x.shape[-1]))


@dataclasses.dataclass(frozen=True)
class Qsgd(Quantising):
    """Settings of `qsgd`."""

    bits: int = 4
    """bits per value, its sign included: 2 to 8"""
    bucket: int = 512
    """consecutive values that share a scale; 0 for one scale per layer"""
    norm: Norm = "max"
    """scale of a bucket: its largest magnitude or its Euclidean norm"""


def qsgd(config: Qsgd | None = None, **overrides) -> Compressor:
    """Stochastic quantisation, unbiased: `bits` for each of n values and f32 for each bucket.

    Raises:
      ValueError: a setting outside its range; error feedback with the Euclidean norm, or with 2
        bits in a ring.

    Example:
      >>> qsgd(bits=2).schedule[0].name
      'qsgd, 2 bits'

    Source: Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, "QSGD", NeurIPS, Section 3.1.
    """
    config = settings_of(Qsgd, config, overrides)
    if not 2 <= config.bits <= 8:
        raise ValueError(f"bits must be 2 to 8, got {config.bits}")
    check_bucket(config.bucket)
    if config.error_feedback and config.norm == "l2":
        raise ValueError("error_feedback needs norm 'max', got 'l2', whose lowest level most "
                         "values never reach")  # fmt: skip
    if config.error_feedback and config.exchange == "ring" and config.bits == 2:
        raise ValueError(
            "error_feedback with exchange='ring' needs bits of at least 3, got 2: a node's "
            "residual takes the errors of whole sums, and with three levels they grow from step to "
            "step")
    levels = levels_of(config.bits, config.bucket, config.norm, nearest=config.error_feedback)
    return quantized(levels, config)


METHOD = Entry(
    "qsgd", Qsgd, qsgd, "Alistarh et al. 2017", lossless=None, citation=("alistarh2017qsgd",),
    exempt={"conservation": "unbiased; keeps no residual"})
