"""EGC, entropy-based gradient compression: top-k per layer, k from the entropy of its gradient.

For each layer of n values on each node:

    v = r + u                      u: the node's momentum, or its gradient
    H                              entropy in bits of the histogram of v over N bins
    t = H / K                      share of the values to send
    tau                            magnitude of the (t n)-th largest value
    send v where |v| >= tau;  r = v - sent

Source: Kuang et al. 2020, "Entropy-based Gradient Compression for Distributed Deep Learning",
Algorithm 1, Sections IV-A and IV-C. Its Algorithm 2, which corrects the learning rate, is no part
of the compression.

Differs from the paper (`literal=True` follows the paper in 1 to 4)
  1. The threshold is selected among magnitudes. Algorithm 1 selects it among the signed values, but
     then sends values whose magnitude exceeds it: about twice as many as intended if a layer has
     both signs, and all of a layer whose threshold is negative.
  2. The last bin includes the largest value. Algorithm 1's bins are half open, and none includes
     it.
  3. If all values of a layer are equal, H = 0 and `min_values` of them are sent. In Algorithm 1 the
     bins then have no width, and the entropy is 0 / 0.
  4. Values equal to the threshold are sent, so the count is t n. Section IV-A sends only values
     above it.
  5. Entropy and threshold are measured in every step by default (`measure_every`). The paper
     measures once per epoch; residuals grow after a measurement, so ever more values exceed an old
     threshold.
  6. The message has a fixed size: room for the values that the largest entropy, log2(N) bits, asks
     for. All of it is sent and counted; an unused slot carries 0. Values that reach the threshold
     but do not fit stay in the residual and count in `Info.overflow`. `Info.elements_sent` counts
     the slots in use, as the paper does. With `literal=True` there is room for every value, because
     Algorithm 1 has no bound: use it for what it does to the training, not for bytes.
  7. Each layer sends at least `min_values`, 1 by default. The paper does not define a share of less
     than one value.
  8. Every node gathers all messages, because nodes select different positions. The paper uses an
     all-reduce.
  9. Momentum correction is a setting (`momentum_correction`), on by default as in the paper. Factor
     masking, which the paper does not mention, is off by default.
 10. With `selection="chunks"` the message has room for the largest values of every chunk of a
     layer; the t n largest of these are sent. Larger ones, for which their chunk has no room, wait
     in the residual.
 11. Entropy and threshold are measured on v, which Section IV-C compares with the threshold.
     Algorithm 1's input is called gradients.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.compress.registry import Entry, settings_of
from jgc.compress.settings import Chunked, ErrorFeedback, memory_of, selector_of
from jgc.compress.sparse import entropy
from jgc.compress.sparse.topk import selected
from jgc.layout.pack import layer_ids
from jgc.method import Layers, Step, dense_step, from_step, phases
from jgc.method.exchange import payload_sizes
from jgc.method.messages import to_all
from jgc.selection.entries import Sparse, nonzero
from jgc.types import Array, Compressor, State
from jgc.wire.values import decode_values, encode_values


@dataclasses.dataclass(frozen=True)
class Egc(Chunked, ErrorFeedback):
    """Settings of `egc`."""

    momentum_correction: bool = True
    """accumulate each node's momentum (DGC), not plain gradients; the optimiser then has none"""
    bins: int = 2
    """N, bins of the histogram of a layer's values, 2 to 1,024"""
    ratio: float = 1024.0
    """K, at least log2(N): a layer with an entropy of H bits sends the share H / K of its values"""
    measure_every: int = 1
    """steps between two measurements of entropy and threshold, at least 1; an application may
    replace 0 by the steps of an epoch (the paper's interval), the library refuses it"""
    warmup_steps: int = 0
    """uncompressed steps before the first compressed one; the paper has none"""
    # codes of a few bits have no 0 for unused slots
    value_code: Literal["float32", "float16", "bfloat16"] = "float32"
    """code of the values sent; the error of a shorter code stays in the residual"""
    literal: bool = False
    """Algorithm 1 to the letter: signed selection, half-open bins, strictly above the threshold;
    the message has room for all values, so only `elements_sent` shows what it saves"""


class Choice(NamedTuple):
    """Which of a node's slots are sent."""

    thresholds: Array  # f32[layers]
    used: Array  # bool[mu]
    reaching: Array  # i32[], values of all layers that should be sent, with or without a slot


def egc(config: Egc | None = None, **overrides) -> Compressor:
    """Entropy-based gradient compression: each node sends about n H / K values of f32[n]; all nodes
    gather them.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> [phase.name for phase in egc(warmup_steps=100).schedule]
      ['dense', 'entropy']

    Source: Kuang et al. 2020, Algorithm 1, Sections IV-A and IV-C.
    """
    config = settings_of(Egc, config, overrides)
    _check(config)
    share = math.log2(config.bins) / config.ratio  # the largest H / K of a layer
    # the message has slots for the values that an entropy of log2(N) bits asks for
    selector = selector_of(config, 1.0 if config.literal else share)
    buffer = selected(selector, config.value_code)

    def init(key, layers, nodes):  # sparse steps so far, thresholds
        return jnp.int32(0), jnp.full((len(layers),), jnp.inf, jnp.float32)

    def step(phase, key, v, state, layers, nodes):
        if phase == phases.DENSE:
            return dense_step(v, state, nodes)
        if not layers:
            return dense_step(v, state, nodes)._replace(shared=state.shared + 1)
        slots, positions = selector.counts(layers), selector.positions(v, layers)
        most = selector_of(config, share).counts(layers)
        choice = _choose(config, v, v[positions], layers, slots, most, state)
        used = jnp.sum(choice.used, dtype=jnp.int32)
        payload = encode_values(config.value_code, jnp.where(choice.used, v[positions], 0), slots)
        packed = {"positions": selector.pack(positions, layers), **payload}
        decoded = Sparse(positions, decode_values(config.value_code, payload, slots))
        return Step(
            mean=buffer.mean(comm.all_gather_dict(packed, nodes), layers),
            sent=nonzero(decoded, v.size),  # an unused slot carries 0
            shared=state.shared + 1, per_node=choice.thresholds,
            elements=used, overflow=choice.reaching - used)

    def figures(phase, key, v, g, step, state, layers, nodes):
        """Of node 0: its layers' mean entropy over values, the share of slots in use, positions."""
        if not isinstance(step.sent, Sparse):
            return {}
        bits = entropy.entropies(v, layers, config.bins, closed=not config.literal)
        sizes = np.array([layer.size for layer in layers], np.float32)
        of_node = {
            "entropy_bits": jnp.sum(jnp.nan_to_num(bits) * sizes) / v.size,
            "slots_used": jnp.float32(step.elements) / sum(selector.counts(layers)),
            "positions": selector.positions(v, layers)}  # fmt: skip
        sent = comm.broadcast_dict(of_node, jnp.int32(0), nodes, "diagnose")
        return sent | {"positions_n": jnp.int32(v.size)}

    return from_step(
        step, init=init, figures=figures, memory=memory_of(config),
        schedule=phases.in_sequence((phases.DENSE, config.warmup_steps), ("entropy", 0)),
        messages=lambda phase, layers, nodes: to_all(payload_sizes(buffer, layers), nodes))


def _check(config: Egc) -> None:
    if config.bins < 2:
        raise ValueError(
            f"bins must be at least 2, got {config.bins}: the entropy over one bin is always 0")
    if config.bins > entropy.MOST_BINS:
        raise ValueError(f"bins must be at most {entropy.MOST_BINS}, got {config.bins}: each costs "
                         "a pass over a layer")  # fmt: skip
    if not math.log2(config.bins) <= config.ratio < math.inf:
        least = f"log2(bins) = {math.log2(config.bins):g}"
        raise ValueError(f"ratio must be at least {least} (1024 sends at most {least} in 1024), "
                         f"got {config.ratio}")  # fmt: skip
    if not 1 <= config.measure_every < 2**31:
        raise ValueError(
            f"measure_every must be at least 1 step, and below 2**31, got {config.measure_every}; "
            "for one measurement per epoch give the number of steps of an epoch")


def _choose(
    config: Egc, v: Array, values: Array, layers: Layers, slots: tuple[int, ...],
    most: tuple[int, ...], state: State,
) -> Choice:  # fmt: skip
    """Choose which of the slots' values f32[mu] to send, at most `most` per layer unless literal;
    measures entropy and thresholds if that is due."""
    magnitudes, ids, old = jnp.abs(values), layer_ids(slots), state.local.per_node

    def above(limits, holds):
        """Choose all values above the thresholds, as far as slots go."""
        reaching = [jnp.sum(holds(jnp.abs(v[at : at + size]), limits[i]))
                    for i, (_, at, size, _) in enumerate(layers)]  # fmt: skip
        total = jnp.sum(jnp.stack(reaching), dtype=jnp.int32)
        return Choice(limits, holds(magnitudes, limits[ids]), total)

    def measured():
        bits = entropy.entropies(v, layers, config.bins, closed=not config.literal)
        # NaN if v is not finite: send the largest values, so that the loss shows it
        bits = bits if config.literal else jnp.nan_to_num(bits)
        count = entropy.wanted(bits, layers, config.ratio, most, config.min_values)
        if config.literal:
            return above(entropy.literal_thresholds(v, layers, count, most), jnp.greater)
        rank = entropy.ranks(magnitudes, slots)
        limits = entropy.thresholds(magnitudes, rank, count, slots)
        # by rank: exact if values are equal
        return Choice(limits, rank < count[ids], jnp.sum(count, dtype=jnp.int32))

    def reaches(magnitudes, limit):  # never 0: a layer of zeros has the threshold 0
        return (magnitudes >= limit) & (magnitudes > 0)

    if config.measure_every == 1:
        return measured()
    holds = jnp.greater if config.literal else reaches
    due = state.shared % config.measure_every == 0
    return jax.lax.cond(due, measured, lambda: above(old, holds))


METHOD = Entry("egc", Egc, egc, "Kuang et al. 2020", lossless=None,
               citation=("kuang2020entropy",))
