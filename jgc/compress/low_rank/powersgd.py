"""PowerSGD: each layer as a product of two thin matrices, by one step of power iteration per training step.

For each layer, let M [rows, cols] be a node's gradient plus residual, and Q [cols, r] the factor of the previous step,
equal on all nodes:

    P = mean over nodes of M Q                all-reduce, of all layers at once, with the uncompressed ones
    P = orthonormal columns of P              by Gram-Schmidt, on every node
    Q = mean over nodes of M' P               all-reduce, of all layers at once
    aggregated = P Q'
    residual: M - P (M' P)'                   M' P is the node's own

P and Q are linear in M, so the aggregate equals that of a single node with the mean of M. A layer goes uncompressed if
its factors have no fewer values than M, (rows + cols) r >= rows cols; so do biases and norms. A step takes two
all-reduces for any number of layers, and one if all are uncompressed. If r is at least the smaller side of every layer,
the step is the plain mean.

Momentum belongs to the optimiser: the paper adds it to the decompressed aggregate.

Limits. Every node orthonormalises P by itself, from equal bits. So all nodes need the same kind of device and the same
software versions, as programs of several processes do anyway. Products use full f32 even on devices that default to
fewer bits: the residual is exact only then.

Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS, Algorithms 1 and 2.

Differs from the paper
  1. A kernel of Flax, [..., inputs, outputs], is the matrix [product of the others, outputs]; the paper, and PyTorch,
     have [outputs, product of the others]. So P and Q swap roles, and the outputs' factor is warm-started.
  2. The columns of Q are scaled to length 1 for the next step. P's directions, and so the aggregate, do not change, but
     small gradients do not underflow in products of small numbers.
  3. Gram-Schmidt makes two passes per column, so columns stay orthogonal even if P is nearly singular. A column that
     depends on earlier ones becomes zero, and its column of Q is kept for the next step: no direction is lost for good
     while gradients are zero or of lower rank.
  4. The residual is M less the node's own product P (M' P)', as in Algorithm 2. The code of the authors and of PyTorch
     subtracts the aggregate. The mean of residuals, on which alone the aggregate depends, is the same. But then each
     residual grows in every step by the difference of the node's gradient from the mean.
  5. `warmup_steps` uncompressed steps can come first, as with PyTorch's `start_powerSGD_iter`. The paper has none.
"""

import dataclasses
from itertools import pairwise
from typing import Literal

import numpy as np

from jgc import comm
from jgc.compress.low_rank.power_iteration import low_rank, make_plan, random_factors
from jgc.compress.registry import Method, settings_of
from jgc.layout.by_layer import joined
from jgc.layout.launches import stacked
from jgc.layout.pack import values_of
from jgc.method import phases
from jgc.method.from_step import Step, from_step
from jgc.method.memory import error_feedback, no_memory
from jgc.method.messages import both_ways
from jgc.method.phases import DENSE
from jgc.types import Compressor

LOW_RANK = "low rank"


@dataclasses.dataclass(frozen=True)
class PowerSgd:
    """Settings of `powersgd`."""

    rank: int = 1
    """r, columns of both factors of a layer, at least 1"""
    warm_start: bool = True
    """start from the factors Q of the previous step; if not, from random ones of the step's key"""
    error_feedback: bool = True
    """add the compression error to the next gradient; the method depends on it"""
    warmup_steps: int = 0
    """uncompressed steps before the first compressed one"""
    algorithm: Literal["psum", "ring"] = "psum"
    """algorithm of both all-reduces: the runtime's, or an explicit ring by `ppermute`"""


def powersgd(config: PowerSgd | None = None, **overrides) -> Compressor:
    """Two thin factors of every layer, P f32[rows, r] and Q f32[cols, r], each averaged by one all-reduce.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: a rank below 1, negative `warmup_steps`, an unknown algorithm.

    Example:
      >>> [phase.name for phase in powersgd(rank=4, warmup_steps=100).schedule]
      ['dense', 'low rank']

    References:
      Vogels, Karimireddy, Jaggi 2019, "PowerSGD", NeurIPS.
    """
    config = settings_of(PowerSgd, config, overrides)
    if config.rank < 1:
        raise ValueError(f"rank must be at least 1, got {config.rank}")
    average = comm.mean_by(config.algorithm)
    memory = error_feedback() if config.error_feedback else no_memory()

    def init(key, layers, nodes):
        return (random_factors(key, make_plan(layers, config.rank), config.rank) if config.warm_start else ()), ()

    def step(phase, key, v, state, layers, nodes):
        def averaged(parts, field):  # in one all-reduce; in none, if there are no arrays
            if not parts:
                return []
            flat = average(joined(parts), nodes, field)
            edges = np.cumsum([0, *(x.size for x in parts)]).tolist()
            return [flat[a:b].reshape(x.shape) for x, (a, b) in zip(parts, pairwise(edges), strict=True)]

        if phase == DENSE:
            return Step(averaged(v, "dense"), v, state.shared, elements=values_of(layers))
        plan = make_plan(layers, config.rank)
        start = stacked(state.shared) if config.warm_start else random_factors(key, plan, config.rank)
        mean, sent, warm = low_rank(plan, v, start, averaged)
        elements = sum(plan.elements(layers, config.rank))
        return Step(mean, sent, warm if config.warm_start else (), elements=elements)

    def messages(phase, layers, nodes):
        factors, dense = make_plan(layers, config.rank).elements(layers, config.rank)
        sizes = {"factors": 4.0 * factors, "dense": 4.0 * dense}
        return both_ways({field: size for field, size in sizes.items() if size})

    schedule = phases.in_sequence((DENSE, config.warmup_steps), (LOW_RANK, 0))
    return from_step(step, memory=memory, schedule=schedule, messages=messages, init=init, form="layers")


CITATION = """@inproceedings{vogels2019powersgd,
  title = {{PowerSGD}: Practical Low-Rank Gradient Compression for Distributed Optimization},
  author = {Vogels, Thijs and Karimireddy, Sai Praneeth and Jaggi, Martin},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2019},
}"""

# lossless at a rank so large that no layer's factors are smaller than the layer: all layers go uncompressed
METHOD = Method("powersgd", PowerSgd, powersgd, "Vogels et al. 2019", lossless={"rank": 65_536}, citation=CITATION)
