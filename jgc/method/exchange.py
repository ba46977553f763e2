"""How payloads travel between nodes: all-reduce, ring, gather, parameter server, and not at all."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jgc import comm
from jgc.layout.pack import values_of
from jgc.layout.select import pack_positions, top_positions, unpack_positions
from jgc.method.compose import Exchange, Item, Layers, Payload
from jgc.types import Array, Message, Nodes

Sizes = dict[str, float]  # bytes by kind


def messages(role: str, direction: str, sizes: Sizes) -> tuple[Message, ...]:
    """One logical message for every kind."""
    return tuple(Message(role, direction, kind, size) for kind, size in sizes.items())


def both_ways(up: Sizes, down: Sizes | None = None) -> tuple[Message, ...]:
    """What each node sends, and what comes back to it; the same if not given."""
    return messages("worker", "up", up) + messages("worker", "down", up if down is None else down)


def led(leader_up: Sizes, worker_up: Sizes, leader_down: Sizes, worker_down: Sizes) -> tuple[Message, ...]:
    """The same where one node, the leader, sends and gets something else than the others."""
    up = messages("leader", "up", leader_up) + messages("worker", "up", worker_up)
    return up + messages("leader", "down", leader_down) + messages("worker", "down", worker_down)


def to_all(sizes: Sizes, nodes: Nodes) -> tuple[Message, ...]:
    """A node's payload goes to all nodes, and theirs come to it."""
    return both_ways(sizes, {kind: size * (nodes.count - 1) for kind, size in sizes.items()})


def leaders_positions(v: Array, leader: Array, layers: Layers, counts: tuple[int, ...], nodes: Nodes) -> Array:
    """Where the leader's v f32[n] is largest, sent to all nodes, i32[mu]: so many positions of each layer."""
    return leaders_choice(v, leader, layers, counts, nodes)[0]


def leaders_choice(
    v: Array, leader: Array, layers: Layers, counts: tuple[int, ...], nodes: Nodes,
    tell: Callable[[Array], Payload] = lambda own: {},
) -> tuple[Array, Payload]:  # fmt: skip
    """The same, and what else the leader tells all nodes of its values there, in the same collective.

    Args:
      v: f32[n] of this node.
      leader: i32[], the same on all nodes.
      layers: of v.
      counts: positions of each layer; mu is their sum.
      nodes: the layout.
      tell: from this node's values f32[mu] at its own positions.
    """
    own = top_positions(v, layers, counts)
    told = comm.broadcast_dict({"positions": pack_positions(own, layers), **tell(v[own])}, leader, nodes)
    return unpack_positions(told.pop("positions"), layers, counts), told


def all_reduce(algorithm: str = "psum") -> Exchange:
    """Add payloads up and decode the mean; linear codes only.

    Args:
      algorithm: "psum" (whatever XLA and its network library choose) or "ring" (explicit, by `ppermute`).
    """
    reduce = comm.MEANS[algorithm]

    def run(items: Sequence[Item], nodes: Nodes) -> list[Array]:
        flat = [item.payload[kind].reshape(-1) for item in items for kind in sorted(item.payload)]
        mean = reduce(jnp.concatenate(flat), nodes, "+".join(sorted({kind for item in items for kind in item.payload})))
        out, start = [], 0
        for item in items:
            payload = {}
            for kind in sorted(item.payload):
                x = item.payload[kind]
                payload[kind] = mean[start : start + x.size].reshape(x.shape)
                start += x.size
            out.append(jnp.asarray(item.codec.decode(payload, item.layers)))
        return out

    return Exchange(f"all-reduce by {algorithm}", True, run, lambda sizes, nodes: both_ways(sizes))


def _gathered(items: Sequence[Item], nodes: Nodes) -> list[Array]:
    """All items' payloads to all nodes in one collective, then the mean of what they stand for."""
    joined = {f"{i:03d} {kind}": x for i, item in enumerate(items) for kind, x in item.payload.items()}
    kinds = "+".join(sorted({kind for item in items for kind in item.payload}))
    everyone = comm.all_gather_dict(joined, nodes, kinds)
    return [
        item.codec.mean({kind: everyone[f"{i:03d} {kind}"] for kind in item.payload}, item.layers)
        for i, item in enumerate(items)
    ]


def gather() -> Exchange:
    """Every node gets every node's payload and decodes them itself; for any code."""
    return Exchange("gather", False, _gathered, to_all)


def server() -> Exchange:
    """A parameter server decodes all payloads and sends the mean back; for any code whose mean is dense.

    On a single-program machine the server is a role: every device gathers the uplink and computes the mean.
    """
    return Exchange("parameter server", False, _gathered, lambda sizes, nodes: both_ways(sizes))


def nowhere() -> Exchange:
    """Nothing is sent, and the mean is zero."""

    def run(items: Sequence[Item], nodes: Nodes) -> list[Array]:
        return [jnp.zeros((values_of(item.layers),), jnp.float32) for item in items]

    return Exchange("nowhere", False, run, lambda sizes, nodes: ())
