"""Positions of the k largest magnitudes of a range, exact, in little more than one read of it.

`lax.top_k` runs all n values through a heap on CPU, and sorts them all on a GPU. This file takes two steps:

1. Divide the range into blocks of b neighbouring values and keep the k blocks with the largest maxima. Ties between
   maxima go to the lower block. This is the only pass over all n values.
2. Keep the k largest of the k b values in these blocks. Ties go to the lower position.

The result is exact, ties included. Take a value x at position p in a block that was dropped. The maximum of every kept
block either exceeds x, or equals both x and the maximum of p's block. In the second case the kept block is the lower
one, so its maximum lies at a position below p. Hence k values come before x, and x is not among the first k.

Both steps solve the same problem, without sorting: on CPU by `jgc.selection.threshold`, on GPU by
`jgc.selection.top_k_digits`. TPUs have blocks of their width: `jgc.selection.top_k_tiles`.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend
from jgc.selection.threshold import GROUP, LANES, PADDING, entries_at, largest_of_parts, parts_of, whole_groups
from jgc.selection.top_k_digits import block_for, largest_by_digits
from jgc.selection.top_k_tiles import Range, bits_of, largest_in_tiles
from jgc.types import Array

Variant = Literal["blocks", "threshold", "plain"]


def largest_positions(values: Array, k: int, variant: Variant | None = None) -> Array:
    """Positions of the k entries of largest magnitude, ascending, i32[k]; ties go to the lower position.

    NaN counts as larger than infinity; 0.0 and -0.0 are equal.

    Args:
      values: f32[n], n < 2^31.
      k: how many, static, 0 <= k <= n.
      variant: "blocks": both steps above; "threshold": the digit search on all values; "plain": sorted `lax.top_k`.
        All return the same. Default: the fastest for these sizes.

    Raises:
      ValueError: k is not between 0 and n.

    Example:
      >>> largest_positions(jnp.array([1.0, -3.0, 0.0, 3.0, 3.0]), 2)
      Array([1, 3], dtype=int32)
    """
    return largest_in_ranges(values, [Range(0, values.size, k)], variant)


def largest_in_ranges(values: Array, ranges: Sequence[Range], variant: Variant | None = None) -> Array:
    """`largest_positions` for every range of a vector, in one program. Many ranges compile as fast as one.

    Args:
      values: f32[n].
      ranges: static, of any sizes.
      variant: for all ranges. Default: the fastest for their sizes.

    Returns:
      i32[mu], positions in `values`, ascending within each range, one range after the other; mu is the sum of all k.

    Raises:
      ValueError: a k is not between 0 and its range's size, or a range is not within the values.

    Example:
      >>> largest_in_ranges(jnp.array([1.0, -3.0, 0.0, 3.0, 3.0, 4.0]), [Range(0, 4, 1), Range(4, 2, 1)])
      Array([1, 5], dtype=int32)
    """
    for start, size, k in ranges:
        if not 0 <= k <= size:
            raise ValueError(f"k must be between 0 and {size}, the number of values, got {k}")
        if start < 0 or start + size > values.size:
            raise ValueError(
                f"a range must lie within the {values.size} values, got start {start} and size {size}"
            )
    if variant is None and backend() == "tpu":
        values = lax.optimization_barrier(values)  # or XLA computes them twice, in two layouts
        return largest_in_tiles(values, ranges)
    if backend() == "gpu" and variant != "plain":
        b = {"threshold": 1, "blocks": block_of(ranges)}
        return largest_by_digits(values, ranges, b[variant] if variant else None)
    kinds = _kinds(ranges, variant)
    parts: list[Array] = []
    found = {kind: _found_by(values, [one for one, of in zip(ranges, kinds, strict=True) if of == kind], kind, variant)
             for kind in dict.fromkeys(kinds)}  # fmt: skip
    at = dict.fromkeys(found, 0)
    for kind, group in groupby(zip(ranges, kinds, strict=True), key=lambda pair: pair[1]):  # neighbours are cut as one
        end = at[kind] + sum(one.k for one, _ in group)
        parts.append(found[kind][at[kind] : end])
        at[kind] = end
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), jnp.int32)


def _kinds(ranges: Sequence[Range], variant: Variant | None) -> list[str]:
    """How to select from each range: "all" or nothing, "plain", or "together" with others."""

    def separately(one: Range) -> str:
        if (variant or fastest(one.size, one.k)) != "plain" and one.k:
            return "together"
        return "all" if one.k in (0, one.size) else "plain"

    kinds = [separately(one) for one in ranges]
    large = [one for one, kind in zip(ranges, kinds, strict=True) if kind == "together"]
    if variant or not large:
        return kinds
    b = block_of(large)  # a small range joins the large ones, unless their blocks would become smaller
    return [
        "together" if kind == "plain" and block_of([one]) >= b else kind
        for one, kind in zip(ranges, kinds, strict=True)
    ]


def _found_by(values: Array, ranges: Sequence[Range], kind: str, variant: Variant | None) -> Array:
    """Positions in ranges of one kind, range after range, i32[mu]."""
    if kind == "together":
        return _selected(values, ranges, 1 if variant == "threshold" else block_of(ranges))
    if kind == "all":
        return jnp.concatenate([one.start + jnp.arange(one.k, dtype=jnp.int32) for one in ranges])
    found: dict[int, Array] = {}
    for size, k in dict.fromkeys((one.size, one.k) for one in ranges):  # ranges of equal size in one batch
        alike = [i for i, one in enumerate(ranges) if one[1:] == (size, k)]
        rows = jnp.stack([values[ranges[i].start : ranges[i].start + size] for i in alike])
        starts = np.array([[ranges[i].start] for i in alike], np.int32)
        # XLA for GPU leaves NaN out of floats if k <= 16 and a row has 1,024 or more; of integers it does not.
        magnitudes = bits_of(rows) if backend() == "gpu" else jnp.abs(rows)
        positions = starts + jnp.sort(lax.top_k(magnitudes, k)[1], axis=1)
        found |= dict(zip(alike, positions, strict=True))
    return jnp.concatenate([found[i] for i in range(len(ranges))])


def fastest(size: int, k: int) -> Variant:
    """The fastest variant: on CPU as measured by `python -m jgc bench select`, on GPU the one that reads least.

    Example:
      >>> fastest(25_600_000, 25_600), fastest(1000, 10), fastest(10**6, 10**6)
      ('blocks', 'plain', 'plain')
    """
    if backend() == "gpu":
        return "threshold" if block_for(np.array([size]), np.array([k])) == 1 else "blocks"
    return "plain" if size < 10_000 or k == size else "blocks"


def block_of(ranges: Sequence[Range]) -> int:
    """b, the largest power of two, at most 256, with b <= sqrt(2 n/k) in every range.

    Then the blocks are about as many as the values in the kept blocks. Returns 1 (no blocks) in place of 2: a
    search of all values takes no longer, and often half as long (measured for n from 1e4 to 1e7).

    Example:
      >>> [block_of([Range(0, n, k)]) for n, k in [(25_600_000, 25_600), (10**6, 250_000), (10**9, 1)]]
      [32, 1, 256]
    """
    b = 256
    while b > 1 and any(b * b * k > 2 * size for _, size, k in ranges):
        b //= 2
    return b if b > 2 else 1


def _selected(values: Array, ranges: Sequence[Range], b: int) -> Array:
    """Both steps, or only the second if b is 1: i32[mu]."""
    counts = [one.k for one in ranges]
    all_blocks = np.array([whole_groups(-(-one.size // b)) for one in ranges])
    shifts = [one.start for one in ranges] - b * _before(all_blocks)
    maxima = _maxima(values, ranges, b)
    if b == 1:
        found = largest_of_parts(maxima, parts_of(all_blocks), counts)
        return found + np.repeat(shifts, counts).astype(np.int32)
    # Constants have one entry a group, not a value: XLA takes a second for each of millions of entries.
    shift = _of_groups(shifts, all_blocks)
    # The kept blocks of each range, filled up to whole groups of values with blocks of padding.
    kept_values = np.array([whole_groups(k * b) for k in counts])
    slots, kept_before = _before(kept_values) // b, _before(counts)
    source = _of_groups(kept_before - slots, kept_values)[:, None]  # a kept block's number, less its slot's
    used = _of_groups(slots + counts, kept_values)[:, None]  # up to this slot
    end = _of_groups([one.start + one.size for one in ranges], kept_values)[:, None]
    size = int(max(sum(all_blocks), sum(kept_values)))

    def starts_of(blocks: Array) -> Array:
        return blocks * b + entries_at(shift, blocks // GROUP)

    def values_of(blocks: Array) -> Array:
        slot = jnp.arange(sum(kept_values) // b, dtype=jnp.int32).reshape(-1, GROUP // b)
        first = starts_of(blocks).at[slot + source].get(mode="clip", wrap_negative_indices=False)[..., None]
        within = jnp.arange(b, dtype=jnp.int32)
        limit = jnp.where(slot < used, end, 0)[..., None]  # a last block may end beyond its range
        found = bits_of(values.at[first + within].get(mode="clip", wrap_negative_indices=False))
        return _filled(jnp.where(within < limit - first, found, PADDING).reshape(-1), size)

    # Both steps are turns of one loop, so that XLA compiles them once.
    parts = jax.tree.map(lambda *of_step: jnp.stack(of_step), parts_of(all_blocks, size), parts_of(kept_values, size))

    def step(i, chosen):
        bits = lax.cond(i == 0, lambda blocks: _filled(maxima, size), values_of, chosen[1])
        return chosen[1], largest_of_parts(bits, jax.tree.map(lambda x: x[i], parts), counts)

    nothing = jnp.zeros_like(maxima, shape=sum(counts))
    blocks, kept = lax.fori_loop(0, 2, step, (nothing, nothing))
    block = kept // b + entries_at(source[:, 0], kept // GROUP)
    return entries_at(starts_of(blocks), block) + kept % b


def _before(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """The sum of all earlier sizes."""
    return np.cumsum(sizes) - sizes


def _of_groups(numbers: Sequence[int] | np.ndarray, sizes: np.ndarray) -> Array:
    """The number of the part that each group belongs to, i32[groups]; all sizes are whole groups."""
    return jnp.asarray(np.repeat(np.asarray(numbers), sizes // GROUP).astype(np.int32))


def _filled(bits: Array, size: int) -> Array:
    """Bits followed by padding, i32[size]."""
    return jnp.pad(bits, (0, size - bits.size), constant_values=PADDING) if bits.size < size else bits


def _maxima(values: Array, ranges: Sequence[Range], b: int) -> Array:
    """The largest of every b neighbouring magnitudes of each range, as bits, padded to whole groups: i32[m]."""
    parts = []
    for start, end in _runs(ranges, b * GROUP):
        part = bits_of(values[start:end]) if b == 1 else _block_maxima(values[start:end], b)
        parts.append(jnp.pad(part, (0, -part.size % GROUP), constant_values=PADDING) if part.size % GROUP else part)
    return jnp.concatenate(parts)


def _runs(ranges: Sequence[Range], unit: int) -> list[tuple[int, int]]:
    """Starts and ends of stretches of adjacent ranges; in each, all ranges but the last consist of whole units.

    Each stretch is one operation, so that the program does not grow with the ranges.

    Example:
      >>> _runs([Range(0, 512, 1), Range(512, 300, 1), Range(812, 256, 1)], 256)
      [(0, 812), (812, 1068)]
    """
    runs: list[tuple[int, int]] = []
    for start, size, _ in ranges:
        if runs and runs[-1][1] == start and (start - runs[-1][0]) % unit == 0:
            runs[-1] = runs[-1][0], start + size
        else:
            runs.append((start, start + size))
    return runs


def _block_maxima(values: Array, b: int) -> Array:
    """The largest of every b neighbouring magnitudes, as bits, i32[ceil(n / b)]; the last block may be shorter."""
    whole = values.size // b * b
    lanes = min(b, LANES)
    rows = bits_of(values[:whole]).reshape(-1, b // lanes, lanes)
    # Two stages, the first over an axis that leaves lanes of 8 neighbours: XLA on CPU vectorises only that, not one
    # fused loop. It reads the n values as fast as `max(abs)`: 9 ms of processor time, not 27, for 25.6M.
    maxima = jnp.max(lax.optimization_barrier(jnp.max(rows, 1)), 1)
    if whole == values.size:
        return maxima
    return jnp.concatenate([maxima, jnp.max(bits_of(values[whole:]), keepdims=True)])
