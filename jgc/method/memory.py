"""A node's memory: error feedback, momentum correction with factor masking, and local clipping.

A memory is a few pure functions that do not communicate. Every step calls them in this order:

    local = accumulated(memory, local, g, ...)     add the gradient g f32[n] to the state
    v, local = compensate(local, g, complete)      v f32[n]: gradient plus residual
    local = update(local, v, sent, complete)       the residual becomes v - sent
    local = stored(key, local, before)             in the dtypes in which the state is kept

`complete` is True in a phase that sends all of v (an uncompressed warm-up).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc import comm
from jgc.layout.devices import squared_norm
from jgc.layout.vector import Memory, accumulated, stored
from jgc.selection.entries import Sparse, cleared, subtract
from jgc.types import Array, Nodes, PyTree

__all__ = [
    "Memory", "accumulated", "clip_local", "error_feedback", "make_memory", "momentum_at_once",
    "momentum_correction", "momentum_only", "no_memory", "stored", "subtract",
]  # fmt: skip

RESIDUAL_DTYPES = ("float32", "bfloat16")


class Corrected(NamedTuple):
    """Local state of momentum correction: u and r, each [n], in the memory's dtype."""

    velocity: Array
    residual: Array


def no_memory() -> Memory:
    """No residual: v = g."""
    return Memory(
        init=lambda n: (),
        accumulate=(),
        compensate=lambda local, g, complete: (g, local),
        update=lambda local, v, sent, complete: local,
        residual=lambda local: None,
        owns_momentum=False,
    )


def error_feedback(dtype: jax.typing.DTypeLike = jnp.float32, decay: float = 1.0) -> Memory:
    """Residuals: v = decay r + g, then r = v - sent.

    Args:
      dtype: storage dtype of the residual r [n]; v is f32[n].
      decay: in (0, 1]; below 1, old residuals fade and gradients are not conserved.

    Raises:
      ValueError: decay outside (0, 1], or a different dtype than `RESIDUAL_DTYPES`.

    Source: Seide et al. 2014 (1-bit SGD); Strom 2015; Stich et al. 2018.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1] (1 keeps all of a residual), got {decay}")
    check_residual_dtype(jnp.dtype(dtype).name)
    return Memory(
        init=lambda n: jnp.zeros((n,), dtype),
        accumulate=(lambda r, g, complete: decay * r.astype(jnp.float32) + g,),
        compensate=lambda v, g, complete: (v, v),
        update=lambda r, v, sent, complete: subtract(v, sent),
        residual=lambda r: r,
        owns_momentum=False,
    )


def momentum_correction(
    momentum: float, masking: bool = False, dtype: jax.typing.DTypeLike = jnp.float32
) -> Memory:
    """Each node accumulates momentum before it sends: u = m u + g, v = r + u, then r = v - sent.

    With `masking`, the velocity u restarts from zero at the sent positions (momentum factor
    masking).

    Source: Lin et al. 2018 (Deep Gradient Compression), Algorithm 4 and Section 3.2.
    """
    check_momentum(momentum)
    check_residual_dtype(jnp.dtype(dtype).name)

    def move(local, g, complete):
        return local._replace(velocity=momentum * local.velocity.astype(jnp.float32) + g)

    def add(local):  # not in `compensate`, which would need a new vector: here it is done in place
        return local._replace(residual=local.residual.astype(jnp.float32) + local.velocity)

    def update(local, v, sent, complete):
        u = local.velocity
        # a dense `sent` delays nothing: no velocity is stale
        if masking and isinstance(sent, Sparse):
            u = cleared(u, sent)
        return Corrected(u, subtract(v, sent))

    return Memory(
        init=lambda n: Corrected(jnp.zeros((n,), dtype), jnp.zeros((n,), dtype)),
        accumulate=(move,),
        compensate=lambda local, g, complete: (local.residual, local),
        update=update,
        residual=lambda local: local.residual,
        owns_momentum=True,
        advance=add,
    )


def momentum_at_once(momentum: float, dtype: jax.typing.DTypeLike = jnp.float32) -> Memory:
    """Momentum without a velocity: the sum of g's momentum series enters the residual r.

    The series is g (1 + m + m^2 + ...) = g / (1 - m).

        compressed phase    v = r + g / (1 - m);    r = v - sent
        complete phase      v = (1 - m) r + g;      r = m v / (1 - m)

    A complete phase is ordinary momentum, u = m u + g and v = u, with r = m u / (1 - m).

    The sum of all messages is that of momentum correction, but no velocity continues in a direction
    after it was sent. That matters because a value waits for about 1 / alpha steps, much longer
    than momentum's 1 / (1 - m).

    For a value that does not wait, this is plain SGD with the learning rate divided by 1 - m. On a
    quadratic it is stable for curvatures below 2 (1 - m) / rate; momentum is stable up to
    2 (1 + m) / rate. So send layers that are selected in nearly every step uncompressed.

    Source: ours, after Lin et al. 2018, Section 3.2.
    """
    check_momentum(momentum)
    check_residual_dtype(jnp.dtype(dtype).name)

    def accumulate(r, g, complete):
        kept = r.astype(jnp.float32)
        return (1 - momentum) * kept + g if complete else kept + g / (1 - momentum)

    def compensate(v, g, complete):
        return v, momentum / (1 - momentum) * v if complete else v

    return Memory(
        init=lambda n: jnp.zeros((n,), dtype),
        accumulate=(accumulate,),
        compensate=compensate,
        update=lambda r, v, sent, complete: r if complete else subtract(v, sent),
        residual=lambda r: r,
        owns_momentum=True,
    )


def momentum_only(momentum: float) -> Memory:
    """Per-node momentum for methods that send everything: v = u = m u + g, no residual."""
    check_momentum(momentum)
    return Memory(
        init=lambda n: jnp.zeros((n,), jnp.float32),
        accumulate=(lambda u, g, complete: momentum * u + g,),
        compensate=lambda u, g, complete: (u, u),
        update=lambda u, v, sent, complete: u,
        residual=lambda u: None,
        owns_momentum=True,
    )


def check_momentum(momentum: float) -> None:
    """Raise ValueError unless momentum is in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")


def check_residual_dtype(dtype: str) -> None:
    """Raise ValueError unless dtype is one of `RESIDUAL_DTYPES`; float16 has too small a range."""
    if dtype not in RESIDUAL_DTYPES:
        names = ", ".join(RESIDUAL_DTYPES)
        raise ValueError(f"residual_dtype must be one of {names}, got {dtype!r}")


def make_memory(
    correction: bool, momentum: float, masking: bool = False, at_once: bool = False,
    dtype: str = "float32", decay: float = 1.0,
) -> Memory:  # fmt: skip
    """The memory for these settings: momentum correction, or error feedback with decay.

    Raises:
      ValueError: momentum outside [0, 1), decay outside (0, 1], an unknown dtype.
    """
    check_momentum(momentum)
    check_residual_dtype(dtype)
    if correction and at_once:
        return momentum_at_once(momentum, jnp.dtype(dtype))
    if correction:
        return momentum_correction(momentum, masking, jnp.dtype(dtype))
    return error_feedback(jnp.dtype(dtype), decay)


def clip_local(grads: PyTree, max_norm: float, nodes: Nodes) -> PyTree:
    """Clip a node's gradient to the norm max_norm / sqrt(K), before it is accumulated.

    Where the gradient is sharded within a node, the norm is that of all shards.

    Raises:
      ValueError: `max_norm` is not finite and positive.

    Source: Lin et al. 2018, Section 3.2 (local gradient clipping).
    """
    if not 0 < max_norm < float("inf"):
        raise ValueError(f"max_norm must be finite and positive, got {max_norm}")
    by_axes: dict[tuple[str, ...], list[Array]] = {}  # fast axes of the leaves' shards
    for g in jax.tree.leaves(grads):
        if jnp.issubdtype(g.dtype, jnp.inexact):
            wide = g.astype(jnp.float32)
            by_axes.setdefault(comm.fast_axes(wide, nodes), []).append(wide)
    squares = {axes: squared_norm(leaves) for axes, leaves in by_axes.items()}
    squared = sum(
        (comm.sum_inside(x, axes, nodes, "clipping") for axes, x in squares.items()), jnp.float32(0)
    )
    scale = jnp.minimum(
        1.0, max_norm / jnp.sqrt(nodes.count) / jnp.maximum(jnp.sqrt(squared), 1e-30)
    )

    def scaled(g):
        return comm.narrowed(g * scale, g.dtype) if jnp.issubdtype(g.dtype, jnp.inexact) else g

    return jax.tree.map(scaled, grads)
