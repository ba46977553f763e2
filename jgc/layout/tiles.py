"""How a TPU keeps a node's vectors between steps: as rows of 128 values, filled up with zeros to whole tiles.

A TPU works on tiles of 8 x 128 values. It lays out f32[1, n], a node's vector in an array [K, n], in tiles of 1 x 128,
and f32[n] in whole ones: to move all of it from one layout into the other and back costs 16 reads of the gradient in
every step. Rows of 128 lie as f32[n] does, and nothing moves.

Other devices keep f32[n]. A step takes either form, whatever device it runs on.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend
from jgc.types import Array
from jgc.wire.bits import LANES, TILE


def in_tiles(x: Array) -> Array:
    """A vector [n] as rows [m, 128] of whole tiles, filled up with zeros.

    Example:
      >>> in_tiles(jnp.ones(1030)).shape
      (16, 128)
    """
    return jnp.pad(x, (0, -x.size % TILE)).reshape(-1, LANES)


def as_flat(x: Array) -> Array:
    """The vector [n] itself, or rows as one vector with the zeros at its end."""
    # The barrier keeps XLA from moving the reshape into the addition that follows, for which it would copy a vector.
    return x if x.ndim == 1 else lax.optimization_barrier(x.reshape(-1))


def decodes_tiles(tiled: Any, words: int, layers: Any) -> bool:
    """Whether a code of so many words is decoded by `tiled`, a `jgc.method.codec.Tiled` or None."""
    return backend() == "tpu" and tiled is not None and tiled.fits(words, layers)


def cut(x: Array, n: int) -> Array:
    """The first n values of a vector."""
    return x if x.size == n else x[:n]


def filled(x: Array, size: int) -> Array:
    """A vector with zeros behind it, `size` values in all."""
    return x if x.size == size else jnp.pad(x, (0, size - x.size))


def in_form(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Saved vectors [..., n] or rows [..., m, 128] in the other form, if that has the given shape; else unchanged.

    Example:
      >>> saved = np.ones((2, 1030))
      >>> in_form(saved, (2, 16, 128)).shape, in_form(saved, (2, 1031)).shape
      ((2, 16, 128), (2, 1030))
    """
    rows, flat = (x.shape, shape) if x.ndim > len(shape) else (shape, x.shape)
    tiles = -(-flat[-1] // TILE) * TILE if flat else 0
    if rows[:-2] != flat[:-1] or rows[-2:] != (tiles // LANES, LANES):
        return x
    values = x.reshape(*flat[:-1], -1)[..., : flat[-1]]
    behind = 0 if x.shape == rows else tiles - flat[-1]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, behind)]).reshape(shape)
