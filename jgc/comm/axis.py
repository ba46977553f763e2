"""Where a node is on the node axis, and the emulated nodes of one device.

Nodes that share a device live on a vmapped axis, devices on mesh axes. JAX supports collectives over a mix of the two
only in part, so every collective goes over the emulated nodes first and over the devices second.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.config import _check_vma  # no public name: see emulated_index
from jax.custom_batching import custom_vmap

from jgc.comm.ledger import are_local_copies
from jgc.types import EMULATED, Array, Key, Nodes, PyTree


def node_index(nodes: Nodes) -> Array:
    """This node's number, i32[] in [0, K).

    Raises:
      RuntimeError: called outside the node axis.
    """
    try:
        device = lax.axis_index(nodes.slow) if nodes.slow else 0
        if nodes.per_device == 1 and nodes.mesh is not None:
            return jnp.asarray(device, jnp.int32)
        return device * nodes.per_device + emulated_index()
    except NameError as error:
        raise RuntimeError(
            "a jgc compressor was called outside the node axis: there the gradient of a sharded batch is already "
            "the mean over nodes, and compressing it would be silently wrong. Take node-local gradients with "
            "jgc.node_grads and run the compressor inside jgc.on_nodes"
        ) from error


def emulated_index() -> Array:
    """This node's number among those of its device, i32[].

    Inside a jit, scan or switch of its own, JAX 0.10 to 0.12 takes the vmapped axis for a mesh axis over which the
    index varies, and fails when it does not find it in the mesh. Nothing is lost without the check: it is a constant.
    """
    with _check_vma(False):
        return lax.axis_index(EMULATED)


def node_key(key: Key, nodes: Nodes) -> Key:
    """A random key of this node's own, from one that all nodes share."""
    return jax.random.fold_in(key, node_index(nodes))


def vary(tree: PyTree, nodes: Nodes) -> PyTree:
    """Declare replicated arrays as each device's own, so that `jax.grad` with respect to them stays node-local.

    Without it `jax.grad` under `shard_map` inserts an all-reduce by itself, and every node sees the sum.
    """
    return jax.tree.map(lambda x: vary_over(x, (*nodes.slow, *nodes.fast)), tree)


def vary_over(x: Array, axes: tuple[str, ...]) -> Array:
    """x declared as varying over mesh axes; nothing where it does already, and under plain `vmap`."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def devices(nodes: Nodes) -> int:
    """How many devices a collective goes over."""
    return nodes.count // nodes.per_device if are_local_copies() else nodes.size(nodes.slow)


# --- the emulated nodes of one device ---------------------------------------------------------------------------
# Named collectives over a vmapped axis are refused inside shard_map with check_vma=True (jax 0.10 to 0.12), so
# these are batching rules: vmap takes for shared what they return unbatched.


def is_emulated(nodes: Nodes) -> bool:
    """Whether nodes share a device."""
    return nodes.mesh is None or nodes.per_device > 1


def emulated_gather(x: Array, size: int) -> Array:
    """x of all nodes of this device, [per_device, ...]."""

    def copies(x):
        return jnp.broadcast_to(x, (size, *x.shape))

    gather = custom_vmap(copies)
    gather.def_vmap(lambda axis_size, batched, x: (x if batched[0] else copies(x), False))
    return gather(x)


def emulated_shift(x: Array) -> Array:
    """x of the previous node of this device, the first one's from the last."""
    shift = custom_vmap(lambda x: x)
    shift.def_vmap(lambda axis_size, batched, x: (jnp.roll(x, 1, axis=0) if batched[0] else x, batched[0]))
    return shift(x)


def emulated_sum(x: Array, nodes: Nodes) -> Array:
    """Sum of x over the nodes of this device; x where each has its own."""
    return jnp.sum(emulated_gather(x, nodes.per_device), axis=0, dtype=x.dtype) if is_emulated(nodes) else x
