"""The collectives of jgc. A method calls them in the same way in all three node layouts.

Each call names the payload field that it sends. While a step is traced, `jgc.comm.ledger` records what one device
sends, so `Wire.physical` comes from the same calls that send.
"""

import math
from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jgc.backend import backend
from jgc.comm.axis import devices, emulated_gather, emulated_sum, is_emulated, node_index, vary_over
from jgc.comm.ledger import are_local_copies, record
from jgc.comm.rounding import at_least_f32, narrowed
from jgc.comm.words import from_words, join_words, split_words, to_words
from jgc.types import Array, Nodes, PyTree


def psum(x: Array, nodes: Nodes, field: str) -> Array:
    """Sum of x over all nodes, equal on every node. Any shape; the dtype stays (f16 and bf16: sum in f32 first)."""
    node_index(nodes)  # raises outside the node axis
    x = emulated_sum(x, nodes)
    if nodes.slow:
        narrow = x.dtype in (jnp.int8, jnp.int16) and backend() != "cpu"
        sent = pack_narrow(x) if narrow else x
        record("all-reduce", field, sent, devices(nodes))
        total = _without_padding(partial(lax.psum, axis_name=nodes.slow), vary_over(sent, nodes.slow))
        x = unpack_narrow(total, x.shape, x.dtype) if narrow else total
    return x


def pack_narrow(x: Array) -> Array:
    """Integers of 8 or 16 bits as i32[m], four or two to a word. GPUs add none of 16 bits, TPUs fill few of them up.

    A sum of such words holds the sums of the integers, if each of these fits its bits: see `unpack_narrow`.
    """
    bits = 8 * x.dtype.itemsize
    flat = x.reshape(-1).astype(jnp.int32)
    fields = jnp.pad(flat, (0, -x.size % (32 // bits))).reshape(32 // bits, -1)
    return reduce(jnp.add, [field << (bits * i) for i, field in enumerate(fields)])


def unpack_narrow(words: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The inverse of `pack_narrow`, also of sums of its results.

    Example:
      >>> x, y = jnp.int16([-3, 7, 32000]), jnp.int16([1, -9, 700])
      >>> unpack_narrow(pack_narrow(x) + pack_narrow(y), (3,), jnp.int16)
      Array([   -2,    -2, 32700], dtype=int16)
    """
    bits, fields = 8 * jnp.dtype(dtype).itemsize, []
    for _ in range(32 // bits):
        fields.append(words << (32 - bits) >> (32 - bits))  # the lowest, with its sign
        words = (words - fields[-1]) >> bits
    return jnp.concatenate(fields)[: math.prod(shape)].astype(dtype).reshape(shape)


def pmean(x: Array, nodes: Nodes, field: str) -> Array:
    """Mean of x over all nodes by an all-reduce, equal on every node."""
    return psum(x, nodes, field) / nodes.count


def pmax(x: Array, nodes: Nodes, field: str) -> Array:
    """Elementwise maximum of x over all nodes by an all-reduce, equal on every node."""
    node_index(nodes)  # raises outside the node axis
    if is_emulated(nodes):
        x = jnp.max(emulated_gather(x, nodes.per_device), axis=0)
    if nodes.slow:
        record("all-reduce", field, x, devices(nodes))
        x = _without_padding(partial(lax.pmax, axis_name=nodes.slow), vary_over(x, nodes.slow))
    return x


def _without_padding(all_reduce: Callable[[Array], Array], x: Array) -> Array:
    """`all_reduce(x)`, which on TPU sends whole tiles of 8 x 128: a vector has almost no padding."""
    if backend() != "tpu" or x.ndim < 2 or (x.shape[-1] % 128 == 0 and x.shape[-2] % 8 == 0):
        return all_reduce(x)
    # without the barrier XLA reshapes before it sends
    return lax.optimization_barrier(all_reduce(x.reshape(-1))).reshape(x.shape)


def fast_axes(x: Array, nodes: Nodes) -> tuple[str, ...]:
    """The fast axes along which x differs: between devices of a node that each hold another part."""
    return tuple(axis for axis in nodes.fast if axis in jax.typeof(x).mat.varying)


def any_true(flag: Array, nodes: Nodes, field: str = "flag") -> Array:
    """Whether a bool[] holds on at least one node, or device of a node if it differs there: one i32 all-reduce."""
    fast = fast_axes(flag, nodes)
    if not fast:
        return psum(flag.astype(jnp.int32), nodes, field) > 0
    axes, x = (*nodes.slow, *fast), emulated_sum(flag.astype(jnp.int32), nodes)
    record("all-reduce", field, x, devices(nodes) * nodes.size(fast))
    return lax.psum(vary_over(x, axes), axes) > 0


def sum_inside(x: Array, axes: tuple[str, ...], nodes: Nodes, field: str) -> Array:
    """Sum of x over devices of one node, along fast axes."""
    if not axes:
        return x
    record("all-reduce", field, x, nodes.size(axes))
    return lax.psum(vary_over(x, axes), axes)


def mean_inside(x: Array, axes: tuple[str, ...], nodes: Nodes) -> Array:
    """Mean of x over devices of one node, along fast axes. Floats only: x is returned as it is otherwise."""
    if not axes or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    wide = x.astype(at_least_f32(x.dtype))
    record("all-reduce", "exact mean", wide, nodes.size(axes))
    return narrowed(lax.pmean(wide, axes), x.dtype)


def exact_mean(tree: PyTree, nodes: Nodes) -> PyTree:
    """Plain mean over the devices of one node (the fast axes). Does nothing if a node is one device."""
    return jax.tree.map(lambda x: mean_inside(x, fast_axes(x, nodes), nodes), tree)


def all_gather(x: Array, nodes: Nodes, field: str) -> Array:
    """x of all nodes in the order of their index, [K, ...], equal on every node."""
    node_index(nodes)  # raises outside the node axis
    if is_emulated(nodes):
        x = emulated_gather(x, nodes.per_device)  # [per_device, ...]
    if nodes.slow:
        record("all-gather", field, x, devices(nodes))
        x = copies(gather_rows(vary_over(x if is_emulated(nodes) else x[None], nodes.slow), nodes.slow), nodes)
    return x


def gather_rows(x: Array, axes: tuple[str, ...]) -> Array:
    """x [m, ...] of all devices along mesh axes, one after the other: [devices m, ...], equal on all of them."""
    if backend() == "tpu":
        # XLA for TPU would flatten a gather of rows whose length is no multiple of a tile, 1,024 values, and then make
        # it an all-reduce of zeros: twice the bytes. The barrier keeps the rows.
        x = lax.optimization_barrier(x)
    return lax.all_gather(x, axes, to="invarying", tiled=True)


def copies(x: Array, nodes: Nodes) -> Array:
    """The gathered x, [K, ...]; inside `local_copies`, K copies of this node's own message."""
    if not are_local_copies():
        return x
    # without the barrier XLA would decode one message instead of K
    return lax.optimization_barrier(jnp.broadcast_to(x, (nodes.count, *x.shape[1:])))


def broadcast(x: Array, leader: Array, nodes: Nodes, field: str) -> Array:
    """x of node `leader` (i32[] in [0, K), the same on all nodes), equal on every node; zeros if there is no such node.

    All nodes run one program with buffers of equal shape, so this is an all-reduce to which all but the leader
    contribute zeros. Only `Wire.logical` shows that workers send nothing here. Words are summed, so bits are exact.
    """
    is_leader = node_index(nodes) == leader
    words = to_words(x)
    words = psum(jnp.where(is_leader, words, jnp.zeros_like(words)), nodes, field)
    return from_words(words, x.shape, x.dtype)


def on_leaders_device(x: Array, leader: Array, nodes: Nodes) -> Array:
    """x of node `leader` on that node's device, zeros on other devices. Sends nothing.

    A computation on the result runs once per device, with the same shapes in all layouts.
    """
    mine = jnp.where(node_index(nodes) == leader, x, jnp.zeros_like(x))
    return emulated_sum(mine, nodes)


def one_by_one(fn: Callable[[PyTree, PyTree], PyTree], shared: PyTree, x: PyTree) -> PyTree:
    """`fn(shared, x)` for one emulated node after another, not batched. Sends nothing.

    `shared` is the same on all nodes. Unrolled convolutions are many times faster on CPU than batched ones.
    """
    # equal shapes and no fusion across the barriers in any layout, so that the layouts agree bit for bit

    def apart(shared, x):
        return lax.optimization_barrier(fn(*lax.optimization_barrier((shared, x))))

    def unrolled(size, batched, shared, x):
        if not any(jax.tree.leaves(batched[1])):
            done = apart(shared, x)
            return done, jax.tree.map(lambda _: False, done)

        def of_node(i):
            return apart(shared, jax.tree.map(lambda x, own: x[i] if own else x, x, batched[1]))

        done = jax.tree.map(lambda *each: jnp.stack(each), *(of_node(i) for i in range(size)))
        return done, jax.tree.map(lambda _: True, done)

    call = custom_vmap(apart)
    call.def_vmap(unrolled)
    return call(shared, x)


def all_gather_dict(payload: dict[str, Array], nodes: Nodes, field: str | None = None) -> dict[str, Array]:
    """`all_gather` of several arrays in one collective, each as [K, ...]. `field` defaults to all their names."""
    words = all_gather(join_words(payload), nodes, field or "+".join(sorted(payload)))  # u32[K, m]
    return jax.vmap(lambda w: split_words(w, payload))(words)


def broadcast_dict(
    payload: dict[str, Array], leader: Array, nodes: Nodes, field: str | None = None
) -> dict[str, Array]:
    """`broadcast` of several arrays in one collective."""
    words = broadcast(join_words(payload), leader, nodes, field or "+".join(sorted(payload)))
    return split_words(words, payload)
