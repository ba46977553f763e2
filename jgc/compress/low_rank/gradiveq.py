"""GradiVeQ: slices of convolution gradients as codes in principal components, summed undecoded.

After an uncompressed warm-up come cycles of L_t sampling and L_c compressed steps. For the slices m
(of K values) of every convolution:

    sampling      all nodes get the mean gradient by 4-bit QSGD, store its first slice, add up all
    in between    mu_m = mean of slice m;  U_d = the first d principal components of the first
                  slice's samples, with the smallest d that holds 1 - lambda of their energy   (6)
    compressed    g'_nm = U_d^T (g_nm - mu_m)        on each node n                            (3)
                  g'_m  = mean over nodes of g'_nm   of codes, by a ring or an all-reduce      (4)
                  g_m   = U_d g'_m + mu_m            decompressed once                         (5)

With `algorithm="ring"` this is the paper's Algorithm 1: a node encodes the next segment while the
last one is sent. With `overlapped=False` it encodes all segments before it sends the first, to
compare with (Figure 2a). Other leaves (norms, biases, fully connected layers, kernels with more
than `max_slice` values per tap) are sent uncompressed, and are counted.

Limits. Every process computes the bases from the same samples, and all use the result of the first
(`jgc.nodes.placing.of_first_process`).

Source: Yu et al. 2018, "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation
in Distributed CNN Training", NeurIPS; equation and section numbers refer to it.

Differs from the paper
  1. Means instead of sums: mu, codes and samples refer to the mean over nodes, so (3) subtracts
     mu_m, not mu_m / N.
  2. All bases of a layer share one d, rounded up to a multiple of an eighth of the largest possible
     d (L_t - 1 or K): each set of sizes compiles to a separate program.
  3. An all-gather of codes replaces lines 10 to 14 of Algorithm 1, and all segments are
     decompressed together. XLA has no other way to know that all nodes hold equal values. The bytes
     are the same.
  4. `samples` is ours: bases can be computed from the newest sampling steps of several cycles, and
     of the warm-up, so that cycles can be short and bases large. mu is still the mean over the
     newest sampling phase.
  5. `error_feedback` is ours: the residual keeps the error of (3), and the first step of the next
     sampling phase sends it; codes cannot carry it, because the bases do not change within a cycle.
     The error of QSGD is not kept: its rounding is unbiased, and its residual would grow.
  6. A cycle has a fixed length. In the paper nodes may end it when the loss (7) has grown.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jgc import comm
from jgc.compress.dense import dense
from jgc.compress.low_rank import slices
from jgc.compress.low_rank.gradiveq_settings import Gradiveq, check, warn_of_wide
from jgc.compress.low_rank.slices import Rows, Sliced
from jgc.compress.quantized.qsgd import levels_of
from jgc.compress.quantized.quantize import codec_of, reduced_mean, segment_sizes
from jgc.compress.registry import Entry, settings_of
from jgc.layout.pack import values_of
from jgc.method import Layers, Step, from_step, per_layer, phases
from jgc.method.compressor import compressor_of
from jgc.method.exchange import exchanged, gather, payload_sizes
from jgc.method.memory import error_feedback, no_memory
from jgc.method.messages import both_ways, to_all
from jgc.nodes.placement import sharding_spec
from jgc.types import Array, Compressor, Nodes, Phase, State

SAMPLING, COMPRESSED = "sampling", "compressed"
BUCKET = 512  # values that share a scale in QSGD
EIGHTHS = 8  # d is rounded up to a multiple of (largest d) / 8


class Learned(NamedTuple):
    """The shared state: all that nodes have learned from the means."""

    samples: Rows  # per layer f32[bases, samples, K], first slices; the newest replaces the oldest
    taken: Array  # i32[], number of samples so far
    bases: Rows  # per layer f32[bases, d, K] with the largest d, one direction per row
    mean: Array  # f32[n], the sum of a sampling phase's mean gradients; in a compressed phase mu
    steps: Array  # i32[], summands of `mean` in a sampling phase


def coded(
    config: Gradiveq, d: tuple[int, ...], v: Array, learned: Learned,
    layers: tuple[Sliced, ...], nodes: Nodes,
) -> tuple[Array, Array]:  # fmt: skip
    """The decoded mean of all nodes' codes of v f32[n], and the part of v that counts as sent.

    Source: GradiVeQ paper, (3) to (5) and Algorithm 1.
    """
    size, x = slices.code_size(layers, d), v - learned.mean
    if not size:
        return v, v

    def code_of(start, stop):
        return slices.codes(layers, learned.bases, d, x, start, stop)  # (3)

    node_code = code_of(0, size)  # in a ring, used only for the residual
    if config.algorithm == "ring":
        segment = comm.segments_of(code_of, node_code, comm.ring_size(nodes), config.overlapped)
        code = comm.ring_mean_of_segments(segment, nodes, "codes")[:size]  # (4)
    else:
        code = comm.pmean(node_code, nodes, "codes")  # (4)
    mean = slices.decoded(layers, learned.bases, d, code) + learned.mean  # (5)
    if not config.error_feedback:
        return mean, v
    return mean, slices.decoded(layers, learned.bases, d, node_code) + learned.mean


def convolutions(config: Gradiveq) -> Compressor:
    """The method for convolution kernels."""
    bits = config.sampling_bits
    qsgd = codec_of(levels_of(bits, BUCKET, "max")) if bits else None

    def init(key, layers, nodes):
        cut = _sliced(config, layers)
        samples = slices.no_rows(cut, [config.kept_samples] * len(cut))
        bases = slices.no_rows(cut, _largest(config, cut))
        mean = jnp.zeros((values_of(layers),), jnp.float32)
        return Learned(samples, jnp.int32(0), bases, mean, jnp.int32(0)), ()

    def step(phase, key, v, state, layers, nodes):
        name, d = _parse(phase)
        cut, learned = _sliced(config, layers), state.shared
        if name == COMPRESSED:
            d = d or _largest(config, cut)
            mean, sent = coded(config, d, v, learned, cut, nodes)
            return Step(mean, sent, learned, elements=slices.code_size(cut, d))
        if name == phases.DENSE or qsgd is None:
            mean = comm.mean_by(config.algorithm)(v, nodes, "dense")
        elif config.algorithm == "ring":
            mean = reduced_mean(qsgd, BUCKET, "ring", key, v, nodes)[0]
        else:
            mean = exchanged(gather(), qsgd, key, v, layers, nodes).mean
        count = learned.samples[0].shape[1] if cut else 1
        samples = slices.add_sample(cut, learned.samples, mean, learned.taken % count)
        learned = learned._replace(samples=samples, taken=learned.taken + 1,
                                   mean=learned.mean + mean, steps=learned.steps + 1)  # fmt: skip
        return Step(mean, v, learned, elements=v.size)

    def messages(phase, layers, nodes):
        name, d = _parse(phase)
        if not layers:
            return ()
        if name == COMPRESSED:
            cut = _sliced(config, layers)
            return both_ways({"codes": 4.0 * slices.code_size(cut, d or _largest(config, cut))})
        if qsgd is None:
            return both_ways({"dense": 4.0 * values_of(layers)})
        if config.algorithm == "ring":
            return both_ways(segment_sizes(qsgd, BUCKET, values_of(layers), nodes.count))
        return to_all(payload_sizes(qsgd, layers), nodes)

    *before, last = phases.in_sequence(
        (phases.DENSE, config.warmup_steps), (SAMPLING, config.sampling_steps),
        (COMPRESSED, config.compressed_steps))
    return from_step(
        step, init=init, messages=messages,
        memory=error_feedback() if config.error_feedback else no_memory(),
        schedule=(*before, last._replace(value=(COMPRESSED, ()))),
        transition=lambda old, new, state, nodes: _transition(config, new, state, nodes),
        next_phase=lambda before, step, state, nodes: _next_phase(
            config, before, step, state.shared, nodes))


# --- between two phases ---------------------------------------------------------------------------


def _transition(config: Gradiveq, new: object, state: State, nodes: Nodes) -> State:
    """On entering a compressed phase, compute new bases and mu from the samples."""
    learned, bases = state.shared, state.shared.bases
    mean = jnp.zeros_like(learned.mean)
    if _parse(new)[0] == COMPRESSED:
        components = [slices.components(samples, learned.taken, config.centred, nodes)[1]
                      for samples in learned.samples]  # fmt: skip
        bases = tuple(
            jnp.zeros_like(basis).at[:, : x.shape[1]].set(x[:, : basis.shape[1]])
            for basis, x in zip(bases, components, strict=True))
        mean = learned.mean / jnp.maximum(learned.steps, 1) if config.centred else mean
    return state._replace(shared=learned._replace(bases=bases, mean=mean, steps=jnp.int32(0)))


def _next_phase(
    config: Gradiveq, before: Phase, step: int, learned: Learned, nodes: Nodes
) -> Phase:
    """Warm-up, then sampling and compressed phases in turn."""
    passed, name = step - before.start, _parse(before.value)[0]
    if name == SAMPLING and passed >= config.sampling_steps:
        return Phase(COMPRESSED, step, (COMPRESSED, _chosen(config, learned, nodes)))
    length = {phases.DENSE: config.warmup_steps, COMPRESSED: config.compressed_steps}
    if name in length and passed >= length[name]:
        return Phase(SAMPLING, step, SAMPLING)
    return before


def _parse(phase) -> tuple[str, tuple[int, ...]]:
    """The name of a phase, and d of every layer; an empty tuple means the largest d."""
    return phase if isinstance(phase, tuple) else (phase, ())


def _sliced(config: Gradiveq, layers: Layers) -> tuple[Sliced, ...]:
    cut = slices.plan(layers, config.slice_taps, config.max_slice, config.reuse)
    for layer in cut:
        if config.rank > layer.width:
            raise ValueError(f"rank must be at most K, which is {layer.width} for a layer, got "
                             f"{config.rank}")  # fmt: skip
    return cut


def _largest(config: Gradiveq, layers: tuple[Sliced, ...]) -> tuple[int, ...]:
    """The largest d of every layer: `rank`, or the directions that samples and slices have."""
    return tuple(config.rank or min(config.kept_samples - 1, layer.width) for layer in layers)


def _chosen(config: Gradiveq, learned: Learned, nodes: Nodes) -> tuple[int, ...]:
    """d of every layer by (6), rounded up to a multiple of an eighth of the largest d."""
    sizes = []
    for samples, basis in zip(learned.samples, learned.bases, strict=True):
        d, most = config.rank, basis.shape[1]
        if not d:
            energies, _ = slices.components(samples, learned.taken, config.centred, nodes)
            d = slices.dimensions(energies, config.loss)
        unit = -(-most // EIGHTHS)
        sizes.append(min(-(-d // unit) * unit, most))
    return tuple(sizes)


# --- the method -----------------------------------------------------------------------------------


def gradiveq(config: Gradiveq | None = None, **overrides) -> Compressor:
    """PCA codes of the slices of convolution gradients, averaged without decoding.

    Raises:
      ValueError: a setting out of range, or, when the method meets the model, a K below `rank`.

    Warns:
      UserWarning: in `init`, if there are no kernels of convolutions, or some wider than
        `max_slice`.

    Example:
      >>> cycle = {"warmup_steps": 50, "sampling_steps": 20, "compressed_steps": 40}
      >>> [phase.name for phase in gradiveq(**cycle).schedule]
      ['dense', 'sampling', 'compressed']

    Source: Yu, Lin, Narra, Li, Li, Kim, Schwing, Annavaram, Avestimehr 2018, "GradiVeQ", NeurIPS.
    """
    config = settings_of(Gradiveq, config, overrides)
    check(config)

    def is_other(path, leaf):
        return not slices.is_convolution(leaf, config.max_slice)

    others = dense(algorithm=config.algorithm)
    method = per_layer([(is_other, others)], default=convolutions(config)).method

    def check_and_warn(params):
        if any(tuple(sharding_spec(x)) for x in params.values()):
            raise ValueError(
                "gradiveq finds the sizes of its phases in whole vectors during the run, and "
                "cannot compress shards: use a method with a fixed schedule, or parameters that "
                "are not sharded")
        method.check(params)
        warn_of_wide(config, params)

    return compressor_of(method._replace(check=check_and_warn))


METHOD = Entry(
    "gradiveq", Gradiveq, gradiveq, "Yu et al. 2018", lossless=None,
    citation=("yu2018gradiveq",),
    exempt={"conservation": "the error of components and rounding is lost, as in the paper",
            "zeros": "mu, the mean of the samples, is added to every aggregate"})
