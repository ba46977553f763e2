"""PowerSGD: each layer as a product of two thin matrices, by one step of power iteration per
training step.

For each layer, let M [rows, cols] be a node's gradient plus residual, and Q [cols, r] the factor of
the previous step, equal on all nodes:

    P = mean over nodes of M Q                all-reduce of all layers, uncompressed ones included
    P = orthonormal columns of P              by Gram-Schmidt, on every node
    Q = mean over nodes of M' P               all-reduce of all layers
    aggregated = P Q'
    residual: M - P (M' P)'                   M' P is the node's own

P and Q are linear in M, so the aggregate equals that of a single node with the mean of M. A layer
goes uncompressed if its factors have no fewer values than M, (rows + cols) r >= rows cols; so do
biases and norms. A step takes two all-reduces for any number of layers, and one if all are
uncompressed. If r is at least the smaller side of every layer, the step is the plain mean.

Momentum belongs to the optimiser: the paper adds it to the decompressed aggregate.

Limits. Every node orthonormalises P by itself, from equal bits. So all nodes need the same kind of
device and the same software versions, as programs of several processes do anyway. Products use full
f32 even on devices that default to fewer bits: the residual is exact only then.

Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS, Algorithms 1 and 2.

Differs from the paper
  1. A kernel of Flax, [..., inputs, outputs], is the matrix [product of the others, outputs]; the
     paper, and PyTorch, have [outputs, product of the others]. So P and Q swap roles, and the
     outputs' factor is warm-started.
  2. The columns of Q are scaled to length 1 for the next step. P's directions, and so the
     aggregate, do not change, but small gradients do not underflow in products of small numbers.
  3. Gram-Schmidt makes two passes per column, so columns stay orthogonal even if P is nearly
     singular. A column that depends on earlier ones becomes zero, and its column of Q is kept for
     the next step: no direction is lost for good while gradients are zero or of lower rank.
  4. The residual is M less the node's own product P (M' P)', as in Algorithm 2. The code of the
     authors and of PyTorch subtracts the aggregate. The mean of residuals, on which alone the
     aggregate depends, is the same. But then each residual grows in every step by the difference of
     the node's gradient from the mean.
  5. `alternate` sends P and Q in turn, one all-reduce a step: see `jgc.compress.low_rank.acp_sgd`.
  6. `warmup_steps` uncompressed steps can come first, as with PyTorch's `start_powerSGD_iter`. The
     paper has none.
"""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import jax
import numpy as np

from jgc import comm
from jgc.compress.low_rank.acp_sgd import (
    EVEN,
    ODD,
    Factors,
    first_factors,
    in_turn,
    one_factor,
    values_sent,
)
from jgc.compress.low_rank.factors import (
    Averaged,
    Plan,
    elements_of,
    make_plan,
    random_factors,
)
from jgc.compress.registry import Entry, settings_of
from jgc.layout.batches import in_batches, stacked
from jgc.layout.matrices import cutter, orthonormal_columns, outer, products, thin_products, unit
from jgc.layout.pack import joined, values_of
from jgc.method import phases
from jgc.method.from_step import Step, from_step
from jgc.method.memory import error_feedback, no_memory
from jgc.method.messages import both_ways
from jgc.method.phases import DENSE
from jgc.types import Array, Compressor

LOW_RANK = "low rank"


def low_rank(
    plan: Plan, v: Sequence[Array], start: Sequence[Array], averaged: Averaged
) -> tuple[list[Array], list[Array], tuple[Array, ...]]:
    """Algorithm 1 of the PowerSGD paper on all matrices of a node's layers.

    Args:
      plan: which layers are matrices.
      v: this node's layers, f32 of any shapes.
      start: Q f32[cols, r] of every matrix, equal on all nodes.
      averaged: `(arrays, field) -> their means over nodes`, in one all-reduce.

    Returns:
      The mean of each layer, equal on all nodes; the part of each layer that counts as sent; the
      factors Q for the next step, equal on all nodes.
    """
    if not plan.matrices:
        return averaged([v[i] for i in plan.dense], "dense+factors"), list(v), ()
    m = [v[matrix.layer].reshape(matrix.rows, matrix.cols) for matrix in plan.matrices]
    cut = cutter(len(m), start[0][0, 0] > 2)  # False, for columns have length 1

    mq = in_batches(products(m, start))
    means = averaged([*mq.arrays, *(v[i] for i in plan.dense)], "dense+factors")
    mq, dense = mq._replace(arrays=means[: len(mq.arrays)]), means[len(mq.arrays) :]
    p = cut(orthonormal_columns(mq), [matrix.rows for matrix in plan.matrices])

    node_products = thin_products(p, m)  # (M' P)' of this node, f32[r, cols]
    pm = in_batches(node_products)
    pm = pm._replace(arrays=averaged(pm.arrays, "factors"))
    q = cut(pm)
    # a zero column keeps its old direction, so that no direction is lost for good
    before = in_batches([x.T for x in start])
    pairs = zip(pm.arrays, before.arrays, strict=True)
    warm = pm._replace(arrays=[jax.vmap(lambda x, old: unit(x.T, old.T))(*pair) for pair in pairs])

    mean, sent = list(v), list(v)
    for i, x in zip(plan.dense, dense, strict=True):
        mean[i] = x
    for matrix, p_i, q_i, product_i in zip(plan.matrices, p, q, node_products, strict=True):
        shape = v[matrix.layer].shape
        mean[matrix.layer] = outer(p_i, q_i).reshape(shape)
        sent[matrix.layer] = outer(p_i, product_i).reshape(shape)
    return mean, sent, tuple(cut(warm, apart=False))


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
    """algorithm of the all-reduces: the runtime's, or an explicit ring by `ppermute`"""
    alternate: bool = False
    """one factor of each layer a step, P and Q in turn (ACP-SGD): one all-reduce a step, half as
    many values of factors"""


def powersgd(config: PowerSgd | None = None, **overrides) -> Compressor:
    """Two thin factors of every layer, P f32[rows, r] and Q f32[cols, r], each averaged by one
    all-reduce; with `alternate` one of them a step.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: a rank below 1, negative `warmup_steps`, an unknown algorithm, `alternate` without
        `warm_start`.

    Example:
      >>> [phase.name for phase in powersgd(rank=4, warmup_steps=100).schedule]
      ['dense', 'low rank']
      >>> [phase.name for phase in powersgd(alternate=True).schedule]
      ['low rank, even steps', 'low rank, odd steps']

    References:
      Vogels, Karimireddy, Jaggi 2019, "PowerSGD", NeurIPS; Zhang, Zhang, Shi, Chu, Li 2023,
      "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS.
    """
    config = settings_of(PowerSgd, config, overrides)
    if config.rank < 1:
        raise ValueError(f"rank must be at least 1, got {config.rank}")
    if config.alternate and not config.warm_start:
        raise ValueError(
            "warm_start must be True with alternate=True, got False: a step computes one factor "
            "from the other one of the step before"
        )
    average = comm.mean_by(config.algorithm)
    memory = error_feedback() if config.error_feedback else no_memory()
    start = first_factors if config.alternate else random_factors

    def init(key, layers, nodes):
        plan = make_plan(layers, config.rank)
        return (start(key, plan, config.rank) if config.warm_start else ()), ()

    def step(phase, key, v, state, layers, nodes):
        def averaged(parts, field):  # in one all-reduce; in none, if there are no arrays
            if not parts:
                return []
            flat = average(joined(parts), nodes, field)
            edges = np.cumsum([0, *(x.size for x in parts)]).tolist()
            pairs = zip(parts, pairwise(edges), strict=True)
            return [flat[first:end].reshape(x.shape) for x, (first, end) in pairs]

        if phase == DENSE:
            return Step(averaged(v, "dense"), v, state.shared, elements=values_of(layers))
        plan, elements = make_plan(layers, config.rank), sum(sizes_of(phase, layers))
        if config.alternate:
            factors = Factors(*(tuple(stacked(x)) for x in state.shared))
            return Step(*one_factor(plan, v, phase, factors, averaged), elements=elements)
        before = stacked(state.shared) if config.warm_start else start(key, plan, config.rank)
        mean, sent, q = low_rank(plan, v, before, averaged)
        return Step(mean, sent, q if config.warm_start else (), elements=elements)

    def sizes_of(phase, layers):
        plan = make_plan(layers, config.rank)
        if config.alternate:
            return values_sent(plan, layers, config.rank, phase)
        return elements_of(plan, layers, config.rank)

    def messages(phase, layers, nodes):
        sizes = zip(("factors", "dense"), sizes_of(phase, layers), strict=True)
        return both_ways({field: 4.0 * size for field, size in sizes if size})

    last = (EVEN, 1), (ODD, 0)
    schedule = phases.in_sequence(
        (DENSE, config.warmup_steps), *(last if config.alternate else [(LOW_RANK, 0)])
    )
    return from_step(
        step, memory=memory, schedule=schedule, messages=messages, init=init, form="layers",
        next_phase=in_turn(schedule) if config.alternate else None,
    )  # fmt: skip


CITATION = """@inproceedings{vogels2019powersgd,
  title = {{PowerSGD}: Practical Low-Rank Gradient Compression for Distributed Optimization},
  author = {Vogels, Thijs and Karimireddy, Sai Praneeth and Jaggi, Martin},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2019},
}
@inproceedings{zhang2023acp,
  title = {Evaluation and Optimization of Gradient Compression for Distributed Deep Learning},
  author = {Zhang, Lin and Zhang, Longteng and Shi, Shaohuai and Chu, Xiaowen and Li, Bo},
  booktitle = {IEEE International Conference on Distributed Computing Systems},
  year = {2023},
}"""

# lossless at a rank so large that no layer's factors are smaller than the layer: all layers go
# uncompressed
METHOD = Entry(
    "powersgd", PowerSgd, powersgd, "Vogels et al. 2019; Zhang et al. 2023",
    lossless={"rank": 65_536}, citation=CITATION,
)  # fmt: skip
