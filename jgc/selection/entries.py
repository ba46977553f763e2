"""Entries of a vector, positions and values, and how they are added to it on each device."""

import math
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend, plain
from jgc.layout.devices import dynamic_part, hidden, node_by_node
from jgc.layout.pack import Layers, values_of
from jgc.types import Array
from jgc.wire.bits import LANES, TILE

_PAST_ALL = np.iinfo(np.int32).max  # a position past the end of every vector


class Sparse(NamedTuple):
    """Some entries of a flat vector."""

    positions: Array  # i32[..., k], ascending and distinct
    values: Array  # f32[..., k]


class Unordered(Sparse):
    """Entries whose positions need not ascend: XLA for TPU sorts them at every use."""


class SparseSum(NamedTuple):
    """A vector f32[n] as a sum of entries: values at equal positions add up."""

    entries: Sparse  # positions i32[..., mu] and values f32[..., mu]
    counts: tuple[int, ...]  # entries of each layer, in order, or of all layers together. Static


def entries_at(x: Array, i: Array) -> Array:
    """x[i] for i within bounds, which the program does not check."""
    return x.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)


def scatter(sparse: Sparse, n: int) -> Array:
    """The entries in a vector of zeros, f32[n]. Values at equal positions add up."""
    return added(jnp.zeros_like(sparse.values, shape=(n,)), sparse)


def added(x: Array, more: Array | Sparse) -> Array:
    """x f32[n] plus a vector f32[n], or plus entries; entries past the end are dropped."""
    if not isinstance(more, Sparse):
        return x + more
    if plain():  # the reference: right on every device, with sums in any order on GPU
        return x.at[more.positions].add(more.values, mode="drop")
    if more.positions.ndim == 1:
        at, unique, ascend = _promises(more, x.size)
        return x.at[at].add(
            more.values, indices_are_sorted=ascend, unique_indices=unique,
            wrap_negative_indices=False,
        )  # fmt: skip
    if backend() == "cpu":  # which adds one by one, node after node
        return added(x, Unordered(*(part.reshape(-1) for part in more)))
    # Node by node: a GPU adds values at equal positions in any order, but all devices
    # need equal sums, and for a TPU the positions of all nodes together would have to be sorted.
    # The first node is outside of the loop: XLA for TPU then makes zeros and scatter in one pass.
    nodes = type(more)(_by_nodes(more.positions, _PAST_ALL), _by_nodes(more.values, 0))

    def add(i, x):
        def of_node(part):
            return lax.dynamic_index_in_dim(part, i, keepdims=False).reshape(-1)

        return added(x, jax.tree.map(of_node, nodes))

    return lax.fori_loop(1, len(nodes.values), add, add(0, x))


def nonzero(sparse: Sparse, n: int) -> Unordered:
    """The entries of a vector f32[n], but those with the value 0 past its end: they are not sent.

    Example:
      >>> nonzero(Sparse(jnp.array([1, 4]), jnp.array([0.0, 3.0])), 6).positions.tolist()
      [6, 4]
    """
    return Unordered(jnp.where(sparse.values != 0, sparse.positions, n), sparse.values)


def cleared(x: Array, sparse: Sparse) -> Array:
    """x f32[n] with zeros at the entries' positions; those past the end are dropped."""
    if plain():
        return x.at[sparse.positions].set(0, mode="drop")
    at, unique, ascend = _promises(sparse, x.size)
    return x.at[at].set(
        0, indices_are_sorted=ascend, unique_indices=unique, wrap_negative_indices=False
    )


def replaced(x: Array, positions: Array, values: Array) -> Array:
    """x f32[n] with values f32[k] at positions i32[k], none twice."""
    return x.at[positions].set(values, unique_indices=True)


def _by_nodes(x: Array, unused: float) -> Array:
    """Entries [..., K, mu] node by node, [K, m]; on TPU as rows [K, m, 128] of whole tiles."""
    # Rows of a node are one stretch of memory. Of [K, mu] a TPU reads 8 nodes for one's entries.
    x = node_by_node(x.reshape(-1, x.shape[-1]))
    if backend() != "tpu":
        return x
    filled = jnp.pad(x, ((0, 0), (0, -x.shape[-1] % TILE)), constant_values=unused)
    return node_by_node(filled.reshape(len(x), -1, LANES))


def _promises(sparse: Sparse, n: int) -> tuple[Array, bool, bool]:
    """The positions of one node, i32[k], and whether they are distinct and ascend."""
    at, ascend = sparse.positions, not isinstance(sparse, Unordered)
    if backend() != "gpu":
        return at, False, ascend
    # XLA for GPU adds distinct positions without atomics; other backends gain nothing. So positions
    # past the end of f32[n], which are dropped, must differ, too. Past the end of int32 they wrap
    # around to negative positions, which are dropped as well.
    return jnp.where(at < n, at, n + jnp.arange(at.size, dtype=at.dtype)), True, ascend


def scatter_layers(total: SparseSum, layers: Layers) -> Array:
    """The sum of entries as a vector f32[n]."""
    if plain() or backend() != "cpu" or len(total.counts) < 2:
        return scatter(total.entries, values_of(layers))
    # Layer by layer on CPU: cutting the vector into the layers' tensors then copies nothing.
    nodes, sizes = math.prod(total.entries.positions.shape[:-1]), _windows(total.counts)
    positions, values = (x.reshape(nodes, -1) for x in total.entries)
    first_entries = (np.cumsum(total.counts) - total.counts).tolist()
    # Numbers that XLA does not know, so that layers with windows of equal size compile once.
    numbers = hidden(
        first_entries + [layer.start for layer in layers], jnp.minimum(positions[0, 0], 0)
    )
    parts = []
    for i, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        first_entry, start = numbers[i], numbers[len(layers) + i]
        # A window of entries that holds the layer's. Entries of other layers lie outside of the
        # layer, for positions ascend from layer to layer, and are dropped.
        at, x = (dynamic_part(entries, first_entry, size) for entries in (positions, values))
        # Zeros, but XLA cannot know it: it would build equal constants once, and then copy them.
        zeros = jnp.full((layer.size,), jnp.minimum(first_entry, 0).astype(x.dtype))
        parts.append(added(zeros, Sparse(at - start, x)))
    return jnp.concatenate(parts)


def _windows(counts: tuple[int, ...]) -> list[int]:
    """How many entries to read for each layer: few distinct numbers, at most a quarter more in all.

    Example:
      >>> _windows((1000, 900, 10, 200))
      [1000, 1000, 200, 200]
    """
    sizes = sorted(set(counts))
    windows = dict(zip(sizes, sizes, strict=True))
    for small, large in pairwise(sizes):
        joined = {size: large if window == small else window for size, window in windows.items()}
        if sum(joined[count] for count in counts) <= 1.25 * sum(counts):
            windows = joined
    return [windows[count] for count in counts]


def subtract(v: Array, sent: Array | Sparse) -> Array:
    """v - sent, f32[n]."""
    if isinstance(sent, Sparse):
        return added(v, sent._replace(values=-sent.values))
    return v - sent


def as_vector(mean: Array | SparseSum, layers: Layers) -> Array:
    """A mean over nodes as f32[n]."""
    return scatter_layers(mean, layers) if isinstance(mean, SparseSum) else mean
