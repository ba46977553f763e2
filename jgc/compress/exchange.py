"""How payloads travel between nodes: all-reduce, ring, gather, parameter server, and not at all."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jgc import comm
from jgc.compress.compose import Exchange, Item
from jgc.types import Array, Message, Nodes


def messages(role: str, direction: str, sizes: Mapping[str, float], times: float = 1) -> tuple[Message, ...]:
    """One logical message for every kind."""
    return tuple(Message(role, direction, kind, times * size) for kind, size in sizes.items())


def _up_and_down(sizes: Mapping[str, float], nodes: Nodes) -> tuple[Message, ...]:
    """A worker sends its payload to a server, and the mean, as long as one payload, comes back."""
    return messages("worker", "up", sizes) + messages("worker", "down", sizes)


def _to_all(sizes: Mapping[str, float], nodes: Nodes) -> tuple[Message, ...]:
    """A worker's payload goes to all nodes, and theirs come to it."""
    return messages("worker", "up", sizes) + messages("worker", "down", sizes, nodes.count - 1)


def all_reduce(algorithm: str = "psum") -> Exchange:
    """Add payloads up and decode the mean; linear codes only.

    Args:
      algorithm: "psum" (whatever XLA and its network library choose) or "ring" (explicit, by `ppermute`).
    """
    reduce = {"psum": comm.mean, "ring": comm.ring_mean}[algorithm]

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

    return Exchange(f"all-reduce by {algorithm}", True, run, _up_and_down)


def _gathered(items: Sequence[Item], nodes: Nodes) -> list[Array]:
    """All items' payloads to all nodes in one collective, then the mean of what they stand for."""
    joined = {f"{i:03d} {kind}": x for i, item in enumerate(items) for kind, x in item.payload.items()}
    kinds = "+".join(sorted({kind for item in items for kind in item.payload}))
    everyone = comm.gather_dict(joined, nodes, kinds)
    return [
        item.codec.mean({kind: everyone[f"{i:03d} {kind}"] for kind in item.payload}, item.layers)
        for i, item in enumerate(items)
    ]


def gather() -> Exchange:
    """Every node gets every node's payload and decodes them itself; for any code."""
    return Exchange("gather", False, _gathered, _to_all)


def server() -> Exchange:
    """A parameter server decodes all payloads and sends the mean back; for any code whose mean is dense.

    On a single-program machine the server is a role: every device gathers the uplink and computes the mean.
    """
    return Exchange("parameter server", False, _gathered, _up_and_down)


def nowhere() -> Exchange:
    """Nothing is sent, and the mean is zero."""

    def run(items: Sequence[Item], nodes: Nodes) -> list[Array]:
        return [jnp.zeros((sum(layer.size for layer in item.layers),), jnp.float32) for item in items]

    return Exchange("nowhere", False, run, lambda sizes, nodes: ())
