"""A node's index on the node axis, and collectives among the emulated nodes of one device.

Nodes that share a device live on a vmapped axis; devices live on mesh axes. JAX does not support
all collectives over both, so they run over the emulated nodes first and over the devices second.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jgc.comm.equal import equal_on_all
from jgc.comm.ledger import are_local_copies
from jgc.types import EMULATED, Array, Key, Nodes, PyTree


class OutsideNodeAxis(RuntimeError):
    """jgc communicates outside the node axis."""


_without: ContextVar[bool] = ContextVar("jgc_without_collectives", default=False)


@contextmanager
def without_collectives() -> Iterator[None]:
    """Trace a function that must not communicate. Raise ValueError if it does."""
    token = _without.set(True)
    try:
        yield
    finally:
        _without.reset(token)


def node_index(nodes: Nodes) -> Array:
    """This node's index, i32[] in [0, K).

    Raises:
      OutsideNodeAxis: called outside the node axis; a RuntimeError.
      ValueError: called inside the node axis of more or fewer nodes, or by a function that must
        not communicate.
    """
    if _without.get():
        raise ValueError(
            "the function communicates (jgc.comm, a compressor), but each node runs it by itself. "
            "A loss sees one node's examples, and jgc takes the mean itself: leave it out"
        )
    device: Array | int = 0
    devices, on_device = 1, 1
    try:
        if nodes.slow:
            device, devices = lax.axis_index(nodes.slow), lax.axis_size(nodes.slow)
        if is_emulated(nodes):
            # Inside a nested jit, scan or switch, JAX 0.10 to 0.12 mistakes the vmapped axis for a
            # mesh axis over which the index varies. The type without that axis is right.
            place, on_device = lax.axis_index(EMULATED), lax.axis_size(EMULATED)
            place = equal_on_all(place, (EMULATED,))
    except NameError as error:
        raise OutsideNodeAxis(
            "a jgc compressor was called outside the node axis, where the gradient of a sharded "
            "batch is already the mean over nodes: compressing it would be silently wrong. Take "
            "node-local gradients with jgc.node_grads, call the compressor inside jgc.on_nodes"
        ) from error
    count = devices * on_device
    if (count, on_device) != (nodes.count, nodes.per_device) and not are_local_copies():
        # a mean would be divided by a wrong number
        raise ValueError(
            f"made for {nodes.count} nodes, {nodes.per_device} on a device, and called inside the "
            f"node axis of {count}, {on_device} on a device: give the same nodes "
            "(jgc.make_nodes, jgc.from_mesh)"
        )
    return device * on_device + place if is_emulated(nodes) else jnp.asarray(device, jnp.int32)


def node_key(key: Key, nodes: Nodes) -> Key:
    """This node's random key, derived from a key that all nodes share."""
    return jax.random.fold_in(key, node_index(nodes))


def vary(tree: PyTree, nodes: Nodes) -> PyTree:
    """Declare replicated arrays as varying between devices, so that their `jax.grad` is node-local.

    Without this, `jax.grad` under `shard_map` inserts an all-reduce, and every node sees the sum.
    """
    return jax.tree.map(lambda x: vary_over(x, (*nodes.slow, *nodes.fast)), tree)


def vary_over(x: Array, axes: tuple[str, ...]) -> Array:
    """Declare x as varying over mesh axes. Returns x where it does, and under plain `vmap`."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def devices_of(nodes: Nodes) -> int:
    """Number of devices that take part in a collective."""
    return nodes.count // nodes.per_device if are_local_copies() else nodes.size(nodes.slow)


# The emulated nodes of one device. JAX 0.10 to 0.12 refuses named collectives over a vmapped axis
# inside shard_map with check_vma=True. So these functions are batching rules: vmap treats an output
# that a rule returns unbatched as shared by all nodes. A rule also runs for a vmap of the caller
# inside that of the nodes; only the latter batches `index`, this node's.


def is_emulated(nodes: Nodes) -> bool:
    """Whether nodes share a device."""
    return nodes.mesh is None or nodes.per_device > 1


@functools.cache
def emulated_gather(size: int) -> Callable[[Array, Array], Array]:
    """`(x, index) -> x` of all `size` nodes of this device, [size, ...]."""
    gather = custom_vmap(lambda x, index: jnp.broadcast_to(x, (size, *x.shape)))

    @gather.def_vmap
    def rule(axis_size, batched, x, index):
        if not batched[1]:
            return jnp.moveaxis(gather(x, index), 1, 0), True
        return x if batched[0] else jnp.broadcast_to(x, (size, *x.shape)), False

    return gather


emulated_sum = custom_vmap(lambda x, index: x)  # sum of x over the nodes of this device


@emulated_sum.def_vmap
def _sum(axis_size, batched, x, index):
    if not batched[1]:
        return emulated_sum(x, index), True
    x = x if batched[0] else jnp.broadcast_to(x, (axis_size, *x.shape))
    return jnp.sum(x, axis=0, dtype=x.dtype), False


emulated_shift = custom_vmap(lambda x, index: x)  # x of the previous node; the first gets the last


@emulated_shift.def_vmap
def _shift(axis_size, batched, x, index):
    if not batched[1]:
        return emulated_shift(x, index), True
    return jnp.roll(x, 1, axis=0) if batched[0] else x, batched[0]


def on_leaders_device(x: Array, leader: Array, nodes: Nodes) -> Array:
    """x of node `leader` on that node's device, zeros on other devices. Sends nothing.

    A computation on the result runs once per device, with the same shapes in all layouts.
    """
    index = node_index(nodes)
    x = jnp.where(index == leader, x, jnp.zeros_like(x))
    return emulated_sum(x, index) if is_emulated(nodes) else x


def one_by_one(fn: Callable[[PyTree, PyTree], PyTree], shared: PyTree, x: PyTree) -> PyTree:
    """`fn(shared, x)` for each emulated node in turn, not batched. Sends nothing.

    `shared` is the same on all nodes. Unrolled convolutions are many times faster on CPU than
    batched ones.
    """

    # equal shapes in all layouts and no fusion across the barriers: layouts agree bit for bit
    def of_node(shared, x):
        return lax.optimization_barrier(fn(*lax.optimization_barrier((shared, x))))

    call = custom_vmap(of_node)

    @call.def_vmap
    def unrolled(size, batched, shared, x):
        if not any(jax.tree.leaves(batched[1])):
            out = of_node(shared, x)
            return out, jax.tree.map(lambda _: False, out)
        nodes = [
            jax.tree.map(lambda x, per_node, i=i: x[i] if per_node else x, x, batched[1])
            for i in range(size)
        ]
        out = jax.tree.map(lambda *xs: jnp.stack(xs), *(of_node(shared, x) for x in nodes))
        return out, jax.tree.map(lambda _: True, out)

    return call(shared, x)
