"""Where arrays lie on the node axis.

A placement is SHARED, LOCAL or BATCH, or a tree of them. Where a node has several devices,
`Sharded` says how an array is sharded over them, and `Stacked` that each has a separate entry.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from jgc.checks.misuse import leaves_by_path, path_of
from jgc.checks.optax_states import check_composition, is_accumulator
from jgc.types import Nodes, PyTree, State

SHARED = "shared"  # the same on every node
LOCAL = "local"  # leading axis [K]: one entry per node
BATCH = "batch"  # leading axes [K, b]: a node's examples, split over its devices


@dataclass(frozen=True)
class Sharded:
    """The placement of an array that is sharded within a node, e.g. a parameter under FSDP.

    Attributes:
      placement: SHARED, or LOCAL for an array with a leading axis [K].
      spec: the fast mesh axes over which each dimension is sharded, without the axis [K].
    """

    placement: str
    spec: P


@dataclass(frozen=True)
class Stacked:
    """The placement of an array with an entry for each device of a node, e.g. a residual.

    Attributes:
      placement: SHARED, leading axis [F] of the devices; or LOCAL, leading axes [K, F].
      axes: the fast mesh axes over which entries differ; F is their size.
    """

    placement: str
    axes: tuple[str, ...]


Placement = str | Sharded | Stacked


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["axes", "group_of"])
@dataclass(frozen=True)
class ByShards:
    """Half of the `State` of a compressor whose gradients are sharded inside a node.

    Leaves that are sharded over the same fast axes form a group, whose shards a device compresses.
    """

    parts: tuple[PyTree, ...]  # of each group; outside a step arrays have an axis of the devices
    axes: tuple[tuple[str, ...], ...]  # the fast axes of each group; () for whole leaves
    group_of: tuple[int, ...]  # the group of each leaf of the gradients, in tree order


def on_node_axis(placement: Placement) -> bool:
    """Whether arrays of this placement have a leading axis [K]."""
    return (placement if isinstance(placement, str) else placement.placement) != SHARED


def check_placements(placements: PyTree) -> None:
    """Raise ValueError for a leaf that is not a placement."""
    for x in jax.tree.leaves(placements):
        if not isinstance(x, Placement) or getattr(x, "placement", x) not in (SHARED, LOCAL, BATCH):
            known = f"jgc.SHARED ({SHARED!r}), jgc.LOCAL ({LOCAL!r}) or jgc.BATCH ({BATCH!r})"
            raise ValueError(f"a placement must be {known}, got {x!r}")


def spec(placement: Placement, nodes: Nodes) -> P:
    """The mesh axes over which an array of this placement is sharded."""
    if isinstance(placement, str):
        slow = nodes.slow or None
        # no None for [b]: keys [K] have no such axis
        batch = P(slow, nodes.fast) if nodes.fast else P(slow)
        return {SHARED: P(), LOCAL: P(slow), BATCH: batch}[placement]
    inner = tuple(placement.spec) if isinstance(placement, Sharded) else (placement.axes or None,)
    return P(nodes.slow or None, *inner) if on_node_axis(placement) else P(*inner)


def axes_of(placement: Placement, nodes: Nodes) -> frozenset[str]:
    """The mesh axes along which an array of this placement differs between devices."""
    return frozenset(axis for dim in spec(placement, nodes) for axis in axes_of_dim(dim))


def axes_of_dim(dim: Any) -> tuple[str, ...]:
    """The mesh axes over which a dimension is sharded, from its entry in a `PartitionSpec`."""
    return () if dim is None else (dim,) if isinstance(dim, str) else tuple(dim)


def locally(placements: PyTree) -> PyTree:
    """The placements of an array per node instead of one for all: gradients', from parameters'.

    Example:
      >>> locally({"w": SHARED, "kernel": Sharded(SHARED, P("fsdp"))})["kernel"].placement
      'local'
    """

    def local(x):
        return LOCAL if isinstance(x, str) else dataclasses.replace(x, placement=LOCAL)

    return jax.tree.map(local, placements)


def any_divided(placements: PyTree) -> bool:
    """Whether an array of a tree of placements is sharded within a node."""
    return any(isinstance(x, Sharded) for x in jax.tree.leaves(placements))


def sharding_of(x: Any) -> Any:
    """The sharding of an array or a `jax.ShapeDtypeStruct`; None if unknown, as in a trace."""
    return None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)


def sharding_spec(x: Any) -> P:
    """How an array or a `jax.ShapeDtypeStruct` is sharded; P() if it is not, or in a trace."""
    sharding = sharding_of(x)
    if isinstance(sharding, NamedSharding) and any(axis is not None for axis in sharding.spec):
        return sharding.spec
    return P()


def check_divided(tree: PyTree, nodes: Nodes) -> None:
    """Raise ValueError, naming the leaf, if it is sharded unevenly, or not over fast axes."""
    for name, x in leaves_by_path(tree).items():
        for i, dim in enumerate(sharding_spec(x)):
            for axis in axes_of_dim(dim):
                if axis not in nodes.fast:
                    cure = "name the axis in from_mesh(..., fast=)"
                    cure = "keep them whole over that axis" if axis in nodes.slow else cure
                    raise ValueError(
                        f"{name!r} is sharded over the mesh axis {axis!r}, which is not one of "
                        f"the fast axes {nodes.fast}: parameters may be sharded inside a node "
                        f"only; {cure}"
                    )
            if x.shape[i] % (n := nodes.size(axes_of_dim(dim))):
                raise ValueError(f"{name!r}: {n} devices do not divide dimension {i} of {x.shape}")


def placements_of(tree: PyTree) -> PyTree:
    """The placement of every leaf of parameters, or of a tree with `State`s, e.g. an optax state.

    A `State` has SHARED and LOCAL leaves. Other leaves are SHARED, or `Sharded` if they are sharded
    within a node. The sums of `optax.MultiSteps` around `as_optax` are LOCAL.

    Raises:
      ValueError: an optax wrapper around `as_optax` that cannot work (docs/composing.md).

    Warns:
      MomentumWarning: both the method and the optimiser have a momentum.

    Example:
      >>> placements_of((State(1, 2), 3))
      (State(shared='shared', local='local'), 'shared')
    """

    check_composition(tree)

    def placement(x):
        if isinstance(x, State):
            return State(_of_state(x.shared, SHARED), _of_state(x.local, LOCAL))
        if is_accumulator(x):
            rest = jax.tree.map(placement, x._replace(acc_grads=None), is_leaf=is_special)
            return rest._replace(acc_grads=jax.tree.map(of_node, x.acc_grads))
        divided = sharding_spec(x)
        return Sharded(SHARED, divided) if divided != P() else SHARED

    def is_special(x):
        return isinstance(x, State) or is_accumulator(x)

    return jax.tree.map(placement, tree, is_leaf=is_special)


def of_node(x: Any) -> Placement:
    """The placement of an array [K, ...] whose entries may be sharded within a node."""
    inner = P(*sharding_spec(x)[1:])
    return Sharded(LOCAL, inner) if any(axis is not None for axis in inner) else LOCAL


def _of_state(tree: PyTree, half: str) -> PyTree:
    if not isinstance(tree, ByShards):
        return jax.tree.map(lambda _: half, tree)
    parts = [
        jax.tree.map(lambda _, axes=axes: Stacked(half, axes) if axes else half, part)
        for axes, part in zip(tree.axes, tree.parts, strict=True)
    ]
    return dataclasses.replace(tree, parts=tuple(parts))


def placed_leaves(placements: PyTree, tree: PyTree) -> list[tuple[str, Placement, Any]]:
    """The leaves of a tree, in tree order, with their paths and placements.

    Example:
      >>> from jgc.nodes.placement import LOCAL, SHARED
      >>> placed_leaves((LOCAL, SHARED), ({"a": 1, "b": 2}, 3))
      [('0/a', 'local', 1), ('0/b', 'local', 2), ('1', 'shared', 3)]
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    each = jax.tree.leaves(jax.tree.broadcast(placements, tree))
    return [(path_of(path), where, x) for (path, x), where in zip(leaves, each, strict=True)]


def map_placed(f: Callable, placements: PyTree, tree: PyTree) -> PyTree:
    """`f(placement, leaf)` of all leaves."""
    return jax.tree.map(lambda where, sub: jax.tree.map(partial(f, where), sub), placements, tree)


def not_shared(name: str = "") -> str:
    """The error of an output that differs between nodes."""
    which = f"the output's leaf {name!r}" if name else "an output"
    return (
        f"{which} is declared SHARED, but differs between nodes (or their devices): it was not "
        "aggregated. Average it, by a compressor or jgc.comm, or declare it LOCAL. In an optax "
        "chain every leaf must go through as_optax (optax.masked leaves some out: use "
        "jgc.compress.per_layer; frozen leaves do not belong to the parameters: pass them to "
        "node_grads as frozen), and momentum comes after it: see docs/composing.md"
    )


def inside_a_node(name: str) -> str:
    """The error of an output that differs between the devices of a node."""
    return (
        f"the output's leaf {name!r} differs between the devices of a node, which share its "
        "examples: return a mean of floats, which jgc.node_grads averages over them, not an "
        "integer such as a count"
    )
