"""The collectives of jgc. A method calls them in the same way in all three node layouts.

Each call names the payload field that it sends. While a step is traced, `jgc.comm.ledger` records
what one device sends, so `Wire.physical` comes from the same calls that send.
"""

import math
from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jgc.backend import backend, plain
from jgc.comm.axis import (
    devices_of,
    emulated_gather,
    emulated_sum,
    is_emulated,
    node_index,
    vary_over,
)
from jgc.comm.equal import equal_on_all
from jgc.comm.ledger import are_local_copies, record
from jgc.comm.rounding import at_least_f32, narrowed
from jgc.types import Array, Nodes, PyTree


def psum(x: Array, nodes: Nodes, field: str) -> Array:
    """Sum of x over all nodes, equal on every node.

    x is of any shape, and keeps its dtype: convert f16 and bf16 to f32 first.
    """
    index = node_index(nodes)  # raises outside the node axis
    if is_emulated(nodes):
        x = emulated_sum(x, index)
    if not nodes.slow:
        return x
    # GPUs add no integers of 16 bits, and TPUs fill few of them up: whole words travel
    narrow = x.dtype in (jnp.int8, jnp.int16) and not plain() and backend() != "cpu"
    sent = pack_narrow(x) if narrow else x
    record("all-reduce", field, sent, devices_of(nodes))
    total = _without_padding(partial(lax.psum, axis_name=nodes.slow), vary_over(sent, nodes.slow))
    return unpack_narrow(total, x.shape, x.dtype) if narrow else total


def pmean(x: Array, nodes: Nodes, field: str) -> Array:
    """Mean of x over all nodes by an all-reduce, equal on every node."""
    return psum(x, nodes, field) / nodes.count


def pmax(x: Array, nodes: Nodes, field: str) -> Array:
    """Elementwise maximum of x over all nodes by an all-reduce, equal on every node."""
    index = node_index(nodes)
    if is_emulated(nodes):
        x = jnp.max(emulated_gather(nodes.per_device)(x, index), axis=0)
    if nodes.slow:
        record("all-reduce", field, x, devices_of(nodes))
        x = _without_padding(partial(lax.pmax, axis_name=nodes.slow), vary_over(x, nodes.slow))
    return x


def _without_padding(all_reduce: Callable[[Array], Array], x: Array) -> Array:
    """`all_reduce(x)`. A TPU sends whole tiles of 8 x 128: a vector has almost no padding."""
    whole_tiles = x.ndim < 2 or (x.shape[-1] % 128 == 0 and x.shape[-2] % 8 == 0)
    if whole_tiles or plain() or backend() != "tpu":
        return all_reduce(x)
    # without the barrier XLA reshapes before it sends
    return lax.optimization_barrier(all_reduce(x.reshape(-1))).reshape(x.shape)


def any_true(flag: Array, nodes: Nodes, field: str = "flag") -> Array:
    """Whether a bool[] is True on at least one node, or device of a node if it differs there.

    One all-reduce of an i32; on CPU, if the devices of a node agree, a byte from each node to each.
    """
    x, fast = flag.astype(jnp.int32), fast_axes(flag, nodes) if nodes.fast else ()
    if _by_all_to_all(nodes) and not fast:
        return jnp.any(all_gather_at_once(flag.astype(jnp.uint8), nodes, field) > 0)
    if fast:
        if is_emulated(nodes):
            x = emulated_sum(x, node_index(nodes))
        record("all-reduce", field, x, devices_of(nodes) * nodes.size(fast))
        axes = (*nodes.slow, *fast)
        any_of_all = lax.psum(vary_over(x, axes), axes) > 0
    else:
        any_of_all = psum(x, nodes, field) > 0
    if backend() != "gpu":
        return any_of_all
    # From an array in memory: XLA on GPU fuses operations on arrays of equal size if they read a
    # common array, not a scalar. `where(flag, 0, x)` of a transformer takes 6 kernels, not 50
    return lax.optimization_barrier(jnp.broadcast_to(any_of_all, (2,)))[0]


def fast_axes(x: Array, nodes: Nodes) -> tuple[str, ...]:
    """The fast axes along which x is sharded or otherwise differs between devices of a node."""
    return tuple(axis for axis in nodes.fast if axis in jax.typeof(x).mat.varying)


def sum_inside(x: Array, axes: tuple[str, ...], nodes: Nodes, field: str) -> Array:
    """Sum of x over devices of one node, along fast axes."""
    if not axes:
        return x
    record("all-reduce", field, x, nodes.size(axes))
    return lax.psum(vary_over(x, axes), axes)


def mean_inside(x: Array, axes: tuple[str, ...], nodes: Nodes) -> Array:
    """Mean of x over devices of a node, along fast axes; x unchanged unless it holds floats."""
    if not axes or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    wide = x.astype(at_least_f32(x.dtype))
    record("all-reduce", "exact mean", wide, nodes.size(axes))
    return narrowed(lax.pmean(wide, axes), x.dtype)


def exact_mean(tree: PyTree, nodes: Nodes) -> PyTree:
    """Plain mean over the devices of a node (the fast axes); unchanged if it has one device."""
    if not nodes.fast:
        return tree
    return jax.tree.map(lambda x: mean_inside(x, fast_axes(x, nodes), nodes), tree)


def all_gather(x: Array, nodes: Nodes, field: str) -> Array:
    """x of all nodes in the order of their index, [K, ...], equal on every node."""
    index = node_index(nodes)
    x = emulated_gather(nodes.per_device)(x, index) if is_emulated(nodes) else x[None]
    if not nodes.slow:
        return x
    record("all-gather", field, x, devices_of(nodes))  # [per_device, ...]
    return gather_rows(vary_over(x, nodes.slow), nodes)


def gather_rows(x: Array, nodes: Nodes) -> Array:
    """x [m, ...] of all devices, one after the other: [devices m, ...], equal on all of them."""
    if not plain() and backend() == "tpu":
        # XLA for TPU would make a gather of rows that do not fill tiles of 1,024 values an
        # all-reduce of zeros: twice the bytes. The barrier keeps the rows.
        x = lax.optimization_barrier(x)
    x = lax.all_gather(x, nodes.slow, to="invarying", tiled=True)
    if are_local_copies():
        # without the barrier XLA would decode one message instead of K
        x = lax.optimization_barrier(jnp.broadcast_to(x, (nodes.count, *x.shape[1:])))
    return x


def all_gather_at_once(x: Array, nodes: Nodes, field: str) -> Array:
    """`all_gather` by a message from each device to each, for as many bytes.

    Gloo's all-gather is a ring of K - 1 dependent messages, so on CPU this is an all-to-all.
    """
    if not _by_all_to_all(nodes):
        return all_gather(x, nodes, field)
    index, devices = node_index(nodes), devices_of(nodes)
    x = emulated_gather(nodes.per_device)(x, index) if is_emulated(nodes) else x[None]
    copies = vary_over(jnp.broadcast_to(x, (devices, *x.shape)), nodes.slow)
    record("all-to-all", field, copies, devices)
    rows = lax.all_to_all(copies, nodes.slow, split_axis=0, concat_axis=0, tiled=True)
    return equal_on_all(rows, nodes.slow).reshape(nodes.count, *x.shape[1:])


def _by_all_to_all(nodes: Nodes) -> bool:
    return bool(nodes.slow) and backend() == "cpu" and not plain() and not are_local_copies()


def all_to_all(x: Array, nodes: Nodes, field: str) -> Array:
    """Send row k of x to node k; return the rows that all nodes sent to this one, by index.

    Both are [K, ...]. With several nodes on a device, one collective carries the rows of all.
    """
    index, here = node_index(nodes), nodes.per_device
    if len(x) != nodes.count:
        raise ValueError(f"x must have a row for each of the {nodes.count} nodes, got {len(x)}")
    rows = emulated_gather(here)(x, index) if is_emulated(nodes) else x[None]  # [here, K, ...]
    rows = jnp.swapaxes(rows.reshape(here, len(x) // here, here, *x.shape[1:]), 0, 1)
    if nodes.slow:
        record("all-to-all", field, rows, devices_of(nodes))  # [device, from, to, ...]
        if are_local_copies():
            rows = lax.optimization_barrier(rows)
        else:
            rows = lax.all_to_all(vary_over(rows, nodes.slow), nodes.slow, 0, 0, tiled=True)
    return rows[:, :, index % here].reshape(x.shape)


def broadcast(x: PyTree, leader: Array, nodes: Nodes, field: str) -> PyTree:
    """x of node `leader`, equal on every node; zeros if there is no such node.

    All nodes run one program with buffers of equal shape, so this is an all-reduce to which all but
    the leader contribute zeros, as exact words; `Wire.logical` shows that workers send nothing.

    Args:
      x: an array of any shape, or a tree of arrays.
      leader: i32[] in [0, K), the same on all nodes.
      nodes: the layout.
      field: the payload field.
    """
    words = to_words(x)
    words = jnp.where(node_index(nodes) == leader, words, jnp.zeros_like(words))
    return from_words(psum(words, nodes, field), x)


def all_gather_dict(
    payload: dict[str, Array], nodes: Nodes, field: str | None = None
) -> dict[str, Array]:
    """`all_gather` of several arrays in one collective, each as [K, ...].

    `field` defaults to all their names.
    """
    words = all_gather(to_words(payload), nodes, field or "+".join(sorted(payload)))  # u32[K, m]
    return jax.vmap(lambda words: from_words(words, payload))(words)


def broadcast_dict(
    payload: dict[str, Array], leader: Array, nodes: Nodes, field: str | None = None
) -> dict[str, Array]:
    """`broadcast` of several arrays in one collective."""
    return broadcast(payload, leader, nodes, field or "+".join(sorted(payload)))


# --- arrays of any dtype as 32-bit words, to send several of them in one collective ---------------


def to_words(tree: PyTree) -> Array:
    """The bits of all arrays of a tree, in tree order, as one uint32[m].

    Each array is padded with zeros to whole words.
    """
    words = []
    for x in jax.tree.leaves(tree):
        if x.dtype == jnp.bool_:
            raise TypeError("pack booleans into bits before sending them")
        size, per_word = x.dtype.itemsize, 4 // x.dtype.itemsize
        bits = lax.bitcast_convert_type(x.reshape(-1), jnp.dtype(f"uint{8 * size}"))
        if size == 8:
            bits = lax.bitcast_convert_type(bits, jnp.uint32).reshape(-1)
        elif size < 4:
            bits = jnp.pad(bits, (0, -bits.size % per_word))
            if not plain() and backend() == "tpu":
                # a TPU fills an axis of 2 or 4 at the end up to 128: a word takes values far apart
                fields = bits.reshape(per_word, -1).astype(jnp.uint32)
                shifted = [field << (8 * size * i) for i, field in enumerate(fields)]
                bits = reduce(jnp.bitwise_or, shifted)
            else:
                bits = lax.bitcast_convert_type(bits.reshape(-1, per_word), jnp.uint32)
        words.append(bits)
    return jnp.concatenate(words)


def from_words(words: Array, like: PyTree) -> PyTree:
    """The inverse of `to_words`; `like` gives the tree, its shapes and its dtypes.

    Example:
      >>> payload = {"scale": jnp.float32(0.5), "signs": jnp.uint8([1, 2, 3])}
      >>> to_words(payload)
      Array([1056964608,     197121], dtype=uint32)
      >>> from_words(to_words(payload), payload)["signs"]
      Array([1, 2, 3], dtype=uint8)
    """
    leaves, start = [], 0
    for x in jax.tree.leaves(like):
        length, size = math.prod(x.shape), x.dtype.itemsize
        unsigned = jnp.dtype(f"uint{8 * size}")
        bits = words[start : start + -(-length * size // 4)]
        start += bits.size
        if size == 8:
            bits = lax.bitcast_convert_type(bits.reshape(-1, 2), unsigned)
        elif size < 4 and not plain() and backend() == "tpu":
            bits = jnp.concatenate([bits >> i for i in range(0, 32, 8 * size)]).astype(unsigned)
        elif size < 4:
            bits = lax.bitcast_convert_type(bits, unsigned)
        leaves.append(lax.bitcast_convert_type(bits.reshape(-1)[:length], x.dtype).reshape(x.shape))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def pack_narrow(x: Array) -> Array:
    """Integers of 8 or 16 bits as i32[m], four or two to a word.

    A sum of such words holds the sums of the integers, if each of these fits its bits.
    """
    bits = 8 * x.dtype.itemsize
    flat = x.reshape(-1).astype(jnp.int32)
    fields = jnp.pad(flat, (0, -x.size % (32 // bits))).reshape(32 // bits, -1)
    return reduce(jnp.add, [field << (bits * i) for i, field in enumerate(fields)])


def unpack_narrow(words: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
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
