"""The k largest values of every chunk of neighbouring values of a layer: made for accelerators.

Exact top-k of a layer of n values needs several passes over all n or a long sort. Chunks need
neither: each is a row of one matrix [chunks, 4096], and one search takes all rows. Sizes are
static, and no chunk waits for the others.

Chunks are cut within layers: a chunk across two layers would send nearly nothing of the layer with
the smaller gradients. A layer's last chunk may be shorter, biases and norms are one layer, and a
layer smaller than a chunk is one chunk. So a layer's number of values is known, as for exact top-k:
scales of value codes, `min_values` and shards need no other rule.

Positions travel as indices within their chunk, log2(4096) = 12 bits, if a chunk sends at most 4
values; else in Elias-Fano code over all layers, which then is shorter:

    values of 4,096    indices    Elias-Fano    entropy of the chunks     sent
                 4        12.0          12.0                     10.9     12.0 bits a position
                16        12.0          10.0                      9.2     10.0
                64        12.0           8.0                      7.4      8.0

Indices pack and unpack without a scatter or gather, which are slow on TPUs. At 4 of 4,096 they
waste only the order of a chunk's indices, log2(4!) / 4 = 1.1 bits a position.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend, plain
from jgc.layout.pack import Layers, values_of
from jgc.selection.ranges import Range, bits_of
from jgc.selection.top_k import largest_in_ranges
from jgc.types import Array
from jgc.wire import elias_fano
from jgc.wire.bits import pack_bits, unpack_bits

CHUNK = 4096
_LONGEST = 2**16
_INDICES = 4  # up to this number of values a chunk, indices are as short as Elias-Fano code


class Chunks(NamedTuple):
    """The chunks of all layers, in their order. Static."""

    length: int  # values of a whole chunk
    most: int  # k of a whole chunk, without `min_values`
    starts: np.ndarray  # i32[chunks], in the vector
    sizes: np.ndarray  # i32[chunks]
    counts: np.ndarray  # i32[chunks], the number k of values to take from each
    of_layers: tuple[int, ...]  # number of values to take from each layer


def check_chunk(alpha: float, chunk: int) -> None:
    """Raise ValueError unless chunk is a power of two, 16 to 65,536, and alpha selects in it."""
    if not 16 <= chunk <= _LONGEST or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two from 16 to {_LONGEST}, got {chunk}")
    if alpha * chunk < 1:
        raise ValueError(
            f"selection='chunks' sends at least one value of every {chunk}: the share that is sent "
            "(alpha; of egc and threshold_v what ratio and capacity come to) must be at least "
            f"1/{chunk}, got {alpha:.3g}; give a longer chunk, or selection='layer'")


@lru_cache
def cut_in_chunks(layers: Layers, alpha: float, min_values: int = 1, chunk: int = CHUNK) -> Chunks:
    """The chunks of these layers, and how many values each sends.

    A chunk sends the share alpha of its values, rounded, but at least one, and its part of the
    layer's `min_values`.

    Example:
      >>> from jgc.layout.pack import Layer
      >>> layers = (Layer("a", 0, 9000, (90, 100)), Layer("b", 9000, 20, (20,)))
      >>> cut_in_chunks(layers, 0.001).counts.tolist()
      [4, 4, 1, 1]
    """
    starts, sizes, counts, of_layers = [], [], [], []
    for layer in layers:
        whole, rest = divmod(layer.size, chunk)
        of_layer = [chunk] * whole + ([rest] if rest else [])
        k = {}
        for size in set(of_layer):
            least = max(1, ceil(min_values * size / layer.size))
            k[size] = min(size, max(least, round(alpha * size)))
        starts += [layer.start + i * chunk for i in range(len(of_layer))]
        sizes += of_layer
        counts += [k[size] for size in of_layer]
        of_layers.append(sum(k[size] for size in of_layer))
    return Chunks(
        length=chunk,
        most=round(alpha * chunk),
        starts=np.array(starts, np.int32),
        sizes=np.array(sizes, np.int32),
        counts=np.array(counts, np.int32),
        of_layers=tuple(of_layers),
    )


def largest_in_chunks(v: Array, layers: Layers, chunks: Chunks) -> Array:
    """Positions of the largest magnitudes of every chunk, ascending, i32[mu].

    Ties go to the lower position; mu is the sum of the chunks' counts.

    Example:
      >>> from jgc.layout.pack import Layer
      >>> layers = (Layer("a", 0, 20, (4, 5)), Layer("b", 20, 3, (3,)))
      >>> v = jnp.array([0.0] * 9 + [2.0, 3.0] + [1.0] * 9 + [5.0, -6.0, 6.0])
      >>> largest_in_chunks(v, layers, cut_in_chunks(layers, 1 / 16, chunk=16))
      Array([10, 16, 21], dtype=int32)
    """
    starts, sizes, counts = chunks.starts, chunks.sizes, chunks.counts
    if (counts == sizes).all():
        return jnp.arange(values_of(layers), dtype=jnp.int32)
    if plain() or backend() == "gpu":  # which searches chunks as it searches layers
        every = zip(starts.tolist(), sizes.tolist(), counts.tolist(), strict=True)
        return largest_in_ranges(v, [Range(*x) for x in every])
    # Chunks are searched in batches: the longest stretch of whole ones, which is nearly everything
    # and must not be copied, and all others joined. Shorter chunks drop their smallest values.
    # Small layers for which `min_values` asks for more have separate batches.
    searched, in_longest = np.maximum(counts, chunks.most), _in_longest(chunks)
    batches = dict.fromkeys(zip(in_longest.tolist(), searched.tolist(), strict=True))
    # The barrier keeps XLA from cutting chunks out of each layer's gradient, not out of their sum.
    v = lax.optimization_barrier(v)
    parts: list[Array] = []
    at = np.zeros(len(searched), np.int64)  # where a chunk's first position is in `parts`
    for longest, k in batches:
        batch = np.flatnonzero((searched == k) & (in_longest == longest))
        top = largest_of_rows(_rows(v, chunks, batch), k)
        top = jnp.where(np.arange(k) < counts[batch, None], top, chunks.length)
        at[batch] = sum(x.size for x in parts) + np.arange(batch.size) * k
        parts.append((jnp.sort(top, axis=1) + starts[batch, None]).reshape(-1))
    if len(parts) == 1 and (counts == searched).all():
        return parts[0]
    ranks = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return jnp.concatenate(parts)[np.repeat(at, counts) + ranks]


def _in_longest(chunks: Chunks) -> np.ndarray:
    """Which chunks belong to the longest stretch of whole ones, bool[chunks]."""
    whole = chunks.sizes == chunks.length
    stretch = np.cumsum(~whole)
    return whole & (stretch == np.bincount(stretch, whole).argmax())


def _rows(v: Array, chunks: Chunks, batch: np.ndarray) -> Array:
    """Magnitudes of some chunks, a chunk a row, f32[chunks, length]; -1 behind shorter chunks."""
    parts = []
    # Neighbouring whole chunks are cut as one, so that the program does not grow with them, and one
    # stretch is no copy.
    for first, last in stretches(chunks.starts[batch], chunks.sizes[batch], chunks.length):
        # Magnitudes by bits, which XLA on TPU fuses with slices: half the time of `jnp.abs`.
        part = lax.bitcast_convert_type(bits_of(v[first:last]), jnp.float32)
        missing = (first - last) % chunks.length
        parts.append(jnp.pad(part, (0, missing), constant_values=-1) if missing else part)
    rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return rows.reshape(-1, chunks.length)


def stretches(starts: np.ndarray, sizes: np.ndarray, length: int) -> list[tuple[int, int]]:
    """Starts and ends of the ranges that chunks form together.

    A chunk shorter than `length` ends a range.

    Example:
      >>> stretches(np.array([0, 16, 32, 35]), np.array([16, 16, 3, 16]), 16)
      [(0, 35), (35, 51)]
    """
    ends = starts + sizes
    breaks = np.flatnonzero((starts[1:] != ends[:-1]) | (sizes[:-1] < length)) + 1
    firsts, lasts = starts[[0, *breaks]], ends[[*(breaks - 1), -1]]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def largest_of_rows(rows: Array, k: int) -> Array:
    """Where the k largest values of every row are, i32[rows, k], largest first.

    Ties go to the lower position. On TPU `lax.top_k` has the fewest cycles of the ways tried
    (docs/results/chunks.md). On CPU it takes 13 ns a value: there one search finds the k blocks of
    b neighbours with the largest maxima (`jgc.selection.top_k`), and a second searches these.

    Example:
      >>> largest_of_rows(jnp.array([[1.0, 4.0, 3.0, 4.0]]), 2)
      Array([[1, 3]], dtype=int32)
    """
    length = rows.shape[1]
    b = max(b for b in (1, 8, 16, 32) if b == 1 or b * b * k <= 2 * length)
    if plain():
        return lax.top_k(rows, k)[1]
    if backend() != "cpu" or b == 1:
        # The barrier keeps XLA on TPU from copying all rows into the layout that a later sort of
        # the indices wants.
        return lax.optimization_barrier(lax.top_k(rows, k)[1].reshape(-1)).reshape(-1, k)
    # Two stages, the first over an axis that leaves 8 neighbours: XLA on CPU vectorises only that.
    lanes = lax.optimization_barrier(jnp.max(rows.reshape(-1, b // 8, 8), 1))
    maxima = jnp.max(lanes, 1).reshape(len(rows), length // b)
    blocks = jnp.sort(lax.top_k(maxima, k)[1], axis=1)
    values = jnp.take_along_axis(rows.reshape(len(rows), -1, b), blocks[:, :, None], 1)
    inner = lax.top_k(values.reshape(len(rows), k * b), k)[1]
    return jnp.take_along_axis(blocks, inner // b, 1) * b + inner % b


def largest_in_rows(x: Array, k: int) -> Array:
    """Where every row's k entries of largest magnitude are, ascending, i32[rows, k].

    Ties go to the lower position.

    Example:
      >>> largest_in_rows(jnp.array([[1.0, -4.0, 3.0, 4.0]]), 2)
      Array([[1, 3]], dtype=int32)
    """
    # XLA for GPU leaves NaN out if k <= 16 and a row has 1,024 floats or more; of integers it
    # leaves out nothing.
    magnitudes = bits_of(x) if plain() or backend() == "gpu" else jnp.abs(x)
    return jnp.sort(lax.top_k(magnitudes, k)[1], axis=1)


def pack_chunk_positions(positions: Array, layers: Layers, chunks: Chunks) -> Array:
    """Positions of `largest_in_chunks` as u32[words]: indices in chunks, or Elias-Fano code."""
    if chunks.most > _INDICES:
        return elias_fano.encode(positions, values_of(layers))
    indices = positions - np.repeat(chunks.starts, chunks.counts)
    return pack_bits(indices.astype(jnp.uint32), chunks.length.bit_length() - 1)


def unpack_chunk_positions(packed: Array, layers: Layers, chunks: Chunks) -> Array:
    """The inverse of `pack_chunk_positions`, i32[mu]."""
    mu = int(chunks.counts.sum())
    if chunks.most > _INDICES:
        return elias_fano.decode(packed, values_of(layers), mu)
    indices = unpack_bits(packed, chunks.length.bit_length() - 1, mu)
    return indices.astype(jnp.int32) + jnp.asarray(np.repeat(chunks.starts, chunks.counts))
