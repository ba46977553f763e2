"""LGC on a ring: every node encodes its values at one node's positions, and the mean of the codes
is decoded.

Three phases: "dense" sends everything; "top-k" sends values at the positions of a node drawn anew
in each step, while one node trains the autoencoder on them; in "compressed" the all-reduce averages
codes instead of values.

Symbols as in `jgc.compress.lgc.server`. `leader` is the node whose positions all nodes use in a
step. All nodes draw it from a shared key, so it is not sent.

Source: Abrahamyan et al. 2021, "Learned Gradient Compression for Distributed Deep Learning", IEEE
TNNLS, Sections IV-B, V-B-2 and VI-A, Algorithm 2, equations (8) to (11) and (17) to (19).

Differs from the paper (`RING_PAPER_RECIPE` follows it, except in the strides, the accumulator,
masking, 4 and 5)
  1. As in `jgc.compress.lgc.server`, items 1 to 3, 8, 11 and 12: the strides of the decoder; the
     normalised input (by the leader's signs and scales, less each node's mean per layer); Adam;
     losses as means; a residual that counts once; masking as a setting.
  2. Codes and means travel in fixed point, 32 or 16 bits, in units of the leader's scales: sums of
     integers are the same in any order, so the ring and `psum`, and all layouts of nodes, agree bit
     for bit (`code_dtype="float32"` sends the paper's floats, for which they agree up to rounding;
     unscaled values need it).
  3. The decoder is linear (`decoder="linear"`), without Table II's leaky ReLUs. The mean of the
     codes then decodes to the mean of the decoded vectors, so every node knows its share, and its
     residual keeps the error (`feedback="exact"`). Algorithm 2 drops the error ("paper").
  4. In the paper one node obtains all gradients in the second phase; how the others get the mean is
     not said. Here that node sends it to them.
  5. Every device trains the autoencoder by itself, on equal values. So the weights that the logical
     account counts are never sent between devices.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.compress.lgc import autoencoder as ae, bytes as sizes, normalise
from jgc.compress.lgc.normalise import Selection, View, from_z, to_z
from jgc.compress.lgc.phases import Shared, lgc, make_optimiser, values_at_leaders
from jgc.compress.lgc.settings import RING_PAPER_RECIPE, LgcRing, check_ring
from jgc.compress.registry import FIRST_DENSE_LAST_TOP_K, Entry, settings_of
from jgc.method.diagnose import cosine, relative_error
from jgc.method.from_step import Step
from jgc.selection.entries import Sparse, SparseSum, scatter
from jgc.selection.selector import layer_means
from jgc.types import Array, Compressor, Key, Nodes
from jgc.wire.fixed_point import largest_summand, to_fixed, units

if TYPE_CHECKING:
    import optax

__all__ = ["RING_PAPER_RECIPE", "LgcRing", "lgc_ring"]

MOST = 2.0**15  # of a node's layer mean, in units of the leader's scale


def lgc_ring(config: LgcRing | None = None, **overrides) -> Compressor:
    """Learned gradient compression, ring-allreduce variant.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together; in `init`,
        too many nodes for `code_dtype`.

    Example:
      >>> schedule = lgc_ring(warmup_steps=10, autoencoder_steps=20).schedule
      >>> [(phase.name, phase.start) for phase in schedule]
      [('dense', 0), ('top-k', 10), ('compressed', 30)]

    Source: Abrahamyan, Chen, Bekoulis, Deligiannis 2021, IEEE TNNLS, Algorithm 2.
    """
    config = settings_of(LgcRing, config, overrides)
    check_ring(config)
    variant = Ring(config, make_optimiser(config))
    return lgc(config, variant, partial(sizes.ring, config), partial(sizes.ring_sent_once, config))


def draw_leader(key: Key, nodes: Nodes) -> Array:
    """The node whose positions all nodes use in this step, i32[]; the key is equal on all nodes."""
    return jax.random.randint(key, (), 0, nodes.count, jnp.int32)


class Header(NamedTuple):
    """The leader's broadcast to all nodes."""

    positions: Array  # i32[mu]
    signs: Array  # f32[mu]
    scales: Array  # f32[L]


class Coded(NamedTuple):
    """The results of one step of the third phase on a node."""

    positions: Array  # i32[mu], the leader's
    mean: Array  # f32[mu], the decoded mean of codes, equation (19), equal on all nodes
    sent: Array  # f32[mu], this node's message decoded
    means: Array  # f32[mu], from signs and averaged layer means only


class Ring(NamedTuple):
    """The steps of LGC on a ring."""

    config: LgcRing
    optimiser: "optax.GradientTransformation"

    @property
    def linear(self) -> bool:
        """Whether the decoder is linear."""
        return self.config.decoder == "linear"

    def weights(self, key: Key, selection: Selection, nodes: Nodes) -> ae.Pair:
        _check_nodes(self.config, nodes)
        return ae.init_pair(key, selection.mu, self.linear)

    def top_k(self, v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes) -> Step:
        """Second phase, equation (15): exact values at the leader's positions; one node trains on
        them."""
        leader = draw_leader(key, nodes)
        positions, x = values_at_leaders(v, leader, selection, nodes)
        weight = float(ae.padded(selection.mu)) if self.config.autoencoder_loss == "sum" else 1.0
        _, z = normalise.server_views(self.config, x, leader, selection)
        trained, _ = ae.train(
            shared.autoencoder, self.optimiser,
            lambda weights: ae.mean_losses(weights, z, self.linear), weight, 0.0)
        return Step(
            mean=SparseSum(Sparse(positions, jnp.sum(x, axis=0) / nodes.count), selection.counts),
            sent=Sparse(positions, v[positions]),
            shared=shared._replace(autoencoder=trained), elements=selection.mu)

    def compressed(
        self, v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes
    ) -> Step:
        """Third phase, Algorithm 2: codes of all nodes, averaged, decoded once."""
        coded = self.send(v, key, shared.autoencoder.weights, selection, nodes)
        sent = coded.sent if self.config.feedback == "exact" else v[coded.positions]
        return Step(
            mean=SparseSum(Sparse(coded.positions, coded.mean), selection.counts),
            sent=Sparse(coded.positions, sent), shared=shared, elements=selection.mu)

    def send(
        self, v: Array, key: Key, weights: ae.Pair, selection: Selection, nodes: Nodes
    ) -> Coded:
        """Broadcast the leader's header; average codes and layer means of all nodes; decode."""
        config = self.config
        _check_nodes(config, nodes)
        header = self.header(v, draw_leader(key, nodes), selection, nodes)
        encode = partial(self.encode, selection, nodes.count)
        decode = partial(self.decode, selection)
        sent = comm.one_by_one(encode, (weights.encoder, header), v[header.positions])
        averaged = comm.mean_by(config.algorithm)(sent, nodes, "code+means")
        mean, of_node = (comm.one_by_one(decode, (weights.decoder, header), message)
                         for message in (averaged, sent))  # fmt: skip
        shares = averaged[ae.code_size(selection.mu) :].astype(jnp.float32)
        means = self.means(shares / units(config.code_dtype), header.scales)[selection.ids]
        return Coded(header.positions, mean, of_node, header.signs * means)

    def header(self, v: Array, leader: Array, selection: Selection, nodes: Nodes) -> Header:
        """Broadcast the leader's positions, signs and scales."""
        config, positions = self.config, selection.selector.positions(v, selection.layers)
        header = normalise.header_of(config, v[positions], positions, selection)
        scales = jnp.ones((len(selection.layers),), jnp.float32)
        if config.scale == "layer":  # the unit of all nodes' means
            header["scales"] = normalise.scales_of(config, v[positions], selection)
        header = comm.broadcast_dict(header, leader, nodes)
        positions = selection.selector.unpack(header["positions"], selection.layers)
        signs = normalise.unpacked_signs(header, selection.mu)
        return Header(positions, signs, header.get("scales", scales))

    def encode(
        self, selection: Selection, nodes: int, known: tuple[Any, Header], x: Array
    ) -> Array:
        """A node's message from its values x f32[mu]: code, equation (17), and means, in fixed
        point."""
        encoder, header = known
        config, scales = self.config, header.scales
        dtype = config.code_dtype
        # means over the leader's scales, 0 if a scale is 0; empty if means are not sent
        shares = jnp.zeros((0,), jnp.float32)
        if config.send_means:
            means = layer_means(header.signs * x, selection.counts)
            shares = jnp.where(scales > 0, means / jnp.where(scales > 0, scales, 1.0), 0.0)
            if config.scale == "layer":  # also bounds floats; integers are narrower
                shares = jnp.clip(shares, -MOST, MOST)
        # rounded, as all nodes will read them
        read = to_fixed(shares, dtype, nodes).astype(jnp.float32) / units(dtype)
        z = to_z(config, x, View(header.signs, self.means(read, scales), scales), selection)
        return to_fixed(jnp.concatenate([ae.encode(encoder, z).reshape(-1), shares]), dtype, nodes)

    def decode(self, selection: Selection, known: tuple[Any, Header], message: Array) -> Array:
        """Decode a message, or the mean of all messages, to f32[mu], equation (19)."""
        decoder, header = known
        size = ae.code_size(selection.mu)
        values = message.astype(jnp.float32) / units(self.config.code_dtype)
        # else parts do not decode to the parts of the whole
        with jax.default_matmul_precision("highest"):
            z = ae.decode_mean(decoder, values[:size].reshape(-1, ae.CHANNELS), self.linear)
        means = self.means(values[size:], header.scales)
        return from_z(z, View(header.signs, means, header.scales), selection)

    def means(self, shares: Array, scales: Array) -> Array:
        """Layer means f32[L] from their shares of the scales; zeros if means are not sent."""
        return scales * shares if self.config.send_means else jnp.zeros_like(scales)

    def training_figures(
        self, v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes
    ) -> dict[str, Array]:
        """The autoencoder's loss (11) on this step's values, before it trains on them."""
        leader = draw_leader(key, nodes)
        _, x = values_at_leaders(v, leader, selection, nodes)
        _, z = normalise.server_views(self.config, x, leader, selection)
        losses = ae.mean_losses(shared.autoencoder.weights, z, self.linear)
        return {"autoencoder_reconstruction": losses.reconstruction}

    def figures(
        self, v: Array, g: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes
    ) -> dict[str, Array]:
        """The diagnostics of `messages.figures`, f32[] each, and the leader's positions.

        Every node contributes to the code, so exact values instead of it give the true mean:
        `ceiling_cosine` is 1. There are no innovations, so `without_code_cosine` equals
        `signs_means_cosine`.
        """
        coded = self.send(v, key, shared.autoencoder.weights, selection, nodes)
        at = comm.pmean(v, nodes, "diagnose")[coded.positions]
        aggregate = scatter(Sparse(coded.positions, coded.mean), v.size)
        return {
            "reconstruction_cosine": cosine(coded.mean, at),
            "relative_error": relative_error(coded.mean, at),
            "ceiling_cosine": cosine(at, at),
            "signs_means_cosine": cosine(coded.means, at),
            "without_code_cosine": cosine(coded.means, at),
            "true_cosine": cosine(aggregate, comm.pmean(g, nodes, "diagnose")),
            "positions": coded.positions,
            "positions_n": jnp.int32(v.size),
        }


def _check_nodes(config: LgcRing, nodes: Nodes) -> None:
    """Raise ValueError if the sum of so many nodes' codes leaves too few integers for each."""
    most = largest_summand("int16", nodes.count) / units("int16")
    if config.code_dtype == "int16" and most < 2:
        raise ValueError(
            f"code_dtype='int16' leaves each of {nodes.count} nodes codes up to {most:.4g} times a "
            "layer's scale, and needs 2: use code_dtype='int32'")


METHOD = Entry(
    "lgc_ring", LgcRing, lgc_ring, "Abrahamyan et al. 2021", lossless=None,
    citation=("abrahamyan2021learned",),
    layers=FIRST_DENSE_LAST_TOP_K)
