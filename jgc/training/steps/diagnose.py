"""Diagnose steps: compare the aggregate with the true mean, in a program apart from the training step."""

from typing import Any

import numpy as np

from jgc.training.settings.config import Config
from jgc.training.steps.costs import PhaseCost
from jgc.training.steps.positions import deflate_bytes, entropy_bound_bits


def is_due(config: Config, number: int, cost: PhaseCost) -> bool:
    """Whether to diagnose a step, with local steps an exchange, of a phase: every so often from its first one on."""
    every = -(-config.diagnose_every // (config.local.every or 1))
    return every > 0 and cost.compresses and (number - cost.phase.start) % every == 0


def host_figures(figures: dict[str, Any]) -> dict[str, float]:
    """Scalars as floats; for positions the bytes sent, their entropy bound, and their bytes after DEFLATE."""
    scalars = {name: float(x) for name, x in figures.items() if not name.startswith("positions")}
    if "positions" in figures:
        positions, n = np.sort(np.asarray(figures["positions"])), int(figures["positions_n"])
        scalars["entropy_position_bytes"] = entropy_bound_bits(n, positions.size) / 8
        scalars["deflate_position_bytes"] = float(deflate_bytes(positions, n))
    return scalars
