"""Threshold-v: each node sends the values whose magnitude exceeds a fixed threshold, up to the size
of a buffer.

    v = r + g;  send v where |v| > threshold, the largest of each layer first;  r = v - sent

Source: Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
Interspeech; in this form "threshold-v" of Xu et al. 2021, "GRACE", ICDCS.

Differs from the paper
  1. Strom sends plus or minus the threshold, one bit per value. Here, as in GRACE, the values
     themselves are sent.
  2. The message has a fixed size, the share `capacity` of each layer, and all of it is sent and
     counted. An unused slot carries 0. Values that exceed the threshold but do not fit stay in the
     residual and count in `Info.overflow`. `Info.elements_sent` counts the slots in use.
  3. An uncompressed warm-up can come first (`warmup_steps`, 0 by default), as for the other sparse
     methods.
  4. Momentum correction (Lin et al. 2018) is a setting, off by default.
"""

import dataclasses

import jax.numpy as jnp

from jgc import comm
from jgc.compress.registry import FIRST_DENSE, Entry, settings_of
from jgc.compress.settings import Chunked, ErrorFeedback, memory_of, selector_of
from jgc.compress.sparse.topk import STROM, selected
from jgc.method import phases
from jgc.method.exchange import Codec, exchanged, gather, payload_sizes
from jgc.method.from_step import dense_step, from_step
from jgc.method.messages import to_all
from jgc.method.phases import DENSE
from jgc.selection.entries import Sparse, Unordered
from jgc.selection.selector import Selector
from jgc.types import Array, Compressor

SPARSE = "threshold"


@dataclasses.dataclass(frozen=True)
class ThresholdV(Chunked, ErrorFeedback):
    """Settings of `threshold_v`."""

    threshold: float = 0.01
    """magnitude of the accumulated gradient above which a value is sent, at least 0; depends on the
    model"""
    capacity: float = 0.01
    """size of the buffer as a share of each layer, in (0, 1]; all of it is sent, used or not"""
    min_values: int = 1
    """least number of slots per layer"""
    warmup_steps: int = 0
    """uncompressed steps before the first sparse one"""


def above(threshold: float, selector: Selector) -> Codec:
    """Values f32[slots] whose magnitude exceeds the threshold, 0 in unused slots, and distinct
    positions."""
    buffer = selected(selector)

    def encode(key, v, layers):
        payload = buffer.encode(key, v, layers)
        values = payload["values"]
        return {**payload, "values": jnp.where(jnp.abs(values) > threshold, values, 0)}

    return buffer._replace(name="threshold-v", encode=encode, encode_with_sent=None)


def threshold_v(config: ThresholdV | None = None, **overrides) -> Compressor:
    """Values above a threshold, with error feedback: each node sends a buffer of fixed size,
    gathered by all nodes.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: a threshold that is negative or infinite, capacity outside (0, 1], a memory that
        does not fit (see `jgc.compress.settings.memory_of`), negative `warmup_steps`, a selection
        that does not fit (see `make_selector`).

    Example:
      >>> [phase.name for phase in threshold_v(threshold=0.1, warmup_steps=100).schedule]
      ['dense', 'threshold']

    References:
      Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
      Interspeech; Xu et al. 2021, "GRACE: A Compressed Communication Framework for Distributed
      Machine Learning", ICDCS.
    """
    config = settings_of(ThresholdV, config, overrides)
    if not 0 <= config.threshold < float("inf"):
        raise ValueError(f"threshold must be finite and at least 0, got {config.threshold}")
    if not 0 < config.capacity <= 1:
        raise ValueError(
            "capacity must be in (0, 1] (0.01 has room for 1 % of the values), got "
            f"{config.capacity}"
        )
    selector = selector_of(config, config.capacity, config.min_values)
    codec = above(config.threshold, selector)

    def step(phase, key, v, state, layers, nodes):
        if phase == DENSE:
            return dense_step(v, state, nodes)
        result = exchanged(gather(), codec, key, v, layers, nodes)
        used = _above(result.sent.values, config.threshold)
        # An unused slot lies past the end: factor masking must not restart a velocity there.
        positions = jnp.where(result.sent.values != 0, result.sent.positions, v.size)
        sent = Unordered(positions, result.sent.values)
        return result._replace(
            sent=sent, elements=used, overflow=_above(v, config.threshold) - used
        )

    def figures(phase, key, v, g, step, state, layers, nodes):
        if not isinstance(step.sent, Sparse):
            return {}
        # of all slots
        own = comm.broadcast(selector.positions(v, layers), jnp.int32(0), nodes, "diagnose")
        return {"positions": own, "positions_n": jnp.int32(v.size)}

    return from_step(
        step,
        memory=memory_of(config),
        schedule=phases.in_sequence((DENSE, config.warmup_steps), (SPARSE, 0)),
        messages=lambda phase, layers, nodes: to_all(payload_sizes(codec, layers), nodes),
        figures=figures,
    )


def _above(x: Array, threshold: float) -> Array:
    return jnp.sum(jnp.abs(x) > threshold, dtype=jnp.int32)


GRACE = """@inproceedings{xu2021grace,
  title = {{GRACE}: A Compressed Communication Framework for Distributed Machine Learning},
  author = {Xu, Hang and Ho, Chen-Yu and Abdelmoniem, Ahmed M. and Dutta, Aritra and
    Bergou, El Houcine and Karatsenidis, Konstantinos and Canini, Marco and Kalnis, Panos},
  booktitle = {{IEEE} International Conference on Distributed Computing Systems},
  year = {2021},
}"""

METHOD = Entry(
    "threshold_v", ThresholdV, threshold_v, "Strom 2015; Xu et al. 2021",
    lossless={"threshold": 0.0,
        "capacity": 1.0},
    layers=FIRST_DENSE,
    citation=f"{STROM}\n{GRACE}",
)  # fmt: skip
