"""Lay out nodes on devices. Functions run on them, in one of three layouts, by `jgc.nodes.axis`.

    1. one node per device of a mesh: `jax.shard_map` with `check_vma=True`;
    2. K nodes emulated on one device: `jax.vmap`;
    3. several nodes per device on several devices: `vmap` inside `shard_map`.

The same method code runs in all three and gives the same result (with `rbg` keys, random numbers
differ). A node may also have several devices, along the fast axes of the mesh. They either hold
copies of the parameters, and the node's gradient is their mean; or the parameters are sharded over
them (FSDP, tensor parallel), and each device compresses the gradient of its shards.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jgc.checks.argument_types import check_type
from jgc.types import Nodes

NODE = "jgc_node"  # default name of the mesh axis between nodes
FAST = "jgc_fast"  # default name of the mesh axis inside one node


def make_nodes(
    count: int, devices: Sequence[jax.Device] | None = None, devices_per_node: int = 1
) -> Nodes:
    """Lay out `count` nodes on the devices that are present.

    With one device, all nodes are emulated on it (on a mesh if it is not JAX's default device);
    with fewer devices than nodes, every device gets the same number of nodes. With several
    processes (`jax.distributed`), every process gets the same number. Devices of several TPU
    slices are taken slice after slice, the same number of each.

    Args:
      count: K, at least 1.
      devices: the devices to use. Default: `jax.devices()`, equally many of each process.
      devices_per_node: devices of one node; the node's gradient is the exact mean of theirs.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a number below 1, `devices` is empty, or the nodes do not divide among the devices
        or the processes.

    Example:
      >>> make_nodes(8, devices=jax.devices()[:1]).layout
      'emulated'
    """
    _check_positive("the number of nodes", count)
    _check_positive("devices_per_node", devices_per_node)
    if isinstance(devices, jax.Device):
        raise TypeError(f"devices must be a sequence, e.g. [{devices!r}], got one device")
    if devices is not None and not len(devices):
        raise ValueError("devices is empty: give at least one, or leave it out to use all")
    devices = _all_devices(count, devices_per_node) if devices is None else list(devices)
    if devices_per_node > 1:
        needed = count * devices_per_node
        if len(devices) < needed:
            want = f"{count} nodes of {devices_per_node} devices need {needed} devices"
            raise ValueError(f"{want}, got {len(devices)}")
        shape, axes = (count, devices_per_node), (NODE, FAST)
        return Nodes(count, 1, _mesh(shape, axes, devices), (NODE,), (FAST,))
    if len(devices) == 1 and count > 1 and devices[0] == _default_device():
        return Nodes(count, count)
    used = min(len(devices), count)
    if count % used:
        fits = [k for k in range(1, 2 * count) if k <= used or k % used == 0]
        nearest = sorted(fits, key=lambda k: abs(k - count))[:2]
        raise ValueError(
            f"{count} nodes do not divide among {used} devices; "
            f"use {' or '.join(str(k) for k in sorted(nearest))} nodes, or fewer devices"
        )
    return Nodes(count, count // used, _mesh((used,), (NODE,), devices), (NODE,))


def _check_positive(name: str, number: Any) -> None:
    check_type(name, int, number)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")


def _default_device() -> jax.Device:
    """The device on which JAX runs what no sharding places."""
    chosen = jax.config.values["jax_default_device"]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def _mesh(shape: tuple[int, ...], axes: tuple[str, ...], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of the first devices; of TPU slices equally many of each, slice after slice."""
    used, auto = math.prod(shape), (AxisType.Auto,) * len(axes)
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    share = -(-used // len(slices))
    if len(slices) == 1:
        return jax.make_mesh(shape, axes, axis_types=auto, devices=list(devices[:used]))
    # jax.make_mesh orders the devices of a slice by their links, and refuses several slices
    order: list[jax.Device] = []
    for _, part in sorted(slices.items()):
        part = part[:share] if share <= min(map(len, slices.values())) else part
        mesh = jax.make_mesh((len(part),), axes[:1], axis_types=auto[:1], devices=part)
        order += mesh.devices.tolist()
    return Mesh(np.array(order[:used]).reshape(shape), axes, axis_types=auto)


def _all_devices(count: int, devices_per_node: int) -> list[jax.Device]:
    """The devices to use: all of them; with several processes, equally many of each process."""
    processes = jax.process_count()
    if processes == 1:
        return jax.devices()
    if count % processes:
        nearest = count // processes * processes, -(-count // processes) * processes
        use = " or ".join(str(k) for k in nearest if k)
        cure = f"use {use} nodes"
        raise ValueError(f"{count} nodes do not divide among {processes} processes; {cure}")
    share, of_each = count // processes, [jax.local_devices(i) for i in range(processes)]
    fewest = min(map(len, of_each))
    if devices_per_node > 1:
        used = min(share * devices_per_node, fewest)
    else:
        used = max(k for k in range(1, min(fewest, share) + 1) if share % k == 0)
    return [device for devices in of_each for device in devices[:used]]


def from_mesh(
    mesh: Mesh, slow: str | Sequence[str], fast: str | Sequence[str] = (), per_device: int = 1
) -> Nodes:
    """Lay out nodes on a mesh: compress over the axes `slow`; devices along `fast` are one node.

    Args:
      mesh: with Auto or Explicit axes.
      slow: axes between nodes, e.g. "dcn". Nodes are numbered in the order of the mesh's axes.
      fast: axes inside a node, e.g. ("fsdp", "tensor"). Parameters may be sharded over them, and so
        are a node's examples. All other axes of the mesh hold copies.
      per_device: nodes that are emulated on each device, or each group of devices along `fast`.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: `slow` is empty, an axis is unknown or named twice, the axes are neither all Auto
        nor all Explicit, or `per_device` is not positive.

    Example:
      >>> mesh = jax.make_mesh((1, 1), ("dcn", "fsdp"), devices=jax.devices()[:1])
      >>> from_mesh(mesh, slow="dcn", fast="fsdp").count
      1
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    _check_positive("per_device", per_device)
    slow, fast = ((x,) if isinstance(x, str) else tuple(x or ()) for x in (slow, fast))
    for axis in (*slow, *fast):
        if axis not in mesh.shape:
            raise ValueError(f"mesh axis {axis!r} is not one of {tuple(mesh.shape)}")
        if (slow + fast).count(axis) > 1:
            raise ValueError(f"mesh axis {axis!r} is named twice: slow={slow}, fast={fast}")
    kinds = {axis: kind.name for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}
    if len(set(kinds.values())) > 1 or "Manual" in kinds.values():
        raise ValueError(f"the axes of the mesh must be all Auto or all Explicit, got {kinds}")
    if not slow:
        raise ValueError(f"slow must name at least one axis of the mesh, of {tuple(mesh.shape)}")
    # `lax.ppermute` numbers devices in the mesh's order, `lax.axis_index` in the given order
    slow, fast = (tuple(axis for axis in mesh.axis_names if axis in axes) for axes in (slow, fast))
    nodes = Nodes(1, per_device, mesh, slow, fast)
    return nodes._replace(count=per_device * nodes.size(slow))


def as_one_per_device(nodes: Nodes) -> Nodes:
    """The same nodes, one per device, on an abstract mesh. For counting bytes; it cannot run."""
    mesh = AbstractMesh((nodes.count,), (NODE,), axis_types=(AxisType.Auto,))
    return Nodes(nodes.count, 1, mesh, (NODE,))
