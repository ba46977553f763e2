"""How many values of a layer EGC sends, from the entropy of its histogram, and the threshold.

    G f32[n]    values of a layer
    N           bins of equal width between its smallest and largest value
    H           entropy of the histogram, bits
    K           the paper's constant, 2^10
    t = H / K   share of the layer's values to send, at most log2(N) / K

Source: Kuang et al. 2020, "Entropy-based Gradient Compression for Distributed Deep Learning",
Algorithm 1 and equation (2).
"""

import jax
import jax.numpy as jnp
import numpy as np

from jgc.layout.devices import not_finite
from jgc.layout.pack import Layers, layer_ids
from jgc.layout.vector import MOST_VALUES
from jgc.types import Array
from jgc.wire.sums import range_maxima

MOST_BINS = 1024
"""The most bins of a histogram: each costs a pass over the values."""


def entropy_bits(values: Array, bins: int, closed: bool = True) -> Array:
    """Entropy of the histogram of values f32[n] over bins of equal width, in bits, f32[].

    If one is not finite, H is NaN. If `closed`, the last bin includes the largest value, and H is 0
    if all values are equal. If not, as in Algorithm 1, all bins are half open, none includes the
    largest value (unless rounding puts it there), and H is NaN if all values are equal.

    Example:
      >>> float(entropy_bits(jnp.array([0.0, 1.0, 2.0, 8.0]), 2))  # three below 4, one above
      0.8112781047821045
    """
    # the width of the values can exceed the largest float, that of their halves cannot
    halves = values / 2
    low, high = jnp.min(halves), jnp.max(halves)
    edges = low + np.arange(1, bins + 1, dtype=np.float32) * (jnp.abs(high - low) / bins)
    # a loop, so that the program does not grow with the number of bins
    below = jax.lax.map(lambda edge: jnp.sum(halves < edge, dtype=jnp.int32), edges)
    if closed:
        below = below.at[-1].set(values.size)
    counts = jnp.diff(below, prepend=0).astype(jnp.float32)
    share = counts / jnp.sum(counts)
    bits = -jnp.sum(jnp.where(counts > 0, share * jnp.log2(jnp.where(counts > 0, share, 1)), 0))
    if closed:
        bits = jnp.where(high > low, bits, 0)
    return jnp.where((jnp.sum(counts) > 0) & ~not_finite(values), bits, jnp.nan)


def entropies(v: Array, layers: Layers, bins: int, closed: bool = True) -> Array:
    """The entropy of every layer of v f32[n], in bits, f32[layers]."""
    parts = [v[layer.start : layer.start + layer.size] for layer in layers]
    return jnp.stack([entropy_bits(x, bins, closed) for x in parts])


def wanted(
    bits: Array, layers: Layers, ratio: float, slots: tuple[int, ...], min_values: int = 1
) -> Array:
    """How many values each layer's entropy H f32[layers] asks for with K = `ratio`, i32[layers]: at
    least `min_values`, at most its slots; 0 if H is NaN."""
    sizes, most = np.array([layer.size for layer in layers], np.float32), np.array(slots, np.int32)
    least = np.minimum(min(min_values, MOST_VALUES), most)
    count = jnp.round(jnp.nan_to_num(bits) / ratio * sizes).astype(jnp.int32)
    return jnp.where(jnp.isnan(bits), 0, jnp.clip(count, least, most))


def ranks(magnitudes: Array, counts: tuple[int, ...]) -> Array:
    """The rank of each of f32[mu] in its layer, 0 for the largest, ties to the earlier, i32[mu].

    Example:
      >>> ranks(jnp.array([1.0, 3.0, 3.0, 2.0, 5.0]), (3, 2)).tolist()
      [2, 0, 1, 1, 0]
    """
    ids = layer_ids(counts)
    starts = np.repeat(np.cumsum((0, *counts))[:-1].astype(np.int32), counts)
    order = jnp.lexsort((-magnitudes, ids))
    rank = np.arange(ids.size, dtype=np.int32) - starts
    return jnp.zeros(magnitudes.shape, jnp.int32).at[order].set(rank)


def thresholds(magnitudes: Array, rank: Array, wanted: Array, counts: tuple[int, ...]) -> Array:
    """The magnitude of the smallest wanted value of each layer, f32[layers]; inf if none is wanted.

    `magnitudes` f32[mu] are the largest `counts` of each layer, `rank` is from `ranks`.
    """
    last = jnp.where(rank == wanted[layer_ids(counts)] - 1, magnitudes, jnp.inf)
    return -range_maxima(-last, counts)


def literal_thresholds(v: Array, layers: Layers, wanted: Array, slots: tuple[int, ...]) -> Array:
    """The thresholds of Algorithm 1, f32[layers]: each layer's `wanted`-th largest signed value, at
    most `slots`; NaN where none is wanted."""
    limits = []
    for i, layer in enumerate(layers):
        largest = jax.lax.top_k(v[layer.start : layer.start + layer.size], slots[i])[0]
        limits.append(jnp.where(wanted[i] > 0, largest[jnp.maximum(wanted[i] - 1, 0)], jnp.nan))
    return jnp.stack(limits)
