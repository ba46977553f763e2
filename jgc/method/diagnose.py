"""Compare an aggregate with the true mean over the nodes. Never part of a training step."""

import jax.numpy as jnp

from jgc import comm
from jgc.types import Array, Nodes


def cosine(a: Array, b: Array) -> Array:
    """Cosine of the angle between two vectors, f32[]; 0 where one of them is zero."""
    norms = jnp.linalg.norm(a) * jnp.linalg.norm(b)
    return jnp.where(norms > 0, jnp.vdot(a, b) / jnp.where(norms > 0, norms, 1), 0.0)


def relative_error(got: Array, true: Array) -> Array:
    """L2 norm of the error over that of the true vector, f32[]; 0 where the true vector is zero."""
    norm = jnp.linalg.norm(true)
    return jnp.where(norm > 0, jnp.linalg.norm(got - true) / jnp.where(norm > 0, norm, 1), 0.0)


def compare(got: Array, v: Array, g: Array, nodes: Nodes, everything: bool = False) -> dict[str, Array]:
    """The diagnostics that every method has.

    Args:
      got: the aggregate, f32[n].
      v: this node's accumulated gradient, f32[n].
      g: this node's gradient of this step, f32[n].
      nodes: the layout.
      everything: whether a code of all values was sent, so that a zero in `got` is a decoded value.

    Returns:
      All f32[]. `reconstruction_cosine` and `relative_error` compare `got` with the mean of v over nodes; without
      `everything`, only where `got` is not zero. `true_cosine` compares `got` with the whole mean of g.
    """
    mean = comm.pmean(v, nodes, "diagnose")
    true = mean if everything else jnp.where(got != 0, mean, 0.0)
    return {
        "reconstruction_cosine": cosine(got, true),
        "relative_error": relative_error(got, true),
        "true_cosine": cosine(got, comm.pmean(g, nodes, "diagnose")),
    }
