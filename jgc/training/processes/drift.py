"""Detect diverged replicas: a flipped bit in one copy persists and spreads.

Each device computes a checksum of its part of every array in the train state. Devices that should hold the same part
are compared: all of them for parameters and optimiser state, the devices of a node for its residual.
"""

from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jgc.checks.misuse import is_key, leaves_by_path
from jgc.nodes.placing import to_host
from jgc.types import Array, Nodes, PyTree

SPREAD = 0x3C6EF372  # even, about 2^32 times the golden ratio modulo 2^32


class Copies(NamedTuple):
    """An array, and the devices that hold equal parts of it by their place in the mesh, group by group."""

    name: str
    groups: tuple[tuple[int, ...], ...]


class Replicas:
    """Compares the copies of a train state's arrays, in a run on several devices."""

    def __init__(self, nodes: Nodes):
        self._mesh = nodes.mesh
        self._devices = () if nodes.mesh is None else tuple(nodes.mesh.devices.flat)
        self._programs: dict[Any, tuple[Any, tuple[Copies, ...]]] = {}  # a phase can change the shapes of a state

    def difference(self, state: PyTree) -> str:
        """The first array of which devices hold different copies, and the device, in words; "" if all agree.

        Collective: all processes must call it, and get the same answer.
        """
        if len(self._devices) < 2:
            return ""
        arrays = _named(state)
        key = tuple((name, x.shape) for name, x in arrays.items())
        if key not in self._programs:
            copies = tuple(Copies(name, _groups(x, self._devices)) for name, x in arrays.items())
            chosen = tuple(of for of in copies if of.groups)
            self._programs[key] = self._program([arrays[of.name] for of in chosen]), chosen
        sums, copies = self._programs[key]
        if not copies:
            return ""
        return _first_difference(to_host(sums(*(arrays[of.name] for of in copies))), copies, self._devices)

    def _program(self, arrays: list[Array]) -> Any:
        """`arrays -> u32[D, L]`, the checksum of each of L arrays on each of D devices."""

        def on_device(*parts: Array) -> Array:
            return jnp.stack([checksum(x) for x in parts])[None]

        specs = tuple(x.sharding.spec for x in arrays)  # type: ignore[attr-defined]
        out = P(self._mesh.axis_names)  # type: ignore[union-attr]
        # without check_vma: each device has its sums, though the arrays should be equal
        return jax.jit(jax.shard_map(on_device, mesh=self._mesh, in_specs=specs, out_specs=out, check_vma=False))


def _named(state: PyTree) -> dict[str, Array]:
    """The arrays of a state by path, without empty ones; random keys as their bits."""
    named = {name: x for name, x in leaves_by_path(state, ".").items() if np.size(x) and isinstance(x, Array)}
    return {name: jax.random.key_data(x) if is_key(x) else x for name, x in named.items()}


def _groups(x: Array, devices: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """The devices that hold equal parts of an array, by their place in the mesh, where they are several."""
    parts: dict[str, list[int]] = {}
    index = x.sharding.devices_indices_map(x.shape)
    for place, device in enumerate(devices):
        parts.setdefault(str(index[device]), []).append(place)
    return tuple(tuple(group) for group in parts.values() if len(group) > 1)


def checksum(x: Array) -> Array:
    """A checksum of an array's bits, u32[]. It differs whenever a single bit does.

    Each word is multiplied by an odd number of its position, so a flipped bit of it changes the sum.

    Example:
      >>> bool(checksum(jnp.array([1.0, 2.0])) == checksum(jnp.array([2.0, 1.0])))
      False
    """
    words = _words(x).reshape(-1)
    position = jax.lax.iota(jnp.uint32, words.size)
    return jnp.sum(words * (position * jnp.uint32(SPREAD) + jnp.uint32(1)), dtype=jnp.uint32)


def _words(x: Array) -> Array:
    """The bits of an array as u32: one word for each value of up to 32 bits, two for 64 bits."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    size = jnp.dtype(x.dtype).itemsize
    if size >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}[size]).astype(jnp.uint32)


def _first_difference(sums: np.ndarray, copies: tuple[Copies, ...], devices: tuple[Any, ...]) -> str:
    for column, (name, groups) in zip(sums.T, copies, strict=True):
        for group in groups:
            held = Counter(int(column[place]) for place in group)
            if len(held) == 1:
                continue
            [(common, times)] = held.most_common(1)
            other = next(place for place in group if int(column[place]) != common)
            if 2 * times > len(group):
                return f"{_name(devices[other])} holds other values of {name} than {times} other devices"
            first = next(place for place in group if int(column[place]) == common)  # nobody can tell which is right
            return f"{_name(devices[first])} and {_name(devices[other])} hold different values of {name}"
    return ""


def _name(device: Any) -> str:
    process = f"process {device.process_index}, " if jax.process_count() > 1 else ""
    return f"{process}device {device.id}"
