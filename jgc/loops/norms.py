"""Norms of gradients, for the metrics of a loop."""

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.layout.devices import squared_norm
from jgc.types import Array, Nodes, PyTree


def norm_of_aggregate(mean: PyTree, nodes: Nodes) -> Array:
    """The norm of an aggregate, f32[], equal on all nodes and devices, inside the node axis.

    Nodes send nothing; a node's devices sum a value for each group of leaves sharded alike.
    """
    leaves: dict[tuple[str, ...], list[Array]] = {}
    for x in jax.tree.leaves(mean):
        leaves.setdefault(comm.fast_axes(x, nodes), []).append(_in_f32(x))
    total = jnp.float32(0)
    for axes, xs in leaves.items():
        total += comm.sum_inside(squared_norm(xs), axes, nodes, "metrics")
    return jnp.sqrt(total)


def norms_of_nodes(grads: PyTree) -> Array:
    """The norm of each node's gradient, f32[K], from whole arrays [K, ...].

    Example:
      >>> norms_of_nodes({"a": jnp.array([[3.0], [0.0]]), "b": jnp.array([4.0, 2.0])})
      Array([5., 2.], dtype=float32)
    """
    leaves = map(_in_f32, jax.tree.leaves(grads))
    squares = [jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in leaves]
    return jnp.sqrt(sum(squares[1:], start=squares[0])).astype(jnp.float32)


def _in_f32(x: Array) -> Array:
    return x.astype(comm.at_least_f32(x.dtype))
