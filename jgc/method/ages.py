"""Ages: the steps since each value was last sent, one i32 per value on each node.

The compression ratio does not show a layer that is never sent; ages do.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jgc import comm
from jgc.layout.pack import Packing
from jgc.method.memory import Memory
from jgc.selection.entries import Sparse, cleared, nonzero
from jgc.types import Array, Nodes, PyTree


class Aged(NamedTuple):
    """Local state of a memory with ages."""

    memory: PyTree
    age: Array  # i32[n]


def with_ages(memory: Memory) -> Memory:
    """The memory with ages. A value v = 0 has age 0; a skipped step does not count."""

    def inside(add):
        return lambda local, g, complete: local._replace(memory=add(local.memory, g, complete))

    def compensate(local, g, complete):
        v, inner = memory.compensate(local.memory, g, complete)
        return v, Aged(inner, jnp.where(v != 0, local.age + 1, 0))

    def update(local, v, sent, complete):
        if isinstance(sent, Sparse):
            age = cleared(local.age, nonzero(sent, v.size))  # an unused slot carries 0
        else:
            age = jnp.where(sent != 0, 0, local.age)
        return Aged(memory.update(local.memory, v, sent, complete), age)

    def advance(local):
        return local._replace(memory=memory.advance(local.memory))

    return memory._replace(
        advance=None if memory.advance is None else advance,
        init=lambda n: Aged(memory.init(n), jnp.zeros((n,), jnp.int32)),
        accumulate=tuple(inside(add) for add in memory.accumulate),
        compensate=compensate,
        update=update,
        residual=lambda local: memory.residual(local.memory),
    )


def ages(local: PyTree, packing: Packing, nodes: Nodes) -> dict[str, Array]:
    """"oldest/LAYER" and "mean_age/LAYER", f32[]: the largest and the mean age of a layer's values
    over all nodes, in steps. `local` is a node's state of any memory; empty if it has no ages.
    """
    if not isinstance(local, Aged) or not packing.layers:
        return {}
    each = [local.age[layer.start : layer.start + layer.size] for layer in packing.layers]
    oldest = comm.pmax(jnp.stack([jnp.max(age) for age in each]), nodes, "diagnose")
    means = jnp.stack([jnp.mean(age, dtype=jnp.float32) for age in each])
    means, names = comm.pmean(means, nodes, "diagnose"), [x.name for x in packing.layers]
    oldest = oldest.astype(jnp.float32)
    figures = {f"oldest/{name}": x for name, x in zip(names, oldest, strict=True)}
    return figures | {f"mean_age/{name}": x for name, x in zip(names, means, strict=True)}
