"""Trivial codes: those that learn nothing.

Each is a function of all nodes' gradients f32[K, n] that returns the decoded mean f32[n] and the bits that all nodes
send up. Positions are counted as Elias-Fano codes layer by layer, scales and means as 32 bits each.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jgc.layout.pack import Layers, values_of, whole as one_layer
from jgc.selection.selector import Selector
from jgc.wire.elias_fano import elias_fano_bits

Code = Callable[[np.ndarray], tuple[np.ndarray, float]]  # f32[K, n] -> (mean f32[n], bits that all nodes send up)
# Levels of |x| / rms with the least squared error for a normal x (Max 1960), by bits with the sign's.
LEVELS = {
    1: np.array([0.798]),
    2: np.array([0.4528, 1.510]),
    3: np.array([0.2451, 0.7560, 1.344, 2.152]),
    4: np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
}


def codes(layers: Layers, alphas: Sequence[float]) -> list[tuple[str, str, Code]]:
    """Name, setting and function of all of them."""
    out: list[tuple[str, str, Code]] = []
    whole = (one_layer(values_of(layers), "all"),)
    for alpha in alphas:
        setting = f"alpha {alpha:g}"
        out.append(("only the leader's exact values", setting, partial(leader_alone, layers, alpha)))
        out.append(("leader's signs, each node's means", setting, partial(signs_means, layers, alpha)))
        for bits in (2, 3, 4):
            name = f"{bits}-bit values at the leader's positions"
            out.append((name, setting, partial(at_leaders, layers, alpha, bits)))
        for bits in (2, 32):  # 32: exact, the best that any code of these values can do
            name = f"{bits}-bit values where the leader's whole gradient is largest"
            out.append((name, setting, partial(at_leaders, whole, alpha, bits)))
        for bits in (1, 2, 3, 4):
            name = f"{bits}-bit values at each node's positions"
            out.append((name, setting, partial(at_own, layers, alpha, bits)))
            out.append((f"{name} over all layers", setting, partial(at_own, whole, alpha, bits)))
    return out


class _Chosen:
    """The largest values of v f32[n] in each layer: positions, their layers, and the bits of the positions."""

    def __init__(self, v: np.ndarray, layers: Layers, alpha: float):
        counts = Selector(alpha).counts(layers)
        ends = [slice(layer.start, layer.start + layer.size) for layer in layers]
        at = [
            end.start + np.sort(np.argpartition(-np.abs(v[end]), count - 1)[:count])
            for end, count in zip(ends, counts, strict=True)
        ]
        self.positions, self.ids = np.concatenate(at), np.repeat(np.arange(len(layers)), counts)
        self.bits = sum(position_bits(layer.size, count) for layer, count in zip(layers, counts, strict=True))

    def means(self, x: np.ndarray) -> np.ndarray:
        return np.bincount(self.ids, x) / np.bincount(self.ids)

    def quantised(self, x: np.ndarray, bits: int) -> np.ndarray:
        """x f32[mu] in `bits` bits a value, one scale a layer."""
        return quantise(x, np.sqrt(self.means(x * x))[self.ids], bits)


    def fitted(self, x: np.ndarray, bits: int) -> tuple[np.ndarray, int]:
        """x f32[mu] by sign and levels fitted to each layer's magnitudes, and the bits of the levels."""
        out, sent = np.zeros_like(x), 0
        for layer in range(self.ids[-1] + 1):
            magnitudes = np.abs(x[self.ids == layer])
            levels = fit_levels(magnitudes, 2 ** (bits - 1))
            nearest = np.abs(magnitudes[:, None] - levels).argmin(1)
            out[self.ids == layer] = np.sign(x[self.ids == layer]) * levels[nearest]
            sent += 32 * levels.size
        return out, sent


def fit_levels(magnitudes: np.ndarray, count: int, rounds: int = 10) -> np.ndarray:
    """At most `count` levels with little squared error (Lloyd 1982), from groups of equal size.

    Example:
      >>> fit_levels(np.array([1.0, 1.2, 5.0, 5.4]), 2)
      array([1.1, 5.2])
    """
    ordered = np.sort(magnitudes)
    levels = np.array([part.mean() for part in np.array_split(ordered, min(count, ordered.size))])
    for _ in range(rounds):
        nearest = np.digitize(ordered, 0.5 * (levels[1:] + levels[:-1]))
        filled = np.bincount(nearest, minlength=levels.size)
        levels = np.where(filled, np.bincount(nearest, ordered, levels.size) / np.maximum(filled, 1), levels)
    return levels


def position_bits(n: int, k: int) -> float:
    """Bits of k sorted positions out of n by Elias-Fano, or of a bit map if that is less; none for all n.

    Example:
      >>> position_bits(1024, 8), position_bits(10, 10)
      (72.0, 0.0)
    """
    return 0.0 if n == k else float(min(n, elias_fano_bits(n, k)))


def quantise(x: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """The sign and the nearest of 2^(bits - 1) levels of |x| / scale."""
    levels = LEVELS[bits]
    index = np.digitize(np.abs(x) / np.where(scale > 0, scale, 1.0), 0.5 * (levels[1:] + levels[:-1]))
    return np.sign(x) * levels[index] * scale


def _placed(positions: np.ndarray, x: np.ndarray, n: int) -> np.ndarray:
    out = np.zeros(n)
    out[positions] = x
    return out


def leader_alone(layers, alpha, g):
    """The first node's largest values stand for the mean."""
    chosen = _Chosen(g[0], layers, alpha)
    return _placed(chosen.positions, g[0][chosen.positions], g.shape[1]), chosen.bits + 32 * chosen.ids.size


def signs_means(layers, alpha, g):
    """The leader's positions and signs, and for each node and layer the mean of its values times these signs."""
    chosen = _Chosen(g[0], layers, alpha)
    x = g[:, chosen.positions]
    signs = np.where(x[0] < 0, -1.0, 1.0)
    means = np.mean([chosen.means(signs * node) for node in x], axis=0)
    bits = chosen.bits + chosen.ids.size + 32 * len(g) * len(layers)
    return _placed(chosen.positions, signs * means[chosen.ids], g.shape[1]), bits


def at_leaders(layers, alpha, bits, g):
    """Each node's values at the leader's positions in `bits` bits; 32 means exact."""
    chosen = _Chosen(g[0], layers, alpha)
    exact = bits == 32
    mean = np.mean(
        [node[chosen.positions] if exact else chosen.quantised(node[chosen.positions], bits) for node in g], axis=0
    )
    scales = 0 if exact else 32 * len(layers)
    return _placed(chosen.positions, mean, g.shape[1]), chosen.bits + len(g) * (bits * chosen.ids.size + scales)


def at_own(layers, alpha, bits, g):
    """Each node's largest values, at positions that differ by node, in `bits` bits."""
    total, sent = np.zeros(g.shape[1]), 0.0
    for node in g:
        chosen = _Chosen(node, layers, alpha)
        x = node[chosen.positions]
        values, levels = chosen.fitted(x, bits)
        total[chosen.positions] += values
        sent += chosen.bits + bits * chosen.ids.size + levels
    return total / len(g), sent
