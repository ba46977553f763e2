"""The exact mean of a tree of gradients, leaf by leaf: large leaves alone, small ones joined into buckets.

No vector of all gradients is allocated. On a network each collective costs about a millisecond, so leaves smaller than
a bucket travel together. Leaves in bf16 travel in two bytes where the backend's all-reduce keeps them. Those in f16
travel as f32: divided by the number of nodes, as a sum that must not overflow needs, small gradients would be 0 in f16.
"""

from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.backend import backend, traced_for
from jgc.layout.launches import bucket_bytes
from jgc.layout.pack import make_packing
from jgc.method.from_step import Local
from jgc.method.guard import Core
from jgc.method.messages import both_ways
from jgc.method.signature import check_signature, signature_of
from jgc.nodes.placement import per_node
from jgc.types import Array, Info, Key, Message, Nodes, PyTree, State


def leaf_by_leaf(core: Core) -> Core:
    """The core of a method that sends everything and keeps nothing, with the mean taken leaf by leaf."""
    return core._replace(init=first_state, aggregate=aggregate, messages=messages)


def first_state(key: Key, params: PyTree, nodes: Nodes) -> State:
    """No state but what the parameters are. They may have more values than a vector of all would hold."""
    return State((), jax.tree.map(lambda x: per_node(x, nodes), Local((), (), signature_of(params))))


def aggregate(
    phase: Hashable, key: Key, grads: PyTree, state: State, nodes: Nodes, skip: Array | bool
) -> tuple[PyTree, State, Info]:
    """The mean over nodes of every leaf; zeros if `skip`. See `Core`."""
    check_signature(grads, state.local.signature)
    packing = make_packing(grads)
    values = jax.tree.leaves(grads)
    out = [(np if x.dtype == jax.dtypes.float0 else jnp).zeros(x.shape, x.dtype) for x in values]  # float0: of integers
    for bucket in buckets((i, x.size, x.dtype) for i, x in enumerate(packing.leaves) if x.start >= 0):
        for i, mean in zip(bucket, joint_mean([values[i] for i in bucket], nodes), strict=True):
            out[i] = comm.narrowed(jnp.where(skip, 0, mean), values[i].dtype)
    info = Info(jnp.float32(0), jnp.float32(packing.size), jnp.int32(0), jnp.bool_(True))
    return jax.tree.unflatten(packing.treedef, out), state, info


def messages(phase: Hashable, shapes: PyTree, nodes: Nodes) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Every value once up and once down. See `Core`."""
    leaves = [x for x in make_packing(shapes).leaves if x.start >= 0]
    with traced_for(nodes):
        return both_ways({"dense": float(sum(x.size * sent_as(x.dtype).itemsize for x in leaves))}), ()


def sent_as(dtype: np.dtype) -> np.dtype:
    """The dtype in which a leaf travels: f32, but bf16 for its own where the backend's all-reduce keeps it.

    Example:
      >>> sent_as(np.dtype("float16")).name, sent_as(np.dtype("float64")).name
      ('float32', 'float32')
    """
    kept = dtype.name == "bfloat16" and backend() != "cpu"  # on CPU XLA sends bf16 as f32
    return dtype if kept else np.dtype(np.float32)


def buckets(leaves: Iterable[tuple[int, int, np.dtype]], least: int | None = None) -> list[list[int]]:
    """Which leaves travel together: those that travel in one dtype, until a bucket has `least` bytes.

    Args:
      leaves: index, number of values and dtype of each.
      least: bytes of a bucket; a leaf that has as many travels alone. Those of `bucket_bytes` by default.

    Example:
      >>> f32 = np.dtype("float32")
      >>> buckets([(0, 8, f32), (1, 100, f32), (2, 8, f32)], least=400)
      [[1], [0, 2]]
    """
    least = bucket_bytes() if least is None else least
    full: list[list[int]] = []
    filling: dict[np.dtype, tuple[list[int], int]] = {}
    for i, values, own in leaves:
        dtype = sent_as(own)
        size = values * dtype.itemsize
        if size >= least:
            full.append([i])
            continue
        members, held = filling.pop(dtype, ([], 0))
        members.append(i)
        if held + size >= least:
            full.append(members)
        else:
            filling[dtype] = members, held + size
    return full + [members for members, _ in filling.values()]


def joint_mean(leaves: Sequence[Array], nodes: Nodes) -> list[Array]:
    """The means over nodes of leaves that travel in one dtype, by one all-reduce; f32 with the leaves' shapes."""
    dtype = sent_as(leaves[0].dtype)
    if len(leaves) == 1:
        return [_mean(leaves[0].astype(dtype), nodes)]
    mean = _mean(jnp.concatenate([x.reshape(-1).astype(dtype) for x in leaves]), nodes)
    ends = np.cumsum([x.size for x in leaves]).tolist()
    return [part.reshape(x.shape) for part, x in zip(jnp.split(mean, ends[:-1]), leaves, strict=True)]


def _mean(x: Array, nodes: Nodes) -> Array:
    return comm.psum(x, nodes, "dense").astype(jnp.float32) / nodes.count
