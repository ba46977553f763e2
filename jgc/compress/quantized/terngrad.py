"""TernGrad: each value is rounded at random to -s, 0 or s, without bias; s is a layer's.

    g = clip(g, -c sigma, c sigma);  s = max |g| over the layer and over all nodes
    Q(g_i) = s sign(g_i) b_i,   b_i = 1 with probability |g_i| / s, else 0

Source: Wen et al. 2017, "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
Learning", NeurIPS, Algorithm 1 and the sections on scaler sharing and on gradient clipping.

Differs from the paper
  1. Two bits per value; log2(3) = 1.58 would suffice.
  2. The scale that nodes agree on also travels with every node's codes: 4 bytes per layer.
  3. sigma is the root mean square of the layer, not its standard deviation, which is 0 for a layer
     of one value.
  4. All nodes gather all codes. The paper's server adds the signs up and sends back the sum, an
     integer per value.
  5. `error_feedback` is ours. It rounds to the nearest of -s, 0, s: the residual of random rounding
     would grow.
  6. With `exchange="ring"` every hop clips and rounds the sum again, with "two_shot" each node the
     mean of its share, both with one scale per segment: nodes cannot agree on the scales of sums.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jgc.compress.quantized.quantize import Quantising, quantized
from jgc.compress.registry import Entry, settings_of
from jgc.types import Compressor
from jgc.wire.quantized_words import Quantiser
from jgc.wire.scales import each_group, fraction, largest, over_groups, root_mean_square

PLUS, MINUS = 1, 2


def ternary(clip: float, shared: bool, nearest: bool = False) -> Quantiser:
    """Every value as 0, s or -s; s of each layer, of one node or `shared` by all."""

    def scales_of(v, layers):
        """The largest clipped magnitude of each layer."""
        s = each_group(largest, jnp.abs(v), layers, 0)
        sigma = each_group(root_mean_square, jnp.abs(v), layers, 0) if clip else 0
        return jnp.minimum(s, clip * sigma) if clip else s

    def quantise(key, g, layers, agreed=None):
        bound = scales_of(g, layers)  # of this node; `agreed` is the largest of all nodes
        s = bound if agreed is None else agreed
        clipped = jnp.minimum(jnp.abs(g), over_groups(bound, layers, 0))
        threshold = 0.5 if nearest else jax.random.uniform(key, g.shape, g.dtype)
        b = threshold < fraction(clipped, over_groups(s, layers, 0))
        return jnp.where(b, jnp.where(g < 0, MINUS, PLUS), 0), (s,)

    def value(codes, s):
        plus, minus = ((codes == sign).astype(jnp.float32) for sign in (PLUS, MINUS))
        return (plus - minus) * s

    return Quantiser(
        "ternary", 2, quantise, value, averages=clip > 0, agree=scales_of if shared else None)


@dataclasses.dataclass(frozen=True)
class TernGrad(Quantising):
    """Settings of `terngrad`."""

    clip: float = 2.5
    """multiple of a layer's root mean square at which its values are clipped; 0 for no clipping"""
    scaler_sharing: bool = True
    """one scale per layer for all nodes, by an all-reduce; if not, one per layer and node"""


def terngrad(config: TernGrad | None = None, **overrides) -> Compressor:
    """Ternary values: two bits for each of n values and one f32 per layer.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> terngrad().schedule[0].name
      'ternary'

    Source: Wen, Xu, Yan, Wu, Wang, Chen, Li 2017, "TernGrad", NeurIPS, Algorithm 1.
    """
    config = settings_of(TernGrad, config, overrides)
    if not 0 <= config.clip < float("inf"):
        raise ValueError(
            f"clip must be finite and at least 0 (0 for no clipping), got {config.clip}")
    if config.exchange != "gather" and config.scaler_sharing:
        raise ValueError(f"scaler_sharing must be False with exchange {config.exchange!r}, got "
                         "True: each code of a sum has a scale of its segment")  # fmt: skip
    if config.exchange == "ring" and config.error_feedback:
        raise ValueError(
            "error_feedback must be False with exchange='ring', got True: a node's residual takes "
            "the errors of whole sums, and with three levels they grow from step to step")
    levels = ternary(config.clip, config.scaler_sharing, nearest=config.error_feedback)
    return quantized(levels, config)


METHOD = Entry(
    "terngrad", TernGrad, terngrad, "Wen et al. 2017", lossless=None,
    citation=("wen2017terngrad",),
    exempt={"conservation": "unbiased but for the clipping; keeps no residual"})
