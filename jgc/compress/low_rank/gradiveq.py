"""GradiVeQ: slices of convolution gradients in the coordinates of their principal components, which can be summed.

After an uncompressed warm-up, cycles of L_t sampling and L_c compressed steps, for the slices m of every convolution:

    sampling      all nodes get the mean gradient by 4-bit QSGD and keep its first slice, and the sum of every slice
    in between    mu_m = mean of slice m;  U_d = the d first principal components of the first slice's samples,
                  d the fewest that hold 1 - lambda of their energy                                            (6)
    compressed    g'_nm = U_d^T (g_nm - mu_m)        on each node n                                           (3)
                  g'_m  = mean over nodes of g'_nm   summed as it is, by a ring or an all-reduce              (4)
                  g_m   = U_d g'_m + mu_m            decompressed once                                        (5)

With `algorithm="ring"` this is the paper's Algorithm 1: a node makes the code of the next segment while the last one
travels. Other leaves (norms, biases, fully connected layers, kernels with more than `max_slice` values a place) go
uncompressed or by QSGD, and are counted.

Limits. Nodes find the same bases from the same samples by themselves: the same kind of device and the same versions, as
programs of several processes need anyway.

Source: Yu et al. 2018, "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
Training", NeurIPS; equation and section numbers are those of that paper.

Differs from the paper
  1. Means in place of sums: mu, codes and samples are of the mean over nodes, so (3) takes off mu_m and not mu_m / N.
  2. One d for all bases of a layer, rounded up to eighths of the largest that is possible, L_t - 1 or K: each set of
     sizes is a program of its own to compile.
  3. Summed segments come round by an all-gather of codes and are decompressed together, in place of lines 10 to 14 of
     Algorithm 1: XLA has no other way to know that all nodes hold the same. Bytes are the same.
  4. The loss (7) that nodes watch is taken relative to the node's gradient, smoothed, and its limit is a multiple of
     what the node saw at the beginning of the cycle: gradients shrink in training, and what a local gradient loses is
     mostly its noise, far above lambda, which is of the aggregate.
  5. `samples` is ours: bases can be made from the newest sampling steps of several cycles, and of the warm-up, so that
     cycles can be short and bases large.
  6. `error_feedback` is ours: what (3) loses is kept. Codes cannot carry it, for the bases stay as they are; it goes
     out in the next sampling phase, at once or over `feedback_steps` in equal shares. What QSGD loses is not kept:
     its rounding is unbiased, and feedback of that grows without bound.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.compress.dense import identity
from jgc.compress.low_rank import slices as _slices
from jgc.compress.low_rank.slices import Rows, Sliced
from jgc.compress.quantized.qsgd import levels_of, qsgd
from jgc.compress.quantized.quantize import around, ring_sizes
from jgc.layout.pack import Packing, make_packing, pack, unpack
from jgc.memory import error_feedback, no_memory, take_in
from jgc.method import phases
from jgc.method.compose import Codec, Exchange, Item, compose, make_info, payload_sizes
from jgc.method.diagnose import compare
from jgc.method.exchange import all_reduce, both_ways, gather
from jgc.method.guard import guard
from jgc.method.per_layer import per_layer
from jgc.nodes import per_node
from jgc.types import Array, Compressor, Message, Nodes, Phase, PyTree, State, Wire

DENSE, SAMPLING, COMPRESSED = "dense", "sampling", "compressed"
BUCKET = 512  # values with one scale in QSGD
EIGHTHS = 8  # d is rounded up to a multiple of the largest d / 8


@dataclasses.dataclass(frozen=True)
class Gradiveq:
    """Settings of `gradiveq`."""

    loss: float = 0.01
    """lambda, the share of the samples' energy that may be lost, in [0, 1)"""
    rank: int = 0
    """d of every layer; 0 to choose it by `loss`"""
    slice_taps: int = 3
    """K is so many times filters * depth, if `slice_size` is 0"""
    slice_size: int = 0
    """K of every layer, a multiple of its filters * depth; 0 for `slice_taps`"""
    max_slice: int = 65_536
    """the largest K; kernels with more values at one place are not compressed"""
    reuse: int = 0
    """s, how many slices of a layer share the first one's basis; 0 for all"""
    warmup_steps: int = 2500
    """uncompressed steps before the first cycle"""
    sampling_steps: int = 100
    """L_t, steps of a cycle from whose gradients bases are made, at least 2; 1 will do with `samples`"""
    compressed_steps: int = 400
    """L_c, steps of a cycle with codes, at least 1"""
    samples: int = 0
    """of how many of the newest steps without codes bases are made; 0 for those of the cycle, as in the paper"""
    sampling_bits: int = 4
    """QSGD's in sampling steps, 2 to 8; 0 for full precision"""
    others: Literal["dense", "qsgd"] = "dense"
    """how leaves that are no convolutions travel"""
    algorithm: Literal["psum", "ring"] = "psum"
    """what sums the codes: the runtime's all-reduce, or the paper's ring by `ppermute`; QSGD goes round a ring, too"""
    centred: bool = True
    """take mu, the mean of the samples, off first, as the paper does; if not, mu is 0 in (3), (5) and the components"""
    error_feedback: bool = False
    """add what was lost to the gradients of the next sampling phase; not with `centred`"""
    feedback_steps: int = 1
    """sampling steps over which that goes out in equal shares"""
    control_limit: float = 0.0
    """back to sampling when most nodes lose more than so many times what they lost first; 0 for never"""
    control_every: int = 10
    """compressed steps between two looks at that, and those in which nodes see what they lose first"""


class Learned(NamedTuple):
    """What all nodes have learned from the means.

    Attributes:
      samples: of each layer f32[bases, samples, K], first slices, the newest in the place of the oldest.
      taken: i32[], how many samples there have been.
      bases: of each layer f32[bases, d, K] with the largest d, one direction a row.
      mean: f32[n], the sum of this cycle's samples, then mu.
      steps: i32[], of this phase so far, without those that were skipped.
      alarm: bool[], most nodes lose more than the limit.
    """

    samples: Rows
    taken: Array
    bases: Rows
    mean: Array
    steps: Array
    alarm: Array


class Watch(NamedTuple):
    """What a node knows of the losses (7) of its own gradients in this cycle, f32[] each: of the first, and lately."""

    first: Array
    lately: Array


class Local(NamedTuple):
    """A node's own state: the residual f32[n], or () without feedback, and the watch, or () without control."""

    residual: PyTree
    watch: PyTree


def gradiveq(config: Gradiveq | None = None, **overrides) -> Compressor:
    """PCA codes of the slices of convolution gradients, averaged as they are.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: a setting out of range, or, when the method meets the model, a K that is no multiple of filters *
        depth of a layer or below the `rank` given.

    Example:
      >>> [phase.name for phase in gradiveq(warmup_steps=50, sampling_steps=20, compressed_steps=40).schedule]
      ['dense', 'sampling', 'compressed']

    References:
      Yu, Lin, Narra, Li, Li, Kim, Schwing, Annavaram, Avestimehr 2018, "GradiVeQ", NeurIPS.
    """
    config = dataclasses.replace(config or Gradiveq(), **overrides)
    check(config)
    uncoded = compose(identity(), no_memory(), all_reduce(config.algorithm))
    by_qsgd = qsgd(bits=4, bucket=BUCKET, exchange="ring" if config.algorithm == "ring" else "gather")

    def goes_otherwise(path, leaf):
        return not _slices.is_convolution(leaf, config.max_slice)

    rest = by_qsgd if config.others == "qsgd" else uncoded
    return per_layer([(goes_otherwise, rest)], default=convolutions(config))


def check(config: Gradiveq) -> None:
    """Raise ValueError for a setting out of range."""
    if not 0 <= config.loss < 1:
        raise ValueError(f"loss (lambda) must be in [0, 1), got {config.loss}")
    if config.sampling_bits not in (0, *range(2, 9)):
        raise ValueError(f"sampling_bits must be 0 (full precision) or 2 to 8, got {config.sampling_bits}")
    if config.others not in ("dense", "qsgd"):
        raise ValueError(f"others must be 'dense' or 'qsgd', got {config.others!r}")
    if config.algorithm not in comm.MEANS:
        raise ValueError(f"algorithm must be 'psum' or 'ring', got {config.algorithm!r}")
    least = {"sampling_steps": 1 if config.samples else 2, "compressed_steps": 1, "slice_taps": 1, "max_slice": 1,
             "control_every": 1, "feedback_steps": 1}  # fmt: skip
    for name, bound in {**least, "rank": 0, "samples": 0, "slice_size": 0, "reuse": 0, "control_limit": 0}.items():
        if not getattr(config, name) >= bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(config, name)}")
    if config.feedback_steps > config.sampling_steps:
        raise ValueError(
            f"feedback_steps must be at most sampling_steps = {config.sampling_steps}, got {config.feedback_steps}"
        )
    fewest = max(2, config.sampling_steps)
    if config.samples and config.samples < fewest:
        raise ValueError(f"samples must be 0 (those of a cycle) or at least {fewest}, got {config.samples}")
    if config.rank > kept_samples(config) - 1:
        raise ValueError(
            f"rank must be at most the samples - 1 = {kept_samples(config) - 1} (so many directions do they have), "
            f"got {config.rank}"
        )
    if config.error_feedback and config.centred:
        raise ValueError(
            "error_feedback must be False with centred True, got True: samples hold what is given back, and their mean "
            "would be added in every compressed step"
        )
    if config.slice_size and config.rank > config.slice_size:
        raise ValueError(f"rank must be at most slice_size = {config.slice_size}, got {config.rank}")


def convolutions(config: Gradiveq) -> Compressor:
    """The method for leaves that are convolutions."""
    memory = error_feedback() if config.error_feedback else no_memory()
    ways = uncompressed(config)

    def init(key, params, nodes):
        packing = make_packing(params)
        layers = _layers(config, packing)
        samples = _slices.no_rows(layers, [kept_samples(config)] * len(layers))
        bases = _slices.no_rows(layers, largest(config, layers))
        learned = Learned(samples, jnp.int32(0), bases, jnp.zeros((packing.size,), jnp.float32), jnp.int32(0),
                          jnp.bool_(False))  # fmt: skip
        watch = Watch(jnp.float32(0), jnp.float32(0)) if config.control_limit else ()
        local = jax.tree.map(lambda x: per_node(x, nodes), Local(memory.init(packing.size), watch))
        return State(learned, local)

    def aggregate(phase, key, grads, state, nodes):
        packing, (name, sizes) = make_packing(grads), _parse(phase)
        layers, learned, local = _layers(config, packing), state.shared, state.local
        v, kept = take_in(memory, local.residual, grads, packing, name == DENSE)
        if name == COMPRESSED:
            d = sizes or largest(config, layers)
            mean, sent = coded(config, d, v, learned, layers, nodes)
            learned, watch = _watched(config, v, sent, learned, local.watch, nodes)
            elements = _slices.code_size(layers, d)
        else:
            held = _held_back(config, local.residual, learned.steps) if name == SAMPLING and memory.conserves else 0.0
            sent = v - held
            mean = ways[name].mean(key, sent, packing, nodes)
            learned, watch, elements = _sampled(mean, learned, layers), local.watch, packing.size
        local = Local(memory.keep(kept, v, sent, name == DENSE), watch)
        info = make_info(memory.residual(local.residual), elements)
        return unpack(mean, packing), State(learned, local), info

    def transition(old, new, state, nodes):
        learned, bases, mean = state.shared, state.shared.bases, jnp.zeros_like(state.shared.mean)
        if _parse(new)[0] == COMPRESSED:
            every = zip(learned.samples, bases, strict=True)
            bases = tuple(_basis(samples, learned.taken, basis, config) for samples, basis in every)
            mean = learned.mean / jnp.maximum(learned.steps, 1) if config.centred else mean
        learned = learned._replace(bases=bases, mean=mean, steps=jnp.int32(0), alarm=jnp.bool_(False))
        local = state.local._replace(watch=jax.tree.map(jnp.zeros_like, state.local.watch))
        return State(learned, local)

    def next_phase(before: Phase, step: int, state: State, nodes: Nodes) -> Phase:
        passed, name = step - before.start, _parse(before.value)[0]
        if name == SAMPLING and passed >= config.sampling_steps:
            return Phase(COMPRESSED, step, (COMPRESSED, chosen(config, state.shared)))
        looks = config.control_limit and passed and passed % config.control_every == 0
        if (name == DENSE and passed >= config.warmup_steps) or (
            name == COMPRESSED and (passed >= config.compressed_steps or (looks and bool(state.shared.alarm)))
        ):
            return Phase(SAMPLING, step, SAMPLING)
        return before

    def wire(phase, shapes, nodes):
        packing, (name, sizes) = make_packing(shapes), _parse(phase)
        layers = _layers(config, packing)
        if not layers:
            return Wire((), ())
        if name == COMPRESSED:
            code = 4.0 * _slices.code_size(layers, sizes or largest(config, layers))
            votes = both_ways({"control": 4.0}) if config.control_limit else ()
            return Wire(both_ways({"codes": code}) + votes, ())
        return Wire(ways[name].messages(packing, nodes), ())

    def diagnose(phase, key, grads, state, nodes):
        g = pack(grads, make_packing(grads))
        aggregated = aggregate(phase, key, grads, state, nodes)[0]
        return compare(pack(aggregated, make_packing(grads)), g, g, nodes, everything=True)

    *before, last = phases.in_sequence(
        (DENSE, config.warmup_steps), (SAMPLING, config.sampling_steps), (COMPRESSED, config.compressed_steps)
    )
    schedule = (*before, last._replace(value=(COMPRESSED, ())))
    return guard(Compressor(init, aggregate, transition, wire, schedule, diagnose, next_phase=next_phase))


class Way(NamedTuple):
    """How gradients travel in steps without codes.

    Attributes:
      mean: `(key, v f32[n], packing, nodes) -> f32[n]`, equal on all nodes.
      messages: `(packing, nodes) -> logical messages`.
    """

    mean: Callable[[Array, Array, Packing, Nodes], Array]
    messages: Callable[[Packing, Nodes], tuple[Message, ...]]


def uncompressed(config: Gradiveq) -> dict[str, Way]:
    """The ways of the phases without codes: in full precision, and by QSGD."""
    exact = _through(identity(), all_reduce(config.algorithm))
    if not config.sampling_bits:
        return {DENSE: exact, SAMPLING: exact}
    codec = levels_of(config.sampling_bits, BUCKET, "max")
    return {DENSE: exact, SAMPLING: _around(codec) if config.algorithm == "ring" else _through(codec, gather())}


def _through(codec: Codec, exchange: Exchange) -> Way:
    def mean(key, v, packing, nodes):
        item = Item(codec, packing.layers, codec.encode(comm.node_key(key, nodes), v, packing.layers))
        return exchange.run([item], nodes)[0]

    return Way(mean, lambda packing, nodes: exchange.messages(payload_sizes(codec, packing.layers), nodes))


def _around(codec: Codec) -> Way:
    """By a ring that quantises again at every hop."""
    return Way(
        lambda key, v, packing, nodes: around(codec, BUCKET, key, v, nodes)[0],
        lambda packing, nodes: both_ways(ring_sizes(codec, BUCKET, packing.size, nodes.count)),
    )


def _parse(phase) -> tuple[str, tuple[int, ...]]:
    """The name of a phase and the d of every layer; none for the largest that is possible."""
    return phase if isinstance(phase, tuple) else (phase, ())


def _layers(config: Gradiveq, packing: Packing) -> tuple[Sliced, ...]:
    layers = _slices.plan(packing, config.slice_size, config.slice_taps, config.max_slice, config.reuse)
    for layer in layers:
        if config.rank > layer.width:
            raise ValueError(f"rank must be at most K, which is {layer.width} for a layer, got {config.rank}")
    return layers


# --- d ------------------------------------------------------------------------------------------------------------


def largest(config: Gradiveq, layers: tuple[Sliced, ...]) -> tuple[int, ...]:
    """The largest d of every layer: `rank`, or as many directions as samples and slices have."""
    return tuple(config.rank or min(kept_samples(config) - 1, layer.width) for layer in layers)


def kept_samples(config: Gradiveq) -> int:
    """Of how many steps bases are made."""
    return config.samples or config.sampling_steps


def chosen(config: Gradiveq, learned: Learned) -> tuple[int, ...]:
    """d of every layer by (6), from the samples, rounded up to eighths of the largest."""
    out = []
    for samples, basis in zip(learned.samples, learned.bases, strict=True):
        most = basis.shape[1]
        d = config.rank or _slices.dimensions(np.asarray(_components(samples, learned.taken, config)[0]), config.loss)
        unit = -(-most // EIGHTHS)
        out.append(min(-(-d // unit) * unit, most))
    return tuple(out)


def _components(samples: Array, taken: Array, config: Gradiveq) -> tuple[Array, Array]:
    """Energies and directions of a layer's samples, found on one device."""
    count = max(min(int(taken), samples.shape[1]), 1)
    return _principal(np.asarray(samples), np.float32(count), config.centred)


_principal = jax.jit(_slices.principal, static_argnums=2)


def _basis(samples: Array, taken: Array, like: Array, config: Gradiveq) -> Array:
    """The directions of most energy, as many as there is room for."""
    directions = _components(samples, taken, config)[1][:, : like.shape[1]]
    return jnp.zeros(like.shape, jnp.float32).at[:, : directions.shape[1]].set(directions)


# --- steps ----------------------------------------------------------------------------------------------------------


def coded(
    config: Gradiveq, d: tuple[int, ...], v: Array, learned: Learned, layers: tuple[Sliced, ...], nodes: Nodes
) -> tuple[Array, Array]:
    """The mean of v f32[n] over nodes as their codes have it, and what this node's code stands for.

    Source: GradiVeQ paper, (3) to (5) and Algorithm 1.
    """
    size, x = _slices.code_size(layers, d), v - learned.mean
    if not size:
        return v, v
    own = _slices.codes(layers, learned.bases, d, x, 0, size)  # in a ring, of use for what this node lost alone
    if config.algorithm == "ring":
        places = comm.ring_size(nodes)
        width = -(-size // places)

        def segment(i):
            makers = [lambda p=p: _segment(layers, learned, d, x, p * width, width) for p in range(places)]
            return jax.lax.switch(i, makers)

        code = comm.ring_mean_of_segments(segment, nodes, "codes")[:size]
    else:
        code = comm.pmean(own, nodes, "codes")
    mean = _slices.decoded(layers, learned.bases, d, code) + learned.mean
    if not (config.error_feedback or config.control_limit):
        return mean, v
    return mean, _slices.decoded(layers, learned.bases, d, own) + learned.mean


def _segment(layers, learned: Learned, d, x: Array, start: int, width: int) -> Array:
    """A node's code of one segment, f32[width]; the last is filled up with zeros."""
    code = _slices.codes(layers, learned.bases, d, x, start, start + width)
    return jnp.pad(code, (0, width - code.size))


def _sampled(mean: Array, learned: Learned, layers: tuple[Sliced, ...]) -> Learned:
    """With one more sample, in the place of the oldest."""
    count = learned.samples[0].shape[1] if layers else 1
    samples = _slices.add_sample(layers, learned.samples, mean, learned.taken % count)
    return learned._replace(
        samples=samples, taken=learned.taken + 1, mean=learned.mean + mean, steps=learned.steps + 1
    )


def _held_back(config: Gradiveq, residual: Array, step: Array) -> Array:
    """What of the residual waits for later sampling steps: each of `feedback_steps` takes an equal share."""
    left = jnp.maximum(config.feedback_steps - step, 1).astype(jnp.float32)
    return residual * (1 - 1 / left)


def _watched(
    config: Gradiveq, v: Array, sent: Array, learned: Learned, watch: PyTree, nodes: Nodes
) -> tuple[Learned, PyTree]:
    """This step's loss (7) in the node's watch, and whether most nodes find theirs too large."""
    step = learned.steps + 1
    learned = learned._replace(steps=step)
    if not config.control_limit:
        return learned, watch
    energy = jnp.vdot(v, v)
    loss = jnp.where(energy > 0, jnp.vdot(v - sent, v - sent) / jnp.where(energy > 0, energy, 1), 0.0)
    begins = step <= config.control_every
    share = jnp.where(begins, 1 / step.astype(jnp.float32), 1 / config.control_every)
    lately = watch.lately + share * (loss - watch.lately)
    first = jnp.where(begins, lately, watch.first)
    exceeds = ~begins & (lately > config.control_limit * first)
    votes = comm.psum(exceeds.astype(jnp.int32), nodes, "control")
    return learned._replace(alarm=2 * votes > nodes.count), Watch(first, lately)
