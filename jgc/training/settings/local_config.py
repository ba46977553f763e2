"""Settings of local steps: --local.every and what goes with it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jgc.training.errors import UserError


@dataclass(frozen=True)
class LocalConfig:
    """Local steps: every node takes steps by itself, and the nodes exchange pseudo-gradients (docs/local_steps.md).
    The method's phases and --record.every then count exchanges."""

    every: int | None = None
    """H, steps of each node between two exchanges; if not given, gradients are exchanged in every step"""
    outer_learning_rate: float = 0.7
    """of the outer optimiser, SGD with the aggregate of the pseudo-gradients"""
    outer_momentum: float = 0.9
    """its Nesterov momentum, in [0, 1); 0: none"""
    fragments: int = 1
    """parts of the parameters that are exchanged one after the other within H steps (Streaming DiLoCo)"""
    overlap: int = 0
    """steps from an exchange to the outer step with its result, from 0 to H - 1"""
    merge: float = 0.0
    """fraction of the node's parameters that it keeps when it takes over the shared ones, in [0, 1)"""


def check_local(config: Any) -> None:
    """Raise UserError for a setting that is out of range or does nothing; `jgc.local_steps` checks the others."""
    local = config.local
    if local.every is None:
        for field in dataclasses.fields(local):
            if (value := getattr(local, field.name)) != field.default:
                name = field.name.replace("_", "-")
                raise UserError(f"--local.{name} {value} does nothing without --local.every, the steps of a round")
        return
    if local.every < 1:
        raise UserError(f"--local.every must be at least 1 step, got {local.every}")
    first = max(1, local.every // max(1, local.fragments)) + max(0, local.overlap)  # the first fragment's
    if first > config.steps:
        raise UserError(
            f"the first outer step comes after {first} steps with --local.every {local.every} and overlap "
            f"{local.overlap}, and this run has {config.steps}: it would not train; give --steps {first} or more"
        )
    if not 0 < local.outer_learning_rate < float("inf"):
        raise UserError(f"--local.outer-learning-rate must be positive and finite, got {local.outer_learning_rate}")
    if not 0 <= local.outer_momentum < 1:
        raise UserError(f"--local.outer-momentum must be in [0, 1), got {local.outer_momentum}")
    if config.schedule == "validation":
        raise UserError("--schedule validation lowers one rate for all nodes, and with --local.every each node has a "
                        "rate: use cosine or a different schedule")  # fmt: skip
    if config.record.every and local.fragments > 1:
        raise UserError(f"--record.every needs --local.fragments 1, got {local.fragments}: a file has all layers")
