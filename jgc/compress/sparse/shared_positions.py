"""Sparse methods in which all nodes send values at the same positions, averaged by an all-reduce.

A method defines how the positions of a step are chosen. The shared state is the number of steps.

    v f32[n]      accumulated gradient of a node
    counts        number of values sent per layer; mu is their sum
    positions     i32[mu], distinct, equal on all nodes
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jgc import comm
from jgc.compress.sparse.sparsity import share_of
from jgc.layout.devices import cut
from jgc.layout.pack import layer_ids, values_of
from jgc.method.from_step import Layers, Step, dense_step, from_step
from jgc.method.memory import Memory
from jgc.selection.entries import Sparse, SparseSum, Unordered
from jgc.selection.selector import Selector
from jgc.types import Array, Compressor, Key, Message, Nodes, Phase
from jgc.wire.fixed_point import check_room, to_fixed, units

Algorithm = Literal["psum", "ring"]


class Chosen(NamedTuple):
    """What all nodes know before they send values."""

    positions: Array  # i32[mu]
    scales: Array | None = None  # f32[layers], the units of values in fixed point (int16)


class Chooser(NamedTuple):
    """How the positions of a step are chosen."""

    # (key, step i32[], v, layers, selector, nodes) -> Chosen; key and step are equal on all nodes
    choose: Callable[[Key, Array, Array, Layers, Selector, Nodes], Chosen]
    # (layers, selector) -> logical messages of a sparse step
    messages: Callable[[Layers, Selector], tuple[Message, ...]]
    ascending: bool = True  # whether positions ascend


def shared_positions(
    chooser: Chooser, memory: Memory, schedule: tuple[Phase, ...], alpha: float,
    select: Callable[[float], Selector], algorithm: Algorithm,
) -> Compressor:  # fmt: skip
    """The method that a chooser makes; `select` gives the selector of a share, alpha in the last
    phase of a `sparse_schedule`. Raises ValueError for an unknown algorithm."""
    average = comm.mean_by(algorithm)
    entries = Sparse if chooser.ascending else Unordered
    shares = {phase.value: share_of(phase, alpha) for phase in schedule}
    selectors = {value: select(share) for value, share in shares.items() if share is not None}

    def step(phase, key, v, state, layers, nodes):
        if phase not in selectors:
            dense = dense_step(cut(v, values_of(layers)), state, nodes, algorithm)
            return dense._replace(shared=state.shared + 1)
        selector = selectors[phase]
        counts = selector.counts(layers)
        chosen = chooser.choose(key, state.shared, v, layers, selector, nodes)
        values = v[chosen.positions]
        if chosen.scales is None:
            mean, sent = average(values, nodes, "values"), values
        else:
            what = "values up to {:.2g} times the leader's mean magnitude"
            check_room("value_code", "int16", nodes.count, what, "float32")
            scales = chosen.scales[layer_ids(counts)]
            in_units = jnp.where(scales > 0, values / jnp.where(scales > 0, scales, 1.0), 0.0)
            fixed, unit = to_fixed(in_units, "int16", nodes.count), scales / units("int16")
            mean, sent = average(fixed, nodes, "values") * unit, fixed * unit
        return Step(
            SparseSum(entries(chosen.positions, mean), counts), entries(chosen.positions, sent),
            shared=state.shared + 1, elements=values.size)

    return from_step(
        step, memory=memory, schedule=schedule, takes_filled=True,
        messages=lambda phase, layers, nodes: chooser.messages(layers, selectors[phase]),
        init=lambda key, layers, nodes: (jnp.int32(0), ()))
