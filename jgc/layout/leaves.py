"""The exact mean of all leaves of a gradient: large leaves separately, small ones in buckets.

No vector of all gradients is allocated. On a network each collective costs about a millisecond,
so leaves smaller than a bucket travel together. Leaves in bf16 travel in two bytes where the
backend's all-reduce keeps them. Leaves in f16 travel as f32: divided by the number of nodes, as a
sum that must not overflow needs, small gradients would be 0 in f16.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.backend import backend
from jgc.layout.pack import Packing
from jgc.types import Array, Nodes


def mean_of_leaves(
    leaves: Sequence[Array], packing: Packing, nodes: Nodes, skip: Array
) -> list[Array]:
    """The mean over nodes of every leaf, zeros if `skip`; zeros for unpacked leaves."""
    out = []
    for x in leaves:  # float0: the gradient dtype of integers
        xp = np if x.dtype == jax.dtypes.float0 else jnp
        out.append(xp.zeros(x.shape, x.dtype))
    packed = ((i, x.size, x.dtype) for i, x in enumerate(packing.leaves) if x.start >= 0)
    for bucket in buckets(packed):
        members = [leaves[i] for i in bucket]
        dtype = sent_as(members[0].dtype)
        parts = [x.astype(dtype) for x in members]
        if len(parts) > 1:  # one all-reduce for all of them
            parts = [jnp.concatenate([x.reshape(-1) for x in parts])]
        mean = comm.psum(parts[0], nodes, "dense").astype(jnp.float32) / nodes.count
        ends = np.cumsum([x.size for x in members]).tolist()
        split = jnp.split(mean, ends[:-1]) if len(members) > 1 else [mean]
        for i, x, part in zip(bucket, members, split, strict=True):
            out[i] = comm.narrowed(jnp.where(skip, 0, part.reshape(x.shape)), x.dtype)
    return out


def sent_as(dtype: np.dtype) -> np.dtype:
    """The dtype in which a leaf travels: f32, but bf16 where the backend's all-reduce keeps it.

    Example:
      >>> sent_as(np.dtype("float16")).name, sent_as(np.dtype("float64")).name
      ('float32', 'float32')
    """
    stays = dtype.name == "bfloat16" and backend() != "cpu"  # on CPU XLA sends bf16 as f32
    return dtype if stays else np.dtype(np.float32)


def buckets(
    leaves: Iterable[tuple[int, int, np.dtype]], least: int | None = None
) -> list[list[int]]:
    """Which leaves, by index, size and dtype, travel together: those of one travelling dtype.

    A bucket is full from `least` bytes on, by default 1 MiB, on GPU 32 MiB: XLA joins smaller
    all-reduces there, but so late that every array has a kernel of its slice.

    Example:
      >>> f32 = np.dtype("float32")
      >>> buckets([(0, 8, f32), (1, 100, f32), (2, 8, f32)], least=400)
      [[1], [0, 2]]
    """
    if least is None:
        least = 2**25 if backend() == "gpu" else 2**20
    full: list[list[int]] = []
    filling: dict[np.dtype, tuple[list[int], int]] = {}
    for i, values, leaf_dtype in leaves:
        dtype = sent_as(leaf_dtype)
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
