"""Sparse methods in which all nodes send values at the same positions, averaged by an all-reduce.

A method defines how the positions of a step are chosen. The shared state is the number of steps.

    v f32[n]      accumulated gradient of a node
    counts        number of values sent per layer; mu is their sum
    positions     i32[mu], distinct, equal on all nodes
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jgc import comm
from jgc.compress.sparse.sparsity import shares_of
from jgc.layout.devices import cut
from jgc.layout.pack import values_of
from jgc.method.from_step import Layers, Step, dense_step, from_step
from jgc.method.memory import Memory
from jgc.selection.entries import Sparse, SparseSum
from jgc.selection.selector import Selector
from jgc.types import Array, Compressor, Key, Message, Nodes, Phase

Algorithm = Literal["psum", "ring"]


# (key, step i32[], v, layers, selector, nodes) -> positions i32[mu], equal on all nodes, as are key
# and step
Choose = Callable[[Key, Array, Array, Layers, Selector, Nodes], Array]


def shared_positions(
    choose: Choose, messages: Callable[[Layers, Selector], tuple[Message, ...]], memory: Memory,
    schedule: tuple[Phase, ...], alpha: float, select: Callable[[float], Selector],
    algorithm: Algorithm, entries: type[Sparse] = Sparse,
) -> Compressor:  # fmt: skip
    """The method that sends values at chosen positions, which ascend unless `entries` is Unordered.
    `select` gives the selector of a share, alpha in the last phase of a `sparse_schedule`."""
    average = comm.mean_by(algorithm)
    selectors = {value: select(share) for value, share in shares_of(schedule, alpha).items()}

    def step(phase, key, v, state, layers, nodes):
        if phase not in selectors:
            dense = dense_step(cut(v, values_of(layers)), state, nodes, algorithm)
            return dense._replace(shared=state.shared + 1)
        selector = selectors[phase]
        positions = choose(key, state.shared, v, layers, selector, nodes)
        values = v[positions]
        mean = entries(positions, average(values, nodes, "values"))
        return Step(
            SparseSum(mean, selector.counts(layers)), entries(positions, values),
            shared=state.shared + 1, elements=values.size)

    return from_step(
        step, memory=memory, schedule=schedule, takes_filled=True,
        messages=lambda phase, layers, nodes: messages(layers, selectors[phase]),
        init=lambda key, layers, nodes: (jnp.int32(0), ()))
