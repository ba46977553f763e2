"""How many values of a layer EGC sends: the entropy of its histogram over K, and the threshold which that gives.

    G f32[n]    values of a layer                  N   bins of equal width between its smallest and largest value
    H           entropy of the histogram, bits     K   the paper's constant, 2^10
    t = H / K   share of the layer's values to send, at most log2(N) / K

Source: Kuang et al. 2020, "Entropy-based Gradient Compression for Distributed Deep Learning", Algorithm 1 and
equation (2).
"""

import jax
import jax.numpy as jnp
import numpy as np

from jgc.method.from_step import Layers
from jgc.method.guard import not_finite
from jgc.types import Array

MOST_BINS = 1024
"""Of a histogram: each is a pass over the values."""


def entropy_bits(values: Array, bins: int, closed: bool = True) -> Array:
    """Entropy of the histogram of some values over bins of equal width, in bits, f32[].

    The bins are laid out over halves of the values, so that a width of more than the largest float is a float too.

    Args:
      values: f32[n], n > 0; where one is not finite, H is NaN. Subnormal ones may count as 0, as elsewhere in XLA.
      bins: N, 2 to `MOST_BINS`.
      closed: count the largest value in the last bin, and a histogram without width as one bin: H = 0. Otherwise as
        Algorithm 1 has it: all bins are half open, the largest value is in none of them (unless rounding puts it
        there), and without a width there is nothing to count: H is NaN.

    Example:
      >>> float(entropy_bits(jnp.array([0.0, 1.0, 2.0, 8.0]), 2))  # three below 4, one above
      0.8112781047821045
    """
    halves = values / 2
    low, high = jnp.min(halves), jnp.max(halves)
    edges = low + np.arange(1, bins + 1, dtype=np.float32) * (jnp.abs(high - low) / bins)
    below = jax.lax.map(lambda edge: jnp.sum(halves < edge, dtype=jnp.int32), edges)  # one program however many bins
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
    return jnp.stack([entropy_bits(v[layer.start : layer.start + layer.size], bins, closed) for layer in layers])


def wanted(bits: Array, layers: Layers, ratio: float, slots: tuple[int, ...], min_values: int = 1) -> Array:
    """How many values of each layer its entropy asks for, i32[layers], at least `min_values` and at most its slots.

    Args:
      bits: f32[layers], H; where it is NaN, none.
      layers: their sizes.
      ratio: K.
      slots: of each layer.
      min_values: of each layer.
    """
    sizes = np.array([layer.size for layer in layers], np.float32)
    least = np.minimum(min_values, np.array(slots))
    count = jnp.round(jnp.nan_to_num(bits) / ratio * sizes).astype(jnp.int32)
    return jnp.where(jnp.isnan(bits), 0, jnp.clip(count, least, np.array(slots, np.int32)))


def ranks(magnitudes: Array, counts: tuple[int, ...]) -> Array:
    """The rank of each value among those of its layer, 0 for the largest, ties to the earlier one, i32[mu].

    Args:
      magnitudes: f32[mu], layer by layer.
      counts: values of each layer.

    Example:
      >>> ranks(jnp.array([1.0, 3.0, 3.0, 2.0, 5.0]), (3, 2)).tolist()
      [2, 0, 1, 1, 0]
    """
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = np.repeat(np.cumsum((0, *counts))[:-1].astype(np.int32), counts)
    order = jnp.lexsort((-magnitudes, ids))
    return jnp.zeros(magnitudes.shape, jnp.int32).at[order].set(np.arange(ids.size, dtype=np.int32) - starts)


def thresholds(magnitudes: Array, rank: Array, wanted: Array, counts: tuple[int, ...]) -> Array:
    """The magnitude of the last value that is wanted of each layer, f32[layers]; infinite where none is.

    Args:
      magnitudes: f32[mu], the largest of each layer.
      rank: i32[mu], from `ranks`.
      wanted: i32[layers].
      counts: how many each layer has there.
    """
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    last = jnp.where(rank == wanted[ids] - 1, magnitudes, jnp.inf)
    return jax.ops.segment_min(last, ids, len(counts), indices_are_sorted=True)


def literal_thresholds(v: Array, layers: Layers, wanted: Array, slots: tuple[int, ...]) -> Array:
    """The threshold as Algorithm 1 selects it: the largest but so many of the values themselves, not of magnitudes.

    Args:
      v: f32[n].
      layers: of v.
      wanted: i32[layers]; where it is 0, the threshold is NaN.
      slots: the most that can be wanted of each layer.
    """
    found = []
    for i, layer in enumerate(layers):
        largest = jax.lax.top_k(v[layer.start : layer.start + layer.size], slots[i])[0]
        found.append(jnp.where(wanted[i] > 0, largest[jnp.maximum(wanted[i] - 1, 0)], jnp.nan))
    return jnp.stack(found)
