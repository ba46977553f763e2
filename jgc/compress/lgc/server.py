"""LGC with a parameter server: an autoencoder learns the part that the nodes' gradients share.

Three phases: "dense" sends everything; "top-k" sends each layer's largest values while the server
trains the autoencoder on them; in "compressed" a leader sends a learned code, and every node its
positions and a few exact values.

    n       values of a node's gradient            mu   selected values, at least one per layer
    L       layers                                 m    mu padded to a multiple of 16
    v f32[n]    accumulated gradient of a node     x f32[mu]  v at the selected positions
    s f32[mu]   signs of x, or the leader's        z f32[m]   normalised x (`View`)

Source: Abrahamyan et al. 2021, "Learned Gradient Compression for Distributed Deep Learning", IEEE
TNNLS, Sections IV-A, V and VI-A, Algorithm 1, Tables I and II.

Differs from the paper (measured in docs/results/lgc_autoencoder.md; `PAPER_RECIPE` follows it in 2,
3, 5, 6 and 8)
  1. Five strided deconvolutions (Table II) multiply by 32, the encoder (Table I) divides by 16: the
     first deconvolution has stride 1, and inputs are padded to a multiple of 16.
  2. The autoencoder's input is normalised: multiplied by signs, less the node's mean per layer,
     divided by a scale per layer, clipped to 16 of them, which the largest values of a node seldom
     reach (7 in a small network). Signs (one bit per value), scales and means are sent; with the
     leader's positions, signs and scales are the leader's, too. On values in index order and
     unscaled, the paper's autoencoder does not learn to reconstruct (`fold_signs`, `send_means`,
     `scale`).
  3. Adam instead of SGD (`autoencoder_*`).
  4. In Algorithm 1 every node selects its positions but does not send them, so the server could not
     place the decoded values. Here they are sent, and counted. With `positions="leader"` all nodes
     use the leader's, and the others send no positions and no signs: 13 % less up at 0.1 %, and 9
     points less accuracy (docs/results/long_runs); for ResNet-50 on 8 nodes a third less. With
     `leader="fixed"` a value without a gradient on the leader is never sent.
  5. The innovations are the values, over all layers together, with the largest error of signs and
     means (`innovation_by="error"`), and the server replaces decoded values by them (`overwrite`).
     The paper takes the largest of each layer (`"layer"`), and its decoder's output stands.
  6. The residual keeps the decoding error (`feedback="exact"`); Algorithm 1 drops it ("paper"). So
     every worker needs the code and its decoder, which are counted.
  7. With `positions="leader"` only the leader selects, in the top-k phase as well. In the paper all
     nodes do.
  8. The losses (5) and (6) are means over their terms, not sums, so that settings carry over
     between sizes (`autoencoder_loss`).
  9. The decoders are trained on the leader's code, which they also get in the third phase. The
     paper draws the node at random in each step.
 10. The paper has three shares for the innovation, with 0.1 % selected: 0.001 % of the gradient,
     which is 1 % of mu (Section III), 0.001 % of mu (Section V-B-1), and 10 % of each layer's
     selected values (Algorithm 1). Here it is 10 %, and at least one value; what
     each would send is in docs/results/papers_numbers.md.
 11. The residual counts once. In Algorithms 1 and 2 a value that is not sent, g = gradient + g_acc,
     is added to g_acc, which it already contains: to the letter g_acc doubles in every step, and
     overflows f32 after 128.
 12. The paper accumulates "using a momentum correlation similar to" DGC's, which clears the
     velocity where values were sent: a setting here, off by default (`factor_masking`). There is no
     clipping.
"""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.compress.lgc import autoencoder as ae, bytes as sizes, messages as server
from jgc.compress.lgc.normalise import Selection, choose_innovations, server_views
from jgc.compress.lgc.phases import Shared, lgc, make_optimiser, values_at_leaders
from jgc.compress.lgc.settings import PAPER_RECIPE, LgcPs, check
from jgc.compress.registry import FIRST_DENSE_LAST_TOP_K, Entry, settings_of
from jgc.method.from_step import Step
from jgc.selection.entries import Sparse, SparseSum, replaced
from jgc.types import Array, Compressor, Key, Nodes

if TYPE_CHECKING:
    import optax

__all__ = ["PAPER_RECIPE", "LgcPs", "lgc_ps"]


class ParameterServer(NamedTuple):
    """The steps of LGC with a parameter server."""

    config: LgcPs
    optimiser: "optax.GradientTransformation"

    def weights(self, key: Key, selection: Selection, nodes: Nodes) -> ae.Weights:
        return ae.init(key, selection.mu, nodes.count)

    def leader(self, shared: Shared, nodes: Nodes) -> Array:
        """The node whose code all nodes use in this step, i32[]."""
        return shared.step % nodes.count if self.config.leader == "rotating" else jnp.int32(0)

    def top_k(self, v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes) -> Step:
        """Second phase, equation (15): exact values at the selected positions; the server trains on
        them."""
        config, leader = self.config, self.leader(shared, nodes)
        positions, every, x = self.values(v, leader, selection, nodes)
        is_sum, m = config.autoencoder_loss == "sum", ae.padded(selection.mu)
        reconstruction, similarity = ae.terms(nodes.count, m) if is_sum else (1.0, 1.0)
        inputs = training_input(config, x, leader, selection)
        trained, _ = ae.train(
            shared.autoencoder, self.optimiser,
            lambda weights: ae.losses(weights, *inputs, leader),
            reconstruction, config.lambda_similarity * similarity)
        return Step(
            mean=SparseSum(Sparse(every, x / nodes.count), selection.counts),
            sent=Sparse(positions, v[positions]),
            shared=shared._replace(autoencoder=trained), elements=selection.mu)

    def compressed(
        self, v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes
    ) -> Step:
        """Third phase, Algorithm 1 and equation (16): the leader's code, innovations of all,
        decoded and averaged."""
        weights, leader = shared.autoencoder.weights, self.leader(shared, nodes)
        inbox = server.receive(self.config, v, weights.encoder, leader, selection, nodes)
        decoded = server.decode(self.config, weights, inbox, selection)  # [K, mu]
        me = comm.node_index(nodes)
        positions = inbox.positions[me]
        mean = Sparse(inbox.positions, decoded / nodes.count)  # equation (13)
        sent = decoded[me] if self.config.feedback == "exact" else v[positions]
        return Step(
            mean=SparseSum(mean, selection.counts), sent=Sparse(positions, sent), shared=shared,
            elements=selection.mu)

    def values(
        self, v: Array, leader: Array, selection: Selection, nodes: Nodes
    ) -> tuple[Array, Array, Array]:
        """This node's positions i32[mu], all nodes' i32[K, mu], and their values there f32[K,
        mu]."""
        if self.config.positions == "leader":
            positions, x = values_at_leaders(v, leader, selection, nodes)
            return positions, jnp.broadcast_to(positions, x.shape), x
        positions = selection.selector.positions(v, selection.layers)
        packed = selection.selector.pack(positions, selection.layers)
        unpack = jax.vmap(partial(selection.selector.unpack, layers=selection.layers))
        every = comm.all_gather_dict({"positions": packed, "values": v[positions]}, nodes)
        return positions, unpack(every["positions"]), every["values"]

    def training_figures(
        self, v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes
    ) -> dict[str, Array]:
        """The autoencoder's losses on this step's values, before it trains on them."""
        leader = self.leader(shared, nodes)
        _, _, x = self.values(v, leader, selection, nodes)
        inputs = training_input(self.config, x, leader, selection)
        losses = ae.losses(shared.autoencoder.weights, *inputs, leader)
        return {"autoencoder_reconstruction": losses.reconstruction,
                "autoencoder_similarity": losses.similarity}  # fmt: skip

    def figures(
        self, v: Array, g: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes
    ) -> dict[str, Array]:
        leader, weights = self.leader(shared, nodes), shared.autoencoder.weights
        inbox = server.receive(self.config, v, weights.encoder, leader, selection, nodes)
        return server.figures(self.config, weights, inbox, v, g, leader, selection, nodes)


def training_input(
    config: LgcPs, x: Array, leader: Array, selection: Selection
) -> tuple[Array, Array]:
    """z of all nodes' values x f32[K, mu] and their innovations, each f32[K, m]."""
    views, z = server_views(config, x, leader, selection)
    picked = jax.vmap(lambda x, view: choose_innovations(config, x, view, selection))(x, views)
    return z, jax.vmap(lambda z, i: replaced(jnp.zeros_like(z), i, z[i]))(z, picked)


def lgc_ps(config: LgcPs | None = None, **overrides) -> Compressor:
    """Learned gradient compression, parameter-server variant.

    Raises:
      ValueError: a setting outside its range, or settings that do not fit together.

    Example:
      >>> schedule = lgc_ps(warmup_steps=10, autoencoder_steps=20).schedule
      >>> [(phase.name, phase.start) for phase in schedule]
      [('dense', 0), ('top-k', 10), ('compressed', 30)]

    Source: Abrahamyan, Chen, Bekoulis, Deligiannis 2021, IEEE TNNLS, Algorithm 1.
    """
    config = settings_of(LgcPs, config, overrides)
    check(config)
    variant = ParameterServer(config, make_optimiser(config))
    return lgc(
        config, variant, partial(sizes.server, config), partial(sizes.server_sent_once, config))


METHOD = Entry(
    "lgc_ps", LgcPs, lgc_ps, "Abrahamyan et al. 2021", lossless={"alpha": 1.0, "innovation": 1.0},
    layers=FIRST_DENSE_LAST_TOP_K, citation=("abrahamyan2021learned",))
