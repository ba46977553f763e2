"""Check that a loop's state has what its `init` makes: leaves, containers, shapes and dtypes."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jgc.checks.misuse import form_of, leaves_by_path, path_of
from jgc.types import PyTree

CURE = "init(key, params) makes one that fits"
RESTORE = "restore the checkpoint into jgc.as_arrays(init(...)) (docs/your_loop.md, Checkpoints)"


def check_fits(field: str, state: PyTree, made: PyTree, mismatch: str) -> None:
    """Raise ValueError, naming a leaf, unless a field of a state is as `init` makes it, in arrays
    or shapes. `mismatch` tells where a value that does not fit may come from.

    Example:
      >>> check_fits("opt_state", {"mu": jnp.zeros(3)}, {"mu": jnp.zeros(4)},
      ...     "of a different optimiser")
      Traceback (most recent call last):
      ValueError: opt_state is of a different optimiser: its leaf 'mu' is float32[3], and should be
      float32[4]. init(key, params) makes one that fits
    """
    expected, leaves = leaves_by_path(made), leaves_by_path(state)
    if differs := differing_leaf(expected, leaves):
        raise ValueError(f"{field} is {mismatch}: it {differs[0]} the leaf {differs[1]!r}. {CURE}")
    check_containers(field, state, made)
    for name, like in expected.items():
        right, form = form_of(like), form_of(leaves[name])
        # users set scalars
        if jnp.shape(like) != jnp.shape(leaves[name]) or (jnp.ndim(like) and form != right):
            raise ValueError(f"{field} is {mismatch}: its leaf {name!r} is {form}, and should be "
                             f"{right}. {CURE}")  # fmt: skip


def differing_leaf(expected: dict[str, Any], leaves: dict[str, Any]) -> tuple[str, str] | None:
    """The first leaf in only one of two trees, and whether the second "lacks" or "has" it, or None.

    Example:
      >>> differing_leaf({"a": 1, "b": 2}, {"a": 3}), differing_leaf({"a": 1}, {"a": 3})
      (('lacks', 'b'), None)
    """
    for name in [*expected, *leaves]:
        if (name in expected) != (name in leaves):
            return ("lacks" if name in expected else "has"), name
    return None


def check_containers(field: str, state: PyTree, made: PyTree) -> None:
    """Raise ValueError, naming a container, if two trees have the same leaves in containers of
    different types, as from Orbax, which restores dicts and lists where it gets no target."""
    if set(leaves_by_path(state)) != set(leaves_by_path(made)):
        return
    expected = dict(_containers((), made))
    for path, container in _containers((), state):
        right = expected.get(path, container)
        if container is not right:
            name = "/".join(filter(None, (field, path)))
            raise ValueError(
                f"{name} is a {container.__name__}, and init makes a {right.__name__}: {RESTORE}")


def remember(made: dict[Any, PyTree], params: PyTree, model_state: PyTree) -> None:
    """Record the structure of the parameters and the model state that a loop's `init` makes."""
    tree = jax.tree.map(lambda x: 0, {"params": params, "model_state": model_state})
    made[jax.tree.structure(tree)] = tree


def check_remembered(made: dict[Any, PyTree], params: PyTree, model_state: PyTree) -> None:
    """Raise ValueError if only types of containers differ from the tree that `init` last made."""
    tree = {"params": params, "model_state": model_state}
    if made and jax.tree.structure(tree) not in made:
        check_containers("", tree, [*made.values()][-1])


def _containers(path: tuple[Any, ...], x: PyTree) -> Iterator[tuple[str, type]]:
    """The paths and types of the containers of a tree, outer ones first."""
    children = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    if children and not children[0][0]:  # a leaf
        return
    yield path_of(path), type(x)
    for key, child in children:
        yield from _containers((*path, *key), child)
