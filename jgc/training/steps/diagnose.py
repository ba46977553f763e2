"""Diagnose steps: compare the aggregate with the true mean, in a program apart from the training step."""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from jgc.training.steps.costs import Costs
from jgc.training.steps.step import Gradients, Parts, TrainState, make_compare, placements_of_state
from jgc.types import Phase
from jgc.wire.positions import deflate_bytes, entropy_bound_bits


class Diagnosis:
    """The compressor's `diagnose`, compiled once a phase, for phases that compress.

    Args:
      parts: of the run.
      costs: by the phase's value; the loop adds phases.
      every: interval in steps, with local steps in exchanges, from a phase's first one on; 0 for none.
    """

    def __init__(self, parts: Parts, costs: Costs, every: int):
        self.every = every
        self._parts = parts
        self._costs = costs
        self._compare: dict[Hashable, Any] = {}

    def is_due(self, step: int, phase: Phase) -> bool:
        """Whether to diagnose before the update of this step."""
        return self.every > 0 and self._costs[phase.value].compresses and (step - phase.start) % self.every == 0

    def run(self, step: int, phase: Phase, state: TrainState, gradients: Gradients) -> dict[str, float]:
        """Figures of the coming update; does not change the state."""
        if phase.value not in self._compare:
            self._compare[phase.value] = jax.jit(make_compare(self._parts, phase.value, placements_of_state(state)))
        figures = jax.device_get(self._compare[phase.value](state, gradients, np.int32(step)))
        return host_figures(figures)


def host_figures(figures: dict[str, Any]) -> dict[str, float]:
    """Scalars as floats; for positions the bytes sent, their entropy bound, and their bytes after DEFLATE."""
    scalars = {name: float(x) for name, x in figures.items() if not name.startswith("positions")}
    if "positions" in figures:
        positions, n = np.sort(np.asarray(figures["positions"])), int(figures["positions_n"])
        scalars["entropy_position_bytes"] = entropy_bound_bits(n, positions.size) / 8
        scalars["deflate_position_bytes"] = float(deflate_bytes(positions, n))
    return scalars
