"""How payloads travel between nodes: all-reduce, ring, gather, parameter server, and not at all."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jgc import comm
from jgc.layout.pack import Layers, values_of
from jgc.layout.tiles import decodes_tiles
from jgc.method.codec import Codec, Exchange, Item, Payload
from jgc.method.messages import both_ways, to_all
from jgc.selection.entries import SparseSum
from jgc.selection.selector import Selector
from jgc.types import Array, Nodes


def broadcast_top_positions(
    v: Array, leader: Array, layers: Layers, selector: Selector, nodes: Nodes,
    side_information: Callable[[Array], Payload] = lambda own: {},
) -> tuple[Array, Payload]:  # fmt: skip
    """Broadcast the leader's top-k positions, with optional side information, in one collective.

    Args:
      v: f32[n] of this node.
      leader: i32[], the same on all nodes.
      layers: ranges of v.
      selector: chooses mu positions, and codes them.
      nodes: the layout.
      side_information: `values -> payload`, called with this node's values f32[mu] at its own positions.

    Returns:
      The leader's positions, i32[mu], and its side information.
    """
    own = selector.positions(v, layers)
    received = comm.broadcast_dict(
        {"positions": selector.pack(own, layers), **side_information(v[own])}, leader, nodes
    )
    return selector.unpack(received.pop("positions"), layers), received


def all_reduce(algorithm: str = "psum") -> Exchange:
    """Add payloads up and decode the mean; linear codes only.

    Args:
      algorithm: "psum" (whatever XLA and its network library choose) or "ring" (explicit, by `ppermute`).

    Raises:
      ValueError: another algorithm.
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
        return jnp.asarray(codec.decode({field: x.sum(axis=0) / count for field, x in payloads.items()}, layers))

    return Exchange(f"all-reduce by {algorithm}", True, run, lambda sizes, nodes: both_ways(sizes), mean)


def _gathered(items: Sequence[Item], nodes: Nodes) -> list[Array | SparseSum]:
    """The mean of each item's decoded payloads, of all nodes: one collective for all of them."""
    means: dict[int, Array | SparseSum] = {}
    joined: dict[str, Array] = {}
    for i, (codec, layers, payload, _) in enumerate(items):
        tiled = codec.tiled
        if tiled is not None and decodes_tiles(tiled, payload[tiled.field].size, layers):
            # Words that travel as tiles are decoded where they lie, so they have a collective by themselves.
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
                means[i] = codec.mean({field: everyone[f"{i:03d} {field}"] for field in payload}, layers)
    return [means[i] for i in range(len(items))]


def gather() -> Exchange:
    """Every node receives the payloads of all nodes and decodes them. Works for any code."""
    return Exchange("gather", False, _gathered, to_all)


def server() -> Exchange:
    """A parameter server decodes all payloads and sends the mean back; for codes whose mean is dense.

    There is no server process: every device gathers the uplink and computes the mean. The logical downlink has the size
    of a payload.
    """
    return Exchange("parameter server", False, _gathered, lambda sizes, nodes: both_ways(sizes))


def nowhere() -> Exchange:
    """Nothing is sent, and the mean is zero."""

    def run(items: Sequence[Item], nodes: Nodes) -> list[Array | SparseSum]:
        return [jnp.zeros((values_of(item.layers),), jnp.float32) for item in items]

    def mean(codec: Codec, payloads: Payload, layers: Layers) -> Array:
        return jnp.zeros((values_of(layers),), jnp.float32)

    return Exchange("nowhere", False, run, lambda sizes, nodes: (), mean)
