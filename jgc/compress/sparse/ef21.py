"""EF21: nodes send compressed changes of a gradient estimate, so no residual accumulates.

On each node, with g its estimate of its gradient, zero at first, and f the mean of all nodes' g:

    u = (1 - eta) u + eta * gradient        momentum; with eta = 1 the gradient itself
    c = top-k of (u - g)                    sent
    g = g + c
    f = f + mean over nodes of c            the aggregate

Source: Richtarik, Sokolov, Fatkhullin 2021, "EF21: A New, Simpler, Theoretically Better, and
Practically Faster Error Feedback", NeurIPS, Algorithm 2; momentum: Fatkhullin, Tyurin, Richtarik
2023, "Momentum Provably Improves Error Feedback!", NeurIPS, Algorithm 1 (EF21-SGDM).

Differs from the paper
  1. Top-k selects the share alpha of each layer (biases and norms form one); the paper's selects
     from the whole vector.
  2. All nodes gather all messages; in the paper a server adds them up and sends the estimate back.
  3. u starts from zero, and grows to the gradient's size in 1 / eta steps; Algorithm 1 of EF21-SGDM
     starts from the first gradient.
  4. In `warmup_steps` uncompressed steps c is all of u - g, so that g and f follow u and its mean.
     Without a warm-up the first message makes g C(gradient), the paper's start.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Chunked, selector_of
from jgc.compress.sparse.sparsity import sparse_schedule
from jgc.compress.sparse.topk import selected
from jgc.layout.pack import values_of
from jgc.method.diagnose import compare
from jgc.method.exchange import exchanged, gather, payload_sizes
from jgc.method.from_step import as_vector, dense_step, from_step
from jgc.method.memory import Memory, no_memory
from jgc.method.messages import to_all
from jgc.method.phases import DENSE
from jgc.selection.entries import added
from jgc.types import Array, Compressor


@dataclasses.dataclass(frozen=True)
class Ef21(Chunked):
    """Settings of `ef21`."""

    alpha: float = 0.001
    """share of each layer's values that is sent, in (0, 1]"""
    eta: float = 1.0
    """weight of a new gradient in each node's momentum (EF21-SGDM), in (0, 1]; 1 for no momentum;
    below 1 the optimiser must have none"""
    warmup_steps: int = 0
    """uncompressed steps before the first compressed one"""


def ef21(config: Ef21 | None = None, **overrides) -> Compressor:
    """EF21 with top-k: mu values of each node's change f32[n] and their positions, gathered by all
    nodes.

    Raises:
      ValueError: a setting outside its range.

    Example:
      >>> [phase.name for phase in ef21(alpha=0.01, warmup_steps=10).schedule]
      ['dense', 'ef21']

    Source: Richtarik et al. 2021, Algorithm 2; Fatkhullin et al. 2023, Algorithm 1; both NeurIPS.
    """
    config = settings_of(Ef21, config, overrides)
    if not 0 < config.eta <= 1:
        raise ValueError(f"eta must be in (0, 1] (1 for no momentum), got {config.eta}")
    codec = selected(selector_of(config, config.alpha))

    def init(key, layers, nodes):
        return jnp.zeros((values_of(layers),), jnp.float32), ()  # f

    def step(phase, key, v, state, layers, nodes):
        if phase == DENSE:
            return dense_step(v, state, nodes)._replace(onto=state.shared)
        return exchanged(gather(), codec, key, v, layers, nodes)._replace(onto=state.shared)

    def figures(phase, key, v, g, step, state, layers, nodes):
        return compare(state.shared + as_vector(step.mean, layers), g, g, nodes, everything=True)

    return from_step(
        step, init=init, figures=figures, memory=estimate(config.eta),
        schedule=sparse_schedule("warmup", config.alpha, config.warmup_steps, "ef21"),
        messages=lambda phase, layers, nodes: to_all(payload_sizes(codec, layers), nodes))


class Estimate(NamedTuple):
    """A node's memory: its estimate g f32[n], and the momentum u f32[n], () for eta = 1."""

    gradient: Array
    momentum: Array | tuple[()]


def estimate(eta: float) -> Memory:
    """The memory of EF21: v = u - g, momentum less estimate; the sent part of v is added to g."""

    def init(n):
        zeros = jnp.zeros((n,), jnp.float32)
        return Estimate(zeros, zeros if eta < 1 else ())

    def move(local, gradient, complete):
        return local._replace(momentum=(1 - eta) * local.momentum + eta * gradient)

    def compensate(local, gradient, complete):
        return (local.momentum if eta < 1 else gradient) - local.gradient, local

    def update(local, v, sent, complete):
        return local._replace(gradient=added(local.gradient, sent))

    return no_memory()._replace(
        init=init, accumulate=(move,) if eta < 1 else (), compensate=compensate, update=update,
        owns_momentum=eta < 1)


METHOD = Entry(
    "ef21", Ef21, ef21, "Richtarik et al. 2021; Fatkhullin et al. 2023", lossless={"alpha": 1.0},
    exempt={"conservation": "an estimate of the gradient instead of a residual",
            "zeros": "the estimate of earlier gradients stays in the aggregate"},
    layers=FIRST_DENSE, citation=("richtarik2021ef21", "fatkhullin2023momentum"))
