"""A rotation that spreads outliers: signs drawn once, then the Hadamard transform of every block.

    rotate(v, m) = H D v,  block by block of m consecutive values;  rotate_back inverts it

D: signs, the same on all nodes and in all steps. H: Sylvester's Hadamard matrix, H H = m I. A block
with one large value becomes m values of the same magnitude, so a code with one scale per block
loses less of the small ones. The values after the last whole block stay as they are. All nodes
rotate alike, so the mean of rotated vectors is the rotated mean.

Source: Suresh et al. 2017, "Distributed Mean Estimation with Limited Communication", ICML, Section
3; Tseng et al. 2025, "Training LLMs with MXFP4", AISTATS, Section 3.2 (blocks).

Differs from the papers
  1. Both directions multiply by powers of two whose product is 1 / m, not by 1 / sqrt(m) each: no
     product rounds, and rotated values are sqrt(2) times smaller where m is no power of four. Codes
     with scales do not notice.
  2. The signs come from a fixed seed, so that a message can be decoded without the step's key. The
     papers draw them anew in each step.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.backend import backend, plain
from jgc.types import Array

MOST = 2**16  # values of a block
_AT_ONCE = 64  # blocks that a processor transforms together
_SEED = 0


def check_block(block: int) -> None:
    """Raise ValueError unless a block is 0 (no rotation) or a power of two, 2 to 65,536."""
    if block and not (2 <= block <= MOST and block & (block - 1) == 0):
        raise ValueError(
            f"hadamard must be a power of two, 2 to {MOST}, or 0 for none, got {block}")


def rotate(v: Array, block: int) -> Array:
    """H D of every block of v f32[n], divided by 2^ceil(log2(m) / 2)."""
    return _of_blocks(v, block, lambda x: _transformed(x * _signs(block), -(-_log2(block) // 2)))


def rotate_back(v: Array, block: int) -> Array:
    """The inverse of `rotate`, f32[n].

    Example:
      >>> v = jnp.array([8.0, 0.0, 0.0, 0.0, 3.0])
      >>> jnp.abs(rotate(v, 4))
      Array([4., 4., 4., 4., 3.], dtype=float32)
      >>> jnp.abs(rotate_back(rotate(v, 4), 4))
      Array([8., 0., 0., 0., 3.], dtype=float32)
    """
    # A processor may fuse a decoder's product with the sums below, which rounds otherwise, and
    # nodes on different processors would hold other bits. A selection between them prevents that;
    # XLA removes an `optimization_barrier` before it fuses.
    v = jnp.where(v == 0, 0, v)
    return _of_blocks(v, block, lambda x: _transformed(x, _log2(block) // 2) * _signs(block))


def _of_blocks(v: Array, block: int, transform: Callable[[Array], Array]) -> Array:
    """v f32[n] with its whole blocks, as columns f32[m, blocks], transformed."""
    whole = v.size // block * block
    if not whole:
        return v

    def turned(blocks):  # as columns: every step of the transform then adds whole rows
        return transform(blocks.T).T

    blocks = v[:whole].reshape(-1, block)
    few = len(blocks) % _AT_ONCE if backend() == "cpu" and not plain() else len(blocks)
    parts = [turned(blocks[len(blocks) - few :]).reshape(-1)] if few else []
    if few < len(blocks):  # in a processor's cache
        rest = blocks[: len(blocks) - few].reshape(-1, _AT_ONCE, block)
        parts = [lax.map(turned, rest).reshape(-1), *parts]
    return jnp.concatenate([*parts, v[whole:]]) if len(parts) > 1 or whole < v.size else parts[0]


def _transformed(x: Array, halvings: int) -> Array:
    """H x / 2^halvings for x f32[m, columns], in passes of up to three of its log2(m) steps."""
    shape, half = x.shape, 1
    while half < shape[0]:
        width = min(8, shape[0] // half)
        x = x.reshape(-1, width, half, shape[1])
        x = jnp.stack(_sums_and_differences([x[:, i] for i in range(width)]), axis=1)
        half *= width
    return x.reshape(shape) * np.float32(2.0**-halvings)


def _sums_and_differences(x: list[Array]) -> list[Array]:
    """H of a list of arrays, step by step."""
    half = 1
    while half < len(x):
        x = [x[i - half] - y if i & half else y + x[i + half] for i, y in enumerate(x)]
        half *= 2
    return x


def _signs(block: int) -> np.ndarray:
    """D of a block, f32[m, 1]."""
    negative = np.random.default_rng(_SEED).random((MOST, 1)) < 0.5
    return np.where(negative[:block], np.float32(-1), np.float32(1))


def _log2(block: int) -> int:
    return block.bit_length() - 1
