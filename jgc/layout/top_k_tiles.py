"""`largest_in_ranges` for TPUs: the same positions, found with operations on whole rows of 128 values.

A TPU works on tiles of 8 x 128 values. An axis of 8 or 32 values at the end of a shape is filled up to 128, and a
gather or scatter of single values takes as long as one of whole rows. So blocks are rows of 128 neighbouring values:

1. Keep the k rows with the largest maxima of each range. As in `jgc.layout.top_k`, they hold the k largest values.
2. Keep the k largest values of these rows.

Where k rows would be half of the values or more, the second step takes all values. Both steps are `_largest`: it finds
the k-th largest digit by digit, counts in every row how many values are chosen, and finds the row and the lane of the
i-th chosen one by comparing counts, 128 at once.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.types import Array

LANES = 128
_TILE = 8 * LANES
_CHUNK = 64  # tiles that share a threshold: counts of a chunk add up tile by tile, without moving lanes
_DIGIT = 3  # bits found in a pass: with 7 candidates a pass takes little longer than a read
_PADDING = -1  # below the bits of every magnitude
_AT_ONCE = 2**13  # rows looked at together


def largest_in_tiles(bits: Sequence[Array], counts: Sequence[int]) -> list[Array]:
    """Places of the k largest values of each array, ascending; ties go to the lower place.

    Args:
      bits: i32[n] each, not negative.
      counts: k of each array, 0 <= k <= n.

    Returns:
      i32[k] for each array.
    """
    used = [i for i, k in enumerate(counts) if k]
    found = {i: jnp.zeros((0,), jnp.int32) for i in range(len(counts))}
    if not used:
        return list(found.values())
    ks = [counts[i] for i in used]
    if 2 * LANES * sum(ks) >= sum(bits[i].size for i in used):
        return list((found | dict(zip(used, _largest([bits[i] for i in used], ks), strict=True))).values())
    rows = [_padded(bits[i], LANES).reshape(-1, LANES) for i in used]
    kept = _largest([jnp.max(x, 1) for x in rows], [min(k, x.shape[0]) for k, x in zip(ks, rows, strict=True)])
    inside = _largest([x[at].reshape(-1) for x, at in zip(rows, kept, strict=True)], ks)
    for i, at, place in zip(used, kept, inside, strict=True):
        found[i] = at[place // LANES] * LANES + place % LANES
    return list(found.values())


def _padded(x: Array, unit: int) -> Array:
    return jnp.pad(x, (0, -x.size % unit), constant_values=_PADDING) if x.size % unit else x


def _largest(parts: Sequence[Array], counts: Sequence[int]) -> list[Array]:
    """As `largest_in_tiles`, of all values and for k > 0."""
    chunk = _chunk_of([x.size for x in parts])
    chunks = [-(-x.size // (chunk * _TILE)) for x in parts]  # of each part
    tiles = jnp.concatenate([_padded(x, chunk * _TILE) for x in parts]).reshape(-1, chunk, 8, LANES)
    owner = np.repeat(np.arange(len(parts)), chunks)
    mine = owner[None, :] == np.arange(len(parts))[:, None]  # [parts, chunks]

    def of_chunks(x: Array) -> Array:  # [parts] -> [chunks]
        return jnp.sum(jnp.where(mine, x[:, None], 0), 0)

    def of_rows(x: Array) -> Array:  # [parts] -> [rows]
        return jnp.broadcast_to(of_chunks(x)[:, None], (owner.size, 8 * chunk)).reshape(-1)

    threshold = _kth_largest(tiles, mine, np.array(counts, np.int32))
    least = of_chunks(threshold)[:, None, None, None]
    # how many values of each row are above the threshold, and how many equal it, by one sum over lanes
    both = jnp.sum((tiles > least).astype(jnp.int32) + 256 * (tiles == least).astype(jnp.int32), 3).reshape(-1)
    above, equal = both & 255, both >> 8
    first = np.concatenate([[0], np.cumsum(chunks)[:-1]]) * 8 * chunk  # row of each part
    earlier = (jnp.cumsum(equal) - equal, jnp.cumsum(above) - above)
    ties = earlier[0] - of_rows(earlier[0][first])  # of the row's part, before the row
    ends = jnp.append(earlier[1][first[1:]], earlier[1][-1] + above[-1])
    missing = jnp.asarray(counts, jnp.int32) - (ends - earlier[1][first])  # of those equal to it, the first so many
    chosen = above + jnp.clip(of_rows(missing) - ties, 0, equal)
    rows, lanes = _places(tiles.reshape(-1, LANES), jnp.cumsum(chosen), threshold, counts)
    out, at = [], np.concatenate([[0], np.cumsum(counts)])
    for i in range(len(parts)):
        of = slice(at[i], at[i + 1])
        out.append((rows[of] - int(first[i])) * LANES + lanes[of])
    return out


def _chunk_of(sizes: Sequence[int]) -> int:
    """Tiles of a chunk: the largest power of two, at most `_CHUNK`, with which padding adds at most an eighth.

    Example:
      >>> _chunk_of([2**20, 2**20]), _chunk_of([2**20, 10]), _chunk_of([10, 10])
      (64, 64, 1)
    """
    chunk = _CHUNK
    while chunk > 1 and sum(-size % (chunk * _TILE) for size in sizes) > sum(sizes) // 8:
        chunk //= 2
    return chunk


def _kth_largest(tiles: Array, mine: np.ndarray, counts: np.ndarray) -> Array:
    """For each part the largest t >= 0 that at least k of its values reach, i32[parts]; highest digit first."""
    passes = -(-31 // _DIGIT)

    def refine(i, t):
        shift = _DIGIT * (passes - 1 - i)
        base = lax.optimization_barrier(jnp.sum(jnp.where(mine, t[:, None], 0), 0))[:, None, None, None]  # of chunks
        sums = [jnp.sum((tiles >= base + (digit << shift)).astype(jnp.int32), 1) for digit in range(1, 2**_DIGIT)]
        lanes = lax.optimization_barrier(sums)  # [chunks, 8, 128] each: lanes are added up only now
        of_chunks = lax.optimization_barrier(jnp.stack([jnp.sum(x, (1, 2)) for x in lanes]))  # [7, chunks]
        reached = jnp.sum(jnp.where(mine, of_chunks[:, None], 0), 2) >= counts  # [7, parts]
        fits = jnp.arange(1, 2**_DIGIT)[:, None] <= (2**31 - 1 >> shift)  # else it has wrapped around to other numbers
        return t + (jnp.sum((reached & fits).astype(jnp.int32), 0) << shift)

    return lax.fori_loop(0, passes, refine, jnp.zeros_like(tiles, shape=counts.size))


def _places(rows: Array, upto: Array, threshold: Array, counts: Sequence[int]) -> tuple[Array, Array]:
    """Row and lane of every chosen value: i32[mu] each. `upto` i32[rows]: chosen values up to the end of each row."""
    total = sum(counts)
    least = jnp.concatenate([jnp.broadcast_to(threshold[i], (k,)) for i, k in enumerate(counts)])

    def look(i: Array, least: Array) -> tuple[Array, Array]:
        row, before, after = _row_of(upto, i)
        x = rows[row]  # [m, 128]
        above, equal = x > least[:, None], x == least[:, None]
        ties = after - before - jnp.sum(above.astype(jnp.int32), 1)  # of the row, its first so many are chosen
        mask = above | (equal & (_running(equal) <= ties[:, None]))
        return row, jnp.sum((_running(mask) <= (i - before)[:, None]).astype(jnp.int32), 1)

    i = jnp.arange(total, dtype=jnp.int32)
    if total <= _AT_ONCE:
        return look(i, least)
    pad = -total % _AT_ONCE
    i, least = (jnp.pad(x, (0, pad), mode="edge").reshape(-1, _AT_ONCE) for x in (i, least))
    row, lane = lax.map(lambda one: look(*one), (i, least))
    return row.reshape(-1)[:total], lane.reshape(-1)[:total]


def _row_of(upto: Array, i: Array) -> tuple[Array, Array, Array]:
    """The first row with upto > i for each i32[m]; the count before it, and the one at its end. All i32[m]."""
    blocks = jnp.pad(upto, (0, -upto.size % LANES), mode="edge").reshape(-1, LANES)
    if blocks.shape[0] == 1:
        inside, block, start = jnp.broadcast_to(blocks, (i.size, LANES)), jnp.zeros_like(i), jnp.zeros_like(i)
    else:
        block, start, _ = _row_of(blocks[:, -1], i)
        inside = blocks[block]
    done = inside <= i[:, None]
    before = jnp.maximum(start, jnp.max(jnp.where(done, inside, 0), 1))
    after = jnp.min(jnp.where(done, jnp.int32(2**31 - 1), inside), 1)
    return block * LANES + jnp.sum(done.astype(jnp.int32), 1), before, after


def _running(mask: Array) -> Array:
    """Sums along the rows of bool[m, 128] up to each lane, i32[m, 128]: a product with a triangle, exact."""
    triangle = jnp.triu(jnp.ones((LANES, LANES), jnp.bfloat16))
    return jnp.dot(mask.astype(jnp.bfloat16), triangle, preferred_element_type=jnp.float32).astype(jnp.int32)
