"""The compiled halves of a step, and what they make a device send."""

import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc import comm
from jgc.training.step import Batch, Gradients, Parts, TrainState, make_gradients, make_update
from jgc.types import Sent


class Program(NamedTuple):
    """A compiled update.

    Attributes:
      run: `(state, gradients, step) -> (state, metrics)`; the state's buffers are given up.
      sent: its collectives, metrics and flags included.
      seconds: what compiling took.
    """

    run: Callable[..., tuple[TrainState, dict[str, Any]]]
    sent: tuple[Sent, ...]
    seconds: float


# Compiled ahead of the first call: a later call that does not fit raises instead of compiling again.


def compile_gradients(parts: Parts, state: TrainState, batch: Batch) -> Callable[..., Gradients]:
    """The nodes' gradients, for all phases."""
    return jax.jit(make_gradients(parts)).lower(state.params, state.batch_stats, batch).compile()


def compile_update(parts: Parts, phase: Hashable, state: TrainState, gradients: Gradients) -> Program:
    """What one phase makes of them."""
    started = time.perf_counter()
    shardings = jax.tree.map(lambda x: x.sharding, state)
    update = jax.jit(make_update(parts, phase), donate_argnums=0, out_shardings=(shardings, None))
    with comm.ledger() as sent:
        lowered = update.lower(state, gradients, np.int32(0))
    compiled = lowered.compile()
    return Program(compiled, tuple(sent), time.perf_counter() - started)
