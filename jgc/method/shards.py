"""Compress gradients whose leaves are sharded over the devices of a node (FSDP, tensor parallel).

Each device compresses its shards and meets the same device of the other nodes over the slow axes.
Leaves that are sharded over the same fast axes form a group with a separate state: a vector, its
residual, its layers, which are shards of leaves. Leaves that are not sharded are a group, too;
every device of a node computes it alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jgc import comm
from jgc.nodes.placement import axes_of_dim, check_divided, placements_of, sharding_spec, spec
from jgc.types import Array, Info, Key, Nodes, PyTree, State


class Shards(NamedTuple):
    """How the leaves of a tree are sharded inside a node. Static."""

    axes: tuple[tuple[str, ...], ...]  # the fast axes of each group of leaves
    group_of: tuple[int, ...]  # the group of each leaf, in tree order
    shapes: PyTree  # shapes and dtypes of one device's shards, a tree like the parameters


def shards_of(tree: PyTree, nodes: Nodes) -> Shards | None:
    """How arrays, or shapes with shardings, are sharded inside a node; None if no leaf is.

    Raises:
      ValueError: a leaf is sharded over an axis that is not a fast one, or not evenly.
    """
    leaves, treedef = jax.tree.flatten(tree)
    divided = [tuple(sharding_spec(leaf)) for leaf in leaves]
    if not any(divided):
        return None
    check_divided(tree, nodes)
    axes_of, shapes = [], []
    for leaf, dims in zip(leaves, divided, strict=True):
        over = [axes_of_dim(dim) for dim in dims]
        shape = list(leaf.shape)
        for i, dim in enumerate(over):
            shape[i] //= nodes.size(dim)
        axes_of.append(tuple(axis for axis in nodes.fast if any(axis in dim for dim in over)))
        shapes.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
    axes = tuple(dict.fromkeys(axes_of))
    group_of = tuple(map(axes.index, axes_of))
    return Shards(axes, group_of, jax.tree.unflatten(treedef, shapes))


def placed(make: Callable[[], State], nodes: Nodes) -> State:
    """The state that `make` computes, each part on its device: no device ever holds all of it."""
    placements = placements_of(jax.eval_shape(make))
    mesh: Any = nodes.mesh
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, spec(x, nodes)), placements)
    return jax.jit(make, out_shardings=shardings)()


def key_of(key: Key, group: int, axes: tuple[str, ...]) -> Key:
    """A key for this device's shards of a group, the same on all nodes."""
    key = jax.random.fold_in(key, group)
    return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key


def sum_of(infos: Sequence[Info], axes: Sequence[tuple[str, ...]], nodes: Nodes) -> Info:
    """A device's share of its node's `Info`, from the infos of all groups.

    Figures of a node are the sums over its devices, and of residual norms the root of the sum of
    squares. So a group that several devices compute alike counts on the first of them only.
    """

    def counted(x: Array, dividing: tuple[str, ...]) -> Array:
        others = tuple(axis for axis in nodes.fast if axis not in dividing)
        first = lax.axis_index(others) == 0 if others else jnp.bool_(True)
        return comm.vary_over(jnp.where(first, x, jnp.zeros_like(x)), nodes.fast)

    norms, elements, overflow = (
        jnp.stack([counted(info[i], over) for info, over in zip(infos, axes, strict=True)])
        for i in range(3)
    )
    finite = comm.vary_over(infos[0].finite, nodes.fast)
    return Info(
        jnp.linalg.norm(norms), jnp.sum(elements), jnp.sum(overflow, dtype=jnp.int32), finite
    )


def info_of_node(info: Info, nodes: Nodes) -> Info:
    """A node's `Info`, equal on its devices, from each device's share (see `sum_of`)."""
    axes = comm.fast_axes(info.residual_norm, nodes)
    if not axes:
        return info
    squared, elements, overflow = (
        comm.sum_inside(x, axes, nodes, "metrics")
        for x in (info.residual_norm**2, info.elements_sent, info.overflow)
    )
    bad = comm.sum_inside((~info.finite).astype(jnp.int32), axes, nodes, "metrics")
    return Info(jnp.sqrt(squared), elements, overflow, bad == 0)


def whole(
    parts: Array, leaf_spec: Sequence[Any], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> Array:
    """The array whose shards are `parts` [F, ...], in the order of the mesh axes `axes`.

    Example:
      >>> parts = jnp.array([[[1], [3]], [[2], [4]]])
      >>> whole(parts, (None, "fast"), ("fast",), {"fast": 2}).tolist()
      [[1, 2], [3, 4]]
    """
    shape = parts.shape[1:]
    dims = [axes_of_dim(dim) for dim in leaf_spec] + [()] * (len(shape) - len(leaf_spec))
    apart = parts.reshape(*(sizes[axis] for axis in axes), *shape)
    order = []
    for i, dim in enumerate(dims):
        order += [*(axes.index(axis) for axis in dim), len(axes) + i]
    return apart.transpose(order).reshape(
        [n * math.prod(sizes[axis] for axis in dim) for n, dim in zip(shape, dims, strict=True)]
    )
