"""A node's index on the node axis, and communication among the emulated nodes of one device.

Nodes that share a device live on a vmapped axis; devices live on mesh axes. JAX supports collectives over a mix of the
two only in part, so every collective runs over the emulated nodes first and over the devices second.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.config import _check_vma  # no public name: see emulated_index
from jax.custom_batching import custom_vmap

from jgc.comm.ledger import are_local_copies
from jgc.types import EMULATED, Array, Key, Nodes, PyTree


class OutsideNodeAxis(RuntimeError):
    """jgc communicates, and no node axis is there."""


_without: ContextVar[bool] = ContextVar("jgc_without_collectives", default=False)


@contextmanager
def without_collectives() -> Iterator[None]:
    """Trace a function that must not communicate: inside the block, `node_index` is outside the node axis."""
    token = _without.set(True)
    try:
        yield
    finally:
        _without.reset(token)


def node_index(nodes: Nodes) -> Array:
    """This node's index, i32[] in [0, K).

    Raises:
      OutsideNodeAxis: called outside the node axis; a RuntimeError.
      ValueError: called inside the node axis of more or fewer nodes.
    """
    try:
        if _without.get():
            raise NameError("no node axis")
        if not are_local_copies():
            _check_count(nodes)
        device = lax.axis_index(nodes.slow) if nodes.slow else 0
        if nodes.per_device == 1 and nodes.mesh is not None:
            return jnp.asarray(device, jnp.int32)
        return device * nodes.per_device + emulated_index()
    except NameError as error:
        raise OutsideNodeAxis(
            "a jgc compressor was called outside the node axis: there the gradient of a sharded batch is already "
            "the mean over nodes, and compressing it would be silently wrong. Take node-local gradients with "
            "jgc.node_grads and run the compressor inside jgc.on_nodes"
        ) from error


def _check_count(nodes: Nodes) -> None:
    """Raise ValueError where the node axis has another number of nodes: means would be divided by a wrong one."""
    with _check_vma(False):  # see emulated_index
        devices = lax.axis_size(nodes.slow) if nodes.slow else 1
        emulated = lax.axis_size(EMULATED) if is_emulated(nodes) else 1
    if (devices * emulated, emulated) != (nodes.count, nodes.per_device):
        raise ValueError(
            f"made for {nodes.count} nodes, {nodes.per_device} on a device, and called inside the node axis of "
            f"{devices * emulated}, {emulated} on a device: give the same nodes (jgc.make_nodes, jgc.from_mesh)"
        )


def emulated_index() -> Array:
    """This node's index among the nodes of its device, i32[]."""
    # Inside a nested jit, scan or switch, JAX 0.10 to 0.12 mistakes the vmapped axis for a mesh axis over which the
    # index varies, and fails because the mesh has no such axis. The index is a constant, so the check is not needed.
    with _check_vma(False):
        return lax.axis_index(EMULATED)


def node_key(key: Key, nodes: Nodes) -> Key:
    """This node's own random key, derived from a key that all nodes share."""
    return jax.random.fold_in(key, node_index(nodes))


def vary(tree: PyTree, nodes: Nodes) -> PyTree:
    """Declare replicated arrays as varying between devices, so that `jax.grad` with respect to them stays node-local.

    Without this, `jax.grad` under `shard_map` inserts an all-reduce, and every node sees the sum.
    """
    return jax.tree.map(lambda x: vary_over(x, (*nodes.slow, *nodes.fast)), tree)


def vary_over(x: Array, axes: tuple[str, ...]) -> Array:
    """Declare x as varying over mesh axes. Does nothing if x already varies, or under plain `vmap`."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def devices(nodes: Nodes) -> int:
    """Number of devices that take part in a collective."""
    return nodes.count // nodes.per_device if are_local_copies() else nodes.size(nodes.slow)


# --- the emulated nodes of one device ---------------------------------------------------------------------------
# JAX 0.10 to 0.12 refuses named collectives over a vmapped axis inside shard_map with check_vma=True. So these
# functions are batching rules: vmap treats an output that a rule returns unbatched as shared by all nodes. A rule also
# runs for a vmap of the caller's, over rows say, inside that of the nodes: only the latter batches a node's index.


def is_emulated(nodes: Nodes) -> bool:
    """Whether nodes share a device."""
    return nodes.mesh is None or nodes.per_device > 1


def emulated_gather(x: Array, size: int) -> Array:
    """x of all nodes of this device, [per_device, ...]."""

    def copies(x, index):
        return jnp.broadcast_to(x, (size, *x.shape))

    def rule(axis_size, batched, x, index):
        if not batched[1]:  # the caller's: its entries stay apart
            return jnp.moveaxis(gather(x, index), 1, 0), True
        return x if batched[0] else copies(x, index), False

    gather = custom_vmap(copies)
    gather.def_vmap(rule)
    return gather(x, emulated_index())


def emulated_shift(x: Array) -> Array:
    """x of the previous node of this device; the first node gets that of the last."""

    def rule(axis_size, batched, x, index):
        if not batched[1]:
            return shift(x, index), True
        return jnp.roll(x, 1, axis=0) if batched[0] else x, batched[0]

    shift = custom_vmap(lambda x, index: x)
    shift.def_vmap(rule)
    return shift(x, emulated_index())


def emulated_sum(x: Array, nodes: Nodes) -> Array:
    """Sum of x over the nodes of this device; x itself if the device has one node."""
    return jnp.sum(emulated_gather(x, nodes.per_device), axis=0, dtype=x.dtype) if is_emulated(nodes) else x
