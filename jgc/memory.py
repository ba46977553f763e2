"""What a node keeps back of its gradient, and for how long: error feedback and momentum correction.

A memory is pure functions: `absorb` takes this step's gradient g into the state, `offer` makes of that what is to be
sent, v, and `keep` stores what of v was not sent. All of it is local to a node; g and v are f32[n]. `complete` says
that the phase sends all of v (an uncompressed warm-up). `accumulate` is `absorb` and `offer`, and `take_in` the same
for a tree of gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jgc.layout.pack import Packing, leaf_paths, make_packing, pack, pieces, unpack
from jgc.layout.select import Sparse
from jgc.types import Array, PyTree

RESIDUAL_DTYPES = ("float32", "bfloat16", "float16")


class Memory(NamedTuple):
    """A node's memory.

    Attributes:
      init: `n -> local`, zeros.
      absorb: `(local, g, complete) -> local`, elementwise, each vector from itself and g; g is f32[n] or a range of
        it, and local then the same range of the state.
      offer: `(local, g, complete) -> (v, local)`, from what `absorb` gave, elementwise.
      keep: `(local, v, sent, complete) -> local`, from the local state that `offer` gave; `sent` is what all nodes
        take this node to have sent, f32[n] or Sparse.
      residual: `local -> f32[n] or None`, what is kept back.
      owns_momentum: whether the momentum lives here; the optimiser must then have none.
      conserves: whether v - sent is kept in full and v holds nothing but kept parts and gradients, so that
        mean over nodes of (what is kept + what is sent) = mean of (what was kept + what came in).
    """

    init: Callable[[int], PyTree]
    absorb: Callable[..., PyTree]
    offer: Callable[[PyTree, Array, bool], tuple[Array, PyTree]]
    keep: Callable[..., PyTree]
    residual: Callable[[PyTree], Array | None]
    owns_momentum: bool
    conserves: bool

    def accumulate(self, local: PyTree, g: Array, complete: bool) -> tuple[Array, PyTree]:
        """What is to be sent with this step's gradient, and the state that goes to `keep`: (v, local)."""
        return self.offer(self.absorb(local, g, complete), g, complete)


class Corrected(NamedTuple):
    """Local state of momentum correction: velocity u and residual r, each f32[n]."""

    velocity: Array
    residual: Array


def take_in(
    memory: Memory, local: PyTree, grads: PyTree, packing: Packing, complete: bool, skip: Array | bool = False
) -> tuple[Array, PyTree]:
    """`memory.accumulate` on a tree of gradients: (v f32[n], local).

    Gradients are absorbed leaf by leaf, and never written down as a vector.

    Args:
      memory: what a node keeps back.
      local: its state.
      grads: this node's.
      packing: theirs.
      complete: whether the phase sends all of v.
      skip: a step that does not count: v is then what was kept back, zeros where nothing is, and local stays as it was.
    """
    absorb = partial(memory.absorb, complete=complete)
    absorbed = _absorbed(absorb, local, pieces(grads, packing), jnp.asarray(skip)) if packing.size else local
    v, new = memory.offer(absorbed, pack(grads, packing), complete)
    kept = memory.residual(absorbed)
    stays = jnp.zeros_like(v) if kept is None else kept
    return _unless(skip, stays, v), jax.tree.map(partial(_unless, skip), absorbed, new)


def _unless(skip: Array | bool, old: Array, new: Array) -> Array:
    return new if new is old else jnp.where(skip, old.astype(new.dtype), new)


def _absorbed(absorb: Callable, local: PyTree, parts: Sequence[tuple[slice, Array]], skip: Array) -> PyTree:
    """`absorb(local, g)` for every range of the vectors of local.

    On CPU range after range is written over the state, where a step that gives up its state needs no other memory:
    memory that is new in every step costs XLA more than the sums.
    """

    def of_range(old: PyTree, g: Array, skip: Array) -> PyTree:
        return jax.tree.map(partial(_unless, skip), old, absorb(old, g))

    if not jax.tree.leaves(local):
        return local
    after = jax.eval_shape(absorb, jax.tree.map(lambda x: x[parts[0][0]], local), parts[0][1])
    same = all(a.dtype == b.dtype for a, b in zip(jax.tree.leaves(local), jax.tree.leaves(after), strict=True))
    if jax.default_backend() == "cpu" and same:
        local = lax.optimization_barrier(local)  # a reshape, fused with the first write, would make XLA copy it
        for at, g in parts:
            local = _on_emulated_nodes(partial(_replaced, of_range, at.start))(local, g, skip)
        return local
    leaves = [of_range(jax.tree.map(lambda x, at=at: x[at], local), g, skip) for at, g in parts]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *leaves)


def _replaced(of_range: Callable, at: int, local: PyTree, g: Array, skip: Array) -> PyTree:
    """local [..., n] with what `of_range` makes of the range [..., m] from `at` on; what it leaves is not written."""
    start = lax.optimization_barrier(jnp.int32(at))  # for a constant one XLA on CPU goes through all n values
    old = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, g.shape[-1], -1), local)

    def written(x, before, after):
        return x if after is before else lax.dynamic_update_slice_in_dim(x, after, start, -1)

    return jax.tree.map(written, local, old, of_range(old, g, skip[..., None]))


def _on_emulated_nodes(fn: Callable) -> Callable:
    """`fn`, which works along the last axis, as it is under `vmap`: the batching rule of a write is a slow scatter."""

    def batched(size, is_batched, *args):
        args = jax.tree.map(lambda x, own: x if own else jnp.broadcast_to(x, (size, *x.shape)), args, tuple(is_batched))
        out = fn(*args)
        return out, jax.tree.map(lambda _: True, out)

    call = custom_vmap(fn)
    call.def_vmap(batched)
    return call


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
        absorb=lambda local, g, complete: local,
        offer=lambda local, g, complete: (g, local),
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
        absorb=lambda r, g, complete: r.astype(jnp.float32) + g,
        offer=lambda v, g, complete: (v, v),
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

    def absorb(local, g, complete):
        return local._replace(velocity=momentum * local.velocity.astype(jnp.float32) + g)

    def offer(local, g, complete):
        u = local.velocity
        return local.residual.astype(jnp.float32) + u, local._replace(velocity=u.astype(dtype))

    def keep(local, v, sent, complete):
        u = local.velocity
        if masking and isinstance(sent, Sparse):
            u = u.at[sent.positions].set(0)
        return Corrected(u, subtract(v, sent).astype(dtype))

    return Memory(
        init=lambda n: Corrected(jnp.zeros((n,), dtype), jnp.zeros((n,), dtype)),
        absorb=absorb,
        offer=offer,
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

    def absorb(r, g, complete):
        kept = r.astype(jnp.float32)
        return (1 - momentum) * kept + g if complete else kept + g / (1 - momentum)

    def offer(v, g, complete):
        return v, (momentum / (1 - momentum) * v).astype(dtype) if complete else v

    return Memory(
        init=lambda n: jnp.zeros((n,), dtype),
        absorb=absorb,
        offer=offer,
        keep=lambda r, v, sent, complete: r if complete else subtract(v, sent).astype(dtype),
        residual=lambda r: r,
        owns_momentum=True,
        conserves=True,
    )


def momentum_only(momentum: float) -> Memory:
    """Each node's own momentum where everything is sent: v = u = m u + g, nothing is kept back."""
    check_momentum(momentum)

    return Memory(
        init=lambda n: jnp.zeros((n,), jnp.float32),
        absorb=lambda u, g, complete: momentum * u + g,
        offer=lambda u, g, complete: (u, u),
        keep=lambda u, v, sent, complete: u,
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
