"""All leaves of a gradient at once: whether they are usable, the sum of their squares, their exact
mean."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np

from jgc import comm
from jgc.backend import backend
from jgc.layout.pack import SMALL, Packing
from jgc.types import Array, Nodes

# Methods square gradients, add them up over nodes and steps, and some square those sums: all of it
# must fit into f32.
LARGEST_NORM = 1e15
_AT_ONCE = 16  # stretches of memory
_IN_A_KERNEL = 64  # arrays: XLA on GPU writes a concatenation of more than 96 to memory


def unusable(arrays: Sequence[Array]) -> Array:
    """Whether the arrays hold NaN or Inf, or have a norm of `LARGEST_NORM` and more together,
    bool[].

    Example:
      >>> [bool(unusable([jnp.array([1.0, x])])) for x in (-1e14, 2e15, 3e38, jnp.nan, -jnp.inf)]
      [False, True, True, True, True]
    """
    # One pass, as long as that of a plain sum. A square that overflows is Inf, and NaN goes
    # through the sum.
    wide = [x if x.dtype.itemsize >= 4 else x.astype(jnp.float32) for x in arrays]
    squares = squared_norm(wide)
    return ~(squares < LARGEST_NORM**2)  # not `>=`, which is false for NaN


def not_finite(x: Array) -> Array:
    """Whether x holds NaN or Inf, bool[].

    Example:
      >>> [bool(not_finite(jnp.array([1.0, last]))) for last in (3e38, jnp.nan, -jnp.inf)]
      [False, True, True]
    """
    # A sum propagates NaN on every backend; XLA's maximum on CPU drops it where it compares 4,096
    # values or more as vectors. The sum takes as long as one read of x; all(isfinite) takes 1.5
    # times as long on CPU.
    return ~jnp.isfinite(jnp.sum(0 * x))


def squared_norm(arrays: Sequence[Array]) -> Array:
    """The sum of the squares of all values, f32[]: Inf where it overflows, NaN if one is NaN.

    Args:
      arrays: of floats of 32 or 64 bits, of any shapes.

    Example:
      >>> squared_norm([jnp.array([[3.0, 4.0]]), jnp.array([1.0])])
      Array(26., dtype=float32)
    """
    if backend() == "gpu":
        return _in_few_kernels(arrays)
    on_tpu = backend() == "tpu"
    # Small ones are one array. On TPU these are biases and norms alone: matrices would have to
    # change their layout.
    is_small = [x.size <= SMALL and (x.ndim < 2 or not on_tpu) for x in arrays]
    small = [x.reshape(-1) for x, is_one in zip(arrays, is_small, strict=True) if is_one]
    large = [x for x, is_one in zip(arrays, is_small, strict=True) if not is_one]
    if len(small) > 1:
        small = [jnp.concatenate(small)]
    groups = _stretches(large) if on_tpu else [[x] for x in large]
    total = jnp.float32(0)
    for group in [small, *groups]:
        squares = [jnp.square(x) for x in group]
        if squares:
            total += jnp.sum(sum(squares[1:], start=squares[0])).astype(jnp.float32)
    return total


def squares_of_new(arrays: Sequence[Array]) -> Array:
    """As `squared_norm`, of f32 arrays with at least one dimension that are being computed.

    The operation that computes an array also sums its squares: on GPU row by row, for one more
    kernel to add up.
    """
    if backend() != "gpu":
        return sum([jnp.sum(jnp.square(x)) for x in arrays], jnp.float32(0))
    rows = [jnp.sum(jnp.square(x), axis=-1).reshape(-1) for x in arrays]
    # `abs`: as in `_in_few_kernels`
    return jnp.sum(jnp.abs(jnp.concatenate([jnp.zeros(1, jnp.float32), *rows])))


def _in_few_kernels(arrays: Sequence[Array]) -> Array:
    """The sum of squares in two kernels for 64 arrays: leaf by leaf it takes two for each.

    A kernel that reads a concatenation finds each value's array by comparing one length after
    another. So arrays of equal size are added up first, and the concatenation has one part for each
    size.
    """
    total = jnp.float32(0)
    in_order = sorted((x.reshape(-1) for x in arrays), key=lambda x: (x.dtype.name, x.size))
    for _, of_dtype in groupby(in_order, key=lambda x: x.dtype):
        alike = list(of_dtype)
        for start in range(0, len(alike), _IN_A_KERNEL):
            parts = [
                sum(map(jnp.square, of_size), start=jnp.zeros((), alike[0].dtype))
                for _, of_size in groupby(alike[start : start + _IN_A_KERNEL], key=lambda x: x.size)
            ]
            # `abs` changes nothing. Without it XLA sums every part of a concatenation in a kernel
            # for itself.
            total += jnp.sum(jnp.abs(jnp.concatenate(parts))).astype(jnp.float32)
    return total


def _stretches(arrays: Sequence[Array]) -> Iterator[list[Array]]:
    """All values of the arrays, in groups of up to 16 arrays of one shape.

    A TPU reads 16 stretches of memory in 0.6 of the cycles that it takes for one after the other.
    So arrays of equal shape go together, and where there are few of a shape, each is cut into parts
    of whole tiles of 8 rows.
    """
    rows = [x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x for x in arrays]
    for (size, *_), of_shape in groupby(sorted(rows, key=lambda x: x.shape), key=lambda x: x.shape):
        alike = list(of_shape)
        while alike:
            together, alike = alike[:_AT_ONCE], alike[_AT_ONCE:]
            cuts = _AT_ONCE // len(together)
            part = size // cuts // 8 * 8
            yield [
                x[i * part : (i + 1) * part] for x in together for i in range(cuts if part else 0)
            ]
            yield [x[cuts * part :] for x in together if cuts * part < size]


# --- the exact mean, leaf by leaf: large leaves by themselves, small ones joined into buckets -----
# No vector of all gradients is allocated. On a network each collective costs about a millisecond,
# so leaves smaller than a bucket travel together. Leaves in bf16 travel in two bytes where the
# backend's all-reduce keeps them. Leaves in f16 travel as f32: divided by the number of nodes, as a
# sum that must not overflow needs, small gradients would be 0 in f16.


def mean_of_leaves(
    leaves: Sequence[Array], packing: Packing, nodes: Nodes, skip: Array
) -> list[Array]:
    """The mean over nodes of every leaf, zeros if `skip`; of unpacked leaves zeros."""
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
    kept = dtype.name == "bfloat16" and backend() != "cpu"  # on CPU XLA sends bf16 as f32
    return dtype if kept else np.dtype(np.float32)


def buckets(
    leaves: Iterable[tuple[int, int, np.dtype]], least: int | None = None
) -> list[list[int]]:
    """Which leaves travel together: those that travel in one dtype, until a bucket has `least`
    bytes.

    Args:
      leaves: index, number of values and dtype of each.
      least: bytes of a bucket; a leaf that has as many travels alone. By default `bucket_bytes`.

    Example:
      >>> f32 = np.dtype("float32")
      >>> buckets([(0, 8, f32), (1, 100, f32), (2, 8, f32)], least=400)
      [[1], [0, 2]]
    """
    least = bucket_bytes() if least is None else least
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


def bucket_bytes() -> int:
    """The bytes from which an array has an all-reduce by itself; smaller ones are joined until they
    have as many.

    XLA on GPU joins all-reduces up to about 32 MB anyway, but so late that every array then has a
    kernel of its slice.
    """
    return 2**25 if backend() == "gpu" else 2**20
