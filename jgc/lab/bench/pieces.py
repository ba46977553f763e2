"""The pieces of a training step after its gradients, each compiled by itself and called again and again in place.

Each function gives a call that takes one step from where the last one ended.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jgc.compress import step_on_nodes
from jgc.lab.bench.step_time import chained
from jgc.method.compose import encoded as encode
from jgc.nodes import LOCAL, SHARED, on_nodes, place
from jgc.training.step import Parts, TrainState
from jgc.types import PyTree, State


def aggregated(parts: Parts, phase: Any, state: State, grads: PyTree) -> Callable[[], Any]:
    """The compressor alone, guard included."""
    on_axis = step_on_nodes(parts.compressor.aggregate, phase, parts.nodes)

    def run(state, key, grads):
        mean, state, info = on_axis(key, grads, state)
        return state, (mean, info)

    return _in_place(run, state, parts.key, grads)


def encoded(parts: Parts, phase: Any, state: State, grads: PyTree) -> Callable[[], Any]:
    """All nodes' payloads and the memory as it then is: what `finish` and the exchange are still to have."""

    def own(key, grads, state):
        core = parts.compressor.core
        begun = core.begin(phase, grads, state, False)
        item = encode(core.stages[phase][0], key, begun.v, begun.packing.layers, parts.nodes)
        return begun.memory, item.payload

    on_axis = on_nodes(own, parts.nodes, ins=(SHARED, LOCAL, State(SHARED, LOCAL)), outs=LOCAL)

    def run(local, key, grads):
        memory, payload = on_axis(key, grads, State(state.shared, local))
        return local._replace(memory=memory), payload

    return _in_place(run, state.local, parts.key, grads)


def updated(parts: Parts, state: TrainState, grads: PyTree) -> Callable[[], Any]:
    """The optimiser's update of the parameters."""

    def run(carried, mean):
        params, opt_state = carried
        updates, opt_state = parts.optimizer.update(mean, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    mean = place(jax.tree.map(lambda g: g.mean(axis=0), grads), SHARED, parts.nodes)
    return _in_place(run, (state.params, state.opt_state), mean)


def _in_place(run: Callable, carried: PyTree, *args: Any) -> Callable[[], Any]:
    """`run(carried, *args) -> (carried, other)`, compiled once and ahead as a training step is, one call after another.

    What is carried stays in its buffers.
    """
    shardings = jax.tree.map(lambda x: x.sharding, carried)
    program = jax.jit(run, donate_argnums=0, out_shardings=(shardings, None)).lower(carried, *args).compile()
    return chained(program, carried, *args)
