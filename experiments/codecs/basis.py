"""A learned code on trial: coefficients of each layer's gradient in bases learned from earlier mean gradients.

A layer's gradient is a matrix G [r, c] (inputs by outputs). U [r, r] and V [c, c] are the eigenvectors of sum G G' and
sum G' G over the mean gradients of the steps learned from, and C = U' G V. Each node sends the coefficients that were
largest on average in those steps: the same on all nodes, so positions cost nothing. They are quantised to a few bits,
relative to their root mean square in those steps and to the node's scale of each of 8 groups. The decoder takes
their mean, times a gain for each group, fitted to the true mean on a few of those steps.

All nodes hold those mean gradients after an uncompressed phase, so each can compute bases, positions and spreads, and
none are sent. Only the gains need the nodes' messages on a few such steps: 8 numbers, once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.codecs.trivial import quantise
from jgc.layout.pack import Packing

SHARES = (0.0002, 0.002, 0.01, 0.05, 0.2)  # coefficients kept, of n
BITS = (1, 2, 4, 32)
GROUPS = 8
FITTED = 3  # steps on which the gains are fitted


class Part(NamedTuple):
    """A layer and its bases."""

    start: int
    u: np.ndarray  # [r, r]
    v: np.ndarray  # [c, c]


class Basis(NamedTuple):
    """A learned basis.

    Attributes:
      parts: one a layer.
      order: coefficients, the largest on average first, i[n].
      spread: root mean square of the mean's coefficients, f32[n].
      fitted: coefficients of all nodes on the steps for gains, [steps, K, n].
    """

    parts: tuple[Part, ...]
    order: np.ndarray
    spread: np.ndarray
    fitted: np.ndarray


def learn(g: np.ndarray, packing: Packing) -> Basis:
    """From recorded steps f32[S, K, n]."""
    means = np.stack([sample.mean(0) for sample in g])
    shapes = _shapes(packing)
    parts = tuple(_part(means, layer.start, shape) for layer, shape in zip(packing.layers, shapes, strict=True))
    energy = np.mean([forward(parts, sample) ** 2 for sample in means], axis=0)
    chosen = np.linspace(0, len(g) - 1, min(FITTED, len(g))).astype(int)
    fitted = np.stack([[forward(parts, node) for node in g[i]] for i in chosen])
    return Basis(parts, np.argsort(-energy), np.maximum(np.sqrt(energy), 1e-20), fitted)


def _shapes(packing: Packing) -> list[tuple[int, int]]:
    """Rows and columns of each layer; biases and norms are one row."""
    of = {leaf.start: leaf.shape for leaf in packing.leaves if len(leaf.shape) > 1}
    columns = [of[layer.start][-1] if layer.start in of else layer.size for layer in packing.layers]
    return [(layer.size // c, c) for layer, c in zip(packing.layers, columns, strict=True)]


def _part(means: np.ndarray, start: int, shape: tuple[int, int]) -> Part:
    r, c = shape
    if r == 1:
        return Part(start, np.eye(1), np.eye(c))
    a = means[:, start : start + r * c].reshape(-1, r, c)
    return Part(start, _vectors(np.tensordot(a, a, ((0, 2), (0, 2)))), _vectors(np.tensordot(a, a, ((0, 1), (0, 1)))))


def _vectors(gram: np.ndarray) -> np.ndarray:
    """Eigenvectors, largest eigenvalue first."""
    return np.linalg.eigh(gram)[1][:, ::-1]


def forward(parts: tuple[Part, ...], g: np.ndarray) -> np.ndarray:
    """f32[n] -> coefficients f32[n]."""
    return np.concatenate([(p.u.T @ _matrix(p, g) @ p.v).ravel() for p in parts])


def backward(parts: tuple[Part, ...], c: np.ndarray) -> np.ndarray:
    """The inverse of `forward`."""
    return np.concatenate([(p.u @ _matrix(p, c) @ p.v.T).ravel() for p in parts])


def _matrix(part: Part, flat: np.ndarray) -> np.ndarray:
    r, c = len(part.u), len(part.v)
    return flat[part.start : part.start + r * c].reshape(r, c)


def words(share: float, bits: int) -> tuple[str, str]:
    """Name and setting for the table."""
    return f"{bits}-bit coefficients in learned bases", f"{share:.2%} of n"


def code(basis: Basis, share: float, bits: int) -> Callable[[np.ndarray], tuple[np.ndarray, float]]:
    """The code of a share of the coefficients in `bits` bits each: coefficients f32[K, n] -> (their mean, bits).

    It stays in coefficients: the bases are orthonormal, so errors and cosines equal the gradients'.
    """
    coefficients = basis.order[: max(GROUPS, round(share * len(basis.order)))]
    group = np.arange(coefficients.size) * GROUPS // coefficients.size
    num, den = np.zeros(GROUPS), np.zeros(GROUPS)
    for step in basis.fitted:
        z, true = _mean(step[:, coefficients], basis.spread[coefficients], group, bits), step[:, coefficients].mean(0)
        num, den = num + np.bincount(group, z * true), den + np.bincount(group, z * z)
    gains = (num / np.where(den > 0, den, 1.0))[group]
    return partial(_coded, basis.spread[coefficients], coefficients, group, gains, bits)


def _coded(spread, coefficients, group, gains, bits: int, c: np.ndarray) -> tuple[np.ndarray, float]:
    out = np.zeros(c.shape[1])
    out[coefficients] = gains * _mean(c[:, coefficients], spread, group, bits)
    return out, len(c) * (bits * coefficients.size + (32 * GROUPS if bits < 32 else 0))


def _mean(c: np.ndarray, spread: np.ndarray, group: np.ndarray, bits: int) -> np.ndarray:
    """The mean over nodes of their quantised coefficients c f32[K, kept]."""
    if bits == 32:
        return c.mean(0)
    size = np.bincount(group)
    scales = [np.sqrt(np.bincount(group, (row / spread) ** 2) / size)[group] * spread for row in c]
    return np.mean([quantise(row, scale, bits) for row, scale in zip(c, scales, strict=True)], axis=0)
