"""How payloads travel between nodes: all-reduce, ring, gather, parameter server, and not at all."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jgc import comm
from jgc.backend import backend
from jgc.layout.pack import values_of
from jgc.method.compose import Exchange, Item, Layers, Payload
from jgc.method.messages import both_ways, to_all
from jgc.selection.select import SparseSum
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

    return Exchange(f"all-reduce by {algorithm}", True, run, lambda sizes, nodes: both_ways(sizes))


def _gathered(items: Sequence[Item], nodes: Nodes) -> list[Array | SparseSum]:
    """The mean of each item's decoded payloads, of all nodes."""
    tiled = [_is_tiled(item) for item in items]
    others = iter(_gathered_at_once([item for item, of in zip(items, tiled, strict=True) if not of], nodes))
    return [_gathered_in_tiles(item, nodes) if of else next(others) for item, of in zip(items, tiled, strict=True)]


def _is_tiled(item: Item) -> bool:
    tiled = item.codec.tiled
    return backend() == "tpu" and tiled is not None and tiled.fits(item.payload[tiled.field].size, item.layers)


def _gathered_in_tiles(item: Item, nodes: Nodes) -> Array:
    """Gather an item's words as tiles, of which a TPU moves none to decode them, and its other fields apart."""
    tiled = item.codec.tiled
    assert tiled is not None
    words = comm.all_gather(item.payload[tiled.field].reshape(-1, 8, 128), nodes, tiled.field)
    rest = {field: x for field, x in item.payload.items() if field != tiled.field}
    return tiled.mean(words, comm.all_gather_dict(rest, nodes) if rest else {}, item.layers)


def _gathered_at_once(items: Sequence[Item], nodes: Nodes) -> list[Array | SparseSum]:
    """Gather all items' payloads in one collective, then compute the mean of each item's decoded payloads."""
    if not items:
        return []
    joined = {f"{i:03d} {field}": x for i, item in enumerate(items) for field, x in item.payload.items()}
    fields = "+".join(sorted({field for item in items for field in item.payload}))
    everyone = comm.all_gather_dict(joined, nodes, fields)
    return [
        item.codec.mean({field: everyone[f"{i:03d} {field}"] for field in item.payload}, item.layers)
        for i, item in enumerate(items)
    ]


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

    return Exchange("nowhere", False, run, lambda sizes, nodes: ())
