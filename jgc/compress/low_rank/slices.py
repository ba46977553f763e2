"""Slices of convolution gradients, their principal components, and the codes made with them
(GradiVeQ).

A kernel [height, width, depth, filters] has the memory order of the paper's Figure 3a: filters vary
fastest, then depth, width and height. A slice is K consecutive values; K is a multiple of depth *
filters. The last slice of a layer is padded with zeros.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.layout.pack import Layer
from jgc.nodes.placing import of_first_process
from jgc.types import Array, Nodes

Rows = tuple[Array, ...]  # per layer f32[bases, L, K]: samples, or the basis, one direction per row
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Sliced(NamedTuple):
    """One layer's slices. Static."""

    start: int  # of the layer in the flat vector
    size: int  # values of the layer
    width: int  # K, values in a slice
    count: int  # type: ignore[assignment]  # number of slices; shadows tuple.count
    reuse: int  # s, number of slices that share a basis

    @property
    def bases(self) -> int:
        """How many bases the layer has."""
        return -(-self.count // self.reuse)


def block_of(shape: Sequence[int]) -> int:
    """F * D, the number of values per tap of a kernel [..., D, F]."""
    return math.prod(shape[-2:])


def is_convolution(leaf: Any, max_slice: int) -> bool:
    """Whether a leaf is a kernel [..., D, F] with taps of at most `max_slice` values."""
    is_kernel = jnp.issubdtype(leaf.dtype, jnp.inexact) and len(leaf.shape) > 2
    return is_kernel and 0 < block_of(leaf.shape) <= max_slice


def plan(
    layers: Sequence[Layer], slice_taps: int, max_slice: int, reuse: int
) -> tuple[Sliced, ...]:
    """The slices of every layer of a vector that holds only convolutions: K = `slice_taps` F D, or
    fewer taps where that exceeds `max_slice`; `reuse` is s, or 0 for one basis a layer."""
    out = []
    for layer in layers:
        block = block_of(layer.shape)
        width = block * min(slice_taps, max_slice // block, layer.size // block)
        count = -(-layer.size // width)
        out.append(Sliced(layer.start, layer.size, width, count, min(reuse or count, count)))
    return tuple(out)


def slices(flat: Array, layer: Sliced) -> Array:
    """The slices of a layer, f32[n] -> f32[count, K]."""
    values = flat[layer.start : layer.start + layer.size]
    behind = layer.count * layer.width - layer.size
    return jnp.pad(values, (0, behind)).reshape(layer.count, layer.width)


def no_rows(layers: Sequence[Sliced], counts: Sequence[int]) -> Rows:
    """Zeros for `counts` samples, or directions, of the first slice of every s slices."""
    return tuple(jnp.zeros((layer.bases, count, layer.width), jnp.float32)
                 for layer, count in zip(layers, counts, strict=True))  # fmt: skip


def add_sample(layers: Sequence[Sliced], rows: Rows, mean: Array, index: Array) -> Rows:
    """Write the first slices of a mean gradient f32[n] into the samples, at `index` i32[]."""
    return tuple(lax.dynamic_update_index_in_dim(r, slices(mean, layer)[:: layer.reuse], index, 1)
                 for layer, r in zip(layers, rows, strict=True))  # fmt: skip


# --- principal components, between two phases -----------------------------------------------------


def principal(samples: Array, count: Array, centred: bool = True) -> tuple[Array, Array]:
    """Principal components of f32[bases, L, K]: energies f32[bases, r], largest first, and
    directions f32[bases, r, K], with r = min(L, K).

    The first `count` of L samples are valid, the others are zero. If `centred`, their mean is
    subtracted. Energies are sums over samples, not means.

    Source: GradiVeQ paper, Section 2, after (5).
    """
    valid = (jnp.arange(samples.shape[1]) < count)[:, None]
    x = samples
    if centred:
        x = jnp.where(valid, samples - samples.sum(1, keepdims=True) / count, 0)
    if samples.shape[1] < samples.shape[2]:
        _, s, directions = jnp.linalg.svd(x, full_matrices=False)
        return s**2, directions
    u, s, _ = jnp.linalg.svd(jnp.einsum("glk,glm->gkm", x, x, precision=lax.Precision.HIGHEST))
    return s, jnp.swapaxes(u, 1, 2)


_principal = jax.jit(principal, static_argnums=2)


def components(
    samples: Array, taken: Array, centred: bool, nodes: Nodes
) -> tuple[np.ndarray, np.ndarray]:
    """`principal` of the newest samples, on one device of each process; all use the first one's."""
    count = max(min(int(taken), samples.shape[1]), 1)
    energies, directions = _principal(np.asarray(samples), np.float32(count), centred)
    return of_first_process(energies, nodes), of_first_process(directions, nodes)


def dimensions(energies: np.ndarray, loss: float) -> int:
    """d: the fewest components, at least 1, with which no basis loses more than the share `loss` of
    its energies f32[bases, r].

    Example:
      >>> dimensions(np.array([[6.0, 3.0, 1.0]]), loss=0.2)
      2

    Source: GradiVeQ paper, (6).
    """
    most = 1
    for base in np.asarray(energies, np.float64):
        left = np.append(np.cumsum(base[::-1])[::-1], 0.0)  # left[d]: beyond the first d components
        most = max(most, int(np.argmax(left <= loss * left[0])))
    return most


# --- codes ----------------------------------------------------------------------------------------


def codes(
    layers: Sequence[Sliced], rows: Rows, d: Sequence[int], x: Array, start: int, stop: int
) -> Array:
    """Values start to stop of the code of x f32[n] (its mean subtracted), (3): d values a slice."""
    out, at = [x[:0]], 0  # `x[:0]`: an empty part, too, must vary between nodes
    for layer, basis, size in zip(layers, rows, d, strict=True):
        a, b = (min(max(bound - at, 0), layer.count * size) for bound in (start, stop))
        if a < b:
            first, last = a // size, -(-b // size)
            products = _products(layer, basis, size, slices(x, layer), first, last)
            out.append(products[a - first * size :][: b - a])
        at += layer.count * size
    return jnp.concatenate(out)


def _products(layer: Sliced, basis: Array, d: int, x: Array, first: int, last: int) -> Array:
    """Codes of slices first to last - 1 of a layer, basis by basis."""
    out = []
    for g in range(first // layer.reuse, -(-last // layer.reuse)):
        rows = x[max(first, g * layer.reuse) : min(last, (g + 1) * layer.reuse)]
        out.append(_matmul(rows, basis[g, :d].T).reshape(-1))
    return jnp.concatenate(out)


def decoded(layers: Sequence[Sliced], rows: Rows, d: Sequence[int], code: Array) -> Array:
    """Decode a code to f32[n], (5), without adding the mean."""
    out, at = [jnp.zeros((0,), jnp.float32)], 0
    for layer, basis, size in zip(layers, rows, d, strict=True):
        x = code[at : at + layer.count * size].reshape(layer.count, size)
        back = [_matmul(x[g * layer.reuse :][: layer.reuse], basis[g, :size])
                for g in range(layer.bases)]  # fmt: skip
        out.append(jnp.concatenate(back).reshape(-1)[: layer.size])
        at += layer.count * size
    return jnp.concatenate(out)


def code_size(layers: Sequence[Sliced], d: Sequence[int]) -> int:
    """Number of values in the code of a whole vector."""
    return sum(layer.count * size for layer, size in zip(layers, d, strict=True))
