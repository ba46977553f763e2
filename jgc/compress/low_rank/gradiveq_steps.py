"""The steps of GradiVeQ on convolutions: sampling, coding, and the decision to sample again.

Equation numbers are those of the paper; see `gradiveq.py` for the symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.compress.dense import identity
from jgc.compress.low_rank import slices
from jgc.compress.low_rank.slices import Rows, Sliced
from jgc.compress.quantized.qsgd import levels_of
from jgc.compress.quantized.quantize import codec_of, ring_quantized_mean, ring_sizes
from jgc.layout.pack import values_of
from jgc.method import phases
from jgc.method.compose import Codec, Exchange, encoded, payload_sizes
from jgc.method.exchange import all_reduce, gather
from jgc.method.from_step import Layers, Step, from_step
from jgc.method.memory import error_feedback, no_memory
from jgc.method.messages import both_ways
from jgc.method.phases import DENSE
from jgc.nodes.placement import of_first_process
from jgc.types import Array, Compressor, Message, Nodes, Phase, PyTree, State

if TYPE_CHECKING:  # the settings' file imports this one
    from jgc.compress.low_rank.gradiveq import Gradiveq

SAMPLING, COMPRESSED = "sampling", "compressed"
BUCKET = 512  # values that share a scale in QSGD
EIGHTHS = 8  # d is rounded up to a multiple of (largest d) / 8


class Learned(NamedTuple):
    """What all nodes have learned from the means.

    Attributes:
      samples: per layer f32[bases, samples, K], first slices; a ring buffer, the newest replaces the oldest.
      taken: i32[], number of samples taken so far.
      bases: per layer f32[bases, d, K] with the largest d, one direction per row.
      mean: f32[n], in a sampling phase the sum of its mean gradients; in a compressed phase mu.
      steps: i32[], steps of this phase so far, without skipped ones.
      alarm: bool[], whether the loss of most nodes exceeds the limit.
    """

    samples: Rows
    taken: Array
    bases: Rows
    mean: Array
    steps: Array
    alarm: Array


class Losses(NamedTuple):
    """A node's own loss (7) in this cycle, f32[] each: its first value, and its running mean."""

    first: Array
    lately: Array


def convolutions(config: Gradiveq) -> Compressor:
    """The method for convolution kernels."""
    ways = uncompressed(config)

    def init(key, layers, nodes):
        cut = _sliced(config, layers)
        samples = slices.no_rows(cut, [kept_samples(config)] * len(cut))
        bases = slices.no_rows(cut, largest(config, cut))
        mean = jnp.zeros((values_of(layers),), jnp.float32)
        learned = Learned(samples, jnp.int32(0), bases, mean, jnp.int32(0), jnp.bool_(False))
        return learned, Losses(jnp.float32(0), jnp.float32(0)) if config.control_limit else ()

    def step(phase, key, v, state, layers, nodes):
        name, sizes = _parse(phase)
        cut, learned = _sliced(config, layers), state.shared
        if name == COMPRESSED:
            d = sizes or largest(config, cut)
            mean, sent = coded(config, d, v, learned, cut, nodes)
            learned, losses = _observed(config, v, sent, learned, state.local.own, nodes)
            return Step(mean, sent, learned, losses, slices.code_size(cut, d))
        sent = v
        if name == SAMPLING and config.error_feedback:
            # each of the `feedback_steps` steps sends an equal share of the residual and leaves the rest
            left = jnp.maximum(config.feedback_steps - learned.steps, 1).astype(jnp.float32)
            sent = v - state.local.memory * (1 - 1 / left)
        mean = ways[name].mean(key, sent, layers, nodes)
        return Step(mean, sent, _sampled(mean, learned, cut), state.local.own, v.size)

    def messages(phase, layers, nodes):
        name, sizes = _parse(phase)
        if not layers:
            return ()
        if name != COMPRESSED:
            return ways[name].messages(layers, nodes)
        cut = _sliced(config, layers)
        votes = both_ways({"control": 4.0}) if config.control_limit else ()
        return both_ways({"codes": 4.0 * slices.code_size(cut, sizes or largest(config, cut))}) + votes

    *before, last = phases.in_sequence(
        (DENSE, config.warmup_steps), (SAMPLING, config.sampling_steps), (COMPRESSED, config.compressed_steps)
    )
    return from_step(
        step,
        memory=error_feedback() if config.error_feedback else no_memory(),
        schedule=(*before, last._replace(value=(COMPRESSED, ()))),
        messages=messages,
        init=init,
        transition=lambda old, new, state, nodes: _transition(config, new, state, nodes),
        next_phase=lambda before, step, state, nodes: _next_phase(config, before, step, state.shared, nodes),
    )


def _transition(config: Gradiveq, new: object, state: State, nodes: Nodes) -> State:
    """On entering a compressed phase, compute new bases and mu from the samples. Every phase resets the counters."""
    learned, bases, mean = state.shared, state.shared.bases, jnp.zeros_like(state.shared.mean)
    if _parse(new)[0] == COMPRESSED:
        found = [_components(samples, learned.taken, config, nodes)[1] for samples in learned.samples]
        new = [directions[:, : b.shape[1]] for directions, b in zip(found, bases, strict=True)]
        bases = tuple(jnp.zeros_like(b).at[:, : x.shape[1]].set(x) for b, x in zip(bases, new, strict=True))
        mean = learned.mean / jnp.maximum(learned.steps, 1) if config.centred else mean
    learned = learned._replace(bases=bases, mean=mean, steps=jnp.int32(0), alarm=jnp.bool_(False))
    own = jax.tree.map(jnp.zeros_like, state.local.own)
    return State(learned, state.local._replace(own=own))


def _next_phase(config: Gradiveq, before: Phase, step: int, learned: Learned, nodes: Nodes) -> Phase:
    """Warm-up, then sampling and compressed phases in turn; an alarm ends a compressed phase early."""
    passed, name = step - before.start, _parse(before.value)[0]
    if name == SAMPLING and passed >= config.sampling_steps:
        return Phase(COMPRESSED, step, (COMPRESSED, chosen(config, learned, nodes)))
    looks = config.control_limit and passed and passed % config.control_every == 0
    if (name == DENSE and passed >= config.warmup_steps) or (
        name == COMPRESSED and (passed >= config.compressed_steps or (looks and bool(learned.alarm)))
    ):
        return Phase(SAMPLING, step, SAMPLING)
    return before


class Way(NamedTuple):
    """How gradients travel in steps without codes.

    Attributes:
      mean: `(key, v f32[n], layers, nodes) -> f32[n]`, equal on all nodes.
      messages: `(layers, nodes) -> logical messages`.
    """

    mean: Callable[[Array, Array, Layers, Nodes], Array]
    messages: Callable[[Layers, Nodes], tuple[Message, ...]]


def uncompressed(config: Gradiveq) -> dict[str, Way]:
    """How gradients travel in the phases without codes: in full precision, or by QSGD."""
    exact = _through(identity(), all_reduce(config.algorithm))
    if not config.sampling_bits:
        return {DENSE: exact, SAMPLING: exact}
    codec = codec_of(levels_of(config.sampling_bits, BUCKET, "max"))
    if config.algorithm == "psum":
        return {DENSE: exact, SAMPLING: _through(codec, gather())}
    requantised = Way(
        lambda key, v, layers, nodes: ring_quantized_mean(codec, BUCKET, key, v, nodes)[0],
        lambda layers, nodes: both_ways(ring_sizes(codec, BUCKET, values_of(layers), nodes.count)),
    )
    return {DENSE: exact, SAMPLING: requantised}


def _through(codec: Codec, exchange: Exchange) -> Way:
    def mean(key, v, layers, nodes):
        return exchange.run([encoded(codec, key, v, layers, nodes)], nodes)[0]

    return Way(mean, lambda layers, nodes: exchange.messages(payload_sizes(codec, layers), nodes))


def _parse(phase) -> tuple[str, tuple[int, ...]]:
    """The name of a phase, and d of every layer; an empty tuple means the largest d."""
    return phase if isinstance(phase, tuple) else (phase, ())


def _sliced(config: Gradiveq, layers: Layers) -> tuple[Sliced, ...]:
    cut = slices.plan(layers, config.slice_size, config.slice_taps, config.max_slice, config.reuse)
    for layer in cut:
        if config.rank > layer.width:
            raise ValueError(f"rank must be at most K, which is {layer.width} for a layer, got {config.rank}")
    return cut


# --- d ------------------------------------------------------------------------------------------------------------


def largest(config: Gradiveq, layers: tuple[Sliced, ...]) -> tuple[int, ...]:
    """The largest d of every layer: `rank`, or as many directions as samples and slices have."""
    return tuple(config.rank or min(kept_samples(config) - 1, layer.width) for layer in layers)


def kept_samples(config: Gradiveq) -> int:
    """Number of steps from which bases are computed."""
    return config.samples or config.sampling_steps


def chosen(config: Gradiveq, learned: Learned, nodes: Nodes) -> tuple[int, ...]:
    """d of every layer by (6), from the samples, rounded up to a multiple of an eighth of the largest d."""
    out = []
    for samples, basis in zip(learned.samples, learned.bases, strict=True):
        most = basis.shape[1]
        d = config.rank or slices.dimensions(_components(samples, learned.taken, config, nodes)[0], config.loss)
        unit = -(-most // EIGHTHS)
        out.append(min(-(-d // unit) * unit, most))
    return tuple(out)


def _components(samples: Array, taken: Array, config: Gradiveq, nodes: Nodes) -> tuple[np.ndarray, np.ndarray]:
    """Energies and directions of a layer's samples, found on one device of each process; all use the first one's."""
    count = max(min(int(taken), samples.shape[1]), 1)
    energies, directions = _principal(np.asarray(samples), np.float32(count), config.centred)
    return of_first_process(energies, nodes), of_first_process(directions, nodes)


_principal = jax.jit(slices.principal, static_argnums=2)


# --- steps ----------------------------------------------------------------------------------------------------------


def coded(
    config: Gradiveq, d: tuple[int, ...], v: Array, learned: Learned, layers: tuple[Sliced, ...], nodes: Nodes
) -> tuple[Array, Array]:
    """The decoded mean over nodes of the codes of v f32[n], and the part of v that counts as sent, each f32[n].

    Source: GradiVeQ paper, (3) to (5) and Algorithm 1.
    """
    size, x = slices.code_size(layers, d), v - learned.mean
    if not size:
        return v, v
    own = slices.codes(layers, learned.bases, d, x, 0, size)  # in a ring, used only for the residual and the loss
    if config.algorithm == "ring":
        places = comm.ring_size(nodes)
        width = -(-size // places)

        def segment(place):
            code = slices.codes(layers, learned.bases, d, x, place * width, (place + 1) * width)
            return jnp.pad(code, (0, width - code.size))  # the last segment is padded with zeros

        everything = jax.lax.optimization_barrier(jnp.pad(own, (0, places * width - size)))

        def segment_of(i):
            if not config.overlapped:
                return jax.lax.dynamic_slice_in_dim(everything, i * width, width)
            return jax.lax.switch(i, [partial(segment, place) for place in range(places)])

        code = comm.ring_mean_of_segments(segment_of, nodes, "codes")[:size]
    else:
        code = comm.pmean(own, nodes, "codes")
    mean = slices.decoded(layers, learned.bases, d, code) + learned.mean
    if not (config.error_feedback or config.control_limit):
        return mean, v
    return mean, slices.decoded(layers, learned.bases, d, own) + learned.mean


def _sampled(mean: Array, learned: Learned, layers: tuple[Sliced, ...]) -> Learned:
    """Add one sample, which replaces the oldest."""
    count = learned.samples[0].shape[1] if layers else 1
    samples = slices.add_sample(layers, learned.samples, mean, learned.taken % count)
    return learned._replace(
        samples=samples, taken=learned.taken + 1, mean=learned.mean + mean, steps=learned.steps + 1
    )


def _observed(
    config: Gradiveq, v: Array, sent: Array, learned: Learned, losses: PyTree, nodes: Nodes
) -> tuple[Learned, PyTree]:
    """Add this step's loss to the node's losses; set the alarm if most nodes exceed the limit."""
    step = learned.steps + 1
    learned = learned._replace(steps=step)
    if not config.control_limit:
        return learned, losses
    energy = jnp.vdot(v, v)
    loss = jnp.where(energy > 0, jnp.vdot(v - sent, v - sent) / jnp.where(energy > 0, energy, 1), 0.0)
    begins = step <= config.control_every
    share = jnp.where(begins, 1 / step.astype(jnp.float32), 1 / config.control_every)
    lately = losses.lately + share * (loss - losses.lately)
    first = jnp.where(begins, lately, losses.first)
    exceeds = ~begins & (lately > config.control_limit * first)
    votes = comm.psum(exceeds.astype(jnp.int32), nodes, "control")
    return learned._replace(alarm=2 * votes > nodes.count), Losses(first, lately)
