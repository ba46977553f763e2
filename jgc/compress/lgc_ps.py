"""LGC with a parameter server: an autoencoder learns what the nodes' gradients have in common.

Three phases: "dense" sends everything; "top-k" sends each layer's largest values while the server trains the
autoencoder on them; in "compressed" a leader sends a learned code, and every node a few values of its own.

    n       values of a node's gradient            mu   values selected of them, at least one a layer
    L       layers                                 m    mu padded to a multiple of 16
    v f32[n]    accumulated gradient of a node     x f32[mu]  v at the selected positions
    s f32[mu]   signs of the leader's x            z f32[m]   what the autoencoder sees of x (`View`)

Source: Abrahamyan et al. 2021, "Learned Gradient Compression for Distributed Deep Learning", IEEE TNNLS,
Sections IV-A, V and VI-A, Algorithm 1, Tables I and II.

Differs from the paper (measured in docs/results/lgc_autoencoder.md; `PAPER_RECIPE` has the paper's way)
  1. Five strided deconvolutions (Table II) multiply by 32, the encoder (Table I) divides by 16: the first
     deconvolution has stride 1, and inputs are padded to a multiple of 16.
  2. The autoencoder sees values multiplied by the leader's signs, less each node's mean per layer, over the leader's
     scale per layer. The leader sends its signs (one bit a value), every node its means. In index order, unscaled, the
     paper's autoencoder does not learn to reconstruct (`fold_signs`, `send_means`, `scale`).
  3. Adam in place of SGD, with any number of updates on each step's gradients (`autoencoder_*`).
  4. Algorithm 1 lets every node select its own positions and does not send them to the server, which could not place
     what it decodes. By default all nodes use the leader's (`positions="leader"`); with `positions="own"` every node
     sends its positions, and they are counted.
  5. The innovation is the values that the signs and means explain worst, over all layers together
     (`innovation_by="error"`), not the largest of each layer (`"magnitude"`); the server puts their exact
     values in place of the decoder's.
  6. What the decoder loses goes back into the residual (`feedback="exact"`); Algorithm 1 drops it ("paper").
     Every worker then needs the code and its own decoder, which are counted.
  7. In the top-k phase the leader alone selects, as in the third phase. With `positions="own"` all nodes do.
  8. The losses (5) and (6) are means over their terms, not sums, so that settings carry over between sizes.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgc import comm, phases
from jgc.compress import _autoencoder as ae
from jgc.compress import _lgc_bytes as sizes
from jgc.compress import _lgc_server as server
from jgc.compress._lgc_settings import COMPRESSED, DENSE, PAPER_RECIPE, TOP_K, LgcPs, check
from jgc.compress._lgc_view import (
    Selection,
    choose_innovations,
    select_layers,
    server_views,
    to_z,
)  # fmt: skip
from jgc.compress.compose import compose_phases, make_info
from jgc.compress.dense import identity
from jgc.compress.diagnose import compare
from jgc.compress.exchange import all_reduce, gather
from jgc.compress.guard import guard
from jgc.compress.per_layer import with_policy
from jgc.compress.topk import top_k
from jgc.memory import Memory, make_memory
from jgc.nodes import per_node
from jgc.pack import make_packing, pack, unpack
from jgc.select import Sparse, narrow, scatter, top_positions, widen
from jgc.types import Array, Compressor, Key, Nodes, State, Wire

__all__ = ["PAPER_RECIPE", "LgcPs", "lgc_ps"]


class Shared(NamedTuple):
    """What is the same on all nodes: the autoencoder, and the number of steps taken, i32[]."""

    autoencoder: ae.Trained
    step: Array


def lgc_ps(config: LgcPs | None = None, **overrides) -> Compressor:
    """Learned gradient compression, parameter-server variant.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: a setting outside its range; the message says which and what would be right.

    Example:
      >>> [(phase.name, phase.start) for phase in lgc_ps(warmup_steps=10, autoencoder_steps=20).schedule]
      [('dense', 0), ('top-k', 10), ('compressed', 30)]

    References:
      Abrahamyan, Chen, Bekoulis, Deligiannis 2021, IEEE TNNLS; the same authors 2021, conference text.
    """
    config = dataclasses.replace(config or LgcPs(), **overrides)
    check(config)
    schedule = phases.in_sequence((DENSE, config.warmup_steps), (TOP_K, config.autoencoder_steps), (COMPRESSED, 0))
    memory = make_memory(
        config.momentum_correction,
        config.momentum,
        config.factor_masking,
        config.momentum_at_once,
        config.residual_dtype,
    )
    sparse = (top_k(config.alpha, config.min_values), gather())
    last = compose_phases({DENSE: (identity(), all_reduce()), TOP_K: sparse, COMPRESSED: sparse}, memory, schedule)
    momentum = config.momentum if memory.owns_momentum else None
    return with_policy(_autoencoded(config, memory, schedule), config.first_layer, config.last_layer, last, momentum)


def _autoencoded(config: LgcPs, memory: Memory, schedule) -> Compressor:
    """The method for the layers that go through the autoencoder."""
    optimiser = {"adam": optax.adam, "sgd": optax.sgd}[config.autoencoder_optimizer](config.autoencoder_learning_rate)

    def init(key, params, nodes):
        packing = make_packing(params)
        weights = ae.init(key, select_layers(config, packing).mu, nodes.count)
        local = jax.tree.map(lambda x: per_node(x, nodes), memory.init(packing.size))
        return State(Shared(ae.Trained(weights, optimiser.init(weights)), jnp.int32(0)), local)

    reduce = {
        DENSE: _dense,
        TOP_K: partial(_top_k, config, optimiser),
        COMPRESSED: partial(_compressed, config),
    }

    def aggregate(phase, key, grads, state, nodes):
        packing = make_packing(grads)
        v, local = memory.accumulate(state.local, pack(grads, packing), phase == DENSE)
        step = reduce[phase](v, key, state.shared, select_layers(config, packing), nodes)
        local = memory.keep(local, v, step.sent)
        info = make_info(memory.residual(local), step.elements)
        shared = step.shared._replace(step=state.shared.step + 1)
        return unpack(step.mean, packing), State(shared, local), info

    def wire(phase, shapes, nodes):
        selection = select_layers(config, make_packing(shapes))
        messages = sizes.logical(config, phase, selection, nodes)
        return Wire(messages, (), sizes.sent_once(config, phase, selection, nodes))

    def diagnose(phase, key, grads, state, nodes):
        packing = make_packing(grads)
        g = pack(grads, packing)
        v, _ = memory.accumulate(state.local, g, phase == DENSE)
        selection = select_layers(config, packing)
        if phase != COMPRESSED:
            return compare(reduce[phase](v, key, state.shared, selection, nodes).mean, v, g, nodes)
        leader, weights = _leader(config, state.shared, nodes), state.shared.autoencoder.weights
        seen = server.receive(config, v, weights.encoder, leader, selection, nodes)
        return server.watch(config, weights, seen, v, g, leader, selection, nodes)

    core = Compressor(init, aggregate, lambda old, new, state, nodes: state, wire, schedule, diagnose,
                      owns_momentum=memory.owns_momentum)
    return guard(core)


def _leader(config: LgcPs, shared: Shared, nodes: Nodes) -> Array:
    return shared.step % nodes.count if config.leader == "rotating" else jnp.int32(0)


class Step(NamedTuple):
    """What a phase makes of a node's v."""

    mean: Array  # f32[n], equal on all nodes
    sent: Array | Sparse  # what all nodes take this node to have sent
    shared: Shared
    elements: int  # values that this node's message stands for


def _dense(v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes) -> Step:
    """First phase, equation (14)."""
    return Step(comm.mean(v, nodes, "dense"), v, shared, v.size)


def _top_k(config: LgcPs, optimiser, v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes) -> Step:
    """Second phase, equation (15): exact values at the selected positions; the server trains on them."""
    leader = _leader(config, shared, nodes)
    layers, counts = selection.packing.layers, selection.counts
    message = {"positions": narrow(top_positions(v, layers, counts), layers, counts)}
    if config.positions == "leader":
        message = comm.broadcast_dict(message, leader, nodes)
    positions = widen(message["positions"], layers, counts)
    if config.positions == "leader":
        x = comm.gather(v[positions], nodes, "values")  # [K, mu]
        everywhere = jnp.broadcast_to(positions, x.shape)
    else:
        every = comm.gather_dict({**message, "values": v[positions]}, nodes)
        x = every["values"]
        everywhere = jax.vmap(lambda p: widen(p, layers, counts))(every["positions"])
    trained = _train(config, optimiser, x, leader, shared.autoencoder, selection)
    mean = scatter(Sparse(everywhere, x), v.size) / nodes.count
    return Step(mean, Sparse(positions, v[positions]), shared._replace(autoencoder=trained), selection.mu)


def _compressed(config: LgcPs, v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes) -> Step:
    """Third phase, Algorithm 1 and equation (16): the leader's code, innovations of all, decoded and averaged."""
    weights = shared.autoencoder.weights
    seen = server.receive(config, v, weights.encoder, _leader(config, shared, nodes), selection, nodes)
    decoded = server.decode(weights, seen, selection)  # [K, mu]
    me = comm.node_index(nodes)
    positions = seen.positions[me]
    kept_from = decoded[me] if config.feedback == "exact" else v[positions]
    return Step(server.average(seen, decoded, v.size), Sparse(positions, kept_from), shared, selection.mu)


def _train(
    config: LgcPs, optimiser, x: Array, leader: Array, trained: ae.Trained, selection: Selection
) -> ae.Trained:
    """The server's training steps on all nodes' values x f32[K, mu]; the leader's code serves all decoders."""
    views = server_views(config, x, leader, selection)
    z = jax.vmap(lambda x, view: to_z(x, view, selection))(x, views)
    picked = jax.vmap(lambda x, view: choose_innovations(config, x, view, selection))(x, views)
    innovations = jax.vmap(lambda z, i: jnp.zeros_like(z).at[i].set(z[i]))(z, picked)
    for _ in range(config.autoencoder_updates):  # unrolled: convolutions in a loop are slow on CPU
        trained, _ = ae.train(
            trained, optimiser, z, innovations, leader, config.lambda_reconstruction, config.lambda_similarity
        )
    return trained
