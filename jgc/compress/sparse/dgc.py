"""Deep gradient compression: top-k with momentum correction, local clipping, factor masking and a
ramp of sparsity.

On each node, for its gradient g f32[n], clipped to clip_norm / sqrt(K):

    u = m u + g;  v = v + u         momentum correction
    send v at the largest |v| of each layer
    v = 0 and u = 0 there           factor masking, for u

Source: Lin et al. 2018, "Deep Gradient Compression", ICLR, Section 3 and Algorithms 1 and 4.

Differs from the paper
  1. The exact top-k of each layer; the paper takes a threshold from a sample of 0.1 to 1 % of the
     values and selects once more where too many exceed it. The message has a fixed size here.
  2. The ramp's length is `warmup_steps`; the paper takes the first four epochs, one for each stage.
     Stages that would not send more than alpha are left out.
  3. Biases and norm parameters form one layer together.
  4. Plain momentum; the paper gives the form for Nesterov momentum, too.
  5. By default there is no clipping and the ramp has 0 steps: both depend on the run.
"""

import dataclasses

from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Selecting
from jgc.compress.sparse.sparsity import Strategy
from jgc.compress.sparse.topk import of_largest
from jgc.types import Compressor


@dataclasses.dataclass(frozen=True)
class Dgc(Selecting):
    """Settings of `dgc`."""

    momentum_correction: bool = True
    """without it, only the ramp and clipping distinguish dgc from topk"""
    factor_masking: bool = True
    """the velocity of values just sent restarts from zero"""
    strategy: Strategy = "exponential"
    """exponential: 25 %, 6.25 %, 1.5625 %, 0.4 %, then alpha; warmup: dense first; fixed: alpha"""
    clip_norm: float = 0.0
    """clip each node's gradient to the norm clip_norm / sqrt(K); 0 for no clipping"""


def dgc(config: Dgc | None = None, **overrides) -> Compressor:
    """Deep gradient compression: mu values and positions of each node's f32[n], gathered by all
    nodes.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> [(phase.name, phase.start) for phase in dgc(alpha=0.01, warmup_steps=300).schedule]
      [('top-k 25 %', 0), ('top-k 6.25 %', 100), ('top-k 1.5625 %', 200), ('top-k', 300)]

    Source: Lin et al. 2018, "Deep Gradient Compression", ICLR, Section 3 and Algorithms 1 and 4.
    """
    config = settings_of(Dgc, config, overrides)
    return of_largest(config, config.clip_norm)


METHOD = Entry(
    "dgc", Dgc, dgc, "Lin et al. 2018", layers=FIRST_DENSE, citation=("lin2018deep",),
    # masking would restart every value's momentum in every step
    lossless={"alpha": 1.0, "factor_masking": False})
