"""The uncompressed baseline: the exact mean, by all-reduce, ring or parameter server.

The all-reduce takes the mean leaf by leaf and sends bf16 leaves in two bytes where the backend's
all-reduce keeps them (XLA on CPU does not), all others as f32, float64 rounded. The ring and the
server send one f32 vector.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jgc.compress.registry import Entry, check_idle, settings_of
from jgc.layout.pack import values_of
from jgc.method.compose import compose
from jgc.method.exchange import Codec, all_reduce, server
from jgc.method.memory import momentum_only, no_memory
from jgc.types import Compressor


@dataclasses.dataclass(frozen=True)
class Dense:
    """Settings of `dense`."""

    algorithm: Literal["psum", "ring", "server"] = "psum"
    """psum: the runtime's all-reduce; ring: by ppermute; server: gather and average"""
    momentum_correction: bool = False
    """momentum on each node; set it for a group of layers if other groups have momentum correction;
    the optimiser then has none"""
    momentum: float = 0.9
    """momentum of momentum correction, in [0, 1)"""


def identity() -> Codec:
    """All n values as f32."""
    return Codec(
        name="dense",
        linear=True,
        encode=lambda key, v, layers: {"dense": v},
        decode=lambda payload, layers: payload["dense"],
        mean=lambda payloads, layers: jnp.mean(payloads["dense"], axis=0),
        elements=values_of)


def dense(config: Dense | None = None, **overrides) -> Compressor:
    """The plain mean of all nodes' gradients.

    Raises:
      ValueError: an unknown algorithm, momentum outside [0, 1).

    Example:
      >>> dense(algorithm="ring").schedule[0].name
      'dense'

    Source: Li et al. 2014 (parameter server); Patarasuk and Yuan 2009 (ring all-reduce).
    """
    config = settings_of(Dense, config, overrides)
    if not config.momentum_correction:
        check_idle(config, "without momentum_correction=True", "momentum")
    memory = momentum_only(config.momentum) if config.momentum_correction else no_memory()
    in_vector = config.algorithm != "psum" or config.momentum_correction
    exchange = server() if config.algorithm == "server" else all_reduce(config.algorithm)
    return compose(identity(), memory, exchange, form="joined" if in_vector else "leaves")


METHOD = Entry("dense", Dense, dense, "uncompressed baseline", lossless={})
