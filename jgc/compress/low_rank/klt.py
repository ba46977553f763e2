"""Transform coding in learned bases: few coefficients for the part that nodes' gradients share,
top-k for the rest.

A layer's gradient is a matrix or, for a convolution, taps x inputs x outputs. Each of its modes is
rotated into the eigenvectors of the mean gradients' second moments (a separable Karhunen-Loeve
transform, KLT). Few coefficients then hold most of the common part. All nodes know the moments, and
so the coefficients' positions, which need not be sent. On each node, with v f32[n] from the memory:

    c = rotate(v)[kept]             kept i32[k]: the k positions of most energy over all layers
    q = round(c / step)             integers whose sum over nodes fits into `code_dtype`; all-reduce
    rest = v - rotate_back(step q)
    s = top-k of rest               at each node's positions, layer by layer; gather
    residual: rest - s

    aggregated = rotate_back(step mean(q)) + mean(s)

With `momentum_at_once`, v holds a gradient's whole momentum series, which suits values that wait
long. The coefficients do not wait, so their mean is spread over the following steps again, as by
the momentum of uncompressed training: u = m u + (1 - m) common.

All nodes compute equal bases from equal means, so no basis is sent: at the end of the uncompressed
warm-up, and again every `refresh` steps, from moments that weight recent aggregates most.

Limits. Eigenvectors must be equal on all nodes to the bit: all nodes need the same kind of device
and the same software versions. A refresh costs an eigendecomposition per mode, O(r^3): on TPU by
Jacobi's iterations, which compile but have not run there. Moments and bases take 8 r^2 bytes per
mode.

Source: ours; how it came about is in docs/results/codecs.md. Its parts: transform coding (Huang and
Schultheiss 1963); second moments of gradients by modes (Gupta et al. 2018, Shampoo; Vyas et al.
2024, SOAP); PCA codes that can be summed (Yu et al. 2018, GradiVeQ, where they span slices of a
layer); common part and innovation (Abrahamyan et al. 2021, LGC); top-k with error feedback (Stich
et al. 2018).
"""

import dataclasses
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc import comm
from jgc.compress.low_rank import klt_bases
from jgc.compress.low_rank.klt_bases import Factors, group_count, rotate
from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Chunked, ErrorFeedback, memory_of, selector_of
from jgc.compress.sparse.topk import selected
from jgc.layout.pack import values_of
from jgc.method import Layers, Step, dense_step, from_step, phases
from jgc.method.exchange import exchanged, gather, payload_sizes
from jgc.method.memory import subtract
from jgc.method.messages import both_ways, to_all
from jgc.selection.entries import Sparse, scatter, scatter_layers
from jgc.types import Array, Compressor, Nodes
from jgc.wire.fixed_point import largest_summand

LEVELS = 7  # each node must be able to use integers up to at least this
FINE = 16.0  # steps are powers of 2 ** (1 / FINE)


@dataclasses.dataclass(frozen=True)
class Klt(Chunked, ErrorFeedback):
    """Settings of `klt`."""

    share: float = 0.01
    """share of all coefficients that is sent, in (0, 1]"""
    alpha: float = 0.001
    """share of each layer's values of the rest that a node sends, in (0, 1]"""
    code_dtype: Literal["int8", "int16", "int32"] = "int8"
    """dtype of the sum of the nodes' integers; int8 has room for up to 18 nodes"""
    warmup_steps: int = 200
    """uncompressed steps, from which the first bases are learned, at least 1"""
    refresh: int = 50
    """steps between two computations of the bases; 0 keeps the first bases"""
    decay: float = 0.98
    """decay of the second moments per step, in [0, 1)"""
    max_mode: int = 2048
    """longest mode that is rotated; its moments and basis each take the square of its length"""
    momentum_correction: bool = True
    """accumulate each node's momentum (DGC), not plain gradients; the optimiser then has none"""


class Learned(NamedTuple):
    """What all nodes have learned from the means so far."""

    moments: Factors  # second moments of each layer's modes, [r, r], or [r] if not rotated
    bases: Factors  # their eigenvectors [r, r], in columns, or [0]
    kept: Array  # i32[k], positions of the coefficients that are sent, ascending
    groups: Array  # i32[k], which of them share a quantisation step, by energy
    step: Array  # i32[], compressed steps so far
    velocity: Array  # with `momentum_at_once` f32[n], of the common part; else f32[0]


def klt(config: Klt | None = None, **overrides) -> Compressor:
    """Average coefficients of f32[n] in learned bases by an all-reduce; gather top-k of the rest.

    Raises:
      ValueError: a setting outside its range; in `init`, too many nodes for `code_dtype`.

    Example:
      >>> [phase.name for phase in klt(share=0.05, warmup_steps=100).schedule]
      ['dense', 'compressed']

    Source: ours (docs/results/codecs.md); Huang and Schultheiss 1963 (transform coding).
    """
    config = settings_of(Klt, config, overrides)
    _check(config)
    rest_codec = selected(selector_of(config, config.alpha))
    smooths = config.momentum_correction and config.momentum_at_once

    def init(key, layers, nodes):
        _largest(config, nodes)
        kept = jnp.arange(_count(config, layers), dtype=jnp.int32)
        velocity = jnp.zeros((values_of(layers) if smooths else 0,), jnp.float32)
        moments, bases = klt_bases.nothing_learned(layers, config.max_mode)
        return Learned(moments, bases, kept, jnp.zeros_like(kept), jnp.int32(0), velocity), ()

    def step(phase, key, v, state, layers, nodes):
        if phase == phases.DENSE:
            result = dense_step(v, state, nodes)
            return _with_moments(config, result, result.mean, layers)
        learned = _renewed(config, state.shared)
        common, node_part = _common(config, v, learned, layers, nodes)
        rest = v - node_part
        innovation = exchanged(gather(), rest_codec, key, rest, layers, nodes)
        innovations = scatter_layers(innovation.mean, layers)
        left = subtract(rest, innovation.sent)
        now = common
        if smooths:
            now = config.momentum * learned.velocity + (1 - config.momentum) * now
            learned = learned._replace(velocity=now)
        learned = learned._replace(step=learned.step + 1)
        elements = learned.kept.size + innovation.elements
        result = Step(now + innovations, v - left, learned, elements=elements)
        return _with_moments(config, result, common + innovations, layers)

    def messages(phase, layers, nodes):
        k = _count(config, layers)
        summed = {"coefficients": float(jnp.dtype(config.code_dtype).itemsize * k)}
        gathered = payload_sizes(rest_codec, layers) | {"scales": 2.0 * group_count(k)}
        return both_ways(summed) + to_all(gathered, nodes)

    schedule = phases.in_sequence((phases.DENSE, config.warmup_steps), ("compressed", 0))
    memory = memory_of(config)
    return from_step(step, memory=memory, schedule=schedule, messages=messages, init=init)


def _with_moments(config: Klt, result: Step, decoded: Array, layers: Layers) -> Step:
    """Add the decoded mean f32[n] to the second moments of the step's shared state."""
    learned: Learned = result.shared
    moments = klt_bases.add_moments(config.decay, learned.moments, decoded, layers)
    return result._replace(shared=learned._replace(moments=moments))


def _renewed(config: Klt, learned: Learned) -> Learned:
    """Compute the bases if they are due."""
    due = learned.step % config.refresh == 0 if config.refresh else learned.step == 0
    old = learned.bases, learned.kept, learned.groups

    def vary_like(x, like):  # over a node's devices, as the branches of a cond must agree
        return comm.vary_over(x, tuple(jax.typeof(like).mat.varying))

    def new():
        computed = klt_bases.eigenbases(learned.moments, learned.kept.size)
        return jax.tree.map(vary_like, computed, old)

    bases, kept, groups = lax.cond(due, new, lambda: old)
    return learned._replace(bases=bases, kept=kept, groups=groups)


def _check(config: Klt) -> None:
    if not 0 < config.share <= 1:
        raise ValueError(
            f"share must be in (0, 1] (0.01 sends 1 % of the coefficients), got {config.share}")
    if not 0 <= config.decay < 1:
        raise ValueError(f"decay must be in [0, 1), got {config.decay}")
    if config.factor_masking:
        raise ValueError("factor_masking must be False, got True: coefficients do not wait, so no "
                         "velocity is stale")  # fmt: skip
    if config.track_age:
        raise ValueError("track_age must be False, got True: coefficients send a part of every "
                         "value in every step")  # fmt: skip
    for name, least in (("warmup_steps", 1), ("refresh", 0), ("max_mode", 1)):
        if getattr(config, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(config, name)}")
    if config.refresh >= 2**31:
        raise ValueError(
            f"refresh must be below 2**31, or 0 to keep the first bases, got {config.refresh}")


# --- coefficients ---------------------------------------------------------------------------------


def _count(config: Klt, layers: Layers) -> int:
    """k, how many coefficients are sent."""
    n = values_of(layers)
    return min(n, max(1, round(config.share * n)))


def _common(
    config: Klt, v: Array, learned: Learned, layers: Layers, nodes: Nodes
) -> tuple[Array, Array]:
    """The common part as f32[n]: the mean of all nodes' coefficients at the positions `kept`,
    decoded, and this node's, decoded."""
    coefficients = comm.one_by_one(partial(rotate, layers), learned.bases, v)[learned.kept]
    largest = _largest(config, nodes)
    step = _steps(coefficients, learned.groups, largest, nodes)
    codes = jnp.clip(jnp.round(coefficients / step), -largest, largest)
    total = comm.psum(codes.astype(config.code_dtype), nodes, "coefficients").astype(jnp.float32)

    def gradients(coefficients):
        spread = scatter(Sparse(learned.kept, coefficients), v.size)
        return comm.one_by_one(partial(rotate, layers, back=True), learned.bases, spread)

    return gradients(total * step / nodes.count), gradients(codes * step)


def _largest(config: Klt, nodes: Nodes) -> float:
    """The largest integer that each node may send. ValueError if it is too small."""
    largest = largest_summand(config.code_dtype, nodes.count)
    if largest < LEVELS:
        raise ValueError(
            f"code_dtype {config.code_dtype} leaves a node of {nodes.count} the integers up to "
            f"{largest:.0f}, too coarse below {LEVELS}; use a wider one")
    return largest


def _steps(coefficients: Array, groups: Array, largest: float, nodes: Nodes) -> Array:
    """The quantisation step of each coefficient, f32[k]: no node's integers exceed the largest."""
    # Nodes send the exponent of a group's largest magnitude: small, and equal on all nodes to the
    # bit.
    numbers = np.arange(group_count(groups.size), dtype=np.int32)
    of_group = jnp.where(groups[None] == numbers[:, None], jnp.abs(coefficients)[None], 0)
    magnitudes = jnp.max(of_group, axis=1, initial=0)
    exponents = jnp.ceil(FINE * jnp.log2(jnp.maximum(magnitudes, 1e-30))).astype(jnp.int16)
    highest = jnp.max(comm.all_gather(exponents, nodes, "scales"), axis=0)
    return (jnp.exp2(highest.astype(jnp.float32) / FINE) / largest)[groups]


METHOD = Entry("klt", Klt, klt, "ours", lossless=None, layers=FIRST_DENSE)
