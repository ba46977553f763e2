"""Sums over a `Wire`: bytes by role, the paper's compression ratio, bytes of all nodes."""

from collections.abc import Iterable

from jgc.types import Message, Sent, Wire

Table = dict[str, dict[str, dict[str, float]]]


def logical_bytes(messages: Iterable[Message], nodes: int) -> Table:
    """Bytes by role, direction and field: `{"leader": {"up": {"positions": ...}}, ...}`.

    Bytes of the leader and of the worker are per node; without a leader, all K nodes are workers.
    The server's "up" is the sum of all that it receives, its "down" of all that it sends.

    Example:
      >>> logical_bytes([Message("worker", "up", "dense", 8)], nodes=2)["server"]
      {'up': {'dense': 16.0}}
    """
    messages = list(messages)
    leaders = 1 if any(m.role == "leader" for m in messages) else 0
    out: Table = {}
    for m in messages:
        times = leaders if m.role == "leader" else nodes - leaders
        for role, size in ((m.role, float(m.bytes)), ("server", float(m.bytes) * times)):
            fields = out.setdefault(role, {}).setdefault(m.direction, {})
            fields[m.field] = fields.get(m.field, 0.0) + size
    return out


def physical_bytes(sent: Iterable[Sent]) -> dict[str, float]:
    """Bytes that one device sends, by collective; flags, metrics and statistics are in `other`."""
    out: dict[str, float] = {}
    for s in sent:
        row = "other" if s.field in ("flag", "metrics", "statistics") else s.op
        out[row] = out.get(row, 0.0) + float(s.bytes)
    return out


def sent_by(role: str, wire: Wire, direction: str = "up") -> float:
    """Bytes of one node of a role in one step. A method without a leader has only workers."""
    role = role if any(m.role == role for m in wire.logical) else "worker"
    return float(sum(m.bytes for m in wire.logical if (m.role, m.direction) == (role, direction)))


def compression_ratio(role: str, wire: Wire, dense_bytes: float) -> float:
    """Bytes of the uncompressed gradient over a node's uplink bytes; inf if it sends nothing.

    Source: LGC paper, Section VI-A (CR).
    """
    up = sent_by(role, wire)
    return dense_bytes / up if up else float("inf")


def step_total(messages: Iterable[Message], nodes: int, direction: str | None = None) -> float:
    """Bytes of a step over all nodes: up, down, or both if no direction is given."""
    table = logical_bytes(messages, nodes).get("server", {})
    return sum(sum(sizes.values()) for way, sizes in table.items() if direction in (None, way))
