"""Logical messages of each role in both LGC variants, from static sizes; symbols as in `server`."""

from functools import partial

import jax
import jax.numpy as jnp

from jgc.compress.lgc import autoencoder as ae
from jgc.compress.lgc.messages import write_code
from jgc.compress.lgc.normalise import Selection, header_of, innovations_by_layer
from jgc.compress.lgc.settings import COMPRESSED, TOP_K, Lgc, LgcPs, LgcRing
from jgc.layout.pack import values_of
from jgc.method.messages import Sizes, both_ways, led, messages, sizes_of
from jgc.types import Message, Nodes, PyTree
from jgc.wire import elias_fano


def server(config: LgcPs, phase: str, selection: Selection, nodes: Nodes) -> tuple[Message, ...]:
    """Messages of one step of a phase with a parameter server."""
    header = _header(config, selection)
    if phase == TOP_K:
        return _top_k(config, header["positions"], 4.0 * selection.mu, nodes)
    count = sum(innovations_by_layer(config, selection))
    of_node = {"innovations": 4.0 * count,
               "innovation positions": 4.0 * elias_fano.words(selection.mu, count)}  # fmt: skip
    means = {"means": 4.0 * len(selection.counts)}
    if config.send_means:
        of_node |= means
    values = jax.ShapeDtypeStruct((ae.code_size(selection.mu), 1), jnp.float32)
    written = jax.eval_shape(partial(write_code, config), values)
    code = sizes_of(written)
    mean = {"values": 4.0 * selection.mu}  # the aggregate, to all nodes
    # for its residual a worker decodes its message, and needs the code and the leader's scales
    to_decode: Sizes = {}
    if config.feedback == "exact" and code:
        to_decode = code | ({"scales": means["means"]} if config.scale == "layer" else {})
    if config.positions == "own":
        union = {"values": mean["values"] * nodes.count,
                 "positions": header["positions"] * nodes.count}  # fmt: skip
        to_worker = union | code if to_decode else union
        return led(header | code | of_node, header | of_node, union, to_worker)
    where = {field: size for field, size in header.items() if field in ("positions", "signs")}
    return led(header | code | of_node, of_node, mean, where | mean | to_decode)


def _header(config: Lgc, selection: Selection) -> Sizes:
    """Bytes of one node's positions, signs and scales, from the shapes of the payload."""

    def header(v):
        positions = selection.selector.positions(v, selection.layers)
        return header_of(config, v[positions], positions, selection)

    v = jax.ShapeDtypeStruct((values_of(selection.layers),), jnp.float32)
    return sizes_of(jax.eval_shape(header, v))


def _top_k(config: Lgc, positions: float, values: float, nodes: Nodes) -> tuple[Message, ...]:
    both = {"positions": positions, "values": values}
    if config.positions == "own":  # at most the union of all nodes' values comes back
        return both_ways(both, {field: size * nodes.count for field, size in both.items()})
    return led(both, {"values": values}, {"values": values}, both)


def server_sent_once(
    config: LgcPs, phase: str, selection: Selection, nodes: Nodes
) -> tuple[Message, ...]:
    """The trained weights, on entering the third phase, to the nodes that need them."""
    if phase != COMPRESSED or config.autoencoder_steps == 0 or config.code_dtype == "none":
        return ()
    weights = jax.eval_shape(lambda: ae.init(jax.random.key(0), selection.mu, 1))
    encoder = {"encoder weights": _bytes(weights.encoder)}
    decoder = {"decoder weights": _bytes(weights.decoders)} if config.feedback == "exact" else {}
    worker = (encoder if config.leader == "rotating" else {}) | decoder
    return messages("leader", "down", encoder | decoder) + messages("worker", "down", worker)


def ring(config: LgcRing, phase: str, selection: Selection, nodes: Nodes) -> tuple[Message, ...]:
    """Messages of one step of a phase of the ring. A summed payload counts once up, once down."""
    header = _header(config, selection)
    if phase == TOP_K:  # to the node that trains, which sends the mean back
        return _top_k(config, header["positions"], 4.0 * selection.mu, nodes)
    if config.scale == "layer":
        header["scales"] = 4.0 * len(selection.counts)
    width = jnp.dtype(config.code_dtype).itemsize
    code = {"code": float(width * ae.code_size(selection.mu))}
    if config.send_means:
        code["means"] = float(width * len(selection.counts))
    return led(header | code, code, code, header | code)


def ring_sent_once(
    config: LgcRing, phase: str, selection: Selection, nodes: Nodes
) -> tuple[Message, ...]:
    """The trained weights, from the node that trained them (here: the leader) to the others."""
    if phase != COMPRESSED or config.autoencoder_steps == 0:
        return ()
    linear = config.decoder == "linear"
    weights = jax.eval_shape(lambda: ae.init_pair(jax.random.key(0), selection.mu, linear))
    sizes = {"encoder weights": _bytes(weights.encoder), "decoder weights": _bytes(weights.decoder)}
    return messages("leader", "down", dict.fromkeys(sizes, 0.0)) + messages("worker", "down", sizes)


def _bytes(tree: PyTree) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))
