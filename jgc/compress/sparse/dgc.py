"""Deep gradient compression: top-k with momentum correction, local clipping, factor masking and a ramp of sparsity.

On each node, for its gradient g f32[n], clipped to clip_norm / sqrt(K):

    u = m u + g;  v = v + u         momentum correction
    send v at the largest |v| of each layer
    v = 0 and u = 0 there           factor masking, for u

Source: Lin et al. 2018, "Deep Gradient Compression", ICLR, Section 3 and Algorithms 1 and 4.

Differs from the paper
  1. The exact top-k of each layer; the paper takes a threshold from a sample of 0.1 to 1 % of the values and selects
     once more where too many exceed it. The message has a fixed size here.
  2. The ramp's length is `warmup_steps`; the paper takes the first four epochs, one for each stage. Stages that
     would send less than alpha are left out.
  3. The first layer is sent uncompressed by default, as in the comparisons of the LGC paper; "" sends it as the others.
  4. Biases and norm parameters form one layer together.
  5. Plain momentum; the paper gives the form for Nesterov momentum, too.
  6. No clipping and a ramp of 0 steps by default: how long and how strong depends on the run. Workloads set the ramp.
"""

import dataclasses
from functools import partial

from jgc.compress.settings import Selecting, first_dense, memory_of, schedule_of
from jgc.compress.sparse.sparsity import Strategy, sparse_stages
from jgc.compress.sparse.topk import top_k
from jgc.memory import clip_local
from jgc.method.compose import compose_phases
from jgc.method.exchange import gather
from jgc.method.guard import guard
from jgc.types import Compressor


@dataclasses.dataclass(frozen=True)
class Dgc(Selecting):
    """Settings of `dgc`."""

    momentum_correction: bool = True
    """without it nothing but the ramp and clipping tell dgc from topk"""
    factor_masking: bool = True
    """the momentum of values just sent restarts from zero"""
    strategy: Strategy = "exponential"
    """exponential: 25 % of the values, 6.25 %, 1.5625 %, 0.4 %, then alpha; warmup: uncompressed first; fixed: alpha"""
    clip_norm: float = 0.0
    """clip each node's gradient to this norm divided by the root of the number of nodes, 0 for no clipping"""
    last_layer: str | None = None
    """path pattern of layers sent as top-k only; all of them are, here"""


def dgc(config: Dgc | None = None, **overrides) -> Compressor:
    """Deep gradient compression: mu values and positions of each node's f32[n], gathered by all nodes.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: alpha outside (0, 1], momentum outside [0, 1), negative `warmup_steps` or `clip_norm`, an unknown
        strategy or value_code.

    Example:
      >>> [(phase.name, phase.start) for phase in dgc(alpha=0.01, warmup_steps=300).schedule]
      [('top-k 25 %', 0), ('top-k 6.25 %', 100), ('top-k 1.5625 %', 200), ('top-k', 300)]

    References:
      Lin, Han, Mao, Wang, Dally 2018, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
      Training", ICLR.
    """
    config = dataclasses.replace(config or Dgc(), **overrides)
    memory, schedule = memory_of(config), schedule_of(config)
    codec = partial(top_k, min_values=config.min_values, value_code=config.value_code)
    compressed = compose_phases(sparse_stages(schedule, config.alpha, codec, gather()), memory, schedule)
    return _clipped(first_dense(compressed, config), config.clip_norm)


def _clipped(compressor: Compressor, clip_norm: float) -> Compressor:
    """The same method on gradients that each node has clipped, all layers together, before it accumulates them."""
    if not 0 <= clip_norm < float("inf"):
        raise ValueError(f"clip_norm must be at least 0 (0 for no clipping), got {clip_norm}")
    if not clip_norm:
        return compressor
    core = compressor.core

    def aggregate(phase, key, grads, state, nodes, skip=False):
        return core.aggregate(phase, key, clip_local(grads, clip_norm, nodes.count), state, nodes, skip)

    def diagnose(phase, key, grads, state, nodes):
        return core.diagnose(phase, key, clip_local(grads, clip_norm, nodes.count), state, nodes)

    return guard(core._replace(aggregate=aggregate, diagnose=diagnose, parts=None))
