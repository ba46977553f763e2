"""The shards of a node's parameters: each device encodes its part.

    w (8, 6) over 4 devices, b (6,) on all of them:
    shard 0: w[0:2], b    shard 1: w[2:4]    shard 2: w[4:6]    shard 3: w[6:8]

Parts on several devices belong to the first. A node whose parameters are on one device, or whole on
all, has one shard.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jgc.rounds.arithmetic import Vector

Piece = tuple[slice, ...]


class Shard(NamedTuple):
    """The part of a device."""

    device: jax.Device | None  # None for JAX's default
    pieces: tuple[Piece | None, ...]  # of each leaf; None without floats, or if an earlier shard has it


def shards_of(leaves: Sequence[Any], floats: Sequence[bool]) -> list[Shard]:
    """The shards of parameters, or of their shapes, of which `floats` are exchanged."""
    divided = [_pieces_of(x) if is_float else {} for x, is_float in zip(leaves, floats, strict=True)]
    if all(len(set(map(_key, pieces.values()))) <= 1 for pieces in divided):
        whole = tuple(
            tuple(slice(0, n) for n in x.shape) if is_float else None
            for x, is_float in zip(leaves, floats, strict=True)
        )
        return [Shard(_only_device(divided), whole)]
    devices = sorted({d for pieces in divided for d in pieces if d is not None}, key=lambda d: d.id)
    earlier: list[set[Any]] = [{None} for _ in leaves]
    shards = []
    for device in devices:
        part: list[Piece | None] = []
        for pieces, before in zip(divided, earlier, strict=True):
            piece = pieces.get(device, pieces.get(None) if device is devices[0] else None)
            part.append(None if _key(piece) in before else piece)
            before.add(_key(piece))
        if any(piece is not None for piece in part):
            shards.append(Shard(device, tuple(part)))
    return shards


def cut(vector: Vector, shard: Shard, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray | None]:
    """A shard's pieces of f32[n], as views; the leaves lie in the vector one by one."""
    return [part if part is None else part[piece] for part, piece in _parts(vector, shard, shapes)]


def fill(vector: Vector, shard: Shard, shapes: Sequence[tuple[int, ...]], pieces: Sequence[Any]) -> None:
    """Write a shard's pieces into f32[n]."""
    for (part, piece), new in zip(_parts(vector, shard, shapes), pieces, strict=True):
        if part is not None:
            part[piece] = new


def _parts(vector: Vector, shard: Shard, shapes: Sequence[tuple[int, ...]]) -> Any:
    at = 0
    for shape, piece in zip(shapes, shard.pieces, strict=True):
        size = int(np.prod(shape))
        yield (vector[at : at + size].reshape(shape), piece) if piece is not None else (None, None)
        at += size


def _pieces_of(x: Any) -> dict[jax.Device | None, Piece]:
    """Each device's piece of a leaf; the whole leaf under None if its sharding is unknown."""
    shape, sharding = tuple(x.shape), getattr(x, "sharding", None)
    if sharding is None:
        return {None: tuple(slice(0, n) for n in shape)}
    if not sharding.is_fully_addressable:
        raise ValueError("params are divided over devices of several processes, and a node of rounds has one process: "
                         "gather them in one process, or let each process be a node")  # fmt: skip
    pieces = sharding.addressable_devices_indices_map(shape)
    return {
        device: tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
        for device, index in pieces.items()
    }


def _only_device(divided: Sequence[dict[jax.Device | None, Piece]]) -> jax.Device | None:
    devices = {d for pieces in divided for d in pieces if d is not None}
    return min(devices, key=lambda d: d.id) if devices else None


def _key(piece: Piece | None) -> Any:
    return None if piece is None else tuple((s.start, s.stop) for s in piece)
