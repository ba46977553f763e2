"""Codecs and exchanges: the payload of a step, and how payloads travel. `compose` joins them.

A codec turns v f32[n] into a payload, a dict of arrays named by their field ("values",
"positions", ...). An exchange turns the payloads of all nodes into the mean of the decoded vectors.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.layout.pack import Layers, values_of
from jgc.layout.tiles import cut
from jgc.method.messages import Sizes, sizes_of
from jgc.method.step import Step
from jgc.selection.entries import Sparse, SparseSum
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
      encode: `(key, v, layers) -> payload`; `key` is this node's own.
      decode: `(payload, layers) -> f32[n] or Sparse`.
      mean: `(payloads with a leading axis [K], layers) -> f32[n] or SparseSum`, the mean of the decoded payloads, for
        exchanges that gather.
      elements: `layers -> int`, how many values a payload encodes.
      encode_with_sent: `encode`, but it returns the payload and what that decodes to, where both are at hand; None if
        `decode` has to be called. v may have zeros at its end.
      tiled: None, or how a TPU takes the mean of payloads whose words are whole tiles.
      agree: `(v, layers) -> f32[m]` or None. Before encoding, an all-reduce takes its elementwise maximum over nodes;
        `encode` gets the result as its last argument (TernGrad's shared scales).
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
    """The payload of one group of leaves, with the codec to decode it, and what it decodes to if that is known."""

    codec: Codec
    layers: Layers
    payload: Payload
    sent: Array | Sparse | None = None


class Exchange(NamedTuple):
    """How payloads travel.

    Attributes:
      name: groups whose exchanges have the same name can share one collective.
      needs_linear: whether it adds payloads up before it decodes them.
      run: `(items, nodes) -> [f32[n] or SparseSum per item]`, the mean over nodes, equal on all of them.
      messages: `(bytes of one node's payload by field, nodes) -> logical messages`.
      mean: `(codec, payloads with a leading axis [K], layers) -> f32[n] or SparseSum`: what `run`
        returns for an item, of payloads that were gathered by other means (`jgc.decode`).
    """

    name: str
    needs_linear: bool
    run: Callable[[Sequence[Item], Nodes], list[Array | SparseSum]]
    messages: Callable[[Sizes, Nodes], tuple[Message, ...]]
    mean: Callable[[Codec, Payload, Layers], Array | SparseSum] = lambda codec, payloads, layers: codec.mean(
        payloads, layers
    )


Stages = dict[Hashable, tuple[Codec, Exchange]]


def encoded(codec: Codec, key: Key, v: Array, layers: Layers, nodes: Nodes) -> Item:
    """Encode v f32[n], or with zeros at its end, into this node's payload. A codec with `agree` communicates here."""
    own = comm.node_key(key, nodes)
    if codec.encode_with_sent is not None:
        return Item(codec, layers, *codec.encode_with_sent(own, v, layers))
    payload = _encode(codec, own, cut(v, values_of(layers)), layers, lambda own: comm.pmax(own, nodes, AGREED))
    return Item(codec, layers, payload)


def as_step(item: Item, mean: Array | SparseSum) -> Step:
    """The step of a node that sent `item`; `mean` is the exchange's result for it."""
    sent = item.codec.decode(item.payload, item.layers) if item.sent is None else item.sent
    return Step(mean, sent, elements=item.codec.elements(item.layers))


def _encode(codec: Codec, key: Key, v: Array, layers: Layers, agree: Callable[[Array], Array]) -> Payload:
    """The codec's payload. `agree` turns this node's proposal into the value that all nodes use."""
    agreed = () if codec.agree is None else (agree(codec.agree(v, layers)),)
    return codec.encode(key, v, layers, *agreed)


def payload_sizes(codec: Codec, layers: Layers) -> Sizes:
    """Bytes of a payload by field."""
    payload = jax.eval_shape(
        lambda key, v: _encode(codec, key, v, layers, lambda own: own), jax.random.key(0), vector_of(layers)
    )
    return sizes_of(payload)


def vector_of(layers: Layers) -> jax.ShapeDtypeStruct:
    """The shape of v f32[n]."""
    return jax.ShapeDtypeStruct((values_of(layers),), jnp.float32)
