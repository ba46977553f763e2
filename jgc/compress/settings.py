"""Settings that methods share, each written once: the memory, the share that is sent, and from which step on."""

import dataclasses

from jgc.compress.sparse.sparsity import Strategy, sparse_schedule
from jgc.memory import Memory, make_memory
from jgc.method.ages import with_ages
from jgc.types import Phase
from jgc.wire.values import ValueCode


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """Settings of methods with a memory."""

    momentum_correction: bool = False
    """accumulate each node's own momentum (DGC) instead of plain gradients; the optimiser then has none"""
    momentum: float = 0.9
    """momentum of momentum correction, in [0, 1)"""
    factor_masking: bool = False
    """with momentum correction: the momentum of values just sent restarts from zero"""
    momentum_at_once: bool = False
    """with momentum correction: g / (1 - momentum) enters the residual at once, no velocity goes on after sending; half
    the state, no masking"""
    residual_dtype: str = "float32"
    """dtype in which residuals and momentum are kept"""
    track_age: bool = False
    """count the steps for which each value has waited, one integer a value on each node; diagnose steps show it"""


@dataclasses.dataclass(frozen=True)
class Sparsifying(ErrorFeedback):
    """Settings of methods that send a share of the values."""

    alpha: float = 0.001
    """share of each layer's values that is sent, in (0, 1]"""
    min_values: int = 1
    """values sent of each layer at least; with 1 a small layer can wait for hundreds of steps"""
    warmup_steps: int = 0
    """uncompressed steps before the first sparse one; with strategy "exponential" the length of the ramp"""
    strategy: Strategy = "warmup"
    """warmup: uncompressed for warmup_steps, then alpha; fixed: alpha at once; exponential: 25 % down to alpha"""


@dataclasses.dataclass(frozen=True)
class Selecting(Sparsifying):
    """Settings of methods in which every node sends values at positions of its own."""

    value_code: ValueCode = "float32"
    """how values are written; what a shorter code loses stays in the residual"""


def memory_of(config: ErrorFeedback) -> Memory:
    """The memory that the settings describe.

    Raises:
      ValueError: momentum outside [0, 1), or a dtype that is not floating-point.
    """
    memory = make_memory(
        config.momentum_correction,
        config.momentum,
        config.factor_masking,
        config.momentum_at_once,
        config.residual_dtype,
    )
    return with_ages(memory) if config.track_age else memory


def schedule_of(config: Sparsifying, name: str = "top-k") -> tuple[Phase, ...]:
    """The phases of a method, the last of which has `name`.

    Raises:
      ValueError: an unknown strategy, negative `warmup_steps`, alpha outside (0, 1].
    """
    return sparse_schedule(config.strategy, config.alpha, config.warmup_steps, name)
