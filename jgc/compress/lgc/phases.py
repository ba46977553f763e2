"""What both variants of LGC have in common: three phases, memory, policy of first and last layer, accounting.

Symbols as in `jgc.compress.lgc.server`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgc import comm
from jgc.compress.dense import identity
from jgc.compress.lgc import autoencoder as ae
from jgc.compress.lgc.normalise import Selection, select_layers
from jgc.compress.lgc.settings import COMPRESSED, DENSE, TOP_K, Lgc
from jgc.compress.settings import first_dense, memory_of
from jgc.compress.sparse.topk import top_k
from jgc.layout.pack import make_packing, pack, unpack
from jgc.layout.select import Sparse
from jgc.memory import Memory, residual_of, take_in
from jgc.method import phases
from jgc.method.compose import compose_phases, make_info
from jgc.method.diagnose import compare
from jgc.method.exchange import all_reduce, gather, leaders_positions
from jgc.method.guard import guard
from jgc.nodes import per_node
from jgc.types import Array, Compressor, Key, Message, Nodes, Phase, State, Wire


class Shared(NamedTuple):
    """What is the same on all nodes: the autoencoder, and the number of steps taken, i32[]."""

    autoencoder: ae.Trained
    step: Array


class Step(NamedTuple):
    """What a phase makes of a node's v."""

    mean: Array  # f32[n], equal on all nodes
    sent: Array | Sparse  # what all nodes take this node to have sent
    shared: Shared
    elements: int  # values that this node's message stands for


class Variant(NamedTuple):
    """In what the parameter server and the ring differ.

    Attributes:
      weights: `(key, selection, nodes) -> fresh weights of the autoencoder`.
      top_k: second phase, `(v, key, shared, selection, nodes) -> Step`.
      compressed: third phase, the same.
      messages: `(phase, selection, nodes) -> logical messages of a step`.
      sent_once: the same for what is sent on entering a phase.
      watch_training: figures of a diagnose step in the second phase,
        `(v, key, shared, selection, nodes) -> dict` of f32[].
      watch: the same in the third, `(v, g, key, shared, selection, nodes) -> dict`.
    """

    weights: Callable[[Key, Selection, Nodes], Any]
    top_k: Callable[..., Step]
    compressed: Callable[..., Step]
    messages: Callable[..., tuple[Message, ...]]
    sent_once: Callable[..., tuple[Message, ...]]
    watch_training: Callable[..., dict[str, Array]]
    watch: Callable[..., dict[str, Array]]


def make_optimiser(config: Lgc) -> optax.GradientTransformation:
    """The autoencoder's optimiser."""
    return {"adam": optax.adam, "sgd": optax.sgd}[config.autoencoder_optimizer](config.autoencoder_learning_rate)


def lgc(config: Lgc, variant: Variant, optimiser: optax.GradientTransformation) -> Compressor:
    """The whole method: first layer dense, last layer top-k, all others through the variant's autoencoder."""
    schedule = phases.in_sequence((DENSE, config.warmup_steps), (TOP_K, config.autoencoder_steps), (COMPRESSED, 0))
    memory = memory_of(config)
    sparse = (top_k(config.alpha, config.min_values, config.value_code), gather())
    last = compose_phases({DENSE: (identity(), all_reduce()), TOP_K: sparse, COMPRESSED: sparse}, memory, schedule)
    rest = _autoencoded(config, variant, optimiser, memory, schedule)
    return first_dense(rest, config, config.last_layer, last)


def _autoencoded(
    config: Lgc, variant: Variant, optimiser: optax.GradientTransformation, memory: Memory, schedule: tuple[Phase, ...]
) -> Compressor:
    """The method for the layers that go through the autoencoder."""
    reduce = {DENSE: _dense, TOP_K: variant.top_k, COMPRESSED: variant.compressed}

    def init(key, params, nodes):
        packing = make_packing(params)
        weights = variant.weights(key, select_layers(config, packing), nodes)
        local = jax.tree.map(lambda x: per_node(x, nodes), memory.init(packing.size))
        return State(Shared(ae.Trained(weights, optimiser.init(weights)), jnp.int32(0)), local)

    def aggregate(phase, key, grads, state, nodes):
        packing = make_packing(grads)
        v, local = take_in(memory, state.local, grads, packing, phase == DENSE)
        step = reduce[phase](v, key, state.shared, select_layers(config, packing), nodes)
        local = memory.keep(local, v, step.sent, phase == DENSE)
        info = make_info(memory.residual(local), step.elements)
        shared = step.shared._replace(step=state.shared.step + 1)
        return unpack(step.mean, packing), State(shared, local), info

    def wire(phase, shapes, nodes):
        selection = select_layers(config, make_packing(shapes))
        once = variant.sent_once(phase, selection, nodes)
        return Wire(variant.messages(phase, selection, nodes), (), once)

    def diagnose(phase, key, grads, state, nodes):
        packing = make_packing(grads)
        g = pack(grads, packing)
        v, _ = take_in(memory, state.local, grads, packing, phase == DENSE)
        selection = select_layers(config, packing)
        if phase == COMPRESSED:
            return variant.watch(v, g, key, state.shared, selection, nodes)
        figures = compare(reduce[phase](v, key, state.shared, selection, nodes).mean, v, g, nodes)
        if phase == TOP_K:
            figures |= variant.watch_training(v, key, state.shared, selection, nodes)
        return figures

    core = Compressor(init, aggregate, lambda old, new, state, nodes: state, wire, schedule, diagnose,
                      owns_momentum=memory.owns_momentum, residual=residual_of(memory))  # fmt: skip
    return guard(core)


def _dense(v: Array, key: Key, shared: Shared, selection: Selection, nodes: Nodes) -> Step:
    """First phase, equation (14)."""
    return Step(comm.pmean(v, nodes, "dense"), v, shared, v.size)


def values_at_leaders(v: Array, leader: Array, selection: Selection, nodes: Nodes) -> tuple[Array, Array]:
    """The leader's positions i32[mu], sent to all nodes, and all nodes' values there, f32[K, mu]."""
    positions = leaders_positions(v, leader, selection.packing.layers, selection.counts, nodes)
    return positions, comm.all_gather(v[positions], nodes, "values")
