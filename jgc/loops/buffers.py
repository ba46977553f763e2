"""Arrays of a loop: in separate buffers, where the compiled programs expect them."""

import warnings
from collections.abc import Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from jgc.backend import backend_of
from jgc.checks.loop_states import first_leaf
from jgc.checks.misuse import check_arrays, form_of, is_key, leaves_by_path
from jgc.nodes.placement import placements_of
from jgc.nodes.placing import place
from jgc.types import Nodes, PyTree


def put_arrays(
    tree: PyTree, nodes: Nodes, device: SingleDeviceSharding, placements: PyTree = None
) -> PyTree:
    """The arrays where the program expects them; committed to `device` if it has all nodes."""
    if nodes.mesh is None:
        return jax.device_put(tree, device)
    return place(tree, placements_of(tree) if placements is None else placements, nodes)


def lies_elsewhere(parts: Sequence[PyTree], nodes: Nodes, numbers: Sequence[Any] = ()) -> bool:
    """Whether a leaf is no array on a device, or a part's first, or one of `numbers`, lies
    elsewhere than the others.

    `numbers` are the parts' scalars, which users set, as learning rates. A program would be
    compiled anew for a weak type, or for an array that JAX may move.
    """
    if not all(issubclass(kind, jax.Array) for kind in set(map(type, jax.tree.leaves(parts)))):
        return True
    firsts = [x for part in parts for x in first_leaf(part)] + [*numbers]
    concrete = not isinstance(nodes.mesh, AbstractMesh)
    if concrete and any(x.weak_type or not x.committed for x in numbers):
        return True
    if not isinstance(nodes.mesh, Mesh):
        return nodes.mesh is None and len({device for x in firsts for device in x.devices()}) > 1
    # in nearly every step all arrays have the nodes' mesh, and no set of all devices is made
    others = [x for x in firsts if getattr(x.sharding, "mesh", None) != nodes.mesh]
    return any(x.sharding.device_set != set(nodes.mesh.devices.flat) for x in others)


def device_of(params: PyTree) -> SingleDeviceSharding:
    """The device of the parameters, or the default; only for nodes that are all on one device."""
    leaf = jnp.asarray(next(iter(first_leaf(params)), 0.0))
    if isinstance(leaf, jax.core.Tracer):  # only shapes are asked for
        return SingleDeviceSharding(jax.devices()[0])
    return SingleDeviceSharding(min(leaf.devices(), key=lambda device: device.id))


def wait_on_cpu(tree: PyTree, nodes: Nodes) -> None:
    """Wait for the arrays on several devices of a CPU.

    These are threads: concurrent collectives of several programs can wait for each other forever.
    """
    if nodes.mesh is not None and nodes.mesh.size > 1 and backend_of(nodes) == "cpu":
        jax.block_until_ready(tree)


def copied(tree: PyTree, unless_of: PyTree = ()) -> PyTree:
    """The arrays in new buffers, to donate, and without weak types, which would recompile.

    Arrays of `unless_of`, a state that the step donates anyway, are not copied.
    """
    donated = {id(x) for x in jax.tree.leaves(unless_of)}

    def copy(x):
        return x if id(x) in donated else jnp.array(x, dtype=jnp.result_type(x))

    return jax.tree.map(copy, tree)


def with_arrays(tree: PyTree) -> PyTree:
    """The tree with an array for each plain number, such as a learning rate that a user has set.

    Example:
      >>> with_arrays({"learning_rate": 0.5})
      {'learning_rate': array(0.5, dtype=float32)}
    """

    def array(x):
        return np.asarray(x, jnp.result_type(x)) if isinstance(x, Number) else x

    return jax.tree.map(array, tree)


def of_each_node(state: Any) -> Any:
    """A loop's state with numbers that a user has set in `inner`, of local steps, for each node."""
    if not hasattr(state, "inner"):
        return state
    count = len(state.largest_norm)

    def repeated(x):
        return x if jnp.ndim(x) or is_key(x) else jnp.full((count,), x, jnp.result_type(x))

    return state._replace(inner=jax.tree.map(repeated, state.inner))


def as_made(tree: PyTree, made: PyTree) -> PyTree:
    """The tree with numbers that a user has set, such as learning rates, as `made` has them.

    They get its dtypes, and its shapes: one for each node where it has shapes [K]. A tree of a
    different structure does not change.

    Example:
      >>> made = {"learning_rate": jax.ShapeDtypeStruct((2,), jnp.float32)}
      >>> as_made({"learning_rate": 1}, made)
      {'learning_rate': array([1., 1.], dtype=float32)}
    """

    def number(x, like):
        if jnp.ndim(x) or is_key(x) or isinstance(x, jax.ShapeDtypeStruct):
            return x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:  # of several processes
            return x.astype(like.dtype)
        return np.full(like.shape, x, like.dtype)  # a copy: no step donates the user's array

    structure: Any = jax.tree.structure(tree)
    return jax.tree.map(number, tree, made) if structure == jax.tree.structure(made) else tree


def check_params(params: PyTree) -> None:
    """Raise TypeError, naming the leaf, unless all are arrays of floats; warn of float64."""
    check_arrays(params)
    for name, x in leaves_by_path(params).items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"the parameter {name!r} is a shape, {form_of(x)}, and init takes arrays: shapes "
                "suffice for jgc.bytes_per_step, and for the state's shapes jax.eval_shape "
                "(docs/your_loop.md)"
            )
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"the parameter {name!r} is {x.dtype}, and optimisers take floats: keep it out of "
                "the parameters (nnx.split(model, nnx.Param, ...), eqx.partition), e.g. in the "
                "loss's closure"
            )
        if x.dtype == jnp.float64:
            text = f"the parameter {name!r} is float64, and its gradients are exchanged in float32"
            warnings.warn(text, stacklevel=3)


def donatable(donated: PyTree, **others: PyTree) -> PyTree:
    """The tree with repeated arrays copied, so that a program may donate it.

    `optimizer.init(state.params)` may return the parameters themselves, and no buffer can be
    donated twice. Every step calls this function, so it compares only the arrays' identity, in a
    quarter of a microsecond an array. It misses arrays that share a buffer, as `jax.device_put` may
    return. Raises ValueError: one of `others`, by name, holds a donated array.
    """
    leaves, structure = jax.tree.flatten(donated)
    ids = set(map(id, leaves))
    for name, tree in others.items():
        if not ids.isdisjoint(map(id, jax.tree.leaves(tree))):
            _refuse_shared(donated, name, tree)
    if len(ids) == len(leaves):
        return donated
    known: set[int] = set()
    for i, x in enumerate(leaves):
        if id(x) in known and isinstance(x, jax.Array):
            leaves[i] = jnp.copy(x)
        known.add(id(x))
    return jax.tree.unflatten(structure, leaves)


def _refuse_shared(donated: PyTree, name: str, tree: PyTree) -> None:
    paths = {id(x): path for path, x in leaves_by_path(donated).items()}
    for path, x in leaves_by_path(tree).items():
        if id(x) in paths and isinstance(x, jax.Array):
            whole = "frozen" if name == "frozen" else f"the {name}"
            leaf = f"the array {path!r} of {whole}" if path else whole
            raise ValueError(
                f"{leaf} is {paths[id(x)]!r} of the state, which step donates: give a copy of "
                f"{whole}, jax.tree.map(jnp.copy, {name})"
            )
