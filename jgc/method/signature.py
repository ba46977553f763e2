"""The paths, shapes and dtypes that a compressor's state was made for, compared with those of every gradient."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgc.layout.pack import leaf_paths
from jgc.types import PyTree


@jax.tree_util.register_static
@dataclass(frozen=True)
class Signature:
    """Paths, shapes and dtypes of the parameters that a state was made for. A part of the state without arrays."""

    leaves: tuple[tuple[str, tuple[int, ...], str], ...]


def signature_of(tree: PyTree) -> Signature:
    """The signature of a tree of arrays. Of leaves that are not packed it has no dtype: their gradients are float0.

    Example:
      >>> signature_of({"w": jnp.zeros((2, 3)), "steps": jnp.int32(0)}).leaves
      (('steps', (), 'no float'), ('w', (2, 3), 'float32'))
    """
    dtypes = [str(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else "no float" for x in jax.tree.leaves(tree)]
    shapes = [tuple(x.shape) for x in jax.tree.leaves(tree)]
    return Signature(tuple(zip(leaf_paths(tree), shapes, dtypes, strict=True)))


def check_signature(grads: PyTree, at_init: Signature) -> None:
    """Raise ValueError, naming the leaf, unless gradients have the paths, shapes and dtypes of the parameters."""
    found = signature_of(grads)
    if found == at_init:
        return
    own, first = ({path: (shape, dtype) for path, shape, dtype in x.leaves} for x in (found, at_init))
    for path in (*first, *own):
        if path not in own:
            raise ValueError(f"the gradients lack the leaf {path!r} that the parameters had at init: {_names(own)}")
        if path not in first:
            raise ValueError(
                f"the gradients have the leaf {path!r} that the parameters did not have at init: {_names(first)}"
            )
        if own[path] != first[path]:
            (shape, dtype), (right_shape, right_dtype) = own[path], first[path]
            cure = "give init what the gradients are taken with respect to"
            if shape[1:] == right_shape:
                cure = "its first axis seems to be the nodes': call aggregate inside jgc.on_nodes, with LOCAL gradients"
            raise ValueError(
                f"the gradient of {path!r} is {dtype}{list(shape)}, and the parameter at init was "
                f"{right_dtype}{list(right_shape)}: {cure}"
            )
    raise ValueError("the leaves of the gradients come in another order than those of the parameters at init")


def _names(leaves: dict[str, Any]) -> str:
    return f"they have {', '.join(leaves)}" if leaves else "they have no leaves"
