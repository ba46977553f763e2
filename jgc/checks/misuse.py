"""Errors and warnings for mistakes that would pass unnoticed: each names what is wrong and what
would be right."""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding

from jgc.checks.loop_states import check_count, check_not_donated, check_phases, first_leaf
from jgc.types import Compressor, Nodes, PyTree


def path_of(path: tuple[Any, ...], separator: str = "/") -> str:
    """A leaf's path, parts joined by the separator."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def leaves_by_path(tree: PyTree, separator: str = "/") -> dict[str, Any]:
    """The leaves by their paths, in tree order."""
    return {
        path_of(path, separator): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def form_of(x: Any) -> str:
    """The dtype and shape of an array or number, e.g. "float32[2, 3]"."""
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def is_key(x: Any) -> bool:
    """Whether x is an array of random keys with a dtype of their own, as `jax.random.key` makes
    them."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def check_compressor(x: Any) -> None:
    """Raise TypeError, naming the cure, unless x is a compressor.

    Example:
      >>> import jgc
      >>> check_compressor(jgc.compress.topk)
      Traceback (most recent call last):
      TypeError: expected a compressor, got the function topk: call it, e.g. jgc.compress.topk()
    """
    if isinstance(x, Compressor):
        return
    if dataclasses.is_dataclass(x):
        name = x.__name__ if isinstance(x, type) else type(x).__name__
        call = f"{name}(...)" if isinstance(x, type) else repr(x)
        raise TypeError(
            f"expected a compressor, got the settings {name}: call jgc.compress.build({call})"
        )
    if callable(getattr(x, "factory", None)):
        raise TypeError(
            f"expected a compressor, got the registered method {x.name!r}: call "
            f"jgc.compress.{x.name}()"
        )
    if callable(x):
        name = getattr(x, "__name__", repr(x))
        cure = (
            f"call it, e.g. jgc.compress.{name}()"
            if "jgc.compress" in getattr(x, "__module__", "")
            else "call it"
        )
        raise TypeError(f"expected a compressor, got the function {name}: {cure}")
    raise TypeError(f"expected a compressor, e.g. jgc.compress.topk(), got {x!r}")


def check_nodes(x: Any) -> None:
    """Raise TypeError, naming the cure, unless x is a layout of nodes; ValueError where another
    mesh is in force."""
    if not isinstance(x, Nodes):
        cure = (
            "jgc.from_mesh(mesh, slow=...)"
            if isinstance(x, Mesh)
            else "jgc.make_nodes(K), or jgc.from_mesh"
        )
        raise TypeError(f"expected the layout of the nodes, got {x!r}: make it by {cure}")
    context = jax.sharding.get_abstract_mesh()
    if x.mesh is None:
        differs = AxisType.Explicit in context.axis_types
    else:
        differs = not context.empty and dict(context.shape) != dict(x.mesh.shape)
    if differs:
        own = (
            "are emulated on one device"
            if x.mesh is None
            else f"lie on one of their own, {dict(x.mesh.shape)}"
        )
        raise ValueError(
            f"jax.set_mesh has put the mesh {dict(context.shape)} in force, and the nodes {own}: "
            "make them of that mesh by jgc.from_mesh(mesh, slow=...), or leave the context"
        )


def check_optimizer(x: Any, name: str = "optimizer") -> None:
    """Raise TypeError, naming the cure, unless x is an optax optimiser."""
    if not (hasattr(x, "init") and hasattr(x, "update")):
        raise TypeError(f"{name} must be an optax optimiser, e.g. optax.sgd(0.7), got {x!r}")


def check_loss(x: Any) -> None:
    """Raise TypeError unless x can be called."""
    if not callable(x):
        raise TypeError(f"loss must be a function (params, batch) -> scalar, got {x!r}")


def check_scalar(value: Any) -> Any:
    """The loss of a node. Raise TypeError, naming the cure, for a tuple."""
    if isinstance(value, tuple):
        raise TypeError(
            f"the loss returned a tuple of {len(value)}: for (scalar, aux) give has_aux=True"
        )
    return value


def check_pair(value: Any, form: str) -> tuple[Any, Any]:
    """What a loss returned, or a part of it. Raise TypeError, naming the form it must have, unless
    it is a pair."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        found = (
            f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        )
        raise TypeError(f"the loss must return {form}, got {found} in place of a pair")
    return value[0], value[1]


def check_loop(state: Any, own: type, batch: PyTree, nodes: Nodes) -> None:
    """Raise TypeError or ValueError, naming the cure, unless a state is that of a loop, and of its
    last step."""
    if not isinstance(state, own):
        raise TypeError(
            f"step takes the {own.__name__} that init or step returned, got a "
            f"{type(state).__name__}"
        )
    check_phases(state)
    if any(
        issubclass(kind, jax.core.Tracer)
        for kind in set(map(type, jax.tree.leaves((state, batch))))
    ):
        raise TypeError(
            "step compiles itself, a program for each phase: call it outside of jit, scan and vmap"
        )
    check_count(state, nodes)
    check_not_donated([first_leaf(getattr(state, name, ())) for name in ("params", "own")])


def check_key(x: Any) -> None:
    """Raise TypeError, naming the cure, unless x is a random key: a typed one, or one of
    `jax.random.PRNGKey`."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if not ((is_key(x) and shape == ()) or (dtype == jnp.uint32 and len(shape or ()) == 1)):
        found = repr(x) if shape is None else f"{dtype}{list(shape)}"
        raise TypeError(f"key must be one random key, e.g. jax.random.key(0), got {found}")


def check_arrays(tree: PyTree, or_numbers: bool = False) -> None:
    """Raise TypeError, naming the leaf, unless all leaves are arrays (or have a shape and a
    dtype)."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        if not (is_array or (or_numbers and isinstance(x, numbers.Number))):
            name = path_of(path)
            found = getattr(x, "__name__", repr(x))
            cure = "give the arrays alone"
            if isinstance(x, numbers.Number):
                cure = f"give jnp.asarray({x!r}), or of a train state its parameters alone"
            elif callable(x):
                cure += ". For an Equinox module: "
                cure += "params, static = eqx.partition(model, eqx.is_inexact_array)"
            raise TypeError(
                f"the leaf {name!r} is not an array but the {type(x).__name__} {found}: {cure}"
            )


def check_model_state(old: PyTree, new: PyTree) -> PyTree:
    """The new model state in the containers of the old one: Flax returns a dict for a FrozenDict.

    Raises:
      TypeError: a loss returns other leaves than it got; the message names one.
    """
    had, has = leaves_by_path(old), leaves_by_path(new)
    before, after = ({name: form_of(x) for name, x in leaves.items()} for leaves in (had, has))
    for name in [*before, *(name for name in after if name not in before)]:
        if before.get(name) != after.get(name):
            raise TypeError(
                f"the loss must return the model state's leaves as they were: {name!r} was "
                f"{before.get(name, 'not there')}, and is {after.get(name, 'not there')}"
            )
    return jax.tree.unflatten(jax.tree.structure(old), [has[name] for name in had])


def check_restored(tree: PyTree) -> None:
    """Raise ValueError, naming the leaf, unless all arrays say how the devices of a node divide
    them."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not isinstance(x, jax.core.Tracer) and not isinstance(
            getattr(x, "sharding", None), NamedSharding
        ):
            raise ValueError(
                f"the devices of a node divide this state, and the leaf {path_of(path)!r} is a "
                "whole array: restore the state into that of init, whose leaves have shardings "
                "(docs/your_loop.md, Checkpoints)"
            )
