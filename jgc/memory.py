"""A node's memory: error feedback, momentum correction with factor masking, and local clipping.

A memory is three pure functions, called in this order in every step, all local to a node:

    local = accumulate(local, g, complete)         add the gradient g f32[n] to the state
    v, local = compensate(local, g, complete)      v f32[n]: the gradient plus the residual, which is to be sent
    local = update(local, v, sent, complete)       the residual becomes v - sent

`complete` says that the phase sends all of v (an uncompressed warm-up).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc.layout.select import Sparse
from jgc.types import Array, PyTree

RESIDUAL_DTYPES = ("float32", "bfloat16", "float16")


class Memory(NamedTuple):
    """A node's memory.

    Attributes:
      init: `n -> local`, zeros.
      accumulate: `(local, g, complete) -> local`, elementwise, each vector from itself and g. g is f32[n] or a range
        of it, and local then the same range of the state.
      compensate: `(local, g, complete) -> (v, local)`, elementwise, from what `accumulate` gave.
      update: `(local, v, sent, complete) -> local`, from what `compensate` gave. `sent` is what all nodes take this
        node to have sent, f32[n] or Sparse.
      residual: `local -> f32[n] or None`.
      owns_momentum: whether the momentum lives here; the optimiser must then have none.
      conserves: whether mean over nodes of (residual after + sent) = mean of (residual before + gradient), or with
        momentum correction the velocity in the gradient's place.
    """

    init: Callable[[int], PyTree]
    accumulate: Callable[[PyTree, Array, bool], PyTree]
    compensate: Callable[[PyTree, Array, bool], tuple[Array, PyTree]]
    update: Callable[[PyTree, Array, Array | Sparse, bool], PyTree]
    residual: Callable[[PyTree], Array | None]
    owns_momentum: bool
    conserves: bool


class Corrected(NamedTuple):
    """Local state of momentum correction: velocity u and residual r, each f32[n]."""

    velocity: Array
    residual: Array


def subtract(v: Array, sent: Array | Sparse) -> Array:
    """v without what was sent, f32[n]."""
    if isinstance(sent, Sparse):
        return v.at[sent.positions].add(-sent.values)
    return v - sent


def no_memory() -> Memory:
    """Nothing is kept: v = g."""
    return Memory(
        init=lambda n: (),
        accumulate=lambda local, g, complete: local,
        compensate=lambda local, g, complete: (g, local),
        update=lambda local, v, sent, complete: local,
        residual=lambda local: None,
        owns_momentum=False,
        conserves=False,
    )


def error_feedback(dtype: jnp.dtype = jnp.float32, decay: float = 1.0) -> Memory:
    """Residuals: v = decay r + g, then r = v - sent.

    Args:
      dtype: in which r f32[n] is kept.
      decay: in (0, 1]; with less than 1 old residuals fade, and gradients are not conserved.

    Raises:
      ValueError: decay outside (0, 1].

    Source: Seide et al. 2014 (1-bit SGD); Strom 2015; Stich et al. 2018.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1] (1 keeps all of a residual), got {decay}")
    return Memory(
        init=lambda n: jnp.zeros((n,), dtype),
        accumulate=lambda r, g, complete: decay * r.astype(jnp.float32) + g,
        compensate=lambda v, g, complete: (v, v),
        update=lambda r, v, sent, complete: subtract(v, sent).astype(dtype),
        residual=lambda r: r,
        owns_momentum=False,
        conserves=decay == 1,
    )


def momentum_correction(momentum: float, masking: bool = False, dtype: jnp.dtype = jnp.float32) -> Memory:
    """Each node's own momentum, accumulated before it is sent: u = m u + g, v = r + u, then r = v - sent.

    With `masking` the velocity of what was sent restarts from zero (momentum factor masking); not where everything is
    sent, for then nothing was delayed.

    Source: Lin et al. 2018 (Deep Gradient Compression), Algorithm 4 and Section 3.2.
    """
    check_momentum(momentum)

    def accumulate(local, g, complete):
        return local._replace(velocity=momentum * local.velocity.astype(jnp.float32) + g)

    def compensate(local, g, complete):
        u = local.velocity
        return local.residual.astype(jnp.float32) + u, local._replace(velocity=u.astype(dtype))

    def update(local, v, sent, complete):
        u = local.velocity
        if masking and isinstance(sent, Sparse):
            u = u.at[sent.positions].set(0)
        return Corrected(u, subtract(v, sent).astype(dtype))

    return Memory(
        init=lambda n: Corrected(jnp.zeros((n,), dtype), jnp.zeros((n,), dtype)),
        accumulate=accumulate,
        compensate=compensate,
        update=update,
        residual=lambda local: local.residual,
        owns_momentum=True,
        conserves=True,
    )


def momentum_at_once(momentum: float, dtype: jnp.dtype = jnp.float32) -> Memory:
    """Each node's own momentum in one vector r, what has come in and has not been sent.

    A gradient's whole series g (1 + m + m^2 + ...) = g / (1 - m) comes in with it. Where all can be sent, what
    momentum would send in this step is: v = (1 - m) r + g, then r = m v / (1 - m), which is the same as u = m u + g,
    v = u for r = m u / (1 - m). Elsewhere v = r + g / (1 - m), then r = v - sent.

    In total that is momentum correction; but a value waits for 1 / alpha steps, much longer than momentum's
    1 / (1 - m), and then no velocity goes on into a direction that has been sent. For values that do not wait, it is
    plain SGD with the learning rate divided by 1 - m: stable on a quadratic for curvatures below 2 (1 - m) / rate,
    where momentum is up to 2 (1 + m) / rate. Send layers that are picked in nearly every step (norms, a small head)
    uncompressed.

    Source: ours, after Lin et al. 2018, Section 3.2.
    """
    check_momentum(momentum)

    def accumulate(r, g, complete):
        kept = r.astype(jnp.float32)
        return (1 - momentum) * kept + g if complete else kept + g / (1 - momentum)

    def compensate(v, g, complete):
        return v, (momentum / (1 - momentum) * v).astype(dtype) if complete else v

    return Memory(
        init=lambda n: jnp.zeros((n,), dtype),
        accumulate=accumulate,
        compensate=compensate,
        update=lambda r, v, sent, complete: r if complete else subtract(v, sent).astype(dtype),
        residual=lambda r: r,
        owns_momentum=True,
        conserves=True,
    )


def momentum_only(momentum: float) -> Memory:
    """Each node's own momentum where everything is sent: v = u = m u + g, nothing is kept back."""
    check_momentum(momentum)

    return Memory(
        init=lambda n: jnp.zeros((n,), jnp.float32),
        accumulate=lambda u, g, complete: momentum * u + g,
        compensate=lambda u, g, complete: (u, u),
        update=lambda u, v, sent, complete: u,
        residual=lambda u: None,
        owns_momentum=True,
        conserves=False,
    )


def check_momentum(momentum: float) -> None:
    """Raise ValueError unless momentum is in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")


def check_residual_dtype(dtype: str) -> None:
    """Raise ValueError unless residuals can be kept in dtype: an integer or 8 bits would lose them without a word."""
    if dtype not in RESIDUAL_DTYPES:
        raise ValueError(f"residual_dtype must be one of {', '.join(RESIDUAL_DTYPES)}, got {dtype!r}")


def make_memory(
    correction: bool, momentum: float, masking: bool = False, at_once: bool = False, dtype: str = "float32"
) -> Memory:
    """Momentum correction or plain residuals, by a setting.

    Raises:
      ValueError: momentum outside [0, 1), or a dtype that is not floating-point.
    """
    check_momentum(momentum)
    check_residual_dtype(dtype)
    if correction and at_once:
        return momentum_at_once(momentum, jnp.dtype(dtype))
    if correction:
        return momentum_correction(momentum, masking, jnp.dtype(dtype))
    return error_feedback(jnp.dtype(dtype))


def clip_local(grads: PyTree, max_norm: float, nodes: int) -> PyTree:
    """Clip a node's gradient to the norm max_norm / sqrt(K), before anything is accumulated.

    Source: Lin et al. 2018, Section 3.2 (local gradient clipping).
    """
    if max_norm <= 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    floats = [g.astype(jnp.float32) for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.inexact)]
    norm = jnp.sqrt(sum((jnp.sum(g**2) for g in floats), jnp.float32(0)))
    scale = jnp.minimum(1.0, max_norm / jnp.sqrt(nodes) / jnp.maximum(norm, 1e-30))

    def scaled(g):
        return (g * scale).astype(g.dtype) if jnp.issubdtype(g.dtype, jnp.inexact) else g

    return jax.tree.map(scaled, grads)
