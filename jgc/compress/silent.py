"""A control for experiments, not a method: after the warm-up the compressed layers send nothing at all.

What a run gains with it comes from the layers that are sent dense and from the statistics of batch norm. A
compressed run has shown something only where it does clearly better.
"""

import dataclasses

import jax.numpy as jnp

from jgc.compress.dense import identity
from jgc.compress.settings import Remembering, first_dense, memory_of
from jgc.compress.sparse.topk import top_k
from jgc.layout.pack import values_of
from jgc.method import phases
from jgc.method.compose import Codec, compose_phases
from jgc.method.exchange import all_reduce, gather, nowhere
from jgc.types import Compressor


@dataclasses.dataclass(frozen=True)
class Silent(Remembering):
    """Settings of `silent`. The first and last layers are treated as by `lgc_ps`."""

    alpha: float = 0.001
    """share of the last layer's values that a node sends, in (0, 1]"""
    min_values: int = 1
    """values sent of the last layer's weights and biases at least"""
    warmup_steps: int = 200
    """uncompressed steps before the silence"""
    momentum_correction: bool = True
    """accumulate each node's own momentum (DGC) instead of plain gradients; the optimiser then has none"""
    last_layer: str | None = None
    """path pattern of layers sent as top-k; the model's last layer if not given, "" for none"""


def nothing() -> Codec:
    """An empty payload, which stands for zeros."""

    def zeros(payload, layers):
        return jnp.zeros((values_of(layers),), jnp.float32)

    return Codec("nothing", True, False, lambda key, v, layers: {}, zeros, zeros, lambda layers: 0)


def silent(config: Silent | None = None, **overrides) -> Compressor:
    """Dense for `warmup_steps`, then nothing.

    Raises:
      ValueError: negative `warmup_steps`, alpha outside (0, 1], momentum outside [0, 1).

    Example:
      >>> [phase.name for phase in silent(warmup_steps=100).schedule]
      ['dense', 'silent']
    """
    config = dataclasses.replace(config or Silent(), **overrides)
    memory = memory_of(config)
    dense = (identity(), all_reduce())
    schedule = phases.in_sequence(("dense", config.warmup_steps), ("silent", 0))
    rest = compose_phases({"dense": dense, "silent": (nothing(), nowhere())}, memory, schedule)
    sparse = (top_k(config.alpha, config.min_values), gather())
    last = compose_phases({"dense": dense, "silent": sparse}, memory, schedule)
    return first_dense(rest, config, config.last_layer, last)
