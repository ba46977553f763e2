"""Compress gradients whose leaves are divided among the devices of a node (FSDP, tensor parallel).

Each device compresses its own shards and meets the same device of the other nodes over the slow axes. Leaves that are
divided over the same fast axes form a group with a state of its own: a vector, its residual, its layers, which are
shards of leaves. Leaves that no device divides are a group, too; every device of a node computes it alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jgc import comm
from jgc.layout.pack import leaf_paths
from jgc.nodes.placement import ByShards, axes_of_dim, check_divided, placements_of, sharding_spec, spec
from jgc.types import Array, Info, Key, Nodes, PyTree, State

Group = dict[str, Any]  # leaves by path


class Shards(NamedTuple):
    """How the leaves of a tree are divided inside a node. Static.

    Attributes:
      axes: the fast axes of each group of leaves.
      group_of: the group of each leaf, in tree order.
      groups: shapes and dtypes of one device's shards in each group, by path.
    """

    axes: tuple[tuple[str, ...], ...]
    group_of: tuple[int, ...]
    groups: tuple[Group, ...]


def shards_of(tree: PyTree, nodes: Nodes) -> Shards | None:
    """How arrays, or shapes with shardings, are divided inside a node; None if no leaf is.

    Raises:
      ValueError: a leaf is divided over an axis that is not a fast one, or not evenly.
    """
    paths, leaves = leaf_paths(tree), jax.tree.leaves(tree)
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
    group_of = tuple(axes.index(one) for one in axes_of)
    return Shards(axes, group_of, tuple(split(paths, shapes, group_of, len(axes))))


def split(paths: Sequence[str], leaves: Sequence[Any], group_of: Sequence[int], count: int) -> list[Group]:
    """The leaves of each group by path."""
    groups: list[Group] = [{} for _ in range(count)]
    for path, leaf, i in zip(paths, leaves, group_of, strict=True):
        groups[i][path] = leaf
    return groups


def join(groups: Sequence[Group], tree: PyTree) -> PyTree:
    """The inverse of `split`: a tree like `tree`."""
    by_path = {path: leaf for group in groups for path, leaf in group.items()}
    return jax.tree.unflatten(jax.tree.structure(tree), [by_path[path] for path in leaf_paths(tree)])


def first_state(init: Callable[..., State], key: Key, shards: Shards, nodes: Nodes) -> State:
    """The state of all groups. A method's shared state is drawn for each device's shards by itself."""

    def of_group(i: int) -> State:
        size = nodes.size(shards.axes[i])
        one = partial(init, params=shards.groups[i], nodes=nodes)
        if not shards.axes[i]:
            return one(jax.random.fold_in(key, i))
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, i)))(jnp.arange(size))
        shared, local = jax.vmap(one)(keys)  # local: [F, K, ...]
        return State(shared, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), local))

    states = [of_group(i) for i in range(len(shards.axes))]
    return joined(states, shards.axes, shards.group_of)


def joined(states: Sequence[State], axes: tuple[tuple[str, ...], ...], group_of: tuple[int, ...]) -> State:
    """The states of all groups as one."""
    shared, local = zip(*states, strict=True)
    return State(ByShards(shared, axes, group_of), ByShards(local, axes, group_of))


def placed(make: Callable[[], State], nodes: Nodes) -> State:
    """The state that `make` computes, each part on its own device: no device ever holds all of it."""
    placements = placements_of(jax.eval_shape(make))
    shardings = jax.tree.map(lambda x: NamedSharding(nodes.mesh, spec(x, nodes)), placements)  # type: ignore[arg-type]
    return jax.jit(make, out_shardings=shardings)()


def states_of(state: State) -> list[State]:
    """The states of the groups."""
    return [State(shared, local) for shared, local in zip(state.shared.parts, state.local.parts, strict=True)]


def key_of(key: Key, group: int, axes: tuple[str, ...]) -> Key:
    """A key for this device's shards of a group, the same on all nodes."""
    key = jax.random.fold_in(key, group)
    return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key


def sum_of(infos: Sequence[Info], axes: Sequence[tuple[str, ...]], nodes: Nodes) -> Info:
    """A device's share of its node's `Info`, from those of all groups.

    Figures of a node are the sums over its devices, and of residual norms the root of the sum of squares. So a group
    that several devices compute alike counts on the first of them only.
    """

    def counted(x: Array, own: tuple[str, ...]) -> Array:
        others = tuple(axis for axis in nodes.fast if axis not in own)
        first = lax.axis_index(others) == 0 if others else jnp.bool_(True)
        return comm.vary_over(jnp.where(first, x, jnp.zeros_like(x)), nodes.fast)

    norms, elements, overflow = (
        jnp.stack([counted(info[i], own) for info, own in zip(infos, axes, strict=True)]) for i in range(3)
    )
    finite = comm.vary_over(infos[0].finite, nodes.fast)
    return Info(jnp.linalg.norm(norms), jnp.sum(elements), jnp.sum(overflow, dtype=jnp.int32), finite)


def info_of_node(info: Info, nodes: Nodes) -> Info:
    """A node's `Info`, equal on its devices, from each device's share (see `sum_of`); any other `Info` as it is."""
    axes = comm.fast_axes(info.residual_norm, nodes)
    if not axes:
        return info
    squared, elements, overflow = (
        comm.sum_inside(x, axes, nodes, "metrics") for x in (info.residual_norm**2, info.elements_sent, info.overflow)
    )
    bad = comm.sum_inside((~info.finite).astype(jnp.int32), axes, nodes, "metrics")
    return Info(jnp.sqrt(squared), elements, overflow, bad == 0)


def residual(residual_of: Callable[..., Callable[[PyTree], Group]], own: ByShards, params: PyTree) -> Group:
    """Whole residuals by path.

    Args:
      residual_of: `(part, shapes, devices) -> function` of a group's state, after a look at its `part`, which has
        `devices` further axes: 1 for an axis of the devices that divide the group, else 0.
      own: a node's local state, with these axes.
      params: with shardings.
    """
    paths, leaves = leaf_paths(params), jax.tree.leaves(params)
    divided = {path: x.sharding for path, x in zip(paths, leaves, strict=True) if tuple(sharding_spec(x))}
    if any(own.axes) and not divided:
        raise ValueError("the state is of shards: give the parameters themselves, whose shardings say how they divide")
    shapes = [
        jax.ShapeDtypeStruct(divided[path].shard_shape(x.shape) if path in divided else x.shape, x.dtype)
        for path, x in zip(paths, leaves, strict=True)
    ]
    found: Group = {}
    groups = split(paths, shapes, own.group_of, len(own.axes))
    for axes, part, group in zip(own.axes, own.parts, groups, strict=True):
        of_group = residual_of(part, group, int(bool(axes)))
        if not axes:
            found |= of_group(part)
            continue
        size = math.prod(next(iter(divided.values())).mesh.shape[axis] for axis in axes)
        for path, x in jax.vmap(of_group, axis_size=size)(part).items():
            found[path] = whole(x, divided[path].spec, axes, divided[path].mesh.shape)
    return found


def whole(parts: Array, leaf_spec: Sequence[Any], axes: tuple[str, ...], sizes: Mapping[str, int]) -> Array:
    """The array whose shards are `parts` [F, ...], in the order of the mesh axes `axes`, of these sizes.

    Example:
      >>> whole(jnp.array([[[1], [3]], [[2], [4]]]), (None, "fast"), ("fast",), {"fast": 2}).tolist()
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
