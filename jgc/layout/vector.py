"""A group's residual as one vector f32[n]: how gradients enter it, and how a mean leaves as a tree.

    v, begun = compensated(...)     before the step
    settled(...)                    after it: the mean as leaves, the residual, its norm

They run the functions of a node's `Memory`; `jgc.method.memory` has the memories. A TPU stores the
vectors as whole tiles (`jgc.layout.devices`), so there v may end in zeros.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jgc.backend import backend, backend_of, plain
from jgc.layout.devices import as_flat, dynamic_part, filled, hidden, in_tiles, sealed, with_part
from jgc.layout.pack import Packing, joined, pack, pieces, unpack
from jgc.selection.entries import Sparse, SparseSum, added, entries_at, scatter_layers
from jgc.types import Array, Key, Nodes, PyTree
from jgc.wire.noise import to_bfloat16

MOST_VALUES = 2**31 - 1


class Memory(NamedTuple):
    """A node's memory.

    Attributes:
      init: `n -> local`, zeros.
      accumulate: functions `(local, g, complete) -> local`, elementwise; each runs on all values
        before the next. g is f32[n] or a range of it; local is then the same range of the state.
        A function changes one vector of the state.
      compensate: `(local, g, complete) -> (v, local)`, elementwise; takes the state after the last
        of `accumulate`.
      update: `(local, v, sent, complete) -> local`, in f32; takes the state that `compensate`
        returned. `sent`, f32[n] or Sparse, is the part of v that counts as sent.
      residual: `local -> [n] or None`, the residual in its dtype.
      owns_momentum: whether this memory holds the momentum; the optimiser must then have none.
      advance: `local -> local`, elementwise, after the last of `accumulate`, without the gradient;
        None for nothing.
    """

    init: Callable[[int], PyTree]
    accumulate: tuple[Callable[[PyTree, Array, bool], PyTree], ...]
    compensate: Callable[[PyTree, Array, bool], tuple[Array, PyTree]]
    update: Callable[[PyTree, Array, Array | Sparse, bool], PyTree]
    residual: Callable[[PyTree], Array | None]
    owns_momentum: bool
    advance: Callable[[PyTree], PyTree] | None = None


class Settled(NamedTuple):
    """A group after its step."""

    leaves: PyTree  # the aggregate, a tree like the gradients
    memory: PyTree  # the memory's state, in dtypes and form of the state before
    norm: Array  # f32[], of the residual
    total: Array | None = None  # f32[n]: `Step.onto` plus the mean


def accumulated(memory: Memory, local: PyTree, g: Array, complete: bool) -> PyTree:
    """The state after all functions of `memory.accumulate`, and `memory.advance`."""
    for add in memory.accumulate:
        local = add(local, g, complete)
    return local if memory.advance is None else memory.advance(local)


def unless(skip: Array | bool, old: PyTree, new: PyTree) -> PyTree:
    """The tree `new`, but `old` if `skip`. Leaves that are the same in both are not selected."""
    with jax.numpy_dtype_promotion("standard"):  # a residual stored in bf16 is f32 in a step
        return jax.tree.map(lambda a, b: b if b is a else jnp.where(skip, a, b), old, new)


def stored(key: Key, new: PyTree, before: PyTree) -> PyTree:
    """A state that `update` returned, in the dtypes of the state before.

    To bfloat16 it is rounded up or down at random, so that the mean over draws is exact. To the
    nearest, each gradient below 1/512 of its residual would be lost: at 0.1 %, up to half of a
    steady one. The key differs between nodes and steps.
    """
    leaves, treedef = jax.tree.flatten(new)
    pairs = zip(leaves, jax.tree.leaves(before), strict=True)
    rounds = [x.dtype == jnp.float32 and old.dtype == jnp.bfloat16 for x, old in pairs]
    if not any(rounds):
        return new
    keys = jax.random.split(key, len(leaves))
    out = [to_bfloat16(keys[i], x) if rounds[i] else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, out)


def first(memory: Memory, packing: Packing, nodes: Nodes) -> PyTree:
    """The memory's state before the first step.

    Raises:
      ValueError: the parameters have more values than positions in i32 reach.
    """
    if packing.size > MOST_VALUES:
        raise ValueError(
            f"the parameters have {packing.size:,} values, and a vector of all holds up to "
            f"{MOST_VALUES:,}, because positions are i32: give groups of layers a method each "
            "(jgc.compress.per_layer), or shard parameters over the devices of a node "
            "(docs/meshes.md)")
    zeros = memory.init(packing.size)
    return jax.tree.map(in_tiles, zeros) if backend_of(nodes) == "tpu" else zeros


def residual(memory: Memory, local: PyTree, packing: Packing) -> PyTree | None:
    """The residual as a tree like the parameters; None without one."""
    values = memory.residual(local)
    return None if values is None else unpack(as_flat(values), packing)


# --- v = residual + gradient ----------------------------------------------------------------------


def compensated(
    memory: Memory, local: PyTree, grads: PyTree, packing: Packing, complete: bool,
    skip: Array | bool = False,
) -> tuple[Array, PyTree]:  # fmt: skip
    """Run `memory.accumulate`, `advance` and `compensate` on a tree of gradients without copies.

    Returns v f32[n] and the new state. `local` holds vectors [n], longer ones that end in zeros, or
    rows of tiles; v is then as long. If `skip`, v is the residual (zeros without one) and `local`
    does not change.
    """
    local = jax.tree.map(as_flat, local)
    vectors = jax.tree.leaves(local)
    behind = vectors[0].size - packing.size if vectors else 0
    if plain() or not packing.size:
        g = jnp.pad(pack(grads, packing), (0, behind))
        return compensate_plain(memory, local, g, complete, skip)
    parts = pieces(grads, packing)
    if behind:
        end = slice(packing.size, packing.size + behind)
        parts.append((end, jnp.zeros((behind,), jnp.float32)))
    # Leaf by leaf, so that no vector of all gradients is allocated.
    for add in memory.accumulate:
        add_part = lambda local, g, add=add: add(local, g, complete)  # noqa: E731
        local = _added(add_part, local, parts, jnp.asarray(skip))
    if memory.advance is not None:
        local = sealed(unless(skip, local, memory.advance(local)), jnp.asarray(skip))
    v, new = memory.compensate(local, joined([g for _, g in parts]), complete)
    before, vectors = memory.residual(local), jax.tree.leaves(local)
    if before is None and vectors and all(v is not x for x in vectors):
        # The memory has no vector to hold v: write v range by range; zeros if `skip`.
        def write(both, g):
            return both[0], memory.compensate(both[0], g, complete)[0]

        empty = jnp.zeros_like(parts[0][1], shape=parts[-1][0].stop)
        v = _added(write, (local, empty), parts, jnp.asarray(skip))[1]
    else:
        v = unless(skip, jnp.zeros_like(v) if before is None else before, v)
    return v, unless(skip, local, new)


def compensate_plain(
    memory: Memory, local: PyTree, g: Array, complete: bool, skip: Array | bool
) -> tuple[Array, PyTree]:
    """The plain reference of `compensated`, of gradients joined in a vector."""
    local = unless(skip, local, accumulated(memory, local, g, complete))
    v, new = memory.compensate(local, g, complete)
    before = memory.residual(local)
    v = unless(skip, jnp.zeros_like(v) if before is None else before, v)
    return v, unless(skip, local, new)


def _added(
    add: Callable, local: PyTree, parts: Sequence[tuple[slice, Array]], skip: Array
) -> PyTree:
    """`add(local, g)` on every range of the state's vectors; unchanged if `skip`."""
    old = jax.tree.leaves(local)
    new = jax.eval_shape(add, jax.tree.map(lambda x: x[parts[0][0]], local), parts[0][1])
    same = [x.dtype for x in old] == [x.dtype for x in jax.tree.leaves(new)]
    if backend() != "cpu" or not same:
        # XLA joins the gradients while it adds them. Cutting the state into ranges costs a TPU two
        # more passes.
        return unless(skip, local, add(local, joined([g for _, g in parts])))

    def write(local, g, skip, at):
        """local [..., n] with `add` of its range [..., m] from `at` on."""
        old = jax.tree.map(lambda x: dynamic_part(x, at, g.shape[-1]), local)
        new = unless(skip[..., None], old, add(old, g))
        return jax.tree.map(lambda x, a, b: x if b is a else with_part(x, b, at), local, old, new)

    # Unbatched under the `vmap` of emulated nodes: a batched write would be a slow scatter.
    write_all = custom_vmap(write)

    @write_all.def_vmap
    def batched(size, is_batched, *args):
        *rest, at = args
        assert not is_batched[-1], "a range starts at the same place on all nodes"

        def every(x, per_node):
            return x if per_node else jnp.broadcast_to(x, (size, *x.shape))

        out = write(*jax.tree.map(every, tuple(rest), tuple(is_batched[:-1])), at)
        return out, jax.tree.map(lambda _: True, out)

    # In place, range by range: on CPU, allocating the state anew in every step costs more than the
    # additions. Without the barrier XLA fuses a reshape with the first write and copies local.
    local = lax.optimization_barrier(local)
    # with starts that XLA knows, it goes through all n values, and compiles every range apart
    starts = hidden([at.start for at, _ in parts], skip)
    for start, (_, g) in zip(starts, parts, strict=True):
        local = write_all(local, g, skip, start)
    return sealed(local, skip)


# --- residual = v - sent --------------------------------------------------------------------------


def settled(
    memory: Memory, before: PyTree, begun: PyTree, v: Array, mean: Array | SparseSum,
    sent: Array | Sparse, onto: Array | None, packing: Packing, complete: bool, skip: Array | bool,
    key: Key,
) -> Settled:  # fmt: skip
    """The aggregate as a tree, zeros if `skip`; the residual v - sent, v if `skip`.

    `before` is the memory's state before the step; v and `begun` are of `compensated`; mean, sent
    and onto of `jgc.method.Step`. `key` differs between nodes and steps, for residuals that are
    rounded at random.
    """
    if sent is v and packing.size and not isinstance(mean, SparseSum):
        # v is the memory's vector: the all-reduce of it comes before it is changed in place
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
    if onto is not None:  # in place
        total = added(onto, mean.entries if isinstance(mean, SparseSum) else mean)
        aggregate = jnp.where(skip, 0, total)
    elif isinstance(mean, SparseSum):
        aggregate = scatter_layers(mean, packing.layers)
    else:
        aggregate = mean
    if isinstance(sent, Sparse):
        # As codecs take them, so that XLA gathers them once; before v is changed in place.
        entries = entries_at(v, sent.positions)
        # JAX drops writes to positions past the end.
        outside = skip if v.size == packing.size else skip | (sent.positions >= packing.size)
        sent = sent._replace(positions=jnp.where(outside, v.size, sent.positions))
    else:
        entries, sent = None, filled(jnp.where(skip, 0, sent), v.size)
    after = stored(key, memory.update(begun, v, sent, complete), before)
    left = memory.residual(after)
    if left is None:
        norm = jnp.float32(0)
    elif entries is None or not isinstance(sent, Sparse) or backend() == "cpu" or plain():
        norm = jnp.linalg.norm(left.astype(jnp.float32))
    else:
        norm = _norm_left(v, entries, sent)
    after = jax.tree.map(lambda x, form: x.reshape(form.shape), after, before)
    return Settled(unpack(aggregate, packing, skip, late), after, norm, total)


def _norm_left(v: Array, entries: Array, sent: Sparse) -> Array:
    """The norm of v - sent without reading it; `entries` are v's at the positions of `sent`."""
    # A TPU sums the squares of v while it makes v; the norm of the residual would be one more pass
    # through memory. It rounds as the norm of v: if v is sent nearly whole, the result is inexact.
    removed = jnp.where(sent.positions < v.size, (2 * entries - sent.values) * sent.values, 0)
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(v)) - jnp.sum(removed), 0))
