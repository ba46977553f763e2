"""Gradient dropping: each node sends the largest values of its gradient, by one threshold.

    v = r + g;  send v at the k largest |v| of all n values;  r = v - sent

Source: Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent", EMNLP,
Section 3.

Differs from the paper
  1. The exact top-k; the paper takes the threshold from a sample of 0.1 % of the values.
  2. All nodes gather all messages. The paper's server also drops values on the downlink, with a
     separate residual.
  3. With one threshold for all layers, the paper adds layer normalisation to its model; here that
     is left to the model. The paper's alternative, a threshold for each layer, is `topk`.
  4. An uncompressed warm-up can come first (`warmup_steps`, 0 by default). The paper drops values
     from the first step on (`strategy="fixed"`).
  5. Momentum correction (Lin et al. 2018) is a setting, off by default.
"""

import dataclasses

from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Sparsifying, memory_of, schedule_of
from jgc.compress.sparse.sparsity import sparse_stages
from jgc.compress.sparse.topk import selected
from jgc.method.compose import compose_phases
from jgc.method.exchange import Codec, gather
from jgc.selection.selector import make_selector
from jgc.types import Compressor
from jgc.wire.values import ValueCode


@dataclasses.dataclass(frozen=True)
class GradientDropping(Sparsifying):
    """Settings of `gradient_dropping`."""

    alpha: float = 0.01
    """share of all values that a node sends, in (0, 1]"""
    min_values: int = 1
    """least number of values that a node sends"""
    value_code: ValueCode = "float32"
    """code of the values sent; the error of a shorter code stays in the residual"""


def gradient_dropping(config: GradientDropping | None = None, **overrides) -> Compressor:
    """Top-k of the whole gradient with error feedback: all nodes gather mu values of every node.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> [phase.name for phase in gradient_dropping(alpha=0.01, warmup_steps=100).schedule]
      ['dense', 'top-k']

    Source: Aji and Heafield 2017, EMNLP, Section 3.
    """
    config = settings_of(GradientDropping, config, overrides)
    memory, schedule = memory_of(config), schedule_of(config)

    def codec(share: float) -> Codec:
        selector = make_selector(share, config.min_values)._replace(together=True)
        return selected(selector, config.value_code)

    return compose_phases(sparse_stages(schedule, config.alpha, codec, gather()), memory, schedule)


METHOD = Entry(
    "gradient_dropping", GradientDropping, gradient_dropping, "Aji and Heafield 2017",
    lossless={"alpha": 1.0}, layers=FIRST_DENSE, citation=("aji2017sparse",))
