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
  5. `error_feedback` is ours: what (3) loses is kept. Codes cannot carry it, for the bases stay as they are; it goes
     out in the next sampling phase, at once or over `feedback_steps` in equal shares. What QSGD loses is not kept:
     its rounding is unbiased, and feedback of that grows without bound.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm, phases
from jgc.compress import _slices
from jgc.compress._slices import Rows, Sliced
from jgc.compress.compose import Codec, Item, compose, make_info, payload_sizes
from jgc.compress.dense import identity
from jgc.compress.diagnose import compare
from jgc.compress.exchange import all_reduce, both_ways, gather
from jgc.compress.guard import guard
from jgc.compress.per_layer import per_layer
from jgc.compress.qsgd import levels_of
from jgc.memory import error_feedback, no_memory
from jgc.nodes import per_node
from jgc.pack import Packing, make_packing, pack, unpack
from jgc.types import Array, Compressor, Nodes, Phase, PyTree, State, Wire

DENSE, SAMPLING, COMPRESSED = "dense", "sampling", "compressed"
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
    """L_t, steps of a cycle from whose gradients bases are made, at least 2"""
    compressed_steps: int = 400
    """L_c, steps of a cycle with codes, at least 1"""
    sampling_bits: int = 4
    """QSGD's in sampling steps, 2 to 8; 0 for full precision"""
    others: Literal["dense", "qsgd"] = "dense"
    """how leaves that are no convolutions travel"""
    algorithm: Literal["psum", "ring"] = "psum"
    """what sums the codes: the runtime's all-reduce, or the paper's ring by `ppermute`"""
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
      rows: of each layer f32[bases, L_t, K]: first slices as sampled, then the basis, one direction a row.
      mean: f32[n], the sum of the samples, then mu.
      steps: i32[], of this phase so far, without those that were skipped.
      alarm: bool[], most nodes lose more than the limit.
    """

    rows: Rows
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
    sampled = levels_of(config.sampling_bits, 512, "max") if config.sampling_bits else identity()
    others = levels_of(4, 512, "max") if config.others == "qsgd" else identity()
    rest = compose(others, no_memory(), all_reduce(config.algorithm) if others.linear else gather())

    def goes_otherwise(path, leaf):
        return not _slices.is_convolution(leaf, config.max_slice)

    return per_layer([(goes_otherwise, rest)], default=convolutions(config, sampled))


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
    least = {"sampling_steps": 2, "compressed_steps": 1, "slice_taps": 1, "max_slice": 1, "control_every": 1,
             "feedback_steps": 1}  # fmt: skip
    for name, bound in {**least, "rank": 0, "slice_size": 0, "reuse": 0, "control_limit": 0}.items():
        if not getattr(config, name) >= bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(config, name)}")
    if config.feedback_steps > config.sampling_steps:
        raise ValueError(
            f"feedback_steps must be at most sampling_steps = {config.sampling_steps}, got {config.feedback_steps}"
        )
    if config.rank > config.sampling_steps - 1:
        raise ValueError(
            f"rank must be at most sampling_steps - 1 = {config.sampling_steps - 1} (so many directions do the samples "
            f"have), got {config.rank}"
        )
    if config.error_feedback and config.centred:
        raise ValueError(
            "error_feedback must be False with centred True, got True: samples hold what is given back, and their mean "
            "would be added in every compressed step"
        )
    if config.slice_size and config.rank > config.slice_size:
        raise ValueError(f"rank must be at most slice_size = {config.slice_size}, got {config.rank}")


def convolutions(config: Gradiveq, sampled: Codec) -> Compressor:
    """The method for leaves that are convolutions; `sampled` is what travels in sampling steps."""
    memory = error_feedback() if config.error_feedback else no_memory()
    whole = all_reduce(config.algorithm)
    through = {DENSE: (identity(), whole), SAMPLING: (sampled, whole if sampled.linear else gather())}

    def init(key, params, nodes):
        packing = make_packing(params)
        layers = _layers(config, packing)
        rows = _slices.no_samples(layers, config.sampling_steps)
        watch = Watch(jnp.zeros(()), jnp.zeros(())) if config.control_limit else ()
        local = jax.tree.map(lambda x: per_node(x, nodes), Local(memory.init(packing.size), watch))
        return State(Learned(rows, jnp.zeros((packing.size,)), jnp.int32(0), jnp.bool_(False)), local)

    def uncompressed(name, key, v, layers, nodes):
        codec, exchange = through[name]
        item = Item(codec, layers, codec.encode(comm.node_key(key, nodes), v, layers))
        return exchange.run([item], nodes)[0]

    def aggregate(phase, key, grads, state, nodes):
        packing, (name, sizes) = make_packing(grads), _parse(phase)
        layers, learned, local = _layers(config, packing), state.shared, state.local
        v, kept = memory.accumulate(local.residual, pack(grads, packing), name == DENSE)
        if name == COMPRESSED:
            d = sizes or largest(config, layers)
            mean, sent = coded(config, d, v, learned, layers, nodes)
            learned, watch = _watched(config, v, sent, learned, local.watch, nodes)
            elements = _slices.code_size(layers, d)
        else:
            held = _held_back(config, local.residual, learned.steps) if name == SAMPLING and memory.conserves else 0.0
            sent = v - held
            mean = uncompressed(name, key, sent, packing.layers, nodes)
            learned, watch, elements = _sampled(name, mean, learned, layers), local.watch, packing.size
        local = Local(memory.keep(kept, v, sent), watch)
        info = make_info(memory.residual(local.residual), elements)
        return unpack(mean, packing), State(learned, local), info

    def transition(old, new, state, nodes):
        learned = state.shared
        rows, mean = learned.rows, learned.mean
        if _parse(new)[0] == SAMPLING:
            rows, mean = jax.tree.map(jnp.zeros_like, (rows, mean))
        elif _parse(new)[0] == COMPRESSED:
            count = max(int(learned.steps), 1)
            rows = tuple(_basis(r, learned.steps, config) for r in rows)
            mean = mean / count if config.centred else jnp.zeros_like(mean)
        local = state.local._replace(watch=jax.tree.map(jnp.zeros_like, state.local.watch))
        return State(Learned(rows, mean, jnp.int32(0), jnp.bool_(False)), local)

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
        codec, exchange = through[name]
        return Wire(exchange.messages(payload_sizes(codec, packing.layers), nodes), ())

    def diagnose(phase, key, grads, state, nodes):
        g = pack(grads, make_packing(grads))
        aggregated = aggregate(phase, key, grads, state, nodes)[0]
        return compare(pack(aggregated, make_packing(grads)), g, g, nodes, everything=True)

    *before, last = phases.in_sequence(
        (DENSE, config.warmup_steps), (SAMPLING, config.sampling_steps), (COMPRESSED, config.compressed_steps)
    )
    schedule = (*before, last._replace(value=(COMPRESSED, ())))
    return guard(Compressor(init, aggregate, transition, wire, schedule, diagnose, next_phase=next_phase))


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
    return tuple(config.rank or min(config.sampling_steps - 1, layer.width) for layer in layers)


def chosen(config: Gradiveq, learned: Learned) -> tuple[int, ...]:
    """d of every layer by (6), from the samples, rounded up to eighths of the largest."""
    out = []
    for rows in learned.rows:
        most = config.rank or min(config.sampling_steps - 1, rows.shape[2])
        d = config.rank or _slices.dimensions(np.asarray(_components(rows, learned.steps, config)[0]), config.loss)
        unit = -(-most // EIGHTHS)
        out.append(min(-(-d // unit) * unit, most))
    return tuple(out)


def _components(rows: Array, count: Array, config: Gradiveq) -> tuple[Array, Array]:
    """Energies and directions of the first `count` samples, found on one device."""
    samples = np.asarray(rows)[:, : max(int(count), 1)]
    return _principal(samples, config.centred)


_principal = jax.jit(_slices.principal, static_argnums=1)


def _basis(rows: Array, count: Array, config: Gradiveq) -> Array:
    """The directions found in the first `count` samples, in the samples' place."""
    directions = _components(rows, count, config)[1]
    return jnp.zeros(rows.shape).at[:, : directions.shape[1]].set(directions)


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
    if config.algorithm == "ring":
        places = comm.ring_places(nodes)
        width = -(-size // places)

        def segment(i):
            makers = [lambda p=p: _segment(layers, learned, d, x, p * width, width) for p in range(places)]
            return jax.lax.switch(i, makers)

        code = comm.ring_mean_of(segment, nodes, "codes")[:size]
    else:
        code = comm.mean(_slices.codes(layers, learned.rows, d, x, 0, size), nodes, "codes")
    mean = _slices.decoded(layers, learned.rows, d, code) + learned.mean
    if not (config.error_feedback or config.control_limit):
        return mean, v
    own = _slices.codes(layers, learned.rows, d, x, 0, size)
    return mean, _slices.decoded(layers, learned.rows, d, own) + learned.mean


def _segment(layers, learned: Learned, d, x: Array, start: int, width: int) -> Array:
    """A node's code of one segment, f32[width]; the last is filled up with zeros."""
    code = _slices.codes(layers, learned.rows, d, x, start, start + width)
    return jnp.pad(code, (0, width - code.size))


def _sampled(name: str, mean: Array, learned: Learned, layers: tuple[Sliced, ...]) -> Learned:
    if name != SAMPLING:
        return learned
    rows = _slices.add_sample(layers, learned.rows, mean, learned.steps)
    return learned._replace(rows=rows, mean=learned.mean + mean, steps=learned.steps + 1)


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
    votes = comm.total(exceeds.astype(jnp.int32), nodes, "control")
    return learned._replace(alarm=2 * votes > nodes.count), Watch(first, lately)
