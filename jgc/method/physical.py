"""Physical bytes of a step, from the collectives that tracing it calls."""

from collections.abc import Hashable
from functools import partial

import jax

from jgc import comm
from jgc.nodes import LOCAL, SHARED, on_nodes
from jgc.types import Compressor, Nodes, PyTree, Sent, State


def step_on_nodes(aggregate, phase: Hashable, nodes: Nodes):
    """`aggregate` of whole arrays: (key, grads [K, ...], state) -> (aggregated, state, info [K])."""

    def one(key, grads, state):
        return aggregate(phase, key, grads, state, nodes)

    state_kinds = State(SHARED, LOCAL)
    return on_nodes(one, nodes, ins=(SHARED, LOCAL, state_kinds), outs=(SHARED, state_kinds, LOCAL))


def physical(core: Compressor, phase: Hashable, shapes: PyTree, nodes: Nodes) -> tuple[Sent, ...]:
    """What one device sends in one step of `core.aggregate`, collective by collective."""
    key = jax.random.key(0)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((nodes.count, *x.shape), x.dtype), shapes)
    state = jax.eval_shape(partial(core.init, nodes=nodes), key, params)
    with comm.ledger() as sent:
        jax.eval_shape(step_on_nodes(core.aggregate, phase, nodes), key, grads, state)
    return tuple(sent)
