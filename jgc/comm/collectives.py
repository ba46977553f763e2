"""Every collective of jgc, the same to a method in all three node layouts.

Nodes that share a device live on a vmapped axis, devices on mesh axes; JAX supports collectives over a mix of
the two only in part, so each function here goes over the emulated nodes first and the devices second.

Each call names the kind of thing it sends. `ledger()` collects, while a step is traced, what one device
sends: that is how `Wire.physical` is made, from the very calls that do the sending.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.config import _check_vma  # no public name: see _emulated_index
from jax.custom_batching import custom_vmap

from jgc.types import EMULATED, Array, Key, Nodes, PyTree, Sent
from jgc.wire.hlo import bytes_sent

_ledger: ContextVar[list[Sent] | None] = ContextVar("jgc_ledger", default=None)
_alone: ContextVar[bool] = ContextVar("jgc_alone", default=False)


@contextmanager
def ledger() -> Iterator[list[Sent]]:
    """Collect what each collective traced inside the block makes one device send.

    Example:
      >>> with ledger() as sent:
      ...     pass
      >>> sent
      []
    """
    entries: list[Sent] = []
    token = _ledger.set(entries)
    try:
        yield entries
    finally:
        _ledger.reset(token)


@contextmanager
def alone() -> Iterator[None]:
    """Trace collectives between devices as local copies of the same shapes: what a step costs without a network.

    For timing. `nodes` is one node per device, K in number, on a mesh of a single device: a sum is then this node's own
    value, and what is gathered or passed on is its own message, K times or once.

    Example:
      >>> nodes = Nodes(4, 1, jax.make_mesh((1,), ("n",), axis_types=(jax.sharding.AxisType.Auto,)), ("n",))
      >>> each = jax.shard_map(lambda x: gather(x[0], nodes, "x"), mesh=nodes.mesh,
      ...     in_specs=jax.P("n"), out_specs=jax.P())
      >>> with alone():
      ...     each(jnp.ones((1, 3))).shape
      (4, 3)
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def _devices(nodes: Nodes) -> int:
    """How many devices a collective goes over."""
    return nodes.count // nodes.per_device if _alone.get() else nodes.size(nodes.slow)


def _copies(x: Array, nodes: Nodes) -> Array:
    """[1, ...] as [K, ...] where the others are only played; the barrier keeps XLA from decoding one for all."""
    return lax.optimization_barrier(jnp.broadcast_to(x, (nodes.count, *x.shape[1:]))) if _alone.get() else x


def _record(op: str, kind: str, x: Array, group: int) -> None:
    entries = _ledger.get()
    if entries is not None and group > 1:
        entries.append(Sent(op, kind, bytes_sent(op, x.size * x.dtype.itemsize, group)))


# --- where a node is ---------------------------------------------------------------------------------------------


def node_index(nodes: Nodes) -> Array:
    """This node's number, i32[] in [0, K).

    Raises:
      RuntimeError: called outside the node axis.
    """
    try:
        device = lax.axis_index(nodes.slow) if nodes.slow else 0
        if nodes.per_device == 1 and nodes.mesh is not None:
            return jnp.asarray(device, jnp.int32)
        return device * nodes.per_device + _emulated_index()
    except NameError as error:
        raise RuntimeError(
            "a jgc compressor was called outside the node axis: there the gradient of a sharded batch is already "
            "the mean over nodes, and compressing it would be silently wrong. Take node-local gradients with "
            "jgc.node_grads and run the compressor inside jgc.on_nodes"
        ) from error


def _emulated_index() -> Array:
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
    return jax.tree.map(lambda x: _vary(x, (*nodes.slow, *nodes.fast)), tree)


def _vary(x: Array, axes: tuple[str, ...]) -> Array:
    missing = tuple(a for a in axes if a not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


# --- the emulated nodes of one device ---------------------------------------------------------------------------
# Named collectives over a vmapped axis are refused inside shard_map with check_vma=True (jax 0.10 to 0.12), so
# these three are written as batching rules: what they return unbatched, vmap accepts as shared.


def _emulated_gather(x: Array, size: int) -> Array:
    """x of all nodes of this device, [per_device, ...]."""

    def copies(x):
        return jnp.broadcast_to(x, (size, *x.shape))

    gather = custom_vmap(copies)
    gather.def_vmap(lambda axis_size, batched, x: (x if batched[0] else copies(x), False))
    return gather(x)


def _emulated_shift(x: Array) -> Array:
    """x of the previous node of this device, the first one's from the last."""
    shift = custom_vmap(lambda x: x)
    shift.def_vmap(lambda axis_size, batched, x: (jnp.roll(x, 1, axis=0) if batched[0] else x, batched[0]))
    return shift(x)


def _is_emulated(nodes: Nodes) -> bool:
    return nodes.mesh is None or nodes.per_device > 1


def _emulated_sum(x: Array, nodes: Nodes) -> Array:
    return jnp.sum(_emulated_gather(x, nodes.per_device), axis=0, dtype=x.dtype) if _is_emulated(nodes) else x


# --- collectives ------------------------------------------------------------------------------------------------


def total(x: Array, nodes: Nodes, kind: str) -> Array:
    """Sum of x over all nodes, equal on every node. Any shape; the dtype stays (f16 and bf16: sum in f32 first)."""
    node_index(nodes)  # raises outside the node axis
    x = _emulated_sum(x, nodes)
    if nodes.slow:
        _record("all-reduce", kind, x, _devices(nodes))
        x = lax.psum(_vary(x, nodes.slow), nodes.slow)
    return x


def mean(x: Array, nodes: Nodes, kind: str) -> Array:
    """Mean of x over all nodes by an all-reduce, equal on every node."""
    return total(x, nodes, kind) / nodes.count


def largest(x: Array, nodes: Nodes, kind: str) -> Array:
    """The largest of x over all nodes, value by value, by an all-reduce; equal on every node."""
    node_index(nodes)  # raises outside the node axis
    if _is_emulated(nodes):
        x = jnp.max(_emulated_gather(x, nodes.per_device), axis=0)
    if nodes.slow:
        _record("all-reduce", kind, x, _devices(nodes))
        x = lax.pmax(_vary(x, nodes.slow), nodes.slow)
    return x


def any_true(flag: Array, nodes: Nodes, kind: str = "flag") -> Array:
    """Whether a bool[] holds on at least one node: one i32 all-reduce."""
    return total(flag.astype(jnp.int32), nodes, kind) > 0


def exact_mean(tree: PyTree, nodes: Nodes) -> PyTree:
    """Plain mean over the devices of one node (the fast axes). Nothing to do where a node is one device."""

    def average(x):
        axes = tuple(a for a in nodes.fast if a in jax.typeof(x).mat.varying)
        if not axes or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        _record("all-reduce", "exact mean", wide, nodes.size(axes))
        return lax.pmean(wide, axes).astype(x.dtype)

    return jax.tree.map(average, tree)


def gather(x: Array, nodes: Nodes, kind: str) -> Array:
    """x of all nodes in the order of their index, [K, ...], equal on every node."""
    node_index(nodes)  # raises outside the node axis
    if _is_emulated(nodes):
        x = _emulated_gather(x, nodes.per_device)  # [per_device, ...]
    if nodes.slow:
        _record("all-gather", kind, x, _devices(nodes))
        x = _copies(lax.all_gather(_vary(x, nodes.slow), nodes.slow, to="invarying", tiled=_is_emulated(nodes)), nodes)
    return x


def broadcast(x: Array, leader: Array, nodes: Nodes, kind: str) -> Array:
    """x of node `leader` (i32[], the same on all nodes), equal on every node.

    In one program every node's buffer has the same shape, so this is an all-reduce in which all but the leader
    add zeros: what workers save over the leader shows in `Wire.logical` only. Bits are kept (words are summed).
    """
    is_leader = node_index(nodes) == leader
    words = to_words(x)
    words = total(jnp.where(is_leader, words, jnp.zeros_like(words)), nodes, kind)
    return from_words(words, x.shape, x.dtype)


def on_leaders_device(x: Array, leader: Array, nodes: Nodes) -> Array:
    """x of node `leader` on the device that it is on, zeros on the others. Sends nothing.

    What is computed from it is computed once a device, and in the same shapes in all layouts.
    """
    mine = jnp.where(node_index(nodes) == leader, x, jnp.zeros_like(x))
    return _emulated_sum(mine, nodes)


def one_by_one(fn: Callable[[PyTree, Array], Array], shared: PyTree, x: Array) -> Array:
    """`fn(shared, x)` for each emulated node by itself, not batched. Sends nothing.

    The same shapes are computed in all layouts, and not fused with what comes before and after, so that the bits
    agree too; and convolutions that are unrolled are many times faster on CPU than batched ones. `shared` is the same
    on all nodes.
    """

    def alone(shared, x):
        return lax.optimization_barrier(fn(*lax.optimization_barrier((shared, x))))

    def unrolled(size, batched, shared, x):
        if not batched[1]:
            return alone(shared, x), False
        return jnp.stack([alone(shared, x[i]) for i in range(size)]), True

    call = custom_vmap(alone)
    call.def_vmap(unrolled)
    return call(shared, x)


def ring_mean(x: Array, nodes: Nodes, kind: str) -> Array:
    """Mean of f32[n] over all nodes by an explicit ring: reduce-scatter by `ppermute`, then all-gather. Integers too,
    where their sum fits.

    Segments are padded to equal length, and the padding is sent. Nodes of one device are summed before the ring
    between devices; with a single device the ring runs over its emulated nodes.

    Source: Patarasuk and Yuan 2009; LGC paper, Section II-A.
    """
    places = ring_places(nodes)
    segments = jnp.pad(x, (0, -x.size % places)).reshape(places, -1)
    return ring_mean_of(lambda i: segments[i], nodes, kind)[: x.size]


def ring_places(nodes: Nodes) -> int:
    """Into how many segments a ring divides a vector: devices, or with a single one its emulated nodes."""
    return _devices(nodes) if nodes.slow else nodes.per_device


def ring_mean_of(segment: Callable[[Array], Array], nodes: Nodes, kind: str) -> Array:
    """`ring_mean` of a vector whose segments are made when it is their turn.

    Args:
      segment: this node's segment of a number i32[] in [0, `ring_places`), f32[m]. Nothing that it computes waits for
        what is travelling, so that the next segment is made while the last is on its way.
      nodes: the layout.
      kind: of what is sent.

    Returns:
      The means of all segments, f32[places * m], equal on every node.

    Source: Yu et al. 2018 (GradiVeQ), Algorithm 1, lines 1 to 9. Segments come round by an all-gather, lines 10 to 14.
    """
    node_index(nodes)  # raises outside the node axis
    if nodes.slow:

        def summed(i):
            return _vary(_emulated_sum(segment(i), nodes), nodes.slow)

        size, place = _devices(nodes), lax.axis_index(nodes.slow)
        return _ring(summed, size, place, _device_shift(nodes, kind), _device_join(nodes, kind)) / nodes.count
    size, place = nodes.per_device, _emulated_index()
    return _ring(segment, size, place, _emulated_shift, lambda x: _emulated_gather(x, size)) / nodes.count


def _device_shift(nodes: Nodes, kind: str) -> Callable[[Array], Array]:
    size = _devices(nodes)

    def shift(x):
        _record("collective-permute", kind, x, size)
        if _alone.get():
            return lax.optimization_barrier(x)
        return lax.ppermute(x, nodes.slow, [(i, (i + 1) % size) for i in range(size)])

    return shift


def _device_join(nodes: Nodes, kind: str) -> Callable[[Array], Array]:
    def join(segment):
        _record("all-gather", kind, segment, _devices(nodes))
        return _copies(lax.all_gather(segment, nodes.slow, to="invarying"), nodes)

    return join


def _ring(segment: Callable[[Array], Array], size: int, place: Array, shift: Callable, join: Callable) -> Array:
    """Sums of the segments over a ring of `size` places; `shift` passes an array on, `join` stacks all places'."""
    travelling = segment((place - 1) % size)  # segment p - 1 starts at place p and ends, summed, at place p - 2 + size
    for hop in range(1, size):
        travelling = shift(travelling) + segment((place - 1 - hop) % size)
    # after size - 1 hops place p holds the sum of segment p - size = p (mod size)
    return join(travelling).reshape(-1)


def ring_mean_recoded(
    key: Key, x: Array, encode: Callable[[Key, Array], dict[str, Array]], decode: Callable[[dict[str, Array]], Array],
    nodes: Nodes, kind: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Mean by a ring for codes that cannot be added up: at every hop a place decodes, adds its own and encodes the sum.

    A place is a device, whose nodes are summed uncompressed first, as in `ring_mean`; with a single device it is an
    emulated node. What is sent differs with that, so the layouts agree only as far as the code is exact. All that
    travels is the code, in one collective a hop. Finished segments come round as they are, and every place, also the
    one that finished it, takes for a segment what its code stands for.

    Args:
      key: the same on all nodes; each place and each hop draws its own from it.
      x: f32[`ring_places`, m], this node's segments.
      encode: `(key, f32[m]) -> payload`, arrays of static shapes.
      decode: `payload -> f32[m]`.
      nodes: the layout.
      kind: of what is sent; all names of the payload by default.

    Returns:
      The means, f32[places, m], equal on every node; and what was lost wherever this node encoded, f32[places, m], not
      divided by anything. The nodes of a device have equal shares of it, so that in all layouts

          mean over nodes of x = the means + mean over nodes of what was lost

    Source: Yu et al. 2018 (GradiVeQ), Section 1: what scalar quantisers have to do in a ring.
    """
    node_index(nodes)  # raises outside the node axis
    if nodes.slow:
        x = _vary(_emulated_sum(x, nodes), nodes.slow)
        size, place = _devices(nodes), lax.axis_index(nodes.slow)
    else:
        size, place = nodes.per_device, _emulated_index()
    sharing = nodes.count // size  # nodes of a place
    own = jax.random.fold_in(key, place * sharing)  # `node_key` of its first node

    def recode(hop: int, received: Array | float) -> tuple[dict[str, Array], Array]:
        """The code of what was received and the place's own segment, and what is lost by it."""
        whole = received + x[(place - 1 - hop) % size]  # f32[m]
        payload = encode(jax.random.fold_in(own, hop), whole)
        return payload, whole - _decoded_apart(decode, payload)

    payload, error = recode(0, 0.0)
    kind = kind or "+".join(sorted(payload))
    if nodes.slow:
        shift, join = _device_shift(nodes, kind), _device_join(nodes, kind)
    else:
        shift, join = _emulated_shift, lambda words: _emulated_gather(words, size)
    errors = [error]
    for hop in range(1, size):
        received = split_words(shift(join_words(payload)), payload)
        payload, error = recode(hop, _decoded_apart(decode, received))
        errors.append(error)
    finished = join(join_words(payload))  # u32[places, words]: place p ends with segment p
    sums = jax.vmap(lambda words: _decoded_apart(decode, split_words(words, payload)))(finished)
    lost = jnp.stack(errors)[(place - 1 - np.arange(size)) % size]  # hop h was segment p - 1 - h
    return sums / nodes.count, lost / sharing


def _decoded_apart(decode: Callable[[dict[str, Array]], Array], payload: dict[str, Array]) -> Array:
    """Decoded, and not fused with the sum that follows, so that the bits are the same wherever it is decoded."""
    return lax.optimization_barrier(decode(payload))


def largest_summand(dtype: str, count: int) -> float:
    """The largest f32 of which an integer dtype holds the sum over so many nodes.

    Example:
      >>> largest_summand("int8", 8)
      15.0
    """
    bound = int(jnp.iinfo(dtype).max) // count
    largest = np.float32(bound)  # may round up
    return float(largest if int(largest) <= bound else np.nextafter(largest, np.float32(0)))


MEANS: dict[str, Callable[[Array, Nodes, str], Array]] = {"psum": mean, "ring": ring_mean}
"""The two ways to average that a setting chooses from: the runtime's all-reduce, and the explicit ring."""


# --- words: several arrays in one collective, bit for bit ------------------------------------------------------


def word_count(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """How many 32-bit words an array takes."""
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // 4)


def to_words(x: Array) -> Array:
    """The bits of an array as uint32[m], padded with zeros to whole words."""
    if x.dtype == jnp.bool_:
        raise TypeError("pack booleans into bits before sending them")
    bits = lax.bitcast_convert_type(x.reshape(-1), jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    if x.dtype.itemsize == 4:
        return bits
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(bits, jnp.uint32).reshape(-1)
    per_word = 4 // x.dtype.itemsize
    bits = jnp.pad(bits, (0, -bits.size % per_word)).reshape(-1, per_word)
    return lax.bitcast_convert_type(bits, jnp.uint32)


def from_words(words: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The inverse of `to_words`."""
    dtype = jnp.dtype(dtype)
    unsigned = jnp.dtype(f"uint{8 * dtype.itemsize}")
    if dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(words.reshape(-1, 2), unsigned)
    elif dtype.itemsize == 4:
        bits = words
    else:
        bits = lax.bitcast_convert_type(words, unsigned)
    return lax.bitcast_convert_type(bits.reshape(-1)[: math.prod(shape)], dtype).reshape(shape)


def join_words(payload: dict[str, Array]) -> Array:
    """A dict of arrays as one uint32[m], in the order of the sorted names."""
    return jnp.concatenate([to_words(payload[name]) for name in sorted(payload)])


def split_words(words: Array, like: dict[str, Array]) -> dict[str, Array]:
    """The inverse of `join_words`; `like` gives shapes and dtypes."""
    out, start = {}, 0
    for name in sorted(like):
        length = word_count(like[name].shape, like[name].dtype)
        out[name] = from_words(words[start : start + length], like[name].shape, like[name].dtype)
        start += length
    return out


def gather_dict(payload: dict[str, Array], nodes: Nodes, kind: str | None = None) -> dict[str, Array]:
    """`gather` of several arrays in one collective: each comes back as [K, ...]. The kind is all names by default."""
    words = gather(join_words(payload), nodes, kind or "+".join(sorted(payload)))  # u32[K, m]
    return jax.vmap(lambda w: split_words(w, payload))(words)


def broadcast_dict(payload: dict[str, Array], leader: Array, nodes: Nodes, kind: str | None = None) -> dict[str, Array]:
    """`broadcast` of several arrays in one collective."""
    return split_words(broadcast(join_words(payload), leader, nodes, kind or "+".join(sorted(payload))), payload)
