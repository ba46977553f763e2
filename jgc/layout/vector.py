"""A group's residual as one vector f32[n]: how gradients enter it, and how a mean leaves as a tree.

    v, kept = compensated(...)      before the step
    settled(...)                    after it: the mean as leaves, the residual, its norm

A TPU stores the vectors as whole tiles (`jgc.layout.tiles`), so there v may end in zeros.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jgc.backend import backend, backend_of, plain
from jgc.layout.opaque import dynamic_part, hidden, sealed, with_part
from jgc.layout.pack import Layers, Packing, joined, pack, pieces, unpack
from jgc.layout.residual import Memory, accumulated, stored, unless
from jgc.layout.tiles import as_flat, cut, filled, in_tiles
from jgc.selection.entries import Sparse, SparseSum, added, entries_at, scatter_layers
from jgc.types import Array, Key, Nodes, PyTree

MOST_VALUES = 2**31 - 1


class Settled(NamedTuple):
    """A group after its step.

    Attributes:
      leaves: the aggregate, a tree like the gradients.
      kept: the memory's state, in dtypes and form of the state before.
      norm: f32[], of the residual.
      total: f32[n] or None: `Step.onto` plus the mean.
    """

    leaves: PyTree
    kept: PyTree
    norm: Array
    total: Array | None = None


def first(memory: Memory, packing: Packing, nodes: Nodes) -> PyTree:
    """The memory's state before the first step.

    Raises:
      ValueError: the parameters have more values than positions in i32 reach.
    """
    if packing.size > MOST_VALUES:
        raise ValueError(
            f"the parameters have {packing.size:,} values, and a vector of all holds up to "
            f"{MOST_VALUES:,}, for positions are i32: give groups of layers a method each "
            "(jgc.compress.per_layer), or divide parameters among the devices of a node "
            "(docs/meshes.md)"
        )
    zeros = memory.init(packing.size)
    return jax.tree.map(in_tiles, zeros) if backend_of(nodes) == "tpu" else zeros


def visible(kept: PyTree, packing: Packing) -> PyTree:
    """The memory's state as a method's step sees it: vectors of n values."""
    return jax.tree.map(lambda x: cut(as_flat(x), packing.size), kept)


def settled(
    memory: Memory, before: PyTree, kept: PyTree, v: Array, mean: Array | SparseSum,
    sent: Array | Sparse, onto: Array | None, packing: Packing, complete: bool, skip: Array | bool,
    key: Key,
) -> Settled:  # fmt: skip
    """The aggregate as a tree, zeros if `skip`; the residual v - sent, v if `skip`.

    Args:
      memory: the node's memory.
      before: its state before the step.
      kept, v: of `compensated`.
      mean, sent, onto: see `jgc.method.Step`.
      packing: the layout of the gradients.
      complete: whether the phase sends all of v.
      skip: bool[].
      key: this node's and this step's, for residuals that are rounded at random.
    """
    if sent is v and packing.size and not isinstance(mean, SparseSum):
        # v is the memory's own vector: the all-reduce of it comes before it is changed in place
        v = sent = sealed(v, skip & (mean[0] > 0))
    # TPU and GPU select while they cut the leaves out of the vector, faster than plain slices.
    late = backend() != "cpu" and isinstance(mean, SparseSum) and onto is None and not plain()
    total = None
    if isinstance(mean, SparseSum):
        # Zero the mu values before scattering: cheaper than to mask n.
        values = mean.entries.values
        values = values if late else jnp.where(skip, 0, values)
        mean = mean._replace(entries=mean.entries._replace(values=values))
    else:
        mean = jnp.where(skip, 0, mean)
    if onto is None:
        aggregate = as_vector(mean, packing.layers)
    else:  # in place
        total = added(onto, mean.entries if isinstance(mean, SparseSum) else mean)
        aggregate = jnp.where(skip, 0, total)
    if isinstance(sent, Sparse):
        # As codecs take them, so that XLA gathers them once; before v is changed in place.
        entries = entries_at(v, sent.positions)
        # JAX drops writes to positions past the end.
        outside = skip if v.size == packing.size else skip | (sent.positions >= packing.size)
        sent = sent._replace(positions=jnp.where(outside, v.size, sent.positions))
    else:
        entries, sent = None, filled(jnp.where(skip, 0, sent), v.size)
    kept = stored(key, memory.update(kept, v, sent, complete), before)
    norm = _norm(memory.residual(kept), v, entries, sent)
    kept = jax.tree.map(lambda x, form: x.reshape(form.shape), kept, before)
    return Settled(unpack(aggregate, packing, skip, late), kept, norm, total)


def _norm(residual: Array | None, v: Array, entries: Array | None, sent: Array | Sparse) -> Array:
    """The norm of the residual, f32[]; 0 without one. `entries` are those of v at the positions of
    `sent`."""
    if residual is None:
        return jnp.float32(0)
    if entries is None or not isinstance(sent, Sparse) or backend() == "cpu" or plain():
        return jnp.linalg.norm(residual.astype(jnp.float32))
    # A TPU sums the squares of v while it makes v; the norm of the residual itself would be one
    # more pass through memory. It rounds as the norm of v: if v is sent nearly whole, the result
    # is not exactly what is left.
    removed = jnp.where(sent.positions < v.size, (2 * entries - sent.values) * sent.values, 0)
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(v)) - jnp.sum(removed), 0))


def as_vector(mean: Array | SparseSum, layers: Layers) -> Array:
    """A mean over nodes as f32[n]."""
    return scatter_layers(mean, layers) if isinstance(mean, SparseSum) else mean


def residual(memory: Memory, kept: PyTree, packing: Packing) -> PyTree | None:
    """The residual as a tree like the parameters; None without one."""
    values = memory.residual(kept)
    return None if values is None else unpack(as_flat(values), packing)


# --- v = residual + gradient ----------------------------------------------------------------------


def compensated(
    memory: Memory, local: PyTree, grads: PyTree, packing: Packing, complete: bool,
    skip: Array | bool = False,
) -> tuple[Array, PyTree]:  # fmt: skip
    """Run `memory.accumulate`, `advance` and `compensate` on a tree of gradients, without extra
    copies; return v f32[n] and the new state.

    Args:
      memory: the node's memory.
      local: its state, of vectors [n], or longer ones that end in zeros, or rows of tiles; v is
        then as long.
      grads: the node's gradients.
      packing: their layout.
      complete: whether the phase sends all of v.
      skip: if true, v is the residual (zeros without one) and `local` does not change.
    """
    local = jax.tree.map(as_flat, local)
    vectors = jax.tree.leaves(local)
    behind = vectors[0].size - packing.size if vectors else 0
    if plain():
        g = jnp.pad(pack(grads, packing), (0, behind))
        return compensate_plain(memory, local, g, complete, skip)
    parts = pieces(grads, packing)
    if behind:
        parts.append((slice(packing.size, packing.size + behind), jnp.zeros((behind,), jnp.float32)))
    # Leaf by leaf, so that no vector of all gradients is allocated.
    for add in memory.accumulate if packing.size else ():
        add_part = lambda local, g, add=add: add(local, g, complete)  # noqa: E731
        local = _added(add_part, local, parts, jnp.asarray(skip))
    if memory.advance is not None and packing.size:
        local = sealed(unless(skip, local, memory.advance(local)), jnp.asarray(skip))
    v, new = memory.compensate(local, joined(parts), complete)
    residual, vectors = memory.residual(local), jax.tree.leaves(local)
    if residual is None and vectors and packing.size and all(v is not x for x in vectors):
        # The memory has no vector to hold v: write v range by range; zeros if `skip`.
        def write(both, g):
            return both[0], memory.compensate(both[0], g, complete)[0]

        empty = jnp.zeros_like(parts[0][1], shape=parts[-1][0].stop)
        v = _added(write, (local, empty), parts, jnp.asarray(skip))[1]
    else:
        v = unless(skip, jnp.zeros_like(v) if residual is None else residual, v)
    return v, unless(skip, local, new)


def compensate_plain(
    memory: Memory, local: PyTree, g: Array, complete: bool, skip: Array | bool
) -> tuple[Array, PyTree]:
    """The plain reference of `compensated`, of gradients joined in a vector."""
    local = unless(skip, local, accumulated(memory, local, g, complete))
    v, new = memory.compensate(local, g, complete)
    residual = memory.residual(local)
    v = unless(skip, jnp.zeros_like(v) if residual is None else residual, v)
    return v, unless(skip, local, new)


def _added(
    add: Callable, local: PyTree, parts: Sequence[tuple[slice, Array]], skip: Array
) -> PyTree:
    """`add(local, g)` on every range of the state's vectors; unchanged if `skip`."""

    def of_range(old: PyTree, g: Array, skip: Array) -> PyTree:
        return unless(skip, old, add(old, g))

    old = jax.tree.leaves(local)
    new = jax.eval_shape(add, jax.tree.map(lambda x: x[parts[0][0]], local), parts[0][1])
    same = [x.dtype for x in old] == [x.dtype for x in jax.tree.leaves(new)]
    if backend() == "cpu" and same:
        # In place, range by range: on CPU, allocating the state anew in every step costs more
        # than the additions. Without the barrier XLA fuses a reshape with the first write and
        # copies local.
        local = lax.optimization_barrier(local)
        # with starts that XLA knows, it goes through all n values, and compiles every range apart
        starts = hidden([at.start for at, _ in parts], skip)
        for start, (_, g) in zip(starts, parts, strict=True):
            local = _per_emulated_node(partial(_write_range, of_range))(local, g, skip, start)
        return sealed(local, skip)
    # Elsewhere XLA joins the gradients while it adds them. Cutting the state into ranges costs a
    # TPU two more passes.
    return of_range(local, joined(parts), skip)


def _write_range(of_range: Callable, local: PyTree, g: Array, skip: Array, at: Array) -> PyTree:
    """local [..., n] with its range [..., m] from `at` on replaced by `of_range` of that range."""
    old = jax.tree.map(lambda x: dynamic_part(x, at, g.shape[-1]), local)
    new = of_range(old, g, skip[..., None])
    return jax.tree.map(lambda x, a, b: x if b is a else with_part(x, b, at), local, old, new)


def _per_emulated_node(fn: Callable) -> Callable:
    """Keep `fn(local, g, skip, at)`, which works on the last axis, unbatched under `vmap`.

    A batched write would be a slow scatter. `at` is the same on all nodes.
    """

    def batched(size, is_batched, *args):
        *rest, at = args
        assert not is_batched[-1], "a range starts at the same place on all nodes"

        of_all = lambda x, batched: x if batched else jnp.broadcast_to(x, (size, *x.shape))  # noqa: E731
        out = fn(*jax.tree.map(of_all, tuple(rest), tuple(is_batched[:-1])), at)
        return out, jax.tree.map(lambda _: True, out)

    call = custom_vmap(fn)
    call.def_vmap(batched)
    return call
