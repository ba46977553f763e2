"""ACP-SGD: PowerSGD that sends one factor of each matrix a step, P and Q in turn.

With the symbols of `powersgd`, for a matrix M whose other factor was averaged in the step before:

    Q = orthonormal columns of Q        P = orthonormal columns of P      on every node
    P = mean over nodes of M Q          Q = mean over nodes of M' P       one all-reduce
    aggregated = P Q'                   aggregated = P Q'
    residual: M - (M Q) Q'              residual: M - P (M' P)'           M is the node's

A step has one all-reduce and half as many values of factors; PowerSGD has two all-reduces, one of
which waits for the other. The method is `powersgd(alternate=True)`.

Limits. A step projects on directions of the step before; PowerSGD finds them in this step's
gradients. For noise the residual is as large as with PowerSGD of half the rank and as many bytes.
In training a GPT with AdamW the loss ends higher than with that PowerSGD, by 0.07 nats with rank 8
and 0.23 with rank 4 (3,000 steps, one seed: docs/results/local_steps).

Source: Zhang, Zhang, Shi, Chu, Li 2023, "Evaluation and Optimization of Gradient Compression for
Distributed Deep Learning", ICDCS, on alternate compressed PowerSGD.

Differs from the paper
  1. Half of the matrices send P while the others send Q, chosen so that all steps send about as
     many bytes. If one matrix, such as an embedding, outweighs all others, every second step sends
     more. In the paper, all layers send P in odd steps and Q in even ones; kernels of convolutions
     have at least nine times as many rows as columns.
  2. The columns of a factor are scaled to length 1, and a column of zeros keeps its old direction,
     as in `powersgd`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jgc.compress.low_rank.factors import Averaged, Plan, random_factors
from jgc.layout.batches import in_batches
from jgc.layout.matrices import cutter, orthonormal_columns, outer, products, thin_products, unit
from jgc.types import Array, Key, NextPhase, Nodes, Phase, State

EVEN, ODD = "low rank, even steps", "low rank, odd steps"


class Factors(NamedTuple):
    """Both factors of every matrix, columns of length 1: P f32[rows, r] and Q f32[cols, r]."""

    p: Any
    q: Any


def first_factors(key: Key, plan: Plan, rank: int) -> Factors:
    """Random factors for a first step."""
    transposed = tuple(x._replace(rows=x.cols, cols=x.rows) for x in plan.matrices)
    for_p, for_q = jax.random.split(key)
    return Factors(random_factors(for_p, plan._replace(matrices=transposed), rank),
                   random_factors(for_q, plan, rank))  # fmt: skip


def sends_p(plan: Plan, phase: str) -> list[bool]:
    """Which matrices send P in a phase; the others send Q."""
    return [first == (phase == EVEN) for first in plan.p_first]


def one_factor(
    plan: Plan, v: Sequence[Array], phase: str, factors: Factors, averaged: Averaged
) -> tuple[list[Array], list[Array], Factors]:
    """One step on all matrices of a node's layers v, f32 of any shapes.

    `averaged` takes arrays and a field to their means over nodes, in one all-reduce. Returns the
    mean and the sent part of each layer, and the factors for the next step, equal on all nodes.
    """
    if not plan.matrices:
        return averaged([v[i] for i in plan.dense], "dense+factors"), list(v), factors
    m = [v[matrix.layer].reshape(matrix.rows, matrix.cols) for matrix in plan.matrices]
    is_p = sends_p(plan, phase)
    pairs = list(zip(factors.p, factors.q, is_p, strict=True))
    old, other = ([p if is_p == new else q for p, q, is_p in pairs] for new in (True, False))
    cut = cutter(len(m), other[0][0, 0] > 2)  # False: columns have length 1
    basis = cut(orthonormal_columns(in_batches(other)), [len(x) for x in other])

    node_factors = _products(m, basis, is_p)  # of this node, f32[rows, r] or f32[cols, r]
    batches = in_batches(node_factors)
    means = averaged([*batches.arrays, *(v[i] for i in plan.dense)], "dense+factors")
    count = len(batches.arrays)
    batches, dense = batches._replace(arrays=means[:count]), means[count:]
    # a zero column keeps its old direction, so that no direction is lost for good
    units = [jax.vmap(unit)(x, old) for x, old in
             zip(batches.arrays, in_batches(old).arrays, strict=True)]  # fmt: skip
    warm = cut(batches._replace(arrays=units), apart=False)

    mean, sent = list(v), list(v)
    for i, x in zip(plan.dense, dense, strict=True):
        mean[i] = x
    for i, x in enumerate(cut(batches)):
        layer = plan.matrices[i].layer
        mean[layer], sent[layer] = (
            (outer(y, basis[i].T) if is_p[i] else outer(basis[i], y.T)).reshape(v[layer].shape)
            for y in (x, node_factors[i]))
    after = [(new, q) if is_p else (p, new)
             for new, (p, q, is_p) in zip(warm, pairs, strict=True)]  # fmt: skip
    return mean, sent, Factors(*map(tuple, zip(*after, strict=True)))


def _products(m: Sequence[Array], basis: Sequence[Array], is_p: Sequence[bool]) -> list[Array]:
    """M Q where `is_p`, else M' P, in the order of the matrices."""
    of_p, of_q = ([i for i, p in enumerate(is_p) if p == side] for side in (True, False))
    p = products([m[i] for i in of_p], [basis[i] for i in of_p])
    q = thin_products([basis[i] for i in of_q], [m[i] for i in of_q])
    out = dict(zip(of_p, p, strict=True)) | {i: x.T for i, x in zip(of_q, q, strict=True)}
    return [out[i] for i in range(len(m))]


def in_turn(schedule: tuple[Phase, ...]) -> NextPhase:
    """`next_phase` of a schedule that ends with `EVEN` and `ODD`: these two in turn, for good."""

    def next_phase(before: Phase, step: int, state: State, nodes: Nodes) -> Phase:
        past = step - schedule[-2].start
        return schedule[-2 + past % 2] if past >= 0 else schedule[0]

    return next_phase
