"""What a node keeps back of its gradient, and for how long: error feedback and momentum correction.

A memory is three pure functions. `accumulate` turns this step's gradient g into what is to be sent, v;
`keep` stores what of v was not sent. All of it is local to a node; g and v are f32[n]. `complete` says that the phase
sends all of v (an uncompressed warm-up). `take_in` is `accumulate` for a tree of gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgc.pack import Packing, leaf_paths, make_packing, pieces, unpack
from jgc.select import Sparse
from jgc.types import Array, PyTree


class Memory(NamedTuple):
    """A node's memory.

    Attributes:
      init: `n -> local`, zeros.
      accumulate: `(local, g, complete) -> (v, local)`.
      keep: `(local, v, sent, complete) -> local`, from the local state that `accumulate` gave; `sent` is what all nodes
        take this node to have sent, f32[n] or Sparse.
      residual: `local -> f32[n] or None`, what is kept back.
      owns_momentum: whether the momentum lives here; the optimiser must then have none.
      conserves: whether v - sent is kept in full and v holds nothing but kept parts and gradients, so that
        mean over nodes of (what is kept + what is sent) = mean of (what was kept + what came in).
    """

    init: Callable[[int], PyTree]
    accumulate: Callable[[PyTree, Array, bool], tuple[Array, PyTree]]
    keep: Callable[..., PyTree]
    residual: Callable[[PyTree], Array | None]
    owns_momentum: bool
    conserves: bool


class Corrected(NamedTuple):
    """Local state of momentum correction: velocity u and residual r, each f32[n]."""

    velocity: Array
    residual: Array


def take_in(
    memory: Memory, local: PyTree, grads: PyTree, packing: Packing, complete: bool, skip: Array | bool = False
) -> tuple[Array, PyTree]:
    """`memory.accumulate` on a tree of gradients: (v f32[n], local).

    Leaf by leaf, for it is elementwise: XLA then writes each sum to its place in the vector, and never the gradients
    as a vector.

    Args:
      memory: what a node keeps back.
      local: its state.
      grads: this node's.
      packing: theirs.
      complete: whether the phase sends all of v.
      skip: a step that does not count: v is then what was kept back, zeros where nothing is, and local stays as it was.
    """

    def leaf(old, g):
        v, new = memory.accumulate(old, g, complete)
        kept = memory.residual(old)
        stays = jnp.zeros_like(v) if kept is None else kept.astype(v.dtype)
        return jax.tree.map(lambda a, b: jnp.where(skip, a, b), (stays, old), (v, new))

    if not packing.size:
        return memory.accumulate(local, jnp.zeros((0,)), complete)
    leaves = [leaf(jax.tree.map(lambda x, at=at: x[at], local), g) for at, g in pieces(grads, packing)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *leaves)


def residual_of(memory: Memory) -> Callable[[PyTree, PyTree], dict[str, Array]]:
    """`Compressor.residual` of a method whose local state is this memory's: what is kept back, by parameter."""

    def residual(local, shapes):
        kept = memory.residual(local)
        if kept is None:
            return {}
        return dict(zip(leaf_paths(shapes), jax.tree.leaves(unpack(kept, make_packing(shapes))), strict=True))

    return residual


def subtract(v: Array, sent: Array | Sparse) -> Array:
    """v without what was sent, f32[n]."""
    if isinstance(sent, Sparse):
        return v.at[sent.positions].add(-sent.values)
    return v - sent


def no_memory() -> Memory:
    """Nothing is kept: v = g."""
    return Memory(
        init=lambda n: (),
        accumulate=lambda local, g, complete: (g, local),
        keep=lambda local, v, sent, complete: local,
        residual=lambda local: None,
        owns_momentum=False,
        conserves=False,
    )


def error_feedback(dtype: jnp.dtype = jnp.float32) -> Memory:
    """Plain residuals: v = r + g, then r = v - sent.

    Source: Seide et al. 2014 (1-bit SGD); Strom 2015; Stich et al. 2018.
    """
    return Memory(
        init=lambda n: jnp.zeros((n,), dtype),
        accumulate=lambda r, g, complete: (r.astype(jnp.float32) + g, r),
        keep=lambda r, v, sent, complete: subtract(v, sent).astype(dtype),
        residual=lambda r: r,
        owns_momentum=False,
        conserves=True,
    )


def momentum_correction(momentum: float, masking: bool = False, dtype: jnp.dtype = jnp.float32) -> Memory:
    """Each node's own momentum, accumulated before it is sent: u = m u + g, v = r + u, then r = v - sent.

    With `masking` the velocity of what was sent restarts from zero (momentum factor masking); not where everything is
    sent, for then nothing was delayed.

    Source: Lin et al. 2018 (Deep Gradient Compression), Algorithm 4 and Section 3.2.
    """
    check_momentum(momentum)

    def accumulate(local, g, complete):
        u = momentum * local.velocity.astype(jnp.float32) + g
        return local.residual.astype(jnp.float32) + u, Corrected(u.astype(dtype), local.residual)

    def keep(local, v, sent, complete):
        u = local.velocity
        if masking and isinstance(sent, Sparse):
            u = u.at[sent.positions].set(0)
        return Corrected(u, subtract(v, sent).astype(dtype))

    return Memory(
        init=lambda n: Corrected(jnp.zeros((n,), dtype), jnp.zeros((n,), dtype)),
        accumulate=accumulate,
        keep=keep,
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
        if not complete:
            return kept + g / (1 - momentum), r
        v = (1 - momentum) * kept + g
        return v, (momentum / (1 - momentum) * v).astype(dtype)

    return Memory(
        init=lambda n: jnp.zeros((n,), dtype),
        accumulate=accumulate,
        keep=lambda r, v, sent, complete: r if complete else subtract(v, sent).astype(dtype),
        residual=lambda r: r,
        owns_momentum=True,
        conserves=True,
    )


def momentum_only(momentum: float) -> Memory:
    """Each node's own momentum where everything is sent: v = u = m u + g, nothing is kept back."""
    check_momentum(momentum)

    def accumulate(u, g, complete):
        u = momentum * u + g
        return u, u

    return Memory(lambda n: jnp.zeros((n,)), accumulate, lambda u, v, sent, complete: u, lambda u: None, True, False)


def check_momentum(momentum: float) -> None:
    """Raise ValueError unless momentum is in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")


def check_residual_dtype(dtype: str) -> None:
    """Raise ValueError unless residuals can be kept in dtype: an integer would lose them without a word."""
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(f"residual_dtype must be a floating-point dtype (float32, bfloat16, float16), got {dtype!r}")


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
