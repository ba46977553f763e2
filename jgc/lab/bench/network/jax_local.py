"""A method with local steps as compiled programs on one host: a local step, and the exchange after H of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc.lab.bench.network.jax_methods import sent_by
from jgc.lab.bench.network.methods import NEVER, local_of, split
from jgc.layout.devices import LARGEST_NORM
from jgc.loops.local_programs import exchange_program, make_inner
from jgc.loops.norms import norms_of_nodes
from jgc.loops.outer import Arrays
from jgc.nodes.gradients import node_grads
from jgc.types import Nodes, PyTree


class Rounds(NamedTuple):
    """A method with local steps, compiled.

    Attributes:
      every: H, steps of a round.
      inner: `(own, inner state, batch) -> (own, inner state)`, which sends nothing.
      exchange: `(arrays, step) -> arrays`; None for steps that nothing follows.
      arrays: before the next round.
      physical, compiled, collectives, audit: see `jax_methods.Built`; of a whole round.
    """

    every: int
    inner: Callable[..., tuple[PyTree, PyTree]]
    exchange: Callable[..., Arrays] | None
    arrays: Arrays
    physical: float
    compiled: float | None
    collectives: dict[str, int]
    audit: str


def build_rounds(name: str, nodes: Nodes, params: PyTree, loss: Callable[..., Any], batch: PyTree) -> Rounds:
    """Compile a method with local steps, in its last phase. No program runs that communicates.

    Args:
      name: see `methods.Row`.
      nodes: one per host.
      params: the model's, replicated.
      loss: `(params, batch) -> f32[]` of a node's examples.
      batch: [K, b, ...].
    """
    _, every = split(name)
    assert every is not None
    parts = local_of(name, nodes).parts
    arrays = parts.first(jax.random.key(1), params)
    placements, shardings = parts.placements(arrays), jax.tree.map(lambda x: x.sharding, arrays)
    gradients, inner_step = node_grads(loss, nodes, placements=placements.own), make_inner(parts, placements)

    def inner(params, state, batch):
        losses, grads = gradients(params, batch)
        return inner_step(params, state, grads, losses, norms_of_nodes(grads) < LARGEST_NORM)

    jitted = jax.jit(inner, donate_argnums=(0, 1), out_shardings=(shardings.own, shardings.inner))
    compiled = jitted.lower(arrays.own, arrays.inner, batch).compile()
    if parts.every == NEVER:
        return Rounds(every, compiled, None, arrays, 0.0, 0.0, {}, "")
    phase = parts.compressor.schedule[-1].value
    exchange = exchange_program(parts, arrays, 0, phase)

    def on_step(arrays, step):
        return exchange(arrays, jax.random.key(0), step)[0]

    program = jax.jit(on_step, donate_argnums=0, out_shardings=shardings).lower(arrays, np.int32(0)).compile()
    physical = float(sum(sent.bytes for sent in parts.compressor.wire(phase, params, nodes).physical))
    return Rounds(every, compiled, program, arrays, physical, *sent_by(program, physical))


def take_round(rounds: Rounds, next_batch: Callable[[], PyTree], step: int) -> Rounds:
    """H steps of this host, and the exchange."""
    arrays = rounds.arrays
    for _ in range(rounds.every):
        params, inner = jax.block_until_ready(rounds.inner(arrays.own, arrays.inner, next_batch()))
        arrays = arrays._replace(own=params, inner=inner)
    if rounds.exchange is not None:
        arrays = jax.block_until_ready(rounds.exchange(arrays, np.int32(step)))
    return rounds._replace(arrays=arrays)
