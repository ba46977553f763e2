"""A control for experiments, not a method: after the warm-up its layers send nothing.

A run with it still learns from layers that other methods send and from batch-norm statistics. A
compressed run shows a benefit only if it is clearly better than this control.
"""

import dataclasses

import jax.numpy as jnp

from jgc.compress.dense import identity
from jgc.compress.registry import FIRST_DENSE_LAST_TOP_K, Entry, check_idle, settings_of
from jgc.compress.settings import ErrorFeedback, memory_of
from jgc.layout.pack import values_of
from jgc.method import Codec, compose_phases, phases
from jgc.method.exchange import Stages, all_reduce, nowhere
from jgc.types import Compressor


@dataclasses.dataclass(frozen=True)
class Silent(ErrorFeedback):
    """Settings of `silent`."""

    warmup_steps: int = 200
    """uncompressed steps before the silence"""
    momentum_correction: bool = True
    """accumulate each node's momentum (DGC), not plain gradients; the optimiser then has none"""


def nothing() -> Codec:
    """An empty payload, which decodes to zeros."""

    def zeros(payload, layers):
        return jnp.zeros((values_of(layers),), jnp.float32)

    return Codec("nothing", True, lambda key, v, layers: {}, zeros, zeros, lambda layers: 0)


def silent(config: Silent | None = None, **overrides) -> Compressor:
    """Dense for `warmup_steps`, then nothing.

    Raises:
      ValueError: a setting outside its range, or settings of the memory that do not fit together.

    Example:
      >>> [phase.name for phase in silent(warmup_steps=100).schedule]
      ['dense', 'silent']
    """
    config = settings_of(Silent, config, overrides)
    check_idle(config, "where no single values are sent", "factor_masking")
    stages: Stages = {phases.DENSE: (identity(), all_reduce()), "silent": (nothing(), nowhere())}
    schedule = phases.in_sequence((phases.DENSE, config.warmup_steps), ("silent", 0))
    return compose_phases(stages, memory_of(config), schedule)


METHOD = Entry("silent", Silent, silent, "a control: sends nothing", lossless=None,
               layers=FIRST_DENSE_LAST_TOP_K)  # fmt: skip
