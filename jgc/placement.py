"""Where arrays lie on the node axis: one copy for all nodes, one entry per node, or each node's examples.

A placement is SHARED, LOCAL or BATCH, or a tree of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jgc.types import Array, Nodes, PyTree, State

SHARED = "shared"  # the same on every node
LOCAL = "local"  # leading axis [K]: one entry per node
BATCH = "batch"  # leading axes [K, b]: a node's examples, split over the node's own devices


def is_placement(x: Any) -> bool:
    """Whether x is a leaf of a tree of placements."""
    return isinstance(x, str)


def spec(placement: str, nodes: Nodes) -> P:
    """The mesh axes over which an array of this placement is divided."""
    slow = nodes.slow or None
    return {SHARED: P(), LOCAL: P(slow), BATCH: P(slow, nodes.fast or None)}[placement]


def placements_of(tree: PyTree) -> PyTree:
    """SHARED or LOCAL for every leaf of a tree that may hold `State`s, e.g. an optax state.

    Example:
      >>> placements_of((State(1, 2), 3))
      (State(shared='shared', local='local'), 'shared')
    """

    def placement(x):
        if isinstance(x, State):
            return State(jax.tree.map(lambda _: SHARED, x.shared), jax.tree.map(lambda _: LOCAL, x.local))
        return SHARED

    return jax.tree.map(placement, tree, is_leaf=lambda x: isinstance(x, State))


def place(tree: PyTree, placements: PyTree, nodes: Nodes) -> PyTree:
    """Put whole arrays where `on_nodes` expects them, so that the second step does not recompile."""
    if nodes.mesh is None:
        return jax.tree.map(jnp.asarray, tree)

    def put(placement, sub):
        sharding = NamedSharding(nodes.mesh, spec(placement, nodes))
        return jax.tree.map(lambda x: place_array(x, sharding), sub)

    return jax.tree.map(put, placements, tree, is_leaf=is_placement)


def placed_shapes(tree: PyTree, placements: PyTree, nodes: Nodes) -> PyTree:
    """Shapes, dtypes and shardings of the result of `place`, for compiling ahead of time."""

    def shape(x, sharding=None):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    if nodes.mesh is None:
        return jax.tree.map(shape, tree)

    def put(placement, sub):
        return jax.tree.map(lambda x: shape(x, NamedSharding(nodes.mesh, spec(placement, nodes))), sub)

    return jax.tree.map(put, placements, tree, is_leaf=is_placement)


def place_array(x: Any, sharding: NamedSharding) -> Array:
    """Put one whole array, equal in all processes, on the devices. Each process puts its own part."""
    if sharding.is_fully_addressable or (isinstance(x, Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(place_array(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x)  # not device_put: it would first compare x between all processes
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_parts(part: Callable[[slice], PyTree], nodes: Nodes) -> PyTree:
    """Make LOCAL or BATCH arrays; each process makes only the part of its own nodes.

    Args:
      part: `slice(a, b) -> tree of host arrays [b - a, ...]`, those of nodes a to b - 1; `slice(None)` means all nodes.
      nodes: the layout, without a fast axis.

    Returns:
      The tree of arrays [K, ...], as `place` returns them.

    Example:
      >>> place_parts(lambda of: np.arange(4)[of], Nodes(4, 4))
      Array([0, 1, 2, 3], dtype=int32)
    """
    if nodes.mesh is None or jax.process_count() == 1:
        return place(part(slice(None)), BATCH, nodes)
    sharding = NamedSharding(nodes.mesh, spec(BATCH, nodes))
    devices = sharding.addressable_devices_indices_map((nodes.count,))
    parts = [jax.device_put(part(index[0]), device) for device, index in devices.items() if index]

    def whole(*shards):
        return jax.make_array_from_single_device_arrays((nodes.count, *shards[0].shape[1:]), sharding, shards)

    return jax.tree.map(whole, *parts)


def to_host(x: Array) -> np.ndarray:
    """A whole array on the host, even if processes hold parts of it. All processes must call it, in the same order."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)
        x = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)
    return np.asarray(jax.device_get(x))


def per_node(x: Array, nodes: Nodes) -> Array:
    """A copy of x for every node, [K, ...]: the initial local state."""
    return jnp.broadcast_to(x, (nodes.count, *x.shape))
