"""Positions and values of the largest entries, layer by layer, in buffers of static size."""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend
from jgc.layout.opaque import dynamic_part, hidden, node_by_node
from jgc.layout.pack import Layers, values_of
from jgc.selection.top_k import Range, largest_in_ranges
from jgc.types import Array
from jgc.wire import elias_fano
from jgc.wire.bits import LANES, TILE
from jgc.wire.sums import range_sums

_PAST_ALL = np.iinfo(np.int32).max  # a position past the end of every vector


class Sparse(NamedTuple):
    """Some entries of a flat vector: positions i32[..., k], ascending and none twice, and values f32[..., k]."""

    positions: Array
    values: Array


class Unordered(Sparse):
    """Entries whose positions need not ascend. XLA for TPU sorts them at every use, which takes seconds to compile."""


class SparseSum(NamedTuple):
    """A vector f32[n] as a sum of entries: values at equal positions add up.

    Attributes:
      entries: positions i32[..., mu] and values f32[..., mu].
      counts: how many of the mu entries belong to each layer, in order; or one count for all of them. Static.
    """

    entries: Sparse
    counts: tuple[int, ...]


def check_alpha(alpha: float) -> None:
    """Raise ValueError unless alpha is in (0, 1]."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1] (0.001 sends 0.1 % of the values), got {alpha}")


def check_min_values(min_values: int) -> None:
    """Raise ValueError unless min_values is at least 1."""
    if min_values < 1:
        raise ValueError(f"min_values must be at least 1, got {min_values}")


def counts_per_layer(layers: Layers, alpha: float, min_values: int = 1) -> tuple[int, ...]:
    """How many values each layer sends: the share alpha of its size, but at least `min_values` (or all it has).

    Example:
      >>> from jgc.layout.pack import Layer
      >>> counts_per_layer((Layer("a", 0, 5000, (50, 100)), Layer("b", 5000, 20, (20,))), 0.001)
      (5, 1)
    """
    return tuple(min(layer.size, max(min_values, round(alpha * layer.size))) for layer in layers)


def top_positions(v: Array, layers: Layers, counts: tuple[int, ...]) -> Array:
    """Positions of the entries of largest magnitude of each layer, ascending, i32[mu].

    Ties go to the lower position, so that nodes with equal values select the same.

    Args:
      v: f32[n].
      layers: ranges of v.
      counts: entries to take from each range; mu is their sum.
    """
    ranges = [Range(layer.start, layer.size, count) for layer, count in zip(layers, counts, strict=True)]
    return largest_in_ranges(v, ranges)


def layer_means(x: Array, counts: tuple[int, ...]) -> Array:
    """Mean of each layer's selected values x f32[mu], f32[layers]."""
    return range_sums(x, counts) / np.array(counts, np.float32)


def layer_starts(layers: Layers, counts: tuple[int, ...]) -> np.ndarray:
    """The start of the layer that each selected value belongs to, i32[mu]."""
    return np.repeat(np.array([layer.start for layer in layers], np.int32), counts)


def pack_positions(positions: Array, layers: Layers) -> Array:
    """Ascending positions i32[mu] in Elias-Fano code: u32[words], about 12 bits per position at 0.1 %."""
    return elias_fano.encode(positions, values_of(layers))


def unpack_positions(packed: Array, layers: Layers, counts: tuple[int, ...]) -> Array:
    """The inverse of `pack_positions`, i32[mu]."""
    return elias_fano.decode(packed, values_of(layers), sum(counts))


def scatter(sparse: Sparse, n: int) -> Array:
    """The entries in a vector of zeros, f32[n]. Values at equal positions (of several nodes) add up."""
    return added(jnp.zeros_like(sparse.values, shape=(n,)), sparse)


def added(x: Array, more: Array | Sparse) -> Array:
    """x f32[n] plus a vector f32[n], or plus entries; those at positions past the end are dropped."""
    if not isinstance(more, Sparse):
        return x + more
    if more.positions.ndim == 1:
        return x.at[_distinct(more, x.size)].add(more.values, **_promises(more))
    if backend() == "cpu":
        return added(x, Unordered(*(entries.reshape(-1) for entries in more)))
    # One node after another: a GPU adds values at equal positions in any order, but all devices need equal sums, and
    # for a TPU the positions of all nodes together would have to be sorted.
    # The first one outside of the loop: into zeros, XLA for TPU then makes these and the scatter in one pass.
    nodes = type(more)(_by_nodes(more.positions, _PAST_ALL), _by_nodes(more.values, 0))

    def add(i, x):
        def of_node(entries):
            return lax.dynamic_index_in_dim(entries, i, keepdims=False).reshape(-1)

        return added(x, jax.tree.map(of_node, nodes))

    return lax.fori_loop(1, len(nodes.values), add, add(0, x))


def _by_nodes(x: Array, unused: float) -> Array:
    """Entries [..., K, mu] node by node, [K, m]; on TPU as rows [K, m, 128] of whole tiles, filled up with `unused`.

    Rows of one node are a stretch of memory of their own. Of [K, mu] a TPU reads 8 nodes for the entries of one.
    """
    x = node_by_node(x.reshape(-1, x.shape[-1]))
    if backend() != "tpu":
        return x
    filled = jnp.pad(x, ((0, 0), (0, -x.shape[-1] % TILE)), constant_values=unused)
    return node_by_node(filled.reshape(len(x), -1, LANES))


def cleared(x: Array, sparse: Sparse) -> Array:
    """x f32[n] with zeros at the entries' positions; those past the end are dropped."""
    return x.at[_distinct(sparse, x.size)].set(0, **_promises(sparse))


def replaced(x: Array, positions: Array, values: Array) -> Array:
    """x f32[n] with values f32[k] at positions i32[k], none twice."""
    return x.at[positions].set(values, unique_indices=True)


def _promises(sparse: Sparse) -> dict[str, Any]:
    """What a scatter to positions from `_distinct` may rely on."""
    # XLA for GPU then adds without atomics. Other backends gain nothing.
    unique = backend() == "gpu"
    ascend = not isinstance(sparse, Unordered)
    return {"indices_are_sorted": ascend, "unique_indices": unique, "wrap_negative_indices": False}


def _distinct(sparse: Sparse, n: int) -> Array:
    """The positions of one node, i32[k], none twice: not those past the end of f32[n] either, which are dropped."""
    at = sparse.positions
    if backend() != "gpu":
        return at
    # Past the end an int32 wraps around to a negative position, which is dropped, too.
    return jnp.where(at < n, at, n + jnp.arange(at.size, dtype=at.dtype))


def scatter_layers(total: SparseSum, layers: Layers) -> Array:
    """The sum of entries as a vector f32[n]."""
    if backend() != "cpu" or len(total.counts) < 2:
        return scatter(total.entries, values_of(layers))
    # Layer by layer on CPU: cutting the vector into the layers' tensors then copies nothing.
    nodes = math.prod(total.entries.positions.shape[:-1])
    positions, values = (x.reshape(nodes, -1) for x in total.entries)
    ends = np.cumsum(total.counts)
    numbers = (ends - total.counts).tolist() + [layer.start for layer in layers]
    seen = hidden(numbers, jnp.minimum(positions[0, 0], 0))
    parts = []
    for layer, size, start, first in zip(
        layers, _windows(total.counts), seen[: len(layers)], seen[len(layers) :], strict=True
    ):
        # A window of entries that holds the layer's; those of other layers, which ascend, lie outside and are dropped.
        at, x = (dynamic_part(every, start, size) for every in (positions, values))
        # Zeros, but XLA cannot know it: it would build equal constants once, and then copy them.
        zeros = jnp.full((layer.size,), jnp.minimum(start, 0).astype(x.dtype))
        parts.append(added(zeros, Sparse(at - first, x)))
    return jnp.concatenate(parts)


def _windows(counts: tuple[int, ...]) -> list[int]:
    """How many entries to look at for each layer: few different numbers, for each is compiled by itself.

    They are at most a quarter more than the layers have in all.

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
