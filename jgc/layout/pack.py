"""A tree of gradients as one flat vector, and its layers as static ranges of that vector.

Every leaf with two or more dimensions is a layer. Leaves with at most one dimension (biases and
norm parameters) lie together at the end of the vector and form one layer. As separate layers they
would send at least one value each and cost as much as the large layers; the LGC paper, Section V-A,
does not mention them.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend
from jgc.checks.misuse import check_arrays, path_of
from jgc.comm import narrowed
from jgc.layout.devices import SMALL, dynamic_part, hidden
from jgc.types import Array, PyTree

POOLED = "biases and norms"


class Layer(NamedTuple):
    """A range of the flat vector that a method treats as one layer."""

    name: str  # the parameter's path, or `POOLED`
    start: int
    size: int
    shape: tuple[int, ...]  # the parameter's; (size,) for the pooled biases and norms


Layers = tuple[Layer, ...]


def whole(size: int, name: str = "all values") -> Layer:
    """A vector of `size` values as one layer."""
    return Layer(name, 0, size, (size,))


def values_of(layers: Sequence[Layer]) -> int:
    """n, the number of values of all layers."""
    return sum(layer.size for layer in layers)


def layer_ids(counts: tuple[int, ...]) -> np.ndarray:
    """Which layer each of the concatenated values belongs to, i32[sum(counts)]."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


class Leaf(NamedTuple):
    """A leaf of a packed tree."""

    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    start: int  # in the flat vector; -1 for a leaf that is not packed


class Packing(NamedTuple):
    """How a tree lies in a flat vector. Static, made from shapes."""

    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[Leaf, ...]  # in tree order
    layers: Layers  # in the order of the vector
    size: int  # n, the length of the vector


def leaf_paths(tree: PyTree) -> list[str]:
    """The path of every leaf in tree order, parts joined by "/".

    Raises:
      ValueError: two leaves have the same path, as in {"a/b": x, "a": {"b": y}}.

    Example:
      >>> leaf_paths({"Conv_0": {"kernel": 1}})
      ['Conv_0/kernel']
    """
    paths = [path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(
            f"two parameters have the path {twice!r}: a name must not hold a / that makes them "
            "alike")
    return paths


def make_packing(tree: PyTree) -> Packing:
    """Lay out a tree of arrays (or of anything with shape and dtype) in a vector.

    The vector leaves out integer, boolean and empty leaves. None is not a leaf.

    Raises:
      TypeError: a leaf is not an array, or is complex; an f32 vector would lose its imaginary part.

    Example:
      >>> tree = {"bias": jnp.zeros(3), "kernel": jnp.zeros((2, 4)), "steps": jnp.zeros((),
      ...     jnp.int32)}
      >>> make_packing(tree).layers
      (Layer(name='kernel', start=0, size=8, shape=(2, 4)),
       Layer(name='biases and norms', start=8, size=3, shape=(3,)))
    """
    check_arrays(tree)
    values, treedef = jax.tree_util.tree_flatten(tree)
    shapes = [(tuple(x.shape), np.dtype(x.dtype)) for x in values]
    names = leaf_paths(tree)
    for name, (_, dtype) in zip(names, shapes, strict=True):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"{name!r} is {dtype}: give real and imaginary parts as two leaves")
    sizes = [math.prod(shape) for shape, _ in shapes]
    packed = [i for i, (_, t) in enumerate(shapes) if jnp.issubdtype(t, jnp.inexact) and sizes[i]]
    large = [i for i in packed if len(shapes[i][0]) > 1]
    small = [i for i in packed if len(shapes[i][0]) <= 1]
    order = [*large, *small]
    starts = dict(zip(order, accumulate((sizes[i] for i in order), initial=0), strict=False))
    layers = [Layer(names[i], starts[i], sizes[i], shapes[i][0]) for i in large]
    if small:
        pooled = sum(sizes[i] for i in small)
        layers.append(Layer(POOLED, starts[small[0]], pooled, (pooled,)))
    leaves = [Leaf(*shapes[i], sizes[i], starts.get(i, -1)) for i in range(len(values))]
    return Packing(treedef, tuple(leaves), tuple(layers), values_of(layers))


def pieces(tree: PyTree, packing: Packing) -> list[tuple[slice, Array]]:
    """The packed leaves as flat f32 arrays in the order of the vector, each with its range.

    Small biases and norms are one array, so that they compile and run as one.
    """
    values = [x.reshape(-1) for x in jax.tree_util.tree_leaves(tree)]
    in_order = sorted((leaf.start, i) for i, leaf in enumerate(packing.leaves) if leaf.start >= 0)
    small = [len(packing.leaves[i].shape) <= 1 and values[i].size <= SMALL for _, i in in_order]
    out = []
    for together, group in groupby(zip(in_order, small, strict=True), key=lambda pair: pair[1]):
        parts = [(at, values[i].astype(jnp.float32)) for (at, i), _ in group]
        if together:
            parts = [(parts[0][0], jnp.concatenate([x for _, x in parts]))]
        out += [(slice(at, at + x.size), x) for at, x in parts]
    return out


def joined(arrays: Sequence[Array]) -> Array:
    """All values of f32 arrays as one vector."""
    flat = [x.reshape(-1) for x in arrays]
    return jnp.concatenate(flat) if flat else jnp.zeros((0,), jnp.float32)


def pack(tree: PyTree, packing: Packing) -> Array:
    """The tree's packed leaves as one vector f32[n]."""
    flat = joined([x for _, x in pieces(tree, packing)])
    if flat.shape != (packing.size,):
        raise ValueError(f"the tree has {flat.size} values, and its packing {packing.size}")
    return flat


def unpack(
    flat: Array, packing: Packing, skip: Array | bool | None = None, clear: bool = False
) -> PyTree:
    """The inverse of `pack`: a vector [n] as a tree with the original shapes and dtypes.

    Unpacked leaves are zeros; with `clear`, all leaves are if `skip`. Values beyond a leaf's dtype,
    as sums of several steps may be in float16, are clipped to it. With `skip` (`nothing` of
    `hidden`), biases and norms of equal size are compiled once.
    """
    if clear and backend() == "gpu":
        # XLA reads what is computed of the vector in one kernel for all leaves of a size. A plain
        # slice is a copy of each. By bits: `where` would need a vector of zeros.
        kept = lax.bitcast_convert_type(flat, jnp.int32) & jnp.where(
            jnp.asarray(skip), jnp.int32(0), jnp.int32(-1)
        )
        flat, clear = lax.bitcast_convert_type(kept, flat.dtype), False
    pooled = [leaf for leaf in packing.leaves if leaf.start >= 0 and len(leaf.shape) <= 1]
    first = min((leaf.start for leaf in pooled), default=0)
    starts: dict[Leaf, Array] = {}
    if skip is not None:
        offsets = hidden([leaf.start - first for leaf in pooled], skip)
        starts = dict(zip(pooled, offsets, strict=True))
    leaves = []
    for leaf in packing.leaves:
        if leaf.start < 0:  # float0: the gradient dtype of integers
            xp = np if leaf.dtype == jax.dtypes.float0 else jnp
            leaves.append(xp.zeros(leaf.shape, leaf.dtype))
            continue
        if leaf in starts:
            part = dynamic_part(flat[first:], starts[leaf], leaf.size)
        else:
            part = flat[leaf.start : leaf.start + leaf.size]
        part = jnp.where(skip, 0, part) if clear and skip is not None else part
        part = part.reshape(leaf.shape)
        leaves.append(part if part.dtype == leaf.dtype else narrowed(part, leaf.dtype))
    return jax.tree_util.tree_unflatten(packing.treedef, leaves)
