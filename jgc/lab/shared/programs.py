"""A training step in two compiled programs, the nodes' gradients and the update, to time and plan each by itself.

Runs compile both as one program, or the gradients once for all phases (`jgc.make_step`).
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc.loops.local_loop import LocalState
from jgc.loops.loop import shardings_of
from jgc.loops.step_program import Arrays, Settings, make_update
from jgc.nodes.gradients import node_grads
from jgc.nodes.placement import SHARED, locally, placements_of
from jgc.training.steps.step import UNROLL, Batch, Parts, TrainState, before_compression, loss_of
from jgc.types import Array, PyTree


class Gradients(NamedTuple):
    """Each node's loss and gradients; leading axis [K] everywhere.

    Attributes:
      loss: f32[K], mean over the node's labels; with a second head plus 0.4 times that head's loss.
      accuracy: f32[K], likewise.
      own: the model state after this batch.
      grads: the gradient of the loss, with the structure of the parameters.
    """

    loss: Array
    accuracy: Array
    own: PyTree
    grads: PyTree


def make_gradients(parts: Parts, placements: PyTree = SHARED) -> Callable[..., Gradients]:
    """`(params, model_state, batch) -> Gradients`, without communication; `placements` are the parameters'."""
    loss, unroll = loss_of(parts.apply, parts.void), UNROLL[parts.config.unroll_nodes]
    gradients = node_grads(loss, parts.nodes, has_aux=True, unroll=unroll, local=True, placements=placements)

    def flat(params, model_state, batch):
        (loss, (after, accuracy)), grads = gradients(params, batch, model_state or {})
        return Gradients(loss, accuracy, after if model_state else model_state, grads)

    return flat


def compile_gradients(parts: Parts, state: TrainState | Arrays, batch: Batch) -> Callable[..., Gradients]:
    """Compile the nodes' gradients; a call with other shapes raises. With local steps each node has its parameters."""
    params, placements = state.params, placements_of(state.params)
    if isinstance(state, LocalState):
        params, placements = state.own, locally(placements)
    run = make_gradients(parts, placements)
    return jax.jit(run).lower(params, state.model_state, batch).compile()


def arrays_of(state: Any) -> Arrays:
    """The arrays of a train state that an update changes."""
    return Arrays(state.params, getattr(state, "opt_state", ()), state.compressor, state.model_state)


def compile_update(
    parts: Parts, phase: Hashable, arrays: Arrays, gradients: Gradients
) -> Callable[..., tuple[Arrays, Any]]:
    """Compile `(arrays, gradients, step) -> (arrays, metrics)` of one phase. It donates the arrays."""
    prepare = partial(before_compression, parts=parts)
    settings = Settings(loss_of, parts.compressor, parts.optimizer, parts.nodes, prepare=prepare, mean_aux=True)
    update = make_update(settings, phase, arrays)

    def run(arrays, gradients, step):
        loss, accuracy, own, grads = gradients
        return update(arrays, parts.key, step, loss, own, accuracy, grads)

    program = jax.jit(run, donate_argnums=0, out_shardings=(shardings_of(arrays), None))
    return program.lower(arrays, gradients, np.int32(0)).compile()
