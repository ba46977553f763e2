"""A training step in two compiled programs, the nodes' gradients and the update, to time and plan each by itself.

Runs compile both as one program, or the gradients once for all phases (`jgc.make_step`).
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc.loops.local_loop import LocalState
from jgc.loops.step_program import Arrays, Settings, update_program
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


def compile_update(parts: Parts, phase: Hashable, arrays: Arrays, gradients: Gradients) -> Any:
    """Compile `(arrays, key, step, results) -> (arrays, metrics)` of one phase, see `results_of`."""
    prepare = partial(before_compression, parts=parts)
    settings = Settings(
        loss_of, parts.compressor, parts.optimizer, parts.nodes, prepare=prepare, mean_aux=True
    )
    program: Any = update_program(settings, phase, arrays)
    return program.lower(arrays, parts.key, np.int32(0), results_of(gradients)).compile()


def results_of(gradients: Gradients) -> tuple[PyTree, PyTree]:
    """As a step's update takes gradients: `((losses, (model_state, accuracies)), grads)`."""
    return (gradients.loss, (gradients.own, gradients.accuracy)), gradients.grads
