"""Sparse methods in which all nodes send their values at the same positions, so that an all-reduce adds them up.

A method says how the positions of a step come about; the state that all nodes share is the number of steps taken.

    v f32[n]      accumulated gradient of a node
    counts        values of each layer that are sent; mu is their sum
    positions     i32[mu], no position twice, equal on all nodes
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.compress.sparse.sparsity import share_of
from jgc.layout.pack import Packing, layer_ids, make_packing, pack, unpack
from jgc.layout.select import Sparse, check_min_values, counts_per_layer, scatter_layers
from jgc.memory import Memory, residual_of, take_in
from jgc.method.ages import ages
from jgc.method.compose import Layers, make_info
from jgc.method.diagnose import compare
from jgc.method.exchange import both_ways
from jgc.method.guard import guard
from jgc.nodes import per_node
from jgc.types import Array, Compressor, Key, Message, Nodes, Phase, State, Wire
from jgc.wire.fixed_point import to_fixed, units

Algorithm = Literal["psum", "ring"]
Counts = tuple[int, ...]
FIXED_POINT = "int16"


class Chosen(NamedTuple):
    """What all nodes know before they send values.

    Attributes:
      positions: i32[mu].
      scales: f32[layers], in which values are measured that travel in fixed point; None for floats.
    """

    positions: Array
    scales: Array | None = None


class Chooser(NamedTuple):
    """How the positions of a step are chosen.

    Attributes:
      choose: `(key, step i32[], v, layers, counts, nodes) -> Chosen`; `key` and `step` are equal on all nodes.
      messages: `(layers, counts) -> logical messages` of a sparse step, positions and values.
      sent: whether the positions travel, so that how well they could be coded is worth watching.
    """

    choose: Callable[[Key, Array, Array, Layers, Counts, Nodes], Chosen]
    messages: Callable[[Layers, Counts], tuple[Message, ...]]
    sent: bool


class _Reduced(NamedTuple):
    """What a step makes of the nodes' v."""

    mean: Array  # f32[n], equal on all nodes
    sent: Array | Sparse  # what this node has sent
    elements: int


def shared_positions(
    chooser: Chooser, memory: Memory, schedule: tuple[Phase, ...], alpha: float, min_values: int, algorithm: Algorithm
) -> Compressor:
    """The method that a chooser makes.

    Args:
      chooser: where the values of a step are.
      memory: what a node keeps back.
      schedule: from `sparse_schedule`.
      alpha: share of each layer in the schedule's last phase.
      min_values: values of each layer at least.
      algorithm: of the all-reduce, "psum" or "ring".

    Raises:
      ValueError: an unknown algorithm, or min_values below 1.
    """
    check_min_values(min_values)
    if algorithm not in comm.MEANS:
        raise ValueError(f"algorithm must be 'psum' or 'ring', got {algorithm!r}")
    average = comm.MEANS[algorithm]
    shares = {phase.value: share_of(phase, alpha) for phase in schedule}

    def counts_of(share: float, packing: Packing) -> Counts:
        return counts_per_layer(packing.layers, share, min_values)

    def reduce(phase, key, step, v, packing, nodes, skip=False) -> _Reduced:
        share = shares[phase]
        if share is None:
            sent = jnp.where(skip, 0, v)
            return _Reduced(average(sent, nodes, "dense"), sent, v.size)
        counts = counts_of(share, packing)
        chosen = chooser.choose(key, step, v, packing.layers, counts, nodes)
        values = jnp.where(skip, 0, v[chosen.positions])
        if chosen.scales is None:
            mean, sent = average(values, nodes, "values"), values
        else:
            mean, sent = _averaged_in_fixed_point(values, chosen.scales[layer_ids(counts)], average, nodes)
        mean = scatter_layers(Sparse(chosen.positions, jnp.where(skip, 0, mean)), packing.layers, counts)
        return _Reduced(mean, Sparse(jnp.where(skip, v.size, chosen.positions), sent), values.size)

    def accumulate(phase, grads, state, packing, skip=False):
        return take_in(memory, state.local, grads, packing, shares[phase] is None, skip)

    def init(key, params, nodes):
        local = memory.init(make_packing(params).size)
        return State(jnp.int32(0), jax.tree.map(lambda x: per_node(x, nodes), local))

    def aggregate(phase, key, grads, state, nodes, skip=False):
        packing = make_packing(grads)
        v, local = accumulate(phase, grads, state, packing, skip)
        got = reduce(phase, key, state.shared, v, packing, nodes, skip)
        local = memory.keep(local, v, got.sent, shares[phase] is None)
        info = make_info(memory.residual(local), got.elements)
        return unpack(got.mean, packing), State(jnp.where(skip, state.shared, state.shared + 1), local), info

    def wire(phase, shapes, nodes):
        packing, share = make_packing(shapes), shares[phase]
        if share is None:
            return Wire(both_ways({"dense": 4.0 * packing.size}), ())
        return Wire(chooser.messages(packing.layers, counts_of(share, packing)), ())

    def diagnose(phase, key, grads, state, nodes):
        packing = make_packing(grads)
        v, local = accumulate(phase, grads, state, packing)
        got = reduce(phase, key, state.shared, v, packing, nodes)
        out = compare(got.mean, v, pack(grads, packing), nodes) | ages(local, packing, nodes)
        if chooser.sent and isinstance(got.sent, Sparse):
            out["positions"], out["positions_n"] = got.sent.positions, jnp.int32(packing.size)
        return out

    core = Compressor(
        init, aggregate, lambda old, new, state, nodes: state, wire, schedule, diagnose,
        owns_momentum=memory.owns_momentum, residual=residual_of(memory), skips=True,
    )  # fmt: skip
    return guard(core)


def _averaged_in_fixed_point(values: Array, scales: Array, average: Callable[..., Array], nodes: Nodes):
    """Mean over nodes of values f32[mu] sent as int16 in units of scales f32[mu], and what this node's stand for."""
    shares = jnp.where(scales > 0, values / jnp.where(scales > 0, scales, 1.0), 0.0)
    fixed = to_fixed(shares, FIXED_POINT, nodes.count)
    unit = scales / units(FIXED_POINT)
    return average(fixed, nodes, "values") * unit, fixed * unit
