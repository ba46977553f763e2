"""The pieces of a training step after its gradients, each compiled by itself.

Each function returns a call. A call takes one step from the state in which the call before ended, in the same buffers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgc.compress import step_on_nodes
from jgc.lab.shared.programs import Gradients, arrays_of, compile_update, results_of
from jgc.layout.pack import make_packing
from jgc.layout.vector import compensated
from jgc.method.exchange import encoded as encode
from jgc.method.phases import DENSE
from jgc.nodes.axis import on_nodes
from jgc.nodes.placement import LOCAL, SHARED
from jgc.nodes.placing import place
from jgc.training.steps.step import Parts, TrainState
from jgc.types import PyTree, State


def updater(parts: Parts, phase: Any, state: TrainState, gradients: Gradients) -> Callable[[], Any]:
    """The compressor and the optimiser: everything after the gradients."""
    arrays = arrays_of(state)
    program = compile_update(parts, phase, arrays, gradients)
    return chained(program, arrays, parts.key, np.int32(0), results_of(gradients))


def aggregated(parts: Parts, phase: Any, state: State, grads: PyTree) -> Callable[[], Any]:
    """The compressor, with its guard against non-finite gradients."""
    on_axis = step_on_nodes(parts.compressor.aggregate, phase, parts.nodes)

    def run(state, key, grads):
        mean, state, info = on_axis(key, grads, state)
        return state, (mean, info)

    return _in_place(run, state, parts.key, grads)


def encoded(parts: Parts, phase: Any, state: State, grads: PyTree) -> Callable[[], Any]:
    """Memory and encoder of all nodes: the payloads before the exchange."""

    def own(key, grads, state):
        method, packing = parts.compressor.method, make_packing(grads)
        v, kept = compensated(method.memory, state.local.memory, grads, packing, phase == DENSE, False)
        return kept, encode(method.stages[phase][0], key, v, packing.layers, parts.nodes).payload

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
    return _in_place(run, tuple(arrays_of(state)[:2]), mean)


def _in_place(run: Callable, carried: PyTree, *args: Any) -> Callable[[], Any]:
    """`chained`, compiled ahead as a training step is. The carried state stays in its buffers."""
    shardings = jax.tree.map(lambda x: x.sharding, carried)
    program = jax.jit(run, donate_argnums=0, out_shardings=(shardings, None)).lower(carried, *args).compile()
    return chained(program, carried, *args)


def chained(run: Callable, state: Any, *args: Any) -> Callable[[], Any]:
    """A call of `run(state, *args) -> (state, other)` that passes each state on to the next call."""
    held = [jax.tree.map(jnp.copy, state)]

    def step():
        held[0], other = run(held[0], *args)
        return held[0], other

    return step
