"""Signatures: the parameters that a compressor's state was made for, and checks against them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jgc.checks.misuse import leaves_by_path
from jgc.checks.states import RESTORE, check_containers, differing_leaf
from jgc.layout.pack import leaf_paths
from jgc.nodes.placement import sharding_of
from jgc.types import Init, Nodes, PyTree, State


@jax.tree_util.register_static
@dataclass(frozen=True)
class Signature:
    """Paths, shapes and dtypes of the parameters that a state was made for. Static."""

    leaves: tuple[tuple[str, tuple[int, ...], str], ...]


def signature_of(tree: PyTree) -> Signature:
    """The signature of a tree of arrays, without dtypes of integers: their gradients are float0.

    Example:
      >>> signature_of({"w": jnp.zeros((2, 3)), "steps": jnp.int32(0)}).leaves
      (('steps', (), 'no float'), ('w', (2, 3), 'float32'))
    """
    dtypes = [
        str(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else "no float"
        for x in jax.tree.leaves(tree)
    ]
    shapes = [tuple(x.shape) for x in jax.tree.leaves(tree)]
    return Signature(tuple(zip(leaf_paths(tree), shapes, dtypes, strict=True)))


def check_signature(signature: Signature, at_init: Signature) -> None:
    """Raise ValueError, naming the leaf, unless gradients are like the parameters."""
    if signature == at_init:
        return
    now, first = (
        {path: (shape, dtype) for path, shape, dtype in x.leaves} for x in (signature, at_init)
    )
    for path in (*first, *now):
        if path not in now or path not in first:
            has, had, leaves = ("lack", "had", now)
            if path in now:
                has, had, leaves = "have", "did not have", first
            names = ", ".join(leaves) or "no leaves"
            raise ValueError(
                f"the gradients {has} the leaf {path!r} that the parameters {had} at init: they "
                f"have {names}")
        if now[path] != first[path]:
            (shape, dtype), (right_shape, right_dtype) = now[path], first[path]
            cure = "give init what the gradients are taken with respect to"
            if shape and shape[1:] == right_shape:
                cure = "its first axis seems to be the nodes': call aggregate inside jgc.on_nodes, "
                cure += "with LOCAL gradients"
            elif (shape != right_shape and len(shape) == len(right_shape)
                  and not any(np.mod(right_shape, shape))):  # fmt: skip
                cure = ("if it is sharded within a node, call init with the sharded arrays outside "
                        "jit, where it sees their shardings")  # fmt: skip
            raise ValueError(
                f"the gradient of {path!r} is {dtype}{list(shape)}, and the parameter at init was "
                f"{right_dtype}{list(right_shape)}: {cure}")
    raise ValueError("the leaves of the gradients come in a different order than at init")


def check_state(
    init: Init, params: PyTree, state: State, nodes: Nodes, field: str = "this state"
) -> None:
    """Raise ValueError, naming a leaf, unless a state has the leaves and dtypes of `init`'s.

    Shapes of shared leaves are compared, too; local ones may have the node axis. A state that was
    made for other parameters passes; `check_signature` finds it. `field` names the state's place in
    a loop's.
    """
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), params
    )
    check_like(jax.eval_shape(lambda: init(jax.random.key(0), shapes, nodes)), state, field)


def check_like(made: State, state: State, field: str = "this state") -> None:
    """`check_state`, given the shapes of the state that `init` makes."""
    if not isinstance(state, State):
        raise ValueError(f"{field} is a {type(state).__name__}, and init makes a State: {RESTORE}")
    check_containers(field, state, made)
    if signed(made) != signed(state):
        return
    expected, leaves = leaves_by_path(made), leaves_by_path(state)
    if differs := differing_leaf(expected, leaves):
        raise ValueError(_of_another(field, f"it {differs[0]} the leaf {differs[1]!r}"))
    shared, its_shared = (leaves_by_path(x.shared) for x in (made, state))
    for name, x in shared.items():
        if x.shape != its_shared[name].shape:
            shapes = f"{list(its_shared[name].shape)}, and this one's is {list(x.shape)}"
            raise ValueError(_of_another(field, f"its shared leaf {name!r} is {shapes}"))
    for name, x in expected.items():
        if x.dtype != leaves[name].dtype:
            raise ValueError(
                _of_another(
                    field, f"its leaf {name!r} is {leaves[name].dtype}, and this one's is {x.dtype}"
                ))


def _of_another(field: str, differs: str) -> str:
    return (
        f"{field} was made by a different compressor, or with other settings: {differs}. "
        "Make it by the init of the compressor that takes it"
    )


def signed(state: PyTree) -> set[tuple[str, tuple[int, ...], str]]:
    """The leaves of the parameters that a state, or a tree of states, was made for."""
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Signature))
    return {leaf for part in parts if isinstance(part, Signature) for leaf in part.leaves}
