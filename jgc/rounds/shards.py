"""The shards of a node's parameters: each device encodes its part.

    w (8, 6) over 4 devices, b (6,) on all of them:
    shard 0: w[0:2], b    shard 1: w[2:4]    shard 2: w[4:6]    shard 3: w[6:8]

Parts on several devices belong to the first. A node whose parameters are on one device, or whole on
all, has one shard.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jgc.rounds.arithmetic import Vector

Piece = tuple[tuple[int, int], ...]  # start and stop in each dimension of a leaf


class Shard(NamedTuple):
    """The part of a device."""

    device: jax.Device | None  # None for JAX's default
    pieces: tuple[Piece | None, ...]  # of each leaf; None without floats, or in an earlier shard


def shards_of(leaves: Sequence[Any], floats: Sequence[bool]) -> list[Shard]:
    """The shards of parameters, or of their shapes, of which `floats` are exchanged."""
    divided = [_pieces_of(x) if f else {} for x, f in zip(leaves, floats, strict=True)]
    devices = {d for pieces in divided for d in pieces if d is not None}
    order: list[Any] = sorted(devices, key=lambda device: device.id) or [None]
    if all(len(set(pieces.values())) <= 1 for pieces in divided):  # all leaves are whole
        return [Shard(order[0], tuple(next(iter(x.values()), None) for x in divided))]
    earlier: list[set[Piece | None]] = [set() for _ in leaves]
    shards = []
    for device in order:
        part: list[Piece | None] = []
        for pieces, before in zip(divided, earlier, strict=True):
            piece = pieces.get(device, pieces.get(None) if device is order[0] else None)
            part.append(None if piece in before else piece)
            before.add(piece)
        if any(piece is not None for piece in part):
            shards.append(Shard(device, tuple(part)))
    return shards


def cut(vector: Vector, shard: Shard, shapes: Sequence[tuple[int, ...]]) -> list[Vector | None]:
    """A shard's pieces of f32[n], as views; the leaves lie in the vector one by one."""
    return list(_views(vector, shard, shapes))


def fill(
    vector: Vector, shard: Shard, shapes: Sequence[tuple[int, ...]], pieces: Sequence[Any]
) -> None:
    """Write a shard's pieces into f32[n]."""
    for view, piece in zip(_views(vector, shard, shapes), pieces, strict=True):
        if view is not None:
            view[...] = piece


def _views(
    vector: Vector, shard: Shard, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Vector | None]:
    at = 0
    for shape, piece in zip(shapes, shard.pieces, strict=True):
        leaf = vector[at : at + math.prod(shape)].reshape(shape)
        yield None if piece is None else leaf[tuple(slice(*part) for part in piece) or ...]
        at += leaf.size


def _pieces_of(x: Any) -> dict[jax.Device | None, Piece]:
    """Each device's piece of a leaf; the whole leaf under None if its sharding is unknown."""
    shape, sharding = tuple(x.shape), getattr(x, "sharding", None)
    if sharding is None:
        return {None: tuple((0, n) for n in shape)}
    if not sharding.is_fully_addressable:
        raise ValueError(
            "params are sharded over devices of several processes, and a node of rounds has one "
            "process: gather them in one process, or let each process be a node"
        )
    return {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
