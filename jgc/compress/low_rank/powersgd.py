"""PowerSGD: each layer as a product of two thin matrices, by one step of power iteration per
training step.

For each layer, let M [rows, cols] be a node's gradient plus residual, and Q [cols, r] the factor of
the previous step, equal on all nodes:

    P = mean over nodes of M Q                all-reduce of all layers, uncompressed ones included
    P = orthonormal columns of P              by Gram-Schmidt, on every node
    Q = mean over nodes of M' P               all-reduce of all layers
    aggregated = P Q'
    residual: M - P (M' P)'                   M' P is the node's

P and Q are linear in M, so the aggregate equals that of a single node with the mean of M. A layer
goes uncompressed if its factors have no fewer values than M, (rows + cols) r >= rows cols; so do
biases and norms. A step takes two all-reduces for any number of layers, and one if all are
uncompressed. If r is at least the smaller side of every layer, the step is the plain mean.

Momentum belongs to the optimiser: the paper adds it to the decompressed aggregate.

Limits. Every node orthonormalises P by itself, from equal bits: all nodes need the same kind of
device and the same software versions. Products use full f32 even on devices that default to fewer
bits, so that the residual is exact.

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
  4. The residual is M less the node's product P (M' P)', as in Algorithm 2. The code of the authors
     and of PyTorch subtracts the aggregate: the mean of residuals, on which the aggregate depends,
     is the same, but each residual grows in every step by the difference of the node's gradient
     from the mean.
  5. `alternate` sends P and Q in turn, one all-reduce a step: see `jgc.compress.low_rank.acp_sgd`.
  6. `warmup_steps` uncompressed steps can come first, as with PyTorch's `start_powerSGD_iter`. The
     paper has none.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.compress.low_rank import acp_sgd
from jgc.compress.low_rank.factors import Averaged, Plan, make_plan, random_factors
from jgc.compress.registry import Entry, settings_of
from jgc.layout.batches import in_batches, stacked
from jgc.layout.matrices import cutter, orthonormal_columns, outer, products, thin_products, unit
from jgc.layout.pack import joined, values_of
from jgc.method import Step, from_step, phases
from jgc.method.memory import error_feedback, no_memory
from jgc.method.messages import both_ways
from jgc.types import Array, Compressor


def low_rank(
    plan: Plan, v: Sequence[Array], start: Sequence[Array], averaged: Averaged
) -> tuple[list[Array], list[Array], tuple[Array, ...]]:
    """Algorithm 1 of the PowerSGD paper on all matrices of a node's layers v, f32 of any shapes.

    `start` has Q f32[cols, r] of every matrix; `averaged` takes arrays and a field to their means
    over nodes, in one all-reduce. Returns the mean and the sent part of each layer, and the factors
    Q for the next step, equal on all nodes.
    """
    if not plan.matrices:
        return averaged([v[i] for i in plan.dense], "dense+factors"), list(v), ()
    m = [v[matrix.layer].reshape(matrix.rows, matrix.cols) for matrix in plan.matrices]
    cut = cutter(len(m), start[0][0, 0] > 2)  # False: columns have length 1

    mq = in_batches(products(m, start))
    means = averaged([*mq.arrays, *(v[i] for i in plan.dense)], "dense+factors")
    mq, dense = mq._replace(arrays=means[: len(mq.arrays)]), means[len(mq.arrays) :]
    p = cut(orthonormal_columns(mq), [matrix.rows for matrix in plan.matrices])

    node_products = thin_products(p, m)  # (M' P)' of this node, f32[r, cols]
    pm = in_batches(node_products)
    pm = pm._replace(arrays=averaged(pm.arrays, "factors"))
    q = cut(pm)
    # a zero column keeps its old direction, so that no direction is lost for good
    before = in_batches([x.T for x in start]).arrays
    units = [jax.vmap(lambda x, old: unit(x.T, old.T))(x, old)
             for x, old in zip(pm.arrays, before, strict=True)]  # fmt: skip
    warm = cut(pm._replace(arrays=units), apart=False)

    mean, sent = list(v), list(v)
    for i, x in zip(plan.dense, dense, strict=True):
        mean[i] = x
    for matrix, p_i, q_i, product_i in zip(plan.matrices, p, q, node_products, strict=True):
        shape = v[matrix.layer].shape
        mean[matrix.layer] = outer(p_i, q_i).reshape(shape)
        sent[matrix.layer] = outer(p_i, product_i).reshape(shape)
    return mean, sent, tuple(warm)


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
    """ACP-SGD: P and Q in turn, one all-reduce a step, half as many values of factors; its limits
    are in `jgc.compress.low_rank.acp_sgd`"""


def powersgd(config: PowerSgd | None = None, **overrides) -> Compressor:
    """Two thin factors of every layer, P f32[rows, r] and Q f32[cols, r], each averaged by one
    all-reduce; with `alternate` one of them a step.

    Raises:
      ValueError: a setting outside its range, `alternate` without `warm_start`.

    Example:
      >>> [phase.name for phase in powersgd(rank=4, warmup_steps=100).schedule]
      ['dense', 'low rank']
      >>> [phase.name for phase in powersgd(alternate=True).schedule]
      ['low rank, even steps', 'low rank, odd steps']

    Source: Vogels et al. 2019, NeurIPS, Algorithms 1 and 2; Zhang et al. 2023, ICDCS (`alternate`).
    """
    config = settings_of(PowerSgd, config, overrides)
    if config.rank < 1:
        raise ValueError(f"rank must be at least 1, got {config.rank}")
    if config.alternate and not config.warm_start:
        raise ValueError("warm_start must be True with alternate=True, got False: a step computes "
                         "one factor from the other one of the step before")  # fmt: skip
    average = comm.mean_by(config.algorithm)
    start = acp_sgd.first_factors if config.alternate else random_factors

    def init(key, layers, nodes):
        plan = make_plan(layers, config.rank)
        return (start(key, plan, config.rank) if config.warm_start else ()), ()

    def step(phase, key, v, state, layers, nodes):
        def averaged(parts, field):  # in one all-reduce; in none, if there are no arrays
            if not parts:
                return []
            flat = average(joined(parts), nodes, field)
            ends = np.cumsum([x.size for x in parts])[:-1]
            return [x.reshape(y.shape) for x, y in zip(jnp.split(flat, ends), parts, strict=True)]

        if phase == phases.DENSE:
            return Step(averaged(v, "dense"), v, state.shared, elements=values_of(layers))
        plan, elements = make_plan(layers, config.rank), sum(sizes_of(phase, layers).values())
        if config.alternate:
            factors = acp_sgd.Factors(*(tuple(stacked(x)) for x in state.shared))
            return Step(*acp_sgd.one_factor(plan, v, phase, factors, averaged), elements=elements)
        before = stacked(state.shared) if config.warm_start else start(key, plan, config.rank)
        mean, sent, q = low_rank(plan, v, before, averaged)
        return Step(mean, sent, q if config.warm_start else (), elements=elements)

    def sizes_of(phase, layers):  # values that a node sends
        plan = make_plan(layers, config.rank)
        p = acp_sgd.sends_p(plan, phase)
        sides = [((m.rows if p[i] else m.cols) if config.alternate else m.rows + m.cols)
                 for i, m in enumerate(plan.matrices)]  # fmt: skip
        return {"factors": config.rank * sum(sides),
                "dense": sum(layers[i].size for i in plan.dense)}  # fmt: skip

    def messages(phase, layers, nodes):
        return both_ways({field: 4.0 * n for field, n in sizes_of(phase, layers).items() if n})

    last = [(acp_sgd.EVEN, 1), (acp_sgd.ODD, 0)] if config.alternate else [("low rank", 0)]
    schedule = phases.in_sequence((phases.DENSE, config.warmup_steps), *last)
    return from_step(
        step, messages=messages, schedule=schedule, init=init, form="layers",
        memory=error_feedback() if config.error_feedback else no_memory(),
        next_phase=acp_sgd.in_turn(schedule) if config.alternate else None)


METHOD = Entry(
    "powersgd", PowerSgd, powersgd, "Vogels et al. 2019; Zhang et al. 2023",
    citation=("vogels2019powersgd", "zhang2023acp"),
    lossless={"rank": 65_536})  # no layer's factors are then smaller than the layer: all go dense
