"""ScaleCom: the nodes take turns in choosing positions for all (cyclic local top-k), with a
low-pass memory.

In step t, with the leader t mod K, on each node:

    v = m + g;  send v at the positions of the leader's largest |v|
    m = (1 - beta) m + beta (v - sent)

An all-reduce averages the values, so the cost does not grow with the number of nodes.

Source: Chen et al. 2020, "ScaleCom: Scalable Sparsified Gradient Compression for
Communication-Efficient Distributed Training", NeurIPS, Algorithm 1 and equations (2) to (5).

Differs from the paper
  1. The exact top-k of each layer; the paper's experiments take the largest value of each chunk of
     a layer, which is faster on an accelerator. `selection="chunks"` takes the k largest of each:
     alpha=1/64 and chunk=64 is the paper's.
  2. beta is 1 by default: plain error feedback, which the paper uses for batches of the usual size.
     For large batches with high learning rates it uses 0.1. With beta < 1, a sent value keeps (1 -
     beta) of its residual, and only the share beta of an unsent one enters the residual: gradients
     are not conserved.
  3. The leader's positions travel by an all-reduce to which the other nodes contribute zeros. Only
     the logical bytes show the leader's role.
  4. An uncompressed warm-up can come first (`warmup_steps`, 0 by default).
  5. Momentum correction (Lin et al. 2018) is a setting, off by default; the filter then applies to
     its residual.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Chunked, Sparsifying, memory_of, schedule_of, selector_of
from jgc.compress.sparse.shared_positions import Algorithm, shared_positions
from jgc.layout.pack import Layers
from jgc.method.ages import Aged
from jgc.method.exchange import broadcast_top_positions
from jgc.method.memory import Corrected, Memory, accumulated
from jgc.method.messages import led, sizes_of
from jgc.selection.selector import Selector
from jgc.types import Array, Compressor, Key, Message, Nodes


@dataclasses.dataclass(frozen=True)
class ScaleCom(Chunked, Sparsifying):
    """Settings of `scalecom`."""

    beta: float = 1.0
    """coefficient of the low-pass memory, in (0, 1]: 1 is error feedback; 0.1 for large batches"""
    algorithm: Algorithm = "psum"
    """how values are averaged: the runtime's all-reduce or an explicit ring"""


def scalecom(config: ScaleCom | None = None, **overrides) -> Compressor:
    """Cyclic local top-k: broadcast the leader's mu positions, then average all nodes' f32[mu]
    there by an all-reduce.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> [phase.name for phase in scalecom(alpha=0.01, warmup_steps=100).schedule]
      ['dense', 'top-k']

    Source: Chen et al. 2020, "ScaleCom", NeurIPS, Algorithm 1 and equations (2) to (5).
    """
    config = settings_of(ScaleCom, config, overrides)
    memory, schedule = low_pass(memory_of(config), config.beta), schedule_of(config)
    return shared_positions(
        of_leader, messages, memory, schedule, config.alpha, partial(selector_of, config),
        config.algorithm)


def of_leader(
    key: Key, step: Array, v: Array, layers: Layers, selector: Selector, nodes: Nodes
) -> Array:
    """The positions of the leader's largest values of each layer; the leader is node step mod K."""
    return broadcast_top_positions(v, step % nodes.count, layers, selector, nodes)


def messages(layers: Layers, selector: Selector) -> tuple[Message, ...]:
    """The leader's positions, and the values of all."""
    mu = sum(selector.counts(layers))
    packed = jax.eval_shape(
        partial(selector.pack, layers=layers), jax.ShapeDtypeStruct((mu,), jnp.int32))
    values = {"values": 4.0 * mu}
    with_positions = sizes_of({"positions": packed}) | values
    return led(with_positions, values, values, with_positions)


def low_pass(memory: Memory, beta: float) -> Memory:
    """Add a low-pass filter to a memory, r = (1 - beta) r + beta (v - sent); beta in (0, 1]."""
    if not 0 < beta <= 1:
        raise ValueError(f"beta must be in (0, 1] (1 is plain error feedback), got {beta}")
    if beta == 1:
        return memory

    def mix(old, new):
        before = old.astype(jnp.float32)
        return before + beta * (new - before)  # exactly old if new is old

    def on_residuals(fn, old, new):
        """`new` with the residual fn(old residual, new residual); velocities are not filtered."""
        if isinstance(new, Aged):
            return new._replace(memory=on_residuals(fn, old.memory, new.memory))
        if isinstance(new, Corrected):
            return new._replace(residual=fn(old.residual, new.residual))
        return fn(old, new)

    def compensate(local, g, complete):
        v, new = memory.compensate(accumulated(memory, local, g, complete), g, complete)
        # nothing is left to filter; with `momentum_at_once` the residual's place has the velocity
        if complete:
            return v, new
        # keep the old residual, which `update` mixes in
        return v, on_residuals(lambda old, new: old, local, new)

    def update(local, v, sent, complete):
        after = memory.update(local, v, sent, complete)
        return after if complete else on_residuals(mix, local, after)

    return memory._replace(accumulate=(), advance=None, compensate=compensate, update=update)


METHOD = Entry(
    "scalecom", ScaleCom, scalecom, "Chen et al. 2020", lossless={"alpha": 1.0}, layers=FIRST_DENSE,
    citation=("chen2020scalecom",))
