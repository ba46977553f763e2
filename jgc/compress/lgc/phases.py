"""Shared by both variants of LGC: three phases, memory, accounting; symbols as in `server`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from jgc import comm
from jgc.compress.lgc import autoencoder as ae
from jgc.compress.lgc.normalise import Selection, select_layers
from jgc.compress.lgc.settings import COMPRESSED, TOP_K, Lgc
from jgc.compress.settings import memory_of, selector_of
from jgc.method import dense_step, from_step, phases
from jgc.method.exchange import broadcast_top_positions
from jgc.types import Array, Compressor, Message, Nodes

if TYPE_CHECKING:
    import optax

    from jgc.compress.lgc.ring import Ring
    from jgc.compress.lgc.server import ParameterServer


MessagesOf = Callable[[str, Selection, Nodes], tuple[Message, ...]]  # of a phase


class Shared(NamedTuple):
    """The shared state: the autoencoder, and the number of steps taken, i32[]."""

    autoencoder: ae.Trained
    step: Array


def make_optimiser(config: Lgc) -> "optax.GradientTransformation":
    """The autoencoder's optimiser."""
    import optax  # here: `import jgc` must not wait for it

    make = {"adam": optax.adam, "sgd": optax.sgd}[config.autoencoder_optimizer]
    return make(config.autoencoder_learning_rate)


def lgc(
    config: Lgc, variant: "ParameterServer | Ring", messages: MessagesOf, sent_once: MessagesOf
) -> Compressor:
    """The three-phase method of a variant's weights, steps and diagnostics, and its messages."""
    selector = selector_of(config, config.alpha)

    def init(key, layers, nodes):
        weights = variant.weights(key, select_layers(selector, layers), nodes)
        return Shared(ae.Trained(weights, variant.optimiser.init(weights)), jnp.int32(0)), ()

    def step(phase, key, v, state, layers, nodes):
        if phase == phases.DENSE or not layers:  # equation (14)
            result = dense_step(v, state, nodes)
        else:
            send = variant.top_k if phase == TOP_K else variant.compressed
            result = send(v, key, state.shared, select_layers(selector, layers), nodes)
        return result._replace(shared=result.shared._replace(step=state.shared.step + 1))

    def figures(phase, key, v, g, step, state, layers, nodes):
        if phase == phases.DENSE or not layers:
            return {}
        selection = select_layers(selector, layers)
        if phase == COMPRESSED:
            return variant.figures(v, g, key, state.shared, selection, nodes)
        return variant.training_figures(v, key, state.shared, selection, nodes)

    def of_layers(fn):
        def messages(phase, layers, nodes):
            return fn(phase, select_layers(selector, layers), nodes) if layers else ()

        return messages

    schedule = phases.in_sequence(
        (phases.DENSE, config.warmup_steps), (TOP_K, config.autoencoder_steps), (COMPRESSED, 0))
    return from_step(
        step, init=init, figures=figures, memory=memory_of(config), schedule=schedule,
        messages=of_layers(messages), sent_once=of_layers(sent_once))


def values_at_leaders(
    v: Array, leader: Array, selection: Selection, nodes: Nodes
) -> tuple[Array, Array]:
    """Broadcast the leader's positions i32[mu] and gather all nodes' values there, f32[K, mu]."""
    positions = broadcast_top_positions(v, leader, selection.layers, selection.selector, nodes)
    return positions, comm.all_gather(v[positions], nodes, "values")
