"""Run functions on the node axis, in one of the three layouts of `jgc.nodes.layouts`."""

from collections.abc import Callable
from functools import partial
from numbers import Number
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
    BATCH,
    SHARED,
    Sharded,
    Stacked,
    axes_of,
    check_placements,
    inside_a_node,
    map_placed,
    not_shared,
    on_node_axis,
    placed_leaves,
    spec,
)  # fmt: skip
from jgc.types import EMULATED, Nodes, PyTree


def on_nodes(
    fn: Callable, nodes: Nodes, ins: tuple, outs: PyTree, unroll: bool = False,
    partitioned: bool = False, communicates: bool = True,
) -> Callable:  # fmt: skip
    """Run `fn` once per node, on the node axis that `jgc.comm` communicates over.

    Args:
      fn: a function of one node's arguments, without the leading node axis.
      nodes: the layout.
      ins: for each argument a placement (SHARED, LOCAL, BATCH, `Sharded`, `Stacked`) or a tree of
        placements.
      outs: the placements of `fn`'s outputs. Tracing raises an error if an output is declared
        SHARED but may differ between nodes, because communication was forgotten.
      unroll: run the nodes of a device one by one instead of under `vmap`, which makes
        convolutions on CPU much faster. Implies `communicates=False`.
      partitioned: whether `fn` sees a node's whole arrays, and XLA divides its work among the
        node's devices. If not, `fn` runs on each device and sees that device's part.
      communicates: False for a function that does not communicate and has only LOCAL outputs. It
        may contain any loop; JAX's check of SHARED outputs refuses some.

    Returns:
      A function of whole arrays: LOCAL and BATCH arrays have a leading axis [K].

    Raises:
      TypeError: `nodes` is not a `Nodes`; `ins` is not a tuple; when called, a leaf of an argument
        that is neither an array nor a number.
      ValueError: an unknown placement; an output declared SHARED with `communicates=False`; when
        called, a wrong number of arguments, a LOCAL or BATCH argument whose first axis is not K, an
        output declared SHARED that differs between nodes, a LOCAL one that differs between the
        devices of a node, or a function that communicates and should not.

    Example:
      >>> from jgc.nodes.layouts import make_nodes
      >>> from jgc.nodes.placement import LOCAL
      >>> nodes = make_nodes(2, devices=jax.devices()[:1])
      >>> on_nodes(lambda x: 2 * x, nodes, ins=(LOCAL,), outs=LOCAL)(jnp.arange(2))
      Array([0, 2], dtype=int32)
    """
    check_nodes(nodes)
    if not isinstance(ins, tuple):
        raise TypeError(f"ins must be a tuple of placements, e.g. (jgc.LOCAL,), got {ins!r}")
    check_placements((ins, outs))
    mesh, communicates = nodes.mesh, communicates and not unroll
    if not communicates:
        if not all(map(on_node_axis, jax.tree.leaves(outs))):
            raise ValueError(
                "unroll=True and communicates=False are for functions that do not communicate; "
                "their outputs are LOCAL, not SHARED")
        fn = _by_itself(fn, nodes._replace(fast=()) if partitioned else nodes, ins, outs)
    differing: list[str] = []  # outputs that differ in the last trace and should not
    on_node = _naming_differences(fn, nodes, outs, communicates, differing)
    on_device = _on_device(on_node, nodes, ins, outs, unroll)
    divide = _partitioned if partitioned and nodes.fast else _mapped
    on_mesh = divide(on_device, nodes, ins, outs, communicates)
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types

    def divided(placement, x):
        return jax.sharding.reshard(jnp.asarray(x), NamedSharding(mesh, spec(placement, nodes)))

    def checked(*args):
        if len(args) != len(ins):
            raise ValueError(f"ins has {len(ins)} placements, and the call {len(args)} arguments")
        for i, (placements, arg) in enumerate(zip(ins, args, strict=True)):
            check_node_axes(placements, arg, nodes, f"argument {i}")
        if explicit:  # on Auto axes, shard_map divides the arguments itself
            args = map_placed(divided, ins, args)
        try:
            with traced_for(nodes):
                return on_mesh(*args)
        except ValueError as error:
            if "vmap has mapped output" not in str(error):
                raise
            raise ValueError(not_shared(*differing[:1])) from None

    return checked


def check_node_axes(placements: PyTree, tree: PyTree, nodes: Nodes, name: str) -> None:
    """Raise ValueError, naming the leaf, unless arrays of nodes have a leading axis [K].

    Also for a batch without examples: its mean loss is NaN. TypeError for a leaf that is not an
    array.
    """
    # K, but for layouts in which one node stands for all (`comm.local_copies`)
    count = nodes.per_device * (nodes.size(nodes.slow) if nodes.slow else 1)
    parts = nodes.size(nodes.fast) if nodes.fast else 1
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]  # named only in errors
    each = jax.tree.leaves(jax.tree.broadcast(placements, tree))
    batches = []  # shapes [K, b, ...]
    for (path, x), placement in zip(leaves, each, strict=True):
        if not (hasattr(x, "dtype") or isinstance(x, Number)):
            check_arrays(tree, or_numbers=True)  # raises
        where = getattr(placement, "placement", placement)
        if where == SHARED:
            continue
        shape = getattr(x, "shape", ())
        if not shape or shape[0] != count:
            cure = "jgc.node_grads, compressor.init and jgc.init_optax return such arrays"
            if where == BATCH:
                split = f"split it by nodes, x.reshape({count}, -1, *x.shape[1:])"
                fill = f"repeat a number for each example, jnp.full(({count}, b), x)"
                cure = f"a batch has leading axes [K, b]: {split if shape else fill}"
            raise ValueError(
                f"{which_leaf(path, name)} has shape {shape}, and its first axis "
                f"must be the K = {count} nodes; {cure}")
        if where != BATCH:
            continue
        if parts > 1 and (len(shape) < 2 or shape[1] % parts):
            raise ValueError(
                f"{which_leaf(path, name)} has shape {shape}, and its second axis, a node's "
                f"examples, must be divisible by the node's {parts} devices (random keys, too)")
        batches += [shape] if len(shape) > 1 else []
    if batches and not any(shape[1] for shape in batches):
        shape = batches[0]
        raise ValueError(f"{name} has no examples, an array of shape {shape}: give every node one")


def which_leaf(path: tuple[Any, ...], name: str) -> str:
    """A leaf of the tree `name`, for an error."""
    return f"the leaf {path_of(path)!r} of {name}" if path else name


def _naming_differences(
    fn: Callable, nodes: Nodes, outs: PyTree, communicates: bool, differing: list[str]
) -> Callable:
    """`fn`, which if it communicates lists in `differing` the outputs that should not differ.

    It raises an error only with one node per device. Under `vmap`, where JAX's error names no leaf,
    it cannot: `batch_dim` may be of a vmap of the caller's around all nodes.
    """
    one_per_device = nodes.layout == "one per device"
    may_vary = {}
    for placement in jax.tree.leaves(outs):
        vmapped = one_per_device or on_node_axis(placement)
        may_vary[placement] = axes_of(placement, nodes) | ({EMULATED} if vmapped else set())

    def on_node(*args):
        out = fn(*args)
        if not communicates:
            return out
        differing.clear()
        leaves = jax.tree_util.tree_flatten_with_path(out)[0]
        placements = jax.tree.leaves(jax.tree.broadcast(outs, out))
        for (path, x), placement in zip(leaves, placements, strict=True):
            on_vmap = {EMULATED} if getattr(x, "batch_dim", None) is not None else set()
            if (jax.typeof(x).mat.varying | on_vmap) - may_vary[placement]:
                differing.append(path_of(path))
                if one_per_device:
                    inside = on_node_axis(placement)
                    raise ValueError((inside_a_node if inside else not_shared)(differing[-1]))
        return out

    return on_node


def _on_device(on_node: Callable, nodes: Nodes, ins: tuple, outs: PyTree, unroll: bool) -> Callable:
    """`on_node` for the nodes of a device: LOCAL and BATCH leaves are [per_device, ...]."""
    count = nodes.per_device

    def node(i: int, args: tuple) -> tuple:
        return map_placed(lambda placement, x: x[i] if on_node_axis(placement) else x, ins, args)

    def with_axis(placement, x):
        return jnp.asarray(x)[None] if on_node_axis(placement) else x

    def single(*args):
        return map_placed(with_axis, outs, on_node(*node(0, args)))

    def one_after_another(*args):
        each = [on_node(*node(i, args)) for i in range(count)]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *each)

    if nodes.layout == "one per device":
        return single
    if unroll:
        return one_after_another
    axes = (jax.tree.map(lambda x: 0 if on_node_axis(x) else None, tree) for tree in (ins, outs))
    return jax.vmap(on_node, next(axes), next(axes), axis_name=EMULATED, axis_size=count)


def _mapped(
    on_device: Callable, nodes: Nodes, ins: tuple, outs: PyTree, communicates: bool
) -> Callable:
    """`on_device` on every device of the mesh, each with its part of the arrays."""
    if any(isinstance(x, Stacked) for x in jax.tree.leaves((ins, outs))):
        on_device = _without_device_axis(on_device, ins, outs)
    if nodes.mesh is None:
        return on_device
    specs = (jax.tree.map(partial(spec, nodes=nodes), tree) for tree in (ins, outs))
    return jax.shard_map(
        on_device, mesh=nodes.mesh, in_specs=next(specs), out_specs=next(specs),
        check_vma=communicates,
    )  # fmt: skip


def _without_device_axis(on_device: Callable, ins: tuple, outs: PyTree) -> Callable:
    """`on_device` of a device's entry of each `Stacked` array, without the axis of the devices."""

    def entry(placement, x):
        if not isinstance(placement, Stacked):
            return x
        return x[:, 0] if on_node_axis(placement) else x[0]

    def stacked(placement, x):
        if not isinstance(placement, Stacked):
            return x
        return x[:, None] if on_node_axis(placement) else x[None]

    return lambda *args: map_placed(stacked, outs, on_device(*map_placed(entry, ins, args)))


def _partitioned(
    on_device: Callable, nodes: Nodes, ins: tuple, outs: PyTree, communicates: bool
) -> Callable:
    """`on_device` with the slow axes divided by `shard_map`, the fast axes by XLA's partitioner."""
    mesh = nodes.mesh
    assert mesh is not None
    explicit = AxisType.Explicit in mesh.axis_types
    if explicit:  # model code without annotations fails on Explicit axes; of [per_device, ...]

        def sharding(x):
            return P(None, *x.spec) if isinstance(x, Sharded) else P()

        shardings = jax.tree.map(sharding, outs)
        others = tuple(axis for axis in mesh.axis_names if axis not in nodes.slow)
        on_device = jax.sharding.auto_axes(on_device, axes=others, out_sharding=shardings)
    slow = P(nodes.slow)
    specs = (jax.tree.map(lambda x: slow if on_node_axis(x) else P(), tree) for tree in (ins, outs))
    on_slow: Callable = jax.shard_map(
        on_device, mesh=mesh, in_specs=next(specs), out_specs=next(specs),
        axis_names=set(nodes.slow), check_vma=communicates,
    )  # fmt: skip
    if not communicates:
        on_slow = jax.jit(on_slow)  # without the check JAX runs such a map under jit only
    if explicit:
        return on_slow

    def constrained(placement, x):  # else XLA returns whole arrays to every device of a node
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(placement, nodes)))

    return lambda *args: map_placed(constrained, outs, on_slow(*args))


def _by_itself(fn: Callable, nodes: Nodes, ins: tuple, outs: PyTree) -> Callable:
    """`fn`, with an error where it communicates, or an output differs between a node's devices."""

    def checked(*args):
        with without_collectives():
            if not nodes.fast:
                return fn(*args)
            traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves, axes_of_outputs = placed_leaves(outs, shapes), varying(traced, ins, args, nodes)
        for (name, placement, _), axes in zip(leaves, axes_of_outputs, strict=True):
            if axes & set(nodes.fast) - axes_of(placement, nodes):
                raise ValueError(inside_a_node(name))
        return evaluated(traced, shapes, args)

    return checked


def varying(traced: Any, ins: PyTree, args: PyTree, nodes: Nodes) -> list[frozenset[str]]:
    """The mesh axes along which each output of a traced function differs; `ins`: placements."""
    placements = jax.tree.leaves(jax.tree.broadcast(ins, args))
    return comm.varying_axes(traced, [axes_of(placement, nodes) for placement in placements])
