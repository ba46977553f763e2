"""A group's residual layer by layer, each in its parameter's shape; biases and norms are a vector.

The same functions as `jgc.layout.vector`, for methods that work on matrices: a step then neither
joins the gradients nor cuts them out of a vector, which would each cost several reads of all
values.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jgc.layout.batches import stacked
from jgc.layout.devices import squares_of_new
from jgc.layout.pack import Packing, joined, pieces, unpack
from jgc.layout.vector import Memory, Settled, accumulated, unless
from jgc.types import Array, Key, Nodes, PyTree

Values = Sequence[Array]  # f32, one array for each layer, in its shape


def first(memory: Memory, packing: Packing, nodes: Nodes) -> PyTree:
    """The memory's state before the first step: an entry for each layer."""
    return tuple(
        jax.tree.map(lambda x, of=layer.shape: x.reshape(of), memory.init(layer.size))
        for layer in packing.layers
    )


def compensated(
    memory: Memory, states: PyTree, grads: PyTree, packing: Packing, complete: bool,
    skip: Array | bool,
) -> tuple[list[Array], list[PyTree]]:  # fmt: skip
    """Each layer's v, and its memory's state before `settled`."""
    v, after = [], []
    for g, before in zip(layer_values(grads, packing), states, strict=True):
        local = unless(skip, before, accumulated(memory, before, g, complete))
        sum_, local = memory.compensate(local, g, complete)
        v.append(sum_)
        after.append(unless(skip, before, local) if local is not sum_ else local)
    return v if complete else stacked(v), after


def settled(
    memory: Memory, before: PyTree, begun: Sequence[PyTree], v: Values, mean: Values, sent: Values,
    onto: None, packing: Packing, complete: bool, skip: Array | bool, key: Key,
) -> Settled:  # fmt: skip
    """See `jgc.layout.vector.settled`; v, mean and sent have an array for each layer."""
    mean = [jnp.where(skip, 0, x) for x in mean]
    sent = [jnp.where(skip, 0, x) for x in sent]
    after = tuple(memory.update(*layer, complete) for layer in zip(begun, v, sent, strict=True))
    residuals = [memory.residual(local) for local in after]
    norm = jnp.sqrt(squares_of_new([x.astype(jnp.float32) for x in residuals if x is not None]))
    # XLA cuts nothing out: a part of a concatenation is its operand
    return Settled(unpack(joined(mean), packing, skip), after, norm)


def residual(memory: Memory, states: Sequence[PyTree], packing: Packing) -> PyTree | None:
    """The residual as a tree like the parameters; None without one."""
    values = [memory.residual(local) for local in states]
    if any(x is None for x in values):
        return None
    return unpack(joined([x for x in values if x is not None]), packing)


def layer_values(tree: PyTree, packing: Packing) -> list[Array]:
    """A tree's layers in their order, f32 in the layers' shapes."""
    flat = {at.start: x for at, x in pieces(tree, packing)}
    out = []
    for layer in packing.layers:
        end = layer.start + layer.size
        parts = [flat[start] for start in sorted(flat) if layer.start <= start < end]
        values = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        out.append(values.reshape(layer.shape))
    return out
