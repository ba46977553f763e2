"""Put arrays on the devices where `jgc.on_nodes` expects them, and bring them back to the host."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding

from jgc.checks.misuse import check_nodes, is_key
from jgc.nodes.axis import check_node_axes
from jgc.nodes.placement import BATCH, LOCAL, check_placements, spec
from jgc.types import Array, Nodes, PyTree


def place(tree: PyTree, placements: PyTree, nodes: Nodes) -> PyTree:
    """Put whole arrays where `on_nodes` expects them, so that the second step does not recompile.

    As with `jax.device_put`, an array that lies there already is not copied: a step that donates
    the result deletes it.

    Raises:
      TypeError: `nodes` is not a `Nodes`; a leaf is neither an array nor a number.
      ValueError: an unknown placement, or the first axis of a LOCAL or BATCH leaf is not K.
    """
    check_nodes(nodes)
    check_placements(placements)
    check_node_axes(placements, tree, nodes, "the tree")
    if nodes.mesh is None:
        return jax.tree.map(lambda x: jnp.asarray(_strong(x)), tree)

    return _map_sharded(place_array, placements, tree, nodes)


def _map_sharded(f: Callable, placements: PyTree, tree: PyTree, nodes: Nodes) -> PyTree:
    """`f(leaf, sharding)` of all leaves, on a mesh."""

    def mapped(placement, sub):
        sharding = NamedSharding(nodes.mesh, spec(placement, nodes))
        return jax.tree.map(lambda x: f(x, sharding), sub)

    return jax.tree.map(mapped, placements, tree)


def _strong(x: Any) -> Any:
    """An array without a weak type, which would compile again; one of NumPy's stays on the host."""
    if not hasattr(x, "dtype"):
        return np.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def placed_shapes(tree: PyTree, placements: PyTree, nodes: Nodes) -> PyTree:
    """Shapes, dtypes and shardings of the result of `place`, for compiling ahead of time."""

    def shape(x, sharding=None):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    if nodes.mesh is None:
        return jax.tree.map(shape, tree)
    return _map_sharded(shape, placements, tree, nodes)


def place_array(x: Any, sharding: Sharding) -> Array:
    """Put a whole array, equal in all processes, on the devices. Each process puts its part."""
    x = _strong(x)
    if sharding.is_fully_addressable or (isinstance(x, Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    if is_key(x):
        data = place_array(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)  # not device_put: it would first compare x between all processes
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_parts(part: Callable[[slice], PyTree], nodes: Nodes) -> PyTree:
    """Make BATCH arrays [K, b, ...] and LOCAL ones [K]; each process makes the part of its nodes.

    Args:
      part: `slice(a, b) -> tree of host arrays [b - a, ...]` of nodes a to b - 1; `slice(None)`
        means all nodes.
      nodes: the layout.

    Returns:
      The tree of arrays [K, ...], as `place` returns them.

    Example:
      >>> place_parts(lambda of: np.arange(4)[of], Nodes(4, 4))
      Array([0, 1, 2, 3], dtype=int32)
    """
    check_nodes(nodes)
    if nodes.mesh is None or jax.process_count() == 1:
        tree = part(slice(None))
        return place(tree, jax.tree.map(lambda x: BATCH if np.ndim(x) > 1 else LOCAL, tree), nodes)
    divided = NamedSharding(nodes.mesh, spec(BATCH, nodes))
    shape = (nodes.count, nodes.size(nodes.fast))
    indices = divided.addressable_devices_indices_map(shape).values()
    trees = {str(index): part(index) for index in {str(x[0]): x[0] for x in indices if x}.values()}

    def whole(*parts):
        of_nodes = dict(zip(trees, parts, strict=True))
        sharding = divided if parts[0].ndim > 1 else NamedSharding(nodes.mesh, spec(LOCAL, nodes))
        shape = (nodes.count, *parts[0].shape[1:])
        return jax.make_array_from_callback(
            shape, sharding, lambda index: of_nodes[str(index[0])][:, *index[1:]]
        )

    return jax.tree.map(whole, *trees.values())


def to_host(x: Array) -> np.ndarray:
    """A whole array on the host. Collective: all processes must call it, in the same order.

    Raises:
      TypeError: a tree, or a random key.
    """
    if not hasattr(x, "dtype"):
        raise TypeError(
            f"to_host takes one array, got a {type(x).__name__}: jax.tree.map(jgc.to_host, tree)"
        )
    if is_key(x):
        raise TypeError("to_host takes an array, got a random key: give jax.random.key_data(key)")
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)
        x = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)
    return np.asarray(jax.device_get(x))


def of_first_process(x: Any, nodes: Nodes) -> np.ndarray:
    """The first process's copy, on the host, of an array that every process computed.

    Copies may differ by rounding: each process compiles for itself, and on GPUs XLA chooses
    algorithms by their time. Collective over the processes of `nodes`.
    """
    host, mesh = np.asarray(x), nodes.mesh
    if not isinstance(mesh, Mesh) or len({x.process_index for x in mesh.devices.flat}) == 1:
        return host
    each, shape = NamedSharding(mesh, P(mesh.axis_names)), (mesh.size, *host.shape)
    copies = jax.make_array_from_callback(shape, each, lambda index: host[None])
    first = jax.jit(lambda copies: copies[0], out_shardings=NamedSharding(mesh, P()))
    return np.asarray(first(copies))


def per_node(x: Array, nodes: Nodes) -> Array:
    """A copy of x for every node, [K, ...]: the initial local state."""
    return jnp.broadcast_to(x, (nodes.count, *x.shape))
