"""signSGD: one bit per value, with a majority vote of the nodes, or scaled and with error feedback.

    vote:       send sign(g);  aggregate = magnitude * sign(sum over nodes of sign(g))
    feedback:   v = r + g;  send sign(v) and s = mean |v| over the layer;  r = v - s sign(v)
                aggregate = mean over nodes of s sign(v)

Source: Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems", ICML,
Algorithm 3 (majority vote); Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML, Algorithm 1.

Differs from the paper
  1. In a vote, a node draws the sign of a zero at random: if it were positive, values without a
     gradient would drift forever. A tie is 0.
  2. With feedback each layer has a scale, as in the second paper's experiments; its Algorithm 1 has
     one for all layers. The residual holds gradients before the learning rate is applied, in the
     paper after it.
  3. The outcome of a vote is multiplied by `magnitude` (the paper: 1), so that learning rates of
     other methods can be used.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jgc.compress.quantized.quantize import codec_of
from jgc.compress.registry import Entry, check_idle, settings_of
from jgc.layout.pack import values_of
from jgc.method.compose import compose
from jgc.method.exchange import Codec, gather, server
from jgc.method.memory import error_feedback, no_memory
from jgc.types import Array, Compressor
from jgc.wire.bits import ones_at
from jgc.wire.noise import noise
from jgc.wire.quantized_words import Quantiser
from jgc.wire.scales import each_group


def majority_vote(magnitude: float) -> Codec:
    """Sign of every value. The mean is the sign that most nodes have, times the magnitude."""

    def quantise(key, g, layers):
        return jnp.where(g == 0, noise(key, g.shape) < 0.5, g < 0), ()

    def vote(payloads, layers):  # counts bits, without decoding them
        nodes = len(payloads["signs"])
        return outcome(nodes - 2 * ones_at(payloads["signs"], values_of(layers)), nodes)

    def outcome(ahead, nodes):  # positive signs less negative ones
        return magnitude * jnp.sign(ahead).astype(jnp.float32)

    q = Quantiser("majority vote", 1, quantise, sign_of, scales=0, field="signs", finish=outcome)
    return codec_of(q)._replace(mean=vote)


def scaled_signs() -> Quantiser:
    """Sign of every value, and s of each layer, the mean magnitude."""

    def quantise(key, v, layers):
        return v < 0, (each_group(lambda x: jnp.mean(x, axis=-1), jnp.abs(v), layers, 0),)

    def value(negative, s):
        return sign_of(negative) * s

    return Quantiser("scaled signs", 1, quantise, value, field="signs")


def sign_of(negative: Array) -> Array:
    """+1, or -1 where `negative` is 1."""
    return 1 - 2 * negative.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class SignSgd:
    """Settings of `signsgd`."""

    combine: Literal["vote", "feedback"] = "vote"
    """vote: the sign that most nodes have; feedback: the mean of scaled signs, with a residual"""
    magnitude: float = 0.003
    """factor of the outcome of a vote; acts like a factor of the learning rate"""


def signsgd(config: SignSgd | None = None, **overrides) -> Compressor:
    """Signs: one bit for each of n values; with feedback also one f32 per layer.

    Raises:
      ValueError: an unknown way to combine, a magnitude that is not positive.

    Example:
      >>> signsgd(combine="vote").schedule[0].name
      'majority vote'

    Source: Bernstein et al. 2018, ICML, Algorithm 3; Karimireddy et al. 2019, ICML, Algorithm 1.
    """
    config = settings_of(SignSgd, config, overrides)
    if not 0 < config.magnitude < float("inf"):
        raise ValueError(f"magnitude must be finite and positive, got {config.magnitude}")
    if config.combine == "vote":
        return compose(majority_vote(config.magnitude), no_memory(), server())
    check_idle(config, "with combine='feedback'", "magnitude")
    return compose(codec_of(scaled_signs()), error_feedback(), gather())


METHOD = Entry(
    "signsgd", SignSgd, signsgd, "Bernstein et al. 2018; Karimireddy et al. 2019", lossless=None,
    exempt={"conservation": "a vote, not a mean", "zeros": "one bit cannot say zero"},
    citation=("bernstein2018signsgd", "karimireddy2019error"))
