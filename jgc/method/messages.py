"""Logical messages: the uplink and downlink of each role, from sizes in bytes by field."""

from collections.abc import Mapping, Sequence
from typing import Any

from jgc.types import Message, Nodes

Sizes = dict[str, float]  # bytes by field


def sizes_of(payload: Mapping[str, Any]) -> Sizes:
    """Bytes of a payload, a dict of arrays or of their shapes."""
    return {field: float(x.size * x.dtype.itemsize) for field, x in payload.items()}


def messages(role: str, direction: str, sizes: Sizes) -> tuple[Message, ...]:
    """One message per field."""
    return tuple(Message(role, direction, field, size) for field, size in sizes.items())


def both_ways(up: Sizes, down: Sizes | None = None) -> tuple[Message, ...]:
    """The messages that each node sends (`up`) and receives (`down`, by default the same)."""
    return messages("worker", "up", up) + messages("worker", "down", up if down is None else down)


def led(
    leader_up: Sizes, worker_up: Sizes, leader_down: Sizes, worker_down: Sizes
) -> tuple[Message, ...]:
    """The messages of a method whose leader sends or receives other fields than the workers."""
    up = messages("leader", "up", leader_up) + messages("worker", "up", worker_up)
    return up + messages("leader", "down", leader_down) + messages("worker", "down", worker_down)


def to_all(sizes: Sizes, nodes: Nodes) -> tuple[Message, ...]:
    """Each node's payload to all other nodes."""
    return both_ways(sizes, {field: size * (nodes.count - 1) for field, size in sizes.items()})


def scaled(messages: Sequence[Message], factor: float) -> tuple[Message, ...]:
    """The messages with their bytes multiplied."""
    return tuple(m._replace(bytes=factor * m.bytes) for m in messages)


def added(groups: Sequence[tuple[Message, ...]]) -> tuple[Message, ...]:
    """The sum of all groups' messages. In a group without a leader, the leader is a worker."""
    has_leader = any(m.role == "leader" for messages in groups for m in messages)
    totals: dict[tuple[str, str, str], float] = {}
    for messages in groups:
        roles = list(messages)
        if has_leader and not any(m.role == "leader" for m in messages):
            roles += [m._replace(role="leader") for m in messages]
        for m in roles:
            totals[m[:3]] = totals.get(m[:3], 0) + m.bytes
    return tuple(Message(*key, size) for key, size in totals.items())
