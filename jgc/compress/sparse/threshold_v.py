"""Threshold-v: each node sends the values whose magnitude exceeds a fixed threshold, up to the size
of a buffer.

    v = r + g;  send v where |v| > threshold, the largest of each layer first;  r = v - sent

Source: Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
Interspeech; in this form "threshold-v" of Xu et al. 2021, "GRACE", ICDCS.

Differs from the paper
  1. The values themselves are sent, as in GRACE. Strom sends plus or minus the threshold, one bit
     per value.
  2. The message has a fixed size, the share `capacity` of each layer, and all of it is sent and
     counted. An unused slot carries 0. Values that exceed the threshold but do not fit stay in the
     residual and count in `Info.overflow`. `Info.elements_sent` counts the slots in use.
  3. An uncompressed warm-up can come first (`warmup_steps`, 0 by default).
  4. Momentum correction (Lin et al. 2018) is a setting, off by default.
"""

import dataclasses

import jax.numpy as jnp

from jgc import comm
from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Chunked, ErrorFeedback, memory_of, selector_of
from jgc.compress.sparse.topk import selected
from jgc.method import dense_step, from_step, phases
from jgc.method.exchange import exchanged, gather, payload_sizes
from jgc.method.messages import to_all
from jgc.selection.entries import Sparse, nonzero
from jgc.types import Compressor


@dataclasses.dataclass(frozen=True)
class ThresholdV(Chunked, ErrorFeedback):
    """Settings of `threshold_v`."""

    threshold: float = 0.01
    """magnitude of the accumulated gradient above which a value is sent, at least 0"""
    capacity: float = 0.01
    """size of the buffer as a share of each layer, in (0, 1]; all of it is sent, used or not"""
    warmup_steps: int = 0
    """uncompressed steps before the first sparse one"""


def threshold_v(config: ThresholdV | None = None, **overrides) -> Compressor:
    """Values above a threshold, with error feedback: each node sends a buffer of fixed size,
    gathered by all nodes.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> [phase.name for phase in threshold_v(threshold=0.1, warmup_steps=100).schedule]
      ['dense', 'threshold']

    Source: Strom 2015, Interspeech; Xu et al. 2021, "GRACE", ICDCS.
    """
    config = settings_of(ThresholdV, config, overrides)
    if not 0 <= config.threshold < float("inf"):
        raise ValueError(f"threshold must be finite and at least 0, got {config.threshold}")
    if not 0 < config.capacity <= 1:
        raise ValueError("capacity must be in (0, 1] (0.01 has room for 1 % of the values), got "
                         f"{config.capacity}")  # fmt: skip
    selector = selector_of(config, config.capacity)
    buffer = selected(selector)

    def above(x):
        return jnp.abs(x) > config.threshold

    def encode(key, v, layers):
        payload = buffer.encode(key, v, layers)
        return payload | {"values": jnp.where(above(payload["values"]), payload["values"], 0)}

    codec = buffer._replace(name="threshold-v", encode=encode, encode_with_sent=None)

    def step(phase, key, v, state, layers, nodes):
        if phase == phases.DENSE:
            return dense_step(v, state, nodes)
        result = exchanged(gather(), codec, key, v, layers, nodes)
        values = result.sent.values
        used, exceeding = (jnp.sum(above(x), dtype=jnp.int32) for x in (values, v))
        # An unused slot carries 0: factor masking must not restart a velocity there.
        sent = nonzero(result.sent, v.size)
        return result._replace(sent=sent, elements=used, overflow=exceeding - used)

    def figures(phase, key, v, g, step, state, layers, nodes):
        if not isinstance(step.sent, Sparse):
            return {}
        positions = selector.positions(v, layers)  # of all slots
        return {"positions": comm.broadcast(positions, jnp.int32(0), nodes, "diagnose"),
                "positions_n": jnp.int32(v.size)}  # fmt: skip

    return from_step(
        step, figures=figures, memory=memory_of(config),
        schedule=phases.in_sequence((phases.DENSE, config.warmup_steps), ("threshold", 0)),
        messages=lambda phase, layers, nodes: to_all(payload_sizes(codec, layers), nodes))


METHOD = Entry(
    "threshold_v", ThresholdV, threshold_v, "Strom 2015; Xu et al. 2021", layers=FIRST_DENSE,
    lossless={"threshold": 0.0, "capacity": 1.0},
    citation=("strom2015scalable", "xu2021grace"))
