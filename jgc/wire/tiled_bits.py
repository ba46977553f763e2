"""`jgc.wire.bits` for a TPU: the same words, in tiles of 8 x 128, unpacked block by block.

A field of w bits of n codes is u32[w, T, 8, 128], n = 32 T tiles, and the codes are u32[32, T, 8,
128]: word tile [i % w, t] holds the fields of code tiles [i, t]. XLA for TPU fuses all steps of
that if no shape but the first axis ever changes, and if that axis is cut once for all widths: into
[32 / w1, w1 / w2, ..., w_last].
"""

from functools import reduce
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.types import Array
from jgc.wire.bits import LANES, TILE, fields_of

SHAPE = (8, LANES)  # of a tile


def first_axis(bits: int) -> tuple[int, ...]:
    """How the 32 of codes u32[32, T, 8, 128] are cut up.

    Example:
      >>> first_axis(9), first_axis(4), first_axis(7)
      ((4, 8, 1), (8, 4), (8, 2, 2, 1))
    """
    widths = [width for _, width in fields_of(bits)]
    return (32 // widths[0], *(a // b for a, b in pairwise(widths)), widths[-1])


def unpack_block(words: Array, bits: int, node: int | Array, start: Array, tiles: int) -> Array:
    """A block of one node's codes, u32[*first_axis, tiles, 8, 128].

    Args:
      words: of all nodes, u32[K, bits, T, 8, 128].
      bits: of a code.
      node: whose.
      start: of the block, in [0, T).
      tiles: of the block.
    """
    axis, codes, at = first_axis(bits), [], 0
    for i, (low, width) in enumerate(fields_of(bits)):
        x = lax.dynamic_slice(words, (node, at, start, 0, 0), (1, width, tiles, *SHAPE))
        x = x.reshape(*[1] * (i + 1), *axis[i + 1 :], tiles, *SHAPE)
        shift = _place(axis) // np.uint32(width) * np.uint32(width)
        codes.append(((x >> shift) & np.uint32(2**width - 1)) << np.uint32(low))
        at += width
    return reduce(jnp.bitwise_or, codes)


def _place(axis: tuple[int, ...]) -> Array:
    """0 to 31 along the first axis as it is cut up."""
    place, stride = jnp.uint32(0), 32
    for i, size in enumerate(axis):
        stride //= size
        place = place + lax.broadcasted_iota(jnp.uint32, (*axis, 1, 1, 1), i) * np.uint32(stride)
    return place


def tiles_of(words: int, bits: int) -> int:
    """T of so many words; 0 if they are not whole tiles."""
    return 0 if words % (bits * TILE) else words // (bits * TILE)
