"""PowerSGD: every layer as a product of two thin matrices, found by one step of a power iteration that goes on.

For each layer, with M its gradient and what was kept back of it, a matrix [rows, cols] on each node, and Q [cols, r]
from the step before, equal on all nodes:

    P = mean over nodes of M Q                all-reduce, of all layers at once and of all that goes uncompressed
    P = orthonormal columns of P              by Gram-Schmidt, on every node
    Q = mean over nodes of M' P               all-reduce, of all layers at once
    aggregated = P Q'
    the memory keeps M - P (M' P)'            M' P is the node's own

As P and Q are linear in M, the aggregate is what a single node would make of the mean of M. Layers of which P and Q
would have as many values as M has, (rows + cols) r >= rows cols, go uncompressed, and so do biases and norms: two
all-reduces a step, however many layers there are, and one if none is worth it. With r at least the smaller side of
every layer the step is therefore the plain mean.

Momentum is the optimiser's: the paper adds it to what is decompressed.

Limits. Every node makes P orthonormal by itself, from equal bits: nodes need the same kind of device and the same
versions, as programs of several processes need anyway. Products are in full f32, on devices also that would take fewer
bits: what is kept is exact only then.

Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS, Algorithms 1 and 2.

Differs from the paper
  1. A kernel of Flax, [..., inputs, outputs], is the matrix [product of the others, outputs]; the paper, and PyTorch,
     have [outputs, product of the others]. So P and Q change places, and the outputs' factor is the warm one.
  2. The columns of Q have length 1 when they go into the next step. P's directions, and so the aggregate, are the same,
     but small gradients do not vanish in products of small numbers.
  3. Gram-Schmidt takes each column twice, which keeps the columns orthogonal also where P is nearly singular. A column
     that depends on those before it becomes zero, and the column of Q that it came from stays for the next step: no
     direction is lost for good when gradients are zero or of a lower rank for a while.
  4. A node keeps what its own factor M' P leaves of M, as Algorithm 2 says. The authors' code and PyTorch's subtract
     the aggregate. The mean over nodes, on which alone the aggregate depends, is the same; but then a node's residual
     grows with every step by what its gradient has that the others' have not.
  5. `warmup_steps` uncompressed steps can come first, as PyTorch's `start_powerSGD_iter` has it. The paper has none.
"""

import dataclasses
from itertools import pairwise
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.compress.low_rank.power_iteration import low_rank, make_plan, random_factors
from jgc.compress.registry import Method
from jgc.memory import error_feedback, no_memory
from jgc.method import phases
from jgc.method.from_step import Step, dense_step, from_step
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
    """begin with the factors Q of the step before; if not, with random ones from the step's key"""
    error_feedback: bool = True
    """add what was lost to the next gradient; the method rests on it"""
    warmup_steps: int = 0
    """uncompressed steps before the first compressed one"""
    algorithm: Literal["psum", "ring"] = "psum"
    """of both all-reduces: the runtime's, or an explicit ring by `ppermute`"""


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
    config = dataclasses.replace(config or PowerSgd(), **overrides)
    if config.rank < 1:
        raise ValueError(f"rank must be at least 1, got {config.rank}")
    if config.algorithm not in comm.MEANS:
        raise ValueError(f"algorithm must be 'psum' or 'ring', got {config.algorithm!r}")
    average = comm.MEANS[config.algorithm]
    memory = error_feedback() if config.error_feedback else no_memory()

    def init(key, layers, nodes):
        return (random_factors(key, make_plan(layers, config.rank), config.rank) if config.warm_start else ()), ()

    def step(phase, key, v, state, layers, nodes):
        if phase == DENSE:
            return dense_step(v, state, nodes, config.algorithm)
        plan = make_plan(layers, config.rank)
        start = state.shared if config.warm_start else random_factors(key, plan, config.rank)

        def averaged(parts, field):  # in one all-reduce; in none, if there are no arrays
            if not parts:
                return []
            flat = average(jnp.concatenate([x.reshape(-1) for x in parts]), nodes, field)
            edges = np.cumsum([0, *(x.size for x in parts)]).tolist()
            return [flat[a:b].reshape(x.shape) for x, (a, b) in zip(parts, pairwise(edges), strict=True)]

        mean, sent, warm = low_rank(plan, v, start, averaged)
        return Step(mean, sent, shared=warm if config.warm_start else (), elements=sum(plan.elements(config.rank)))

    def messages(phase, layers, nodes):
        factors, dense = make_plan(layers, config.rank).elements(config.rank)
        sizes = {"factors": 4.0 * factors, "dense": 4.0 * dense}
        return both_ways({field: size for field, size in sizes.items() if size})

    schedule = phases.in_sequence((DENSE, config.warmup_steps), (LOW_RANK, 0))
    return from_step(step, memory=memory, schedule=schedule, messages=messages, init=init)


# lossless with a rank at which factors are smaller than no layer: all layers then go uncompressed
METHOD = Method("powersgd", PowerSgd, powersgd, "Vogels et al. 2019", lossless={"rank": 65_536})
