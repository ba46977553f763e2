"""Codecs and exchanges: the payload of a step, and how payloads travel. `compose` joins them.

A codec turns v f32[n] into a payload, a dict of arrays named by their field ("values",
"positions", ...). An exchange turns the payloads of all nodes into the mean of the decoded vectors:
by an all-reduce, a ring, a gather, a parameter server, or not at all.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.layout.devices import cut, decodes_tiles
from jgc.layout.pack import Layers, values_of
from jgc.method.messages import Sizes, both_ways, sizes_of, to_all
from jgc.method.step import Step
from jgc.selection.entries import Sparse, SparseSum
from jgc.selection.selector import Selector
from jgc.types import Array, Key, Message, Nodes

AGREED = "agreed scales"  # the payload field of `Codec.agree`

Payload = dict[str, Array]


class Tiled(NamedTuple):
    """How a TPU takes the mean of payloads whose largest field is words of whole tiles.

    Attributes:
      field: the name of that field.
      fits: `(number of words, layers) -> bool`.
      mean: `(words u32[K, tiles, 8, 128], other fields with a leading axis [K], layers) -> f32[n]`.
    """

    field: str
    fits: Callable[[int, Layers], bool]
    mean: Callable[[Array, Payload, Layers], Array]


class Codec(NamedTuple):
    """How a node encodes a vector v f32[n] with static layers.

    Attributes:
      name: for error messages.
      linear: whether the mean of payloads is the payload of the mean.
      encode: `(key, v, layers) -> payload`; `key` differs between nodes.
      decode: `(payload, layers) -> f32[n] or Sparse`.
      mean: `(payloads with a leading axis [K], layers) -> f32[n] or SparseSum`, the mean of the
        decoded payloads, for exchanges that gather.
      elements: `layers -> int`, how many values a payload encodes.
      agree: `(v, layers) -> f32[m]` or None. Before encoding, an all-reduce takes its elementwise
        maximum over nodes; `encode` gets the result as its last argument (TernGrad's shared
        scales).
      encode_with_sent: `(key, v, layers) -> (payload, decoded payload)`, or None if `decode` has to
        be called; v may have zeros at its end.
      tiled: None, or how a TPU takes the mean of payloads whose words are whole tiles.
    """

    name: str
    linear: bool
    encode: Callable[..., Payload]
    decode: Callable[[Payload, Layers], Array | Sparse]
    mean: Callable[[Payload, Layers], Array | SparseSum]
    elements: Callable[[Layers], int]
    agree: Callable[[Array, Layers], Array] | None = None
    encode_with_sent: Callable[..., tuple[Payload, Array | Sparse]] | None = None
    tiled: Tiled | None = None


class Item(NamedTuple):
    """The payload of one group of leaves, with the codec to decode it, and what it decodes to."""

    codec: Codec
    layers: Layers
    payload: Payload
    sent: Array | Sparse


class Exchange(NamedTuple):
    """How payloads travel.

    Attributes:
      name: groups whose exchanges have the same name can share one collective.
      needs_linear: whether it adds payloads up before it decodes them.
      run: `(items, nodes) -> [f32[n] or SparseSum per item]`, the mean over nodes, equal on all of
        them.
      messages: `(bytes of one node's payload by field, nodes) -> logical messages`.
      mean: `(codec, payloads with a leading axis [K], layers) -> f32[n] or SparseSum`: the result
        of `run` for an item, of payloads that were gathered by other means (`jgc.decode`).
    """

    name: str
    needs_linear: bool
    run: Callable[[Sequence[Item], Nodes], list[Array | SparseSum]]
    messages: Callable[[Sizes, Nodes], tuple[Message, ...]]
    mean: Callable[[Codec, Payload, Layers], Array | SparseSum] = lambda codec, payloads, layers: (
        codec.mean(payloads, layers)
    )


Stages = dict[Hashable, tuple[Codec, Exchange]]


def encoded(codec: Codec, key: Key, v: Array, layers: Layers, nodes: Nodes) -> Item:
    """Encode v f32[n], or with zeros at its end. A codec with `agree` communicates here."""
    key = comm.node_key(key, nodes)
    if codec.encode_with_sent is not None:
        return Item(codec, layers, *codec.encode_with_sent(key, v, layers))
    v = cut(v, values_of(layers))
    payload = _payload(codec, key, v, layers, lambda x: comm.pmax(x, nodes, AGREED))
    return Item(codec, layers, payload, codec.decode(payload, layers))


def exchanged(
    exchange: Exchange, codec: Codec, key: Key, v: Array, layers: Layers, nodes: Nodes
) -> Step:
    """The step of a method that encodes v f32[n] and exchanges it by itself."""
    item = encoded(codec, key, v, layers, nodes)
    (mean,) = exchange.run([item], nodes)
    return Step(mean, item.sent, elements=codec.elements(layers))


def _payload(
    codec: Codec, key: Key, v: Array, layers: Layers, agree: Callable[[Array], Array]
) -> Payload:
    """The codec's payload. `agree` turns this node's proposal into the value that all nodes use."""
    agreed = () if codec.agree is None else (agree(codec.agree(v, layers)),)
    return codec.encode(key, v, layers, *agreed)


def payload_sizes(codec: Codec, layers: Layers) -> Sizes:
    """Bytes of a payload by field."""
    key, v = jax.random.key(0), vector_of(layers)
    return sizes_of(
        jax.eval_shape(lambda key, v: _payload(codec, key, v, layers, lambda x: x), key, v)
    )


def vector_of(layers: Layers) -> jax.ShapeDtypeStruct:
    """The shape of v f32[n]."""
    return jax.ShapeDtypeStruct((values_of(layers),), jnp.float32)


# --- exchanges ------------------------------------------------------------------------------------


def broadcast_top_positions(
    v: Array, leader: Array, layers: Layers, selector: Selector, nodes: Nodes
) -> Array:
    """The positions of the leader's top-k values, broadcast to all nodes: i32[mu].

    Args:
      v: f32[n] of this node.
      leader: i32[], the same on all nodes.
      layers: ranges of v.
      selector: chooses mu positions, and codes them.
      nodes: the layout.
    """
    packed = selector.pack(selector.positions(v, layers), layers)
    return selector.unpack(comm.broadcast(packed, leader, nodes, "positions"), layers)


def all_reduce(algorithm: str = "psum") -> Exchange:
    """Add payloads up and decode the mean; linear codes only.

    Args:
      algorithm: "psum" (whatever XLA and its network library choose) or "ring" (explicit, by
        `ppermute`).

    Raises:
      ValueError: a different algorithm.
    """
    reduce = comm.mean_by(algorithm)

    def run(items: Sequence[Item], nodes: Nodes) -> list[Array | SparseSum]:
        flat = [item.payload[field].reshape(-1) for item in items for field in sorted(item.payload)]
        fields = "+".join(sorted({field for item in items for field in item.payload}))
        mean = reduce(jnp.concatenate(flat), nodes, fields)
        out: list[Array | SparseSum] = []
        start = 0
        for item in items:
            payload = {}
            for field in sorted(item.payload):
                x = item.payload[field]
                payload[field] = mean[start : start + x.size].reshape(x.shape)
                start += x.size
            out.append(jnp.asarray(item.codec.decode(payload, item.layers)))
        return out

    def mean(codec: Codec, payloads: Payload, layers: Layers) -> Array | SparseSum:
        count = len(next(iter(payloads.values())))
        payload = {field: x.sum(axis=0) / count for field, x in payloads.items()}
        return jnp.asarray(codec.decode(payload, layers))

    name = f"all-reduce by {algorithm}"
    return Exchange(name, True, run, lambda sizes, nodes: both_ways(sizes), mean)


def _gathered(items: Sequence[Item], nodes: Nodes) -> list[Array | SparseSum]:
    """The mean of each item's decoded payloads, of all nodes: one collective for all of them."""
    means: dict[int, Array | SparseSum] = {}
    joined: dict[str, Array] = {}
    for i, (codec, layers, payload, _) in enumerate(items):
        tiled = codec.tiled
        if tiled is not None and decodes_tiles(tiled, payload[tiled.field].size, layers):
            # Words that travel as tiles are decoded in place, so they have a separate collective.
            words = comm.all_gather(payload[tiled.field].reshape(-1, 8, 128), nodes, tiled.field)
            rest = {field: x for field, x in payload.items() if field != tiled.field}
            means[i] = tiled.mean(words, comm.all_gather_dict(rest, nodes) if rest else {}, layers)
        else:
            joined |= {f"{i:03d} {field}": x for field, x in payload.items()}
    if len(means) < len(items):
        fields = "+".join(sorted({name[4:] for name in joined}))
        everyone = comm.all_gather_dict(joined, nodes, fields)
        for i, (codec, layers, payload, _) in enumerate(items):
            if i not in means:
                payloads = {field: everyone[f"{i:03d} {field}"] for field in payload}
                means[i] = codec.mean(payloads, layers)
    return [means[i] for i in range(len(items))]


def gather() -> Exchange:
    """Every node receives the payloads of all nodes and decodes them. Works for any code."""
    return Exchange("gather", False, _gathered, to_all)


def server() -> Exchange:
    """A parameter server decodes all payloads and sends the mean back; for codes with dense means.

    There is no server process: every device gathers the uplink and computes the mean. The logical
    downlink has the size of a payload.
    """
    return Exchange("parameter server", False, _gathered, lambda sizes, nodes: both_ways(sizes))


def nowhere() -> Exchange:
    """Nothing is sent, and the mean is zero."""

    def mean(codec: Codec, payloads: Payload, layers: Layers) -> Array:
        return jnp.zeros((values_of(layers),), jnp.float32)

    def run(items: Sequence[Item], nodes: Nodes) -> list[Array | SparseSum]:
        return [mean(item.codec, {}, item.layers) for item in items]

    return Exchange("nowhere", False, run, lambda sizes, nodes: (), mean)
