"""signSGD: one bit per value, with a majority vote of the nodes, or scaled and with error feedback.

    vote:       send sign(g);  aggregate = magnitude * sign(sum over nodes of sign(g))
    feedback:   v = r + g;  send sign(v) and s = mean |v| over the layer;  r = v - s sign(v)
                aggregate = mean over nodes of s sign(v)

Source: Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems", ICML, Algorithm 3 (majority
vote); Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML,
Algorithm 1.

Differs from the paper
  1. In a vote, a node draws the sign of a zero at random. If it were positive, values without a gradient would drift
     forever. A tie is 0.
  2. With feedback each layer has a scale, as in the second paper's experiments; its Algorithm 1 has one for all layers.
     The residual holds gradients before the learning rate is applied, in the paper after it.
  3. The outcome of a vote is multiplied by `magnitude`, so that learning rates of other methods can be used. The
     paper's is 1.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jgc.compress.quantized.in_tiles import InTiles
from jgc.compress.quantized.quantize import each_group, over_groups, scalar_codec
from jgc.compress.registry import Method, settings_of
from jgc.compress.unused_settings import check_idle
from jgc.layout.pack import values_of
from jgc.method.compose import Codec, Layers, Payload, compose
from jgc.method.exchange import gather, server
from jgc.method.memory import error_feedback, no_memory
from jgc.types import Array, Compressor
from jgc.wire.bits import ones_at, pack_bits, unpack_bits
from jgc.wire.noise import noise


@dataclasses.dataclass(frozen=True)
class SignSgd:
    """Settings of `signsgd`."""

    combine: Literal["vote", "feedback"] = "vote"
    """vote: the sign that most nodes have; feedback: the mean of scaled signs, with error feedback"""
    magnitude: float = 0.003
    """factor of the outcome of a vote; acts like a factor of the learning rate"""


def signsgd(config: SignSgd | None = None, **overrides) -> Compressor:
    """Signs: one bit for each of n values; with feedback also one f32 per layer.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: an unknown way to combine, a magnitude that is not positive.

    Example:
      >>> signsgd(combine="vote").schedule[0].name
      'majority vote'

    References:
      Bernstein, Wang, Azizzadenesheli, Anandkumar 2018, "signSGD", ICML; Karimireddy, Rebjock, Stich, Jaggi 2019,
      "Error Feedback Fixes SignSGD", ICML.
    """
    config = settings_of(SignSgd, config, overrides)
    if config.combine not in ("vote", "feedback"):
        raise ValueError(f"combine must be 'vote' or 'feedback', got {config.combine!r}")
    if not 0 < config.magnitude < float("inf"):
        raise ValueError(f"magnitude must be finite and positive, got {config.magnitude}")
    if config.combine == "vote":
        return compose(majority_vote(config.magnitude), no_memory(), server())
    check_idle(config, "with combine='feedback'", "magnitude")
    return compose(scaled_signs(), error_feedback(), gather())


def majority_vote(magnitude: float) -> Codec:
    """Signs of all values, packed into words. `mean` is the majority sign times the magnitude."""

    def encode(key, v, layers):
        return {"signs": pack_bits(jnp.where(v == 0, noise(key, v.shape) < 0.5, v < 0), 1)}

    def vote(payloads, layers):
        signs = payloads["signs"]
        ahead = signs.shape[0] - 2 * ones_at(signs, values_of(layers))  # positive signs less negative ones
        return outcome(ahead, len(signs))

    def outcome(ahead, nodes):
        return magnitude * jnp.sign(ahead).astype(jnp.float32)

    tiled = InTiles("signs", 1, _sign, finish=outcome)
    return scalar_codec("majority vote", encode, signs_of, tiled)._replace(mean=vote)


def scaled_signs() -> Codec:
    """Signs of all values, packed into words, and the mean magnitude of each layer."""

    def encode(key, v, layers):
        scales = each_group(lambda x: jnp.mean(x, axis=-1), jnp.abs(v), layers, 0)
        return {"signs": pack_bits(v < 0, 1), "scales": scales}

    def decode(payload, layers):
        return signs_of(payload, layers) * over_groups(payload["scales"], layers, 0)

    tiled = InTiles("signs", 1, lambda negative, scale: _sign(negative) * scale, lambda rest: (rest["scales"],))
    return scalar_codec("scaled signs", encode, decode, tiled)


def signs_of(payload: Payload, layers: Layers) -> Array:
    """The signs that were sent, as +1 or -1, f32[n]."""
    return _sign(unpack_bits(payload["signs"], 1, values_of(layers)))


def _sign(negative: Array) -> Array:
    return 1 - 2 * negative.astype(jnp.float32)


CITATION = """@inproceedings{bernstein2018signsgd,
  title = {{signSGD}: Compressed Optimisation for Non-Convex Problems},
  author = {Bernstein, Jeremy and Wang, Yu-Xiang and Azizzadenesheli, Kamyar and Anandkumar, Animashree},
  booktitle = {International Conference on Machine Learning},
  year = {2018},
}
@inproceedings{karimireddy2019error,
  title = {Error Feedback Fixes {SignSGD} and other Gradient Compression Schemes},
  author = {Karimireddy, Sai Praneeth and Rebjock, Quentin and Stich, Sebastian U. and Jaggi, Martin},
  booktitle = {International Conference on Machine Learning},
  year = {2019},
}"""

METHOD = Method(
    "signsgd", SignSgd, signsgd, "Bernstein et al. 2018; Karimireddy et al. 2019", lossless=None,
    exempt={
        "conservation": "a vote, not a mean",
        "zeros": "one bit cannot say zero",
    },
    citation=CITATION,
)  # fmt: skip
