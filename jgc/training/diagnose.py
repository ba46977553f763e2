"""Diagnose steps: every so often the aggregate is held against the true mean, apart from the training step."""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from jgc.training.costs import Costs
from jgc.training.step import Gradients, Parts, TrainState, make_compare
from jgc.types import Phase
from jgc.wire import elias_fano
from jgc.wire.positions import deflate_bytes, entropy_bound_bits


class Diagnosis:
    """Runs the compressor's `diagnose` in the phases that compress.

    Args:
      parts: of the run.
      costs: by the phase's value; may be added to.
      every: steps between two of them, 0 for none; the first is a phase's first step.
    """

    def __init__(self, parts: Parts, costs: Costs, every: int):
        self.every = every
        self._parts = parts
        self._costs = costs
        self._compare: dict[Hashable, Any] = {}

    def is_due(self, step: int, phase: Phase) -> bool:
        """Whether the update of that step is to be looked at first."""
        return self.every > 0 and self._costs[phase.value].compresses and (step - phase.start) % self.every == 0

    def run(self, step: int, phase: Phase, state: TrainState, gradients: Gradients) -> dict[str, float]:
        """The figures of the update that comes next; the state stays as it is."""
        if phase.value not in self._compare:
            self._compare[phase.value] = jax.jit(make_compare(self._parts, phase.value))
        figures = jax.device_get(self._compare[phase.value](state, gradients, np.int32(step)))
        return host_figures(figures)


def host_figures(figures: dict[str, Any]) -> dict[str, float]:
    """Scalars as floats; of positions the bytes that are sent, that no code can save, and that DEFLATE leaves."""
    scalars = {name: float(x) for name, x in figures.items() if not name.startswith("positions")}
    if "positions" in figures:
        positions, n = np.sort(np.asarray(figures["positions"])), int(figures["positions_n"])
        scalars["position_bytes"] = 4.0 * elias_fano.words(n, positions.size)
        scalars["entropy_position_bytes"] = entropy_bound_bits(n, positions.size) / 8
        scalars["deflate_position_bytes"] = float(deflate_bytes(positions, n))
    return scalars
