"""Run functions on the node axis, in one of the three layouts of `jgc.nodes.layouts`. No other file does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jgc import comm
from jgc.backend import traced_for
from jgc.checks.misuse import check_arrays, check_nodes, path_of
from jgc.comm.axis import without_collectives
from jgc.comm.jaxprs import evaluated
from jgc.nodes.placement import (
    LOCAL,
    SHARED,
    Placement,
    Sharded,
    Stacked,
    axes_of,
    check_node_axes,
    check_placements,
    is_placement,
    on_node_axis,
    spec,
)
from jgc.types import EMULATED, Array, Nodes, PyTree


def on_nodes(
    fn: Callable, nodes: Nodes, ins: tuple, outs: PyTree, unroll: bool = False, partitioned: bool = False,
    communicates: bool = True,
) -> Callable:  # fmt: skip
    """Run `fn` once per node, on the node axis that `jgc.comm` communicates over.

    Args:
      fn: a function of one node's arguments, without the leading node axis.
      nodes: the layout.
      ins: for each argument a placement (SHARED, LOCAL, BATCH, `Sharded`, `Stacked`) or a tree of placements.
      outs: the placements of `fn`'s outputs. Tracing raises an error if an output is declared SHARED but may
        differ between nodes, because communication was forgotten.
      unroll: run the nodes of one device one after another instead of under `vmap`. Only for functions that
        do not communicate and have LOCAL outputs only. Makes convolutions on CPU much faster.
      communicates: False for a function that does not communicate and has LOCAL outputs only. Such a function may
        contain any loop or branch; JAX's check of SHARED outputs refuses a loop that begins with a constant. `unroll`
        implies False.
      partitioned: where a node has several devices, `fn` sees the node's whole arrays, and XLA divides its work among
        these devices. If not, `fn` runs on each device and sees that device's part.

    Returns:
      A function of whole arrays: LOCAL and BATCH arrays have a leading axis [K].

    Raises:
      TypeError: something else in place of the nodes; `ins` is not a tuple; when called, a leaf of an argument that is
        neither an array nor a number.
      ValueError: `unroll` or `communicates=False` with an output declared SHARED: nothing could check it; an unknown
        placement; when called, another number of arguments than `ins` has, a LOCAL or BATCH argument whose first axis
        is not K, an output declared SHARED that differs between nodes, a LOCAL one that differs between the devices of
        a node, or a function that communicates and should not.

    Example:
      >>> from jgc.nodes.layouts import make_nodes
      >>> nodes = make_nodes(2, devices=jax.devices()[:1])
      >>> on_nodes(lambda x: 2 * x, nodes, ins=(LOCAL,), outs=LOCAL)(jnp.arange(2))
      Array([0, 2], dtype=int32)
    """

    check_nodes(nodes)
    if not isinstance(ins, tuple):
        raise TypeError(f"ins must be a tuple with a placement for each argument, e.g. (jgc.LOCAL,), got {ins!r}")
    check_placements((ins, outs))
    communicates = communicates and not unroll
    if not communicates and not all(on_node_axis(x) for x in jax.tree.leaves(outs, is_leaf=is_placement)):
        raise ValueError(
            "unroll=True and communicates=False are for functions that do not communicate; their outputs are LOCAL, "
            "not SHARED"
        )
    if not communicates:
        fn = _by_itself(fn, nodes._replace(fast=()) if partitioned else nodes, ins, outs)

    differing: list[str] = []  # outputs that the last trace has found to differ; JAX's own error under vmap has no name

    def one(*args):
        out = fn(*args)
        if not communicates:
            return out
        found = [leaf for leaf in placed_leaves(outs, out) if _differs(leaf[2], leaf[1], nodes)]
        differing[:] = [name for name, *_ in found]
        if found and nodes.mesh is not None and nodes.per_device == 1:
            name, placement, _ = found[0]
            raise ValueError(_inside_a_node(name) if on_node_axis(placement) else _not_shared(name))
        return out

    def on_device(*args):  # LOCAL and BATCH leaves: [per_device, ...] on each device
        args = map_placed(_unstacked, ins, args)
        return map_placed(_stacked, outs, on_its_nodes(*args))

    def on_its_nodes(*args):
        if nodes.mesh is not None and nodes.per_device == 1:
            return _map_nodes(lambda x: jnp.asarray(x)[None], outs, one(*_map_nodes(lambda x: x[0], ins, args)))
        if unroll:
            each = [fn(*_map_nodes(lambda x, i=i: x[i], ins, args)) for i in range(nodes.per_device)]
            return jax.tree.map(lambda *xs: jnp.stack(xs), *each)
        in_axes, out_axes = (
            jax.tree.map(lambda x: 0 if on_node_axis(x) else None, tree, is_leaf=is_placement) for tree in (ins, outs)
        )
        on_axis = jax.vmap(one, in_axes=in_axes, out_axes=out_axes, axis_name=EMULATED, axis_size=nodes.per_device)
        try:
            return on_axis(*args)
        except ValueError as error:
            if "vmap has mapped output" not in str(error):
                raise
            raise ValueError(_not_shared(differing[0] if differing else "")) from None

    if nodes.mesh is None:
        run: Callable = on_device
    elif partitioned and nodes.fast:
        run = _partitioned(on_its_nodes, nodes, ins, outs, communicates)
    else:
        on_mesh = jax.shard_map(
            on_device, mesh=nodes.mesh, in_specs=_specs(ins, nodes), out_specs=_specs(outs, nodes),
            check_vma=communicates,
        )  # fmt: skip

        def run(*args):  # arrays on Explicit axes must lie as in_specs says
            return on_mesh(*_resharded(ins, args, nodes))

    def checked(*args):
        check_arguments(args, ins, nodes)
        with traced_for(nodes):
            return run(*args)

    return checked


def check_arguments(args: tuple, ins: tuple, nodes: Nodes) -> None:
    """Raise ValueError or TypeError, naming the argument, unless each fits its placements."""
    if len(args) != len(ins):
        raise ValueError(f"ins has {len(ins)} placements, and the function was called with {len(args)} arguments")
    for i, (placements, arg) in enumerate(zip(ins, args, strict=True)):
        check_arrays(arg, or_numbers=True)
        check_node_axes(placements, arg, nodes, f"argument {i}")


@contextmanager
def without_others() -> Iterator[None]:
    """Trace a function that must not communicate. Raise ValueError if it does."""
    try:
        with without_collectives():
            yield
    except comm.OutsideNodeAxis:
        raise ValueError(
            "the function communicates (jgc.comm, a compressor), and each node is to run it without the others. A "
            "loss sees one node's examples, and jgc takes the mean itself: leave it out"
        ) from None


def _by_itself(fn: Callable, nodes: Nodes, ins: tuple, outs: PyTree) -> Callable:
    """`fn`, with an error where it communicates, or where an output differs between the devices of a node."""

    def checked(*args):
        with without_others():
            if not nodes.fast:
                return fn(*args)
            traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = placed_leaves(outs, shapes)
        for (name, placement, _), axes in zip(leaves, varying(traced, ins, args, nodes), strict=True):
            if axes & set(nodes.fast) - axes_of(placement, nodes):
                raise ValueError(_inside_a_node(name))
        return evaluated(traced, shapes, args)

    return checked


def varying(traced: Any, ins: PyTree, args: PyTree, nodes: Nodes) -> list[frozenset[str]]:
    """The mesh axes along which each output of a traced function differs, from the placements of its arguments."""
    return comm.varying_axes(traced, [axes_of(placement, nodes) for _, placement, _ in placed_leaves(ins, args)])


def placed_leaves(placements: PyTree, tree: PyTree) -> list[tuple[str, Placement, Any]]:
    """The leaves of a tree, in tree order, with their paths and placements.

    Example:
      >>> placed_leaves((LOCAL, SHARED), ({"a": 1, "b": 2}, 3))
      [('0/a', 'local', 1), ('0/b', 'local', 2), ('1', 'shared', 3)]
    """
    leaves: list[tuple[str, Placement, Any]] = []

    def add(path, placement, sub):
        below = jax.tree_util.tree_flatten_with_path(sub)[0]
        leaves.extend((path_of((*path, *rest)), placement, x) for rest, x in below)

    jax.tree_util.tree_map_with_path(add, placements, tree, is_leaf=is_placement)
    return leaves


def _differs(x: Any, placement: Placement, nodes: Nodes) -> bool:
    """Whether JAX takes an output of a node to differ, between nodes or their devices, where its placement does not."""
    emulated = (nodes.mesh is None or nodes.per_device > 1) and not on_node_axis(placement)
    over_mesh = set(jax.typeof(x).mat.varying) - axes_of(placement, nodes)
    return bool(over_mesh) or (emulated and getattr(x, "batch_dim", None) is not None)


def _not_shared(name: str) -> str:
    which = f"the output's leaf {name!r}" if name else "an output"
    return (
        f"{which} is declared SHARED, but differs between nodes (or their devices): it was not aggregated. Average it, "
        "by a compressor or jgc.comm, or declare it LOCAL. In an optax chain every leaf must go through as_optax "
        "(optax.masked leaves some out, and optax.partition the frozen ones: use jgc.compress.per_layer), and momentum "
        "comes after it: see docs/composing.md"
    )


def _inside_a_node(name: str) -> str:
    return (
        f"the output's leaf {name!r} differs between the devices of a node, which share its examples: return a mean of "
        "floats, which jgc.node_grads averages over them, not an integer such as a count"
    )


def _specs(placements: PyTree, nodes: Nodes) -> PyTree:
    return jax.tree.map(lambda x: spec(x, nodes), placements, is_leaf=is_placement)


def _resharded(placements: PyTree, args: PyTree, nodes: Nodes) -> PyTree:
    """Arguments as `shard_map` wants them on a mesh with Explicit axes: divided as their placements say."""
    if nodes.mesh is None or AxisType.Explicit not in nodes.mesh.axis_types:
        return args  # on Auto axes, shard_map divides them itself
    mesh = nodes.mesh

    def one(placement, x):
        return jax.sharding.reshard(jnp.asarray(x), NamedSharding(mesh, spec(placement, nodes)))

    return map_placed(one, placements, args)


def _partitioned(on_its_nodes: Callable, nodes: Nodes, ins: tuple, outs: PyTree, communicates: bool) -> Callable:
    """`on_its_nodes` with the slow axes divided by `shard_map`, and the fast axes left to XLA's partitioner."""
    assert nodes.mesh is not None
    slow_only, explicit = nodes._replace(fast=()), AxisType.Explicit in nodes.mesh.axis_types
    in_specs, out_specs = (
        jax.tree.map(lambda x: spec(LOCAL if on_node_axis(x) else SHARED, slow_only), tree, is_leaf=is_placement)
        for tree in (ins, outs)
    )

    def on_slow(*args):
        if not explicit:
            return on_its_nodes(*args)
        # model code without annotations fails on Explicit axes
        shardings = jax.tree.map(  # of arrays [per_device, ...]
            lambda x: P(None, *x.spec) if isinstance(x, Sharded) else P(), outs, is_leaf=is_placement
        )
        others = tuple(axis for axis in nodes.mesh.axis_names if axis not in nodes.slow)
        return jax.sharding.auto_axes(on_its_nodes, axes=others, out_sharding=shardings)(*args)

    on_axes: Callable = jax.shard_map(
        on_slow, mesh=nodes.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(nodes.slow),
        check_vma=communicates,
    )  # fmt: skip
    if not communicates:
        on_axes = jax.jit(on_axes)  # without the check JAX runs such a map under jit only
    if explicit:
        return lambda *args: on_axes(*_resharded(ins, args, nodes))

    def constrained(*args):  # without it, XLA returns whole arrays to every device of a node
        return map_placed(
            lambda placement, x: jax.lax.with_sharding_constraint(x, NamedSharding(nodes.mesh, spec(placement, nodes))),
            outs,
            on_axes(*args),
        )

    return constrained


def map_placed(f: Callable, placements: PyTree, tree: PyTree) -> PyTree:
    """`f(placement, leaf)` of all leaves."""

    def mapped(placement, sub):
        return jax.tree.map(lambda x: f(placement, x), sub)

    return jax.tree.map(mapped, placements, tree, is_leaf=is_placement)


def _map_nodes(f: Callable, placements: PyTree, tree: PyTree) -> PyTree:
    """`f(leaf)` of all leaves whose placement has a node axis."""
    return map_placed(lambda placement, x: f(x) if on_node_axis(placement) else x, placements, tree)


def _unstacked(placement: Placement, x: Array) -> Array:
    """A device's entry of a `Stacked` array, without the axis of the devices; any other array as it is."""
    if not isinstance(placement, Stacked):
        return x
    return x[:, 0] if on_node_axis(placement) else x[0]


def _stacked(placement: Placement, x: Array) -> Array:
    """The inverse of `_unstacked`."""
    if not isinstance(placement, Stacked):
        return x
    return x[:, None] if on_node_axis(placement) else x[None]
