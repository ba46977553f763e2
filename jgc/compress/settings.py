"""Settings that methods share: the memory, the share of values that is sent, and the warm-up."""

import dataclasses

from jgc.compress.registry import check_idle
from jgc.compress.sparse.sparsity import Strategy, sparse_schedule
from jgc.method.ages import with_ages
from jgc.method.memory import Memory, make_memory
from jgc.selection.chunks import CHUNK
from jgc.selection.selector import SelectBy, Selector, make_selector
from jgc.types import Phase
from jgc.wire.values import ValueCode


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """Settings of methods with a memory."""

    momentum_correction: bool = False
    """accumulate each node's momentum (DGC), not plain gradients; the optimiser then has none"""
    momentum: float = 0.9
    """momentum of momentum correction, in [0, 1)"""
    factor_masking: bool = False
    """with momentum correction: the velocity of values just sent restarts from zero"""
    momentum_at_once: bool = False
    """with momentum correction: g / (1 - momentum) enters the residual in the first step, so no
    velocity continues after sending; half the state, no masking"""
    residual_dtype: str = "float32"
    """dtype of stored residuals and momentum: float32, or bfloat16, rounded at random"""
    residual_decay: float = 1.0
    """share of a residual that is kept from step to step, in (0, 1]; below 1 old residuals fade
    (SparseLoCo: 0.95). Not with momentum correction"""
    track_age: bool = False
    """count the steps that each value has waited, one i32 per value and node, for diagnose steps"""


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Settings of methods that select the largest values."""

    selection: SelectBy = "layer"
    """layer: the largest values of each layer, exactly; chunks: of every chunk, for accelerators"""
    chunk: int = CHUNK
    """with selection "chunks": values of a chunk, a power of two"""
    min_values: int = 1
    """least number of values sent per layer; with 1 a small layer can wait for hundreds of steps"""


@dataclasses.dataclass(frozen=True)
class Sparsifying(ErrorFeedback):
    """Settings of methods that send a share of the values."""

    alpha: float = 0.001
    """share of each layer's values that is sent, in (0, 1]"""
    min_values: int = 1
    """least number of values sent per layer; with 1 a small layer can wait for hundreds of steps"""
    warmup_steps: int = 0
    """uncompressed steps before the first sparse one; with strategy "exponential" the length of the
    ramp"""
    strategy: Strategy = "warmup"
    """warmup: dense for warmup_steps, then alpha; fixed: alpha; exponential: from 25 % to alpha"""


@dataclasses.dataclass(frozen=True)
class Selecting(Chunked, Sparsifying):
    """Settings of methods in which every node selects the positions that it sends."""

    value_code: ValueCode = "float32"
    """code of the values sent; the error of a shorter code stays in the residual"""


def memory_of(config: ErrorFeedback) -> Memory:
    """The memory that the settings describe; ValueError if they do not fit together."""
    if not config.momentum_correction:
        for field in dataclasses.fields(config):  # masking may be the method's default
            of_correction = field.name in ("factor_masking", "momentum_at_once")
            if of_correction and getattr(config, field.name) and not field.default:
                raise ValueError(f"{field.name}=True does nothing without momentum_correction=True")
        check_idle(config, "without momentum_correction=True", "momentum")
    if config.momentum_at_once:
        check_idle(config, "with momentum_at_once=True", "factor_masking")
    if not 0 < config.residual_decay <= 1:
        raise ValueError("residual_decay must be in (0, 1] (1 keeps all of a residual), got "
                         f"{config.residual_decay}")  # fmt: skip
    if config.momentum_correction and config.residual_decay != 1:
        raise ValueError(f"residual_decay={config.residual_decay} needs momentum_correction=False")
    memory = make_memory(
        config.momentum_correction, config.momentum, config.factor_masking,
        config.momentum_at_once, config.residual_dtype, config.residual_decay)
    return with_ages(memory) if config.track_age else memory


def selector_of(config: Chunked, share: float) -> Selector:
    """The selector that the settings describe, for a share of the values."""
    return make_selector(share, config.min_values, config.selection, config.chunk)


def schedule_of(config: Sparsifying, name: str = "top-k") -> tuple[Phase, ...]:
    """The phases of a sparse method; the last one is called `name`."""
    return sparse_schedule(config.strategy, config.alpha, config.warmup_steps, name)
