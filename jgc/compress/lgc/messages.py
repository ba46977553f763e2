"""The messages to LGC's parameter server in the third phase, and its reconstruction of the values.

Symbols as in `jgc.compress.lgc.server`. There is no server process: every device plays the server.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.compress.lgc import autoencoder as ae, normalise
from jgc.compress.lgc.normalise import Selection, View, from_z, header_of, to_z, view_of
from jgc.compress.lgc.settings import LgcPs
from jgc.method.diagnose import cosine, relative_error
from jgc.method.exchange import Payload
from jgc.nodes.placing import per_node
from jgc.selection.entries import Sparse, replaced, scatter
from jgc.types import Array, Nodes, PyTree
from jgc.wire import elias_fano
from jgc.wire.values import decode_values, encode_values

# of the code's payload
_FIELDS = {"values": "code", "scales": "code scales", "group_scales": "code group scales"}


class ServerInbox(NamedTuple):
    """The messages that the server received in a step, decoded."""

    positions: Array  # i32[K, mu]
    views: View  # leading axis [K]
    code: Array | None  # f32[m / 16, 4], from the leader; None without a code
    picked: Array  # i32[K, innovations], indices into the selected values
    innovations: Array  # f32[K, innovations], exact values there


def receive(
    config: LgcPs, v: Array, encoder: PyTree, leader: Array, selection: Selection, nodes: Nodes
) -> ServerInbox:
    """Send one step's messages: the leader's to all nodes, then every node's to the server."""
    positions = selection.selector.positions(v, selection.layers)
    x = v[positions]
    header = header_of(config, x, positions, selection)
    view = view_of(config, x, header, selection)
    # equation (3), on the leader's device: encode once per device, not once per emulated node
    z = comm.on_leaders_device(to_z(config, x, view, selection), leader, nodes)
    code = write_code(config, ae.encode(encoder, z))
    if config.positions == "leader":
        common = comm.broadcast_dict({**header, **code}, leader, nodes)
        header = {field: common[field] for field in header}
        x = v[selection.selector.unpack(header["positions"], selection.layers)]
        view = view_of(config, x, header, selection)
    else:
        common = comm.broadcast_dict(code, leader, nodes) if code else {}
    picked = normalise.choose_innovations(config, x, view, selection)
    message = {"innovation positions": elias_fano.encode(picked, selection.mu),
               "innovations": x[picked]}  # fmt: skip
    if config.send_means:
        message["means"] = view.means
    every = comm.all_gather_dict(message | (header if config.positions == "own" else {}), nodes)
    return _read_inbox(config, common, every, header, leader, selection, nodes)


def write_code(config: LgcPs, code: Array) -> Payload:
    """The payload of a code f32[m / 16, 4]; empty without a code."""
    if config.code_dtype == "none":
        return {}
    payload = encode_values(config.code_dtype, code.reshape(-1), (code.size,))
    return {_FIELDS[field]: x for field, x in payload.items()}


def _read_inbox(
    config: LgcPs, common: Payload, every: Payload, header: Payload, leader: Array,
    selection: Selection, nodes: Nodes,
) -> ServerInbox:  # fmt: skip
    """Decode the messages on the server."""
    by_node, mu = config.positions == "own", selection.mu
    headers = {field: every[field] if by_node else per_node(x, nodes)
               for field, x in header.items()}  # fmt: skip
    means = every.get("means", jnp.zeros((nodes.count, len(selection.layers)), jnp.float32))
    if "scales" in headers:
        scales = headers["scales"]
    elif config.scale == "none":
        scales = jnp.ones_like(means)
    else:
        scales = means if by_node else per_node(means[leader], nodes)
    unpack = partial(selection.selector.unpack, layers=selection.layers)
    signs = jax.vmap(lambda header: normalise.unpacked_signs(header, mu))(headers)
    count = every["innovations"].shape[1]
    picked = jax.vmap(lambda code: elias_fano.decode(code, mu, count))
    return ServerInbox(
        positions=jax.vmap(unpack)(headers["positions"]),
        views=View(signs, means, scales),
        code=read_code(config, common, selection),
        picked=picked(every["innovation positions"]),
        innovations=every["innovations"])


def read_code(config: LgcPs, payload: Payload, selection: Selection) -> Array | None:
    """The inverse of `write_code`."""
    if config.code_dtype == "none":
        return None
    written = {name: payload[field] for name, field in _FIELDS.items() if field in payload}
    code = decode_values(config.code_dtype, written, (ae.code_size(selection.mu),))
    return code.reshape(-1, ae.CHANNELS)


def decode(config: LgcPs, weights: ae.Weights, inbox: ServerInbox, selection: Selection) -> Array:
    """The server's reconstruction of every node's selected values, equation (12), f32[K, mu]."""
    if inbox.code is None:
        return _without_code(inbox, selection)

    def of_node(decoder, view, picked, values):
        innovation = normalise.innovation_vector(config, view, picked, values, selection)
        x = from_z(ae.decode(decoder, inbox.code, innovation), view, selection)
        return replaced(x, picked, values) if config.overwrite else x

    return jax.vmap(of_node)(weights.decoders, inbox.views, inbox.picked, inbox.innovations)


def _by_signs(inbox: ServerInbox, selection: Selection) -> Array:
    """Every node's values from only signs and means, f32[K, mu]."""
    return inbox.views.signs * inbox.views.means[:, selection.ids]


def _without_code(inbox: ServerInbox, selection: Selection) -> Array:
    """Every node's values from signs, means and innovations, f32[K, mu]."""
    return jax.vmap(replaced)(_by_signs(inbox, selection), inbox.picked, inbox.innovations)


def average(inbox: ServerInbox, x: Array, n: int) -> Array:
    """Equation (13): the mean over nodes of x f32[K, mu] at each node's positions, f32[n]."""
    return scatter(Sparse(inbox.positions, x), n) / x.shape[0]


def figures(
    config: LgcPs, weights: ae.Weights, inbox: ServerInbox, v: Array, g: Array, leader: Array,
    selection: Selection, nodes: Nodes,
) -> dict[str, Array]:  # fmt: skip
    """Diagnostics of a step, f32[] each, and the leader's positions; `v` and `g` are this node's,
    f32[n].

    These compare an aggregate with the mean over nodes of v at the positions used:

      `reconstruction_cosine`, `relative_error`  the aggregate of the step
      `ceiling_cosine`                           from exact values instead of the code: the
                                                 leader's if all nodes use its positions, else
                                                 every node's
      `signs_means_cosine`                       from signs and means only
      `without_code_cosine`                      from signs, means and innovations

    `true_cosine` compares the aggregate of the step with the whole mean of g.
    """
    used = scatter(Sparse(inbox.positions, jnp.ones_like(inbox.views.signs)), v.size) > 0
    true = jnp.where(used, comm.pmean(v, nodes, "diagnose"), 0.0)
    positions = inbox.positions[comm.node_index(nodes)]
    exact = comm.all_gather(v[positions], nodes, "diagnose")  # [K, mu]
    best = exact
    if config.positions == "leader":
        best = _ceiling(config, exact[leader], leader, inbox, selection)
    aggregate, ceiling, trivial, without_code = (average(inbox, x, v.size) for x in (
        decode(config, weights, inbox, selection), best, _by_signs(inbox, selection),
        _without_code(inbox, selection)))  # fmt: skip
    return {
        "reconstruction_cosine": cosine(aggregate, true),
        "relative_error": relative_error(aggregate, true),
        "ceiling_cosine": cosine(ceiling, true),
        "signs_means_cosine": cosine(trivial, true),
        "without_code_cosine": cosine(without_code, true),
        "true_cosine": cosine(aggregate, comm.pmean(g, nodes, "diagnose")),
        "positions": inbox.positions[leader],
        "positions_n": jnp.int32(v.size),
    }


def _ceiling(
    config: LgcPs, exact: Array, leader: Array, inbox: ServerInbox, selection: Selection
) -> Array:
    """The reconstruction from the leader's exact values f32[mu] instead of its code, f32[K, mu].

    A node's deviation from its layer mean is assumed to be the leader's, times the ratio of the two
    means clipped to [0, 1]. This was the most accurate of the simple rules tried.
    """
    of_leader = jax.tree.map(lambda x: x[leader], inbox.views)
    z = to_z(config, exact, of_leader, selection)
    has_mean = of_leader.means > 0  # False if means are not sent
    ratio = inbox.views.means / jnp.where(has_mean, of_leader.means, 1.0)
    follows = jnp.where(has_mean, jnp.clip(ratio, 0.0, 1.0), 1.0)

    def of_node(view, follows, picked, values):
        x = from_z(follows[selection.ids] * z[: selection.mu], view, selection)
        return replaced(x, picked, values)

    everyone = jax.vmap(of_node)(inbox.views, follows, inbox.picked, inbox.innovations)
    return everyone.at[leader].set(exact)
