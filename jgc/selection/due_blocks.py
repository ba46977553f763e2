"""Blocks of neighbouring values that are due: a step searches a few, and nodes learn which.

A value waits for hundreds of steps until it is among the largest, and most of them need not search
it. So a step searches a few blocks of each layer, the most due ones, the same on all nodes. A
position is then one among the values of these blocks: with 64 candidates for each value sent it
takes 8 bits, however long the vector is.

All nodes receive all positions, and so learn alike how often values of a block are sent. A block's
turn comes when about as many of its values should have become large as of any other block. In turns
of equal length, values that are sent often would wait longer (docs/results/learned_positions shows
the cost). Each block's rate gets a prior of 1 + mean/4, so that one early value does not starve the
others. Rates and turns are integers: nodes hold the same bits in every layout.

    rates = first(layers)
    blocks = due(rates, cut)                      # i32[m], ascending within each layer
    rates = after(rates, blocks, sent, cut, K)    # sent: i32[K, k], the block of each position
"""

from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.layout.pack import Layers
from jgc.selection.entries import entries_at
from jgc.selection.ranges import Range
from jgc.selection.top_k import largest_in_ranges
from jgc.types import Array

BLOCK = 8
_UNIT = 16  # of the rates: one value sent
_FADING = 9  # a step takes the 2^-9-th part off the rates: they stand for some 512 steps


class Rates(NamedTuple):
    """How often values of each block were sent. Equal on all nodes."""

    rate: Array  # i32[blocks], how many values of each block were sent lately
    due: Array  # i32[blocks], the block's rate, added up since it was last searched
    steps: Array  # i32[], the rate of a block of which one value is sent in every step


class Cut(NamedTuple):
    """The blocks of all layers. Static."""

    starts: np.ndarray  # i32[blocks], in the vector
    ends: np.ndarray  # i32[blocks]; a layer's last block may be shorter
    searched: tuple[Range, ...]  # the blocks of each layer, and how many a step searches
    selected: tuple[Range, ...]  # the values of these, block after block, and how many are sent
    mean: np.ndarray  # i32[blocks], values that a node sends of a block of the layer, in 2^-12

    @property
    def candidates(self) -> int:
        """How many values a step searches; a shorter block is filled up."""
        return sum(part.size for part in self.selected)


@lru_cache
def cut_in_blocks(layers: Layers, counts: tuple[int, ...], candidates: int) -> Cut:
    """The blocks of these layers, which send `counts` values, of `candidates` for each of them.

    Example:
      >>> from jgc.layout.pack import Layer
      >>> layers = (Layer("a", 0, 1000, (10, 100)), Layer("b", 1000, 40, (40,)))
      >>> cut_in_blocks(layers, (2, 1), 64).searched
      (Range(start=0, size=125, k=16), Range(start=125, size=5, k=5))
    """
    starts: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    mean: list[np.ndarray] = []
    searched: list[Range] = []
    selected: list[Range] = []
    for layer, count in zip(layers, counts, strict=True):
        blocks = np.arange(layer.start, layer.start + layer.size, BLOCK, dtype=np.int32)
        few = min(blocks.size, -(-candidates * count // BLOCK))
        searched.append(Range(sum(map(len, starts)), blocks.size, few))
        selected.append(Range(sum(part.size for part in selected), BLOCK * few, count))
        starts.append(blocks)
        ends.append(np.minimum(blocks + BLOCK, layer.start + layer.size).astype(np.int32))
        mean.append(np.full(blocks.size, max(1, 2**12 * count // blocks.size), np.int32))
    return Cut(
        np.concatenate(starts),
        np.concatenate(ends),
        tuple(searched),
        tuple(selected),
        np.concatenate(mean),
    )


def first(layers: Layers) -> Rates:
    """Initial state: no block has been sent."""
    blocks = sum(-(-layer.size // BLOCK) for layer in layers)
    return Rates(jnp.zeros((blocks,), jnp.int32), jnp.zeros((blocks,), jnp.int32), jnp.int32(0))


def due(rates: Rates, cut: Cut) -> Array:
    """The blocks to search, i32[m]: the most due of each layer, ascending; ties to the lower."""
    # Not by sorting: a large part of the blocks is due, and on CPU that takes six times as long.
    return largest_in_ranges(rates.due.astype(jnp.float32), cut.searched, blocks=True)


def after(rates: Rates, blocks: Array, sent: Array, cut: Cut, nodes: int) -> Rates:
    """The rates after a step that searched `blocks` i32[m]; nodes sent values of i32[K, k]."""
    rate, steps = _faded(rates.rate).at[sent.reshape(-1)].add(_UNIT), _faded(rates.steps) + _UNIT
    prior = _UNIT + _mean_rates(steps, cut, nodes) // 4  # so that the turn of every block comes
    return Rates(rate, rates.due.at[blocks].set(0) + rate + prior, steps)


def _mean_rates(steps: Array, cut: Cut, nodes: int) -> Array:
    """The mean rate in each block's layer, i32[blocks]."""
    each = cut.mean.astype(np.int64) * nodes
    less = max(0, int(each.max()).bit_length() - 17)  # or the product would overflow: steps < 2^14
    return steps * (each >> less).astype(np.int32) >> (12 - less)


def _faded(rate: Array) -> Array:
    """Rates a step later. What is taken off is rounded up, so that all fade in the end."""
    return rate - (rate + 2**_FADING - 1 >> _FADING)


def candidates_of(v: Array, blocks: Array, cut: Cut) -> Array:
    """The values of blocks i32[m] in a row, f32[m BLOCK]; zeros behind a shorter block."""
    at = jnp.asarray(cut.starts)[blocks][:, None] + np.arange(BLOCK, dtype=np.int32)[None]
    values = entries_at(v, jnp.minimum(at, v.size - 1))
    values = jnp.where(at < jnp.asarray(cut.ends)[blocks][:, None], values, 0).reshape(-1)
    return lax.optimization_barrier(values)  # or XLA gathers in each use of them


def positions_of(chosen: Array, blocks: Array, cut: Cut, n: int) -> Array:
    """Positions in v f32[n] of places i32[...] in the row of candidates; n behind a block's end."""
    block = blocks[chosen // BLOCK]
    at = jnp.asarray(cut.starts)[block] + chosen % BLOCK
    return jnp.where(at < jnp.asarray(cut.ends)[block], at, n)
