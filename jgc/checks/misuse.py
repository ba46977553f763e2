"""Errors for mistakes that would otherwise pass unnoticed; helpers that name a tree's leaves."""

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
    return {path_of(p, separator): x for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def form_of(x: Any) -> str:
    """The dtype and shape of an array or number, e.g. "float32[2, 3]"."""
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def is_key(x: Any) -> bool:
    """Whether x is an array of typed random keys, as `jax.random.key` makes them."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def check_compressor(x: Any) -> None:
    """Raise TypeError, saying what to call, unless x is a compressor.

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
        got = f"got the settings {name}: call jgc.compress.build({call})"
    elif callable(getattr(x, "factory", None)):
        got = f"got the registered method {x.name!r}: call jgc.compress.{x.name}()"
    elif callable(x):
        name, module = getattr(x, "__name__", repr(x)), getattr(x, "__module__", "")
        example = f", e.g. jgc.compress.{name}()" if "jgc.compress" in module else ""
        got = f"got the function {name}: call it{example}"
    else:
        raise TypeError(f"expected a compressor, e.g. jgc.compress.topk(), got {short(x)}")
    raise TypeError(f"expected a compressor, {got}")


def short(x: Any) -> str:
    """A value in an error message: its repr if that is short, else its type.

    Example:
      >>> short(3), short({"w": jnp.zeros((9, 9))}), short(jnp.zeros((9, 9)))
      ('3', 'a dict', 'an ArrayImpl')
    """
    text, name = repr(x), type(x).__name__
    if len(text) <= 60 and "\n" not in text:
        return text
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_nodes(x: Any) -> None:
    """Raise TypeError unless x is a layout of nodes; ValueError where `jax.set_mesh` has set
    a different mesh."""
    if not isinstance(x, Nodes):
        of_mesh, by_count = "jgc.from_mesh(mesh, slow=...)", "jgc.make_nodes(K), or jgc.from_mesh"
        raise TypeError(f"expected the layout of the nodes, got {short(x)}: make it by "
                        f"{of_mesh if isinstance(x, Mesh) else by_count}")  # fmt: skip
    context = jax.sharding.get_abstract_mesh()
    if x.mesh is None:
        differs, place = AxisType.Explicit in context.axis_types, "are emulated on one device"
    else:
        differs = not context.empty and dict(context.shape) != dict(x.mesh.shape)
        place = f"lie on a different one, {dict(x.mesh.shape)}"
    if differs:
        raise ValueError(
            f"jax.set_mesh has put the mesh {dict(context.shape)} in force, and the nodes {place}: "
            "make them of that mesh by jgc.from_mesh(mesh, slow=...), or leave the context")


def check_optimizer(x: Any, name: str = "optimizer") -> None:
    """Raise TypeError unless x is an optax optimiser."""
    if not (hasattr(x, "init") and hasattr(x, "update")):
        raise TypeError(
            f"{name} must be an optax optimiser, e.g. optax.sgd(0.7), got {short(x)}")


def check_loss(x: Any) -> None:
    """Raise TypeError unless x can be called."""
    if not callable(x):
        raise TypeError(f"loss must be a function (params, batch) -> scalar, got {short(x)}")


def check_scalar(value: Any) -> Any:
    """Return a node's loss. Raise TypeError for a tuple."""
    if isinstance(value, tuple):
        raise TypeError(
            f"the loss returned a tuple of {len(value)}: for (scalar, aux) give has_aux=True")
    return value


def check_pair(value: Any, form: str) -> tuple[Any, Any]:
    """Return both parts of what a loss returned. Raise TypeError, naming the form that it must
    have, unless it is a pair."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        length = f" of {len(value)}" if isinstance(value, tuple) else ""
        raise TypeError(
            f"the loss must return {form}, got a {type(value).__name__}{length} instead of a pair")
    return value[0], value[1]


def check_loop(state: Any, state_type: type, batch: PyTree, nodes: Nodes) -> None:
    """Raise TypeError or ValueError unless a state is of a loop's type, and of its last step."""
    if not isinstance(state, state_type):
        raise TypeError(
            f"step takes the {state_type.__name__} that init or step returned, got {short(state)}")
    check_phases(state)
    types = set(map(type, jax.tree.leaves((state, batch))))
    if any(issubclass(x, jax.core.Tracer) for x in types):
        raise TypeError(
            "step compiles itself, a program for each phase: call it outside of jit, scan and vmap")
    check_count(state, nodes)
    check_not_donated([first_leaf(getattr(state, name, ())) for name in ("params", "own")])


def check_key(x: Any) -> None:
    """Raise TypeError unless x is one random key, typed or of `jax.random.PRNGKey`."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if not ((is_key(x) and shape == ()) or (dtype == jnp.uint32 and len(shape or ()) == 1)):
        got = repr(x) if shape is None else f"{dtype}{list(shape)}"
        raise TypeError(f"key must be one random key, e.g. jax.random.key(0), got {got}")


def check_arrays(tree: PyTree, or_numbers: bool = False) -> None:
    """Raise TypeError, naming the leaf, unless all leaves have a shape and a dtype."""
    for name, x in leaves_by_path(tree).items():
        is_number = isinstance(x, numbers.Number)
        if (hasattr(x, "shape") and hasattr(x, "dtype")) or (or_numbers and is_number):
            continue
        cure = "give only the arrays"
        if is_number:
            cure = f"give jnp.asarray({x!r}), or of a train state only its parameters"
        elif callable(x):
            cure += (". For an Equinox module: "
                     "params, static = eqx.partition(model, eqx.is_inexact_array)")  # fmt: skip
        raise TypeError(f"the leaf {name!r} is not an array but the {type(x).__name__} "
                        f"{getattr(x, '__name__', repr(x))}: {cure}")  # fmt: skip


def with_same_leaves(old: PyTree, new: PyTree, must: str) -> PyTree:
    """The new tree in the containers of the old one: Flax returns a dict for a FrozenDict.

    Raises TypeError, naming a leaf, if paths, shapes or dtypes differ; `must` begins the message.
    """
    had, has = leaves_by_path(old), leaves_by_path(new)
    before, after = ({name: form_of(x) for name, x in leaves.items()} for leaves in (had, has))
    for name in before | after:
        if before.get(name) != after.get(name):
            was, now = (forms.get(name, "not there") for forms in (before, after))
            raise TypeError(f"{must}: {name!r} was {was}, and is {now}")
    return jax.tree.unflatten(jax.tree.structure(old), [has[name] for name in had])


def check_restored(tree: PyTree) -> None:
    """Raise ValueError, naming the leaf, unless every array has the sharding that `init` gives.
    Numbers, such as a learning rate, may have none."""
    for name, x in leaves_by_path(tree).items():
        is_sharded = isinstance(getattr(x, "sharding", None), NamedSharding)
        if jnp.ndim(x) and not (isinstance(x, jax.core.Tracer) or is_sharded):
            raise ValueError(
                f"this state is sharded within a node, and the leaf {name!r} is a whole array: "
                "restore the state into that of init, whose leaves have shardings "
                "(docs/your_loop.md, Checkpoints)")
