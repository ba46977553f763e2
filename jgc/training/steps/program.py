"""The two compiled programs of a step, and the collectives that they send."""

import time
import zlib
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Lowered

from jgc import comm
from jgc.training.processes.distributed import ALONE, Team
from jgc.training.steps.step import (
    Batch,
    Gradients,
    Parts,
    TrainState,
    make_gradients,
    make_update,
    placements_of_state,
)
from jgc.types import Sent


class Program(NamedTuple):
    """A compiled update.

    Attributes:
      run: `(state, gradients, step) -> (state, metrics)`; donates the state's buffers.
      sent: its collectives, those of metrics and flags included.
      seconds: compile time.
    """

    run: Callable[..., tuple[TrainState, dict[str, Any]]]
    sent: tuple[Sent, ...]
    seconds: float


# Compiled ahead of time: a later call with other shapes raises instead of compiling again.


def compile_gradients(parts: Parts, state: TrainState, batch: Batch, team: Team = ALONE) -> Callable[..., Gradients]:
    """Compile the nodes' gradients; one program serves all phases."""
    lowered = jax.jit(make_gradients(parts, placements_of_state(state))).lower(state.trained, state.own, batch)
    return _compile(lowered, "gradients", team)


def compile_update(
    parts: Parts, phase: Hashable, state: TrainState, gradients: Gradients, team: Team = ALONE
) -> Program:
    """Compile the update of one phase."""
    update = make_update(parts, phase, placements_of_state(state))
    return compile_program(update, (state, gradients, np.int32(0)), state, team, "update")


def compile_program(
    function: Callable[..., Any], args: tuple[Any, ...], state: TrainState, team: Team, name: str
) -> Program:
    """Compile `(state, ...) -> (state, outputs)`. It donates the state, and leaves each array where it was."""
    started = time.perf_counter()
    shardings = jax.tree.map(lambda x: x.sharding, state)
    with comm.ledger() as sent:
        lowered = jax.jit(function, donate_argnums=0, out_shardings=(shardings, None)).lower(*args)
    compiled = _compile(lowered, name, team)
    return Program(compiled, tuple(sent), time.perf_counter() - started)


def _compile(lowered: Lowered, name: str, team: Team) -> Callable[..., Any]:
    """Compile after checking that all processes have lowered the same text; wait until all have compiled."""
    if team.count > 1:
        text = lowered.as_text()
        team.require_equal({f"a program of the {name}, StableHLO of checksum": f"{zlib.crc32(text.encode()):08x}"})
    compiled = lowered.compile()
    team.wait()
    return compiled
