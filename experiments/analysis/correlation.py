"""Linear correlation of a convolution's gradients: the measurements behind GradiVeQ's Figures 4 and 5.

Symbols, as in the paper. g: a slice, K neighbouring values of the layer's flat gradient f32[S, n]. mu: its mean over
L_t steps, its samples. U, K x d: the d principal axes of the samples. s: their variances. lambda: the loss allowed on
the samples, from which d follows by (6). The decoded slice is U U'(g - mu) + mu, (3) to (5); its loss is
|decoded - g|^2 / |g|^2.

Two bounds hold for any data and are shown next to the measurements. L_t samples minus their mean have at most L_t - 1
axes, so K/d is at least K / (L_t - 1). A random U of d columns keeps d/K of the energy.

References:
    Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN Training",
    NeurIPS 2018, Section 1 (observations 1 to 3), Section 2 (equations 3 to 5), Section 3 (equation 6).

Differs from the paper:
    1. The aggregate is the mean over nodes, not the sum (2): losses and shares of variance do not change.
    2. The paper does not say over which steps its losses are. Here: on the samples, and on steps after them.
    3. If K does not divide n, the rest at the end of a layer is in no slice; it is not measured.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jgc.compress.low_rank.slices import dimensions

POINTS = 150  # steps in Figure 4
TRIPLES = 20_000  # of a layer in Figure 4's histogram, spread evenly over it
_CHUNK = 32  # steps converted to f64 together


class Pca(NamedTuple):
    """Principal axes of samples [L, K].

    Attributes:
      mean: mu, f64[K].
      variances: s, largest first, f64[min(L - 1, K)].
      axes: f64[K, min(L - 1, K)], orthonormal columns.
    """

    mean: np.ndarray
    variances: np.ndarray
    axes: np.ndarray


def pca(samples: np.ndarray) -> Pca:
    """Mean, variances and axes of samples [L, K], by SVD of the samples minus their mean.

    Example:
      >>> pca(np.array([[0.0, 0.0], [2.0, 0.0]])).variances
      array([1.])
    """
    mean = samples.mean(0, dtype=np.float64)
    _, values, axes = np.linalg.svd(samples - mean, full_matrices=False)
    rank = min(len(samples) - 1, samples.shape[1])
    return Pca(mean, values[:rank] ** 2 / len(samples), axes[:rank].T)


def basis(samples: np.ndarray, loss: float) -> np.ndarray:
    """U f64[K, d] of samples [L, K]."""
    components = pca(samples)
    return components.axes[:, : dimensions(components.variances[None], loss)]


def by_samples(flat: np.ndarray, k: int, loss: float) -> dict[int, int]:
    """d of the first slice by its number of samples L_t: 4, 8, 16, ... and all.

    Args:
      flat: f32[S, n].
      k: slice size.
      loss: lambda.

    Example:
      >>> line = np.outer(np.arange(20.0), np.ones(6))  # one direction: one axis suffices
      >>> by_samples(line, 3, 0.01)
      {4: 1, 8: 1, 16: 1, 20: 1}

    Source: GradiVeQ paper, Section 3, "Number of iterations with uncompressed aggregation".
    """
    counts = sorted({*(2**i for i in range(2, len(flat).bit_length()) if 2**i <= len(flat)), len(flat)})
    first = slices(flat, k)[:, 0]
    return {count: dimensions(pca(first[:count]).variances[None], loss) for count in counts if count > 1}


def enough_samples(d: dict[int, int], change: float = 0.1) -> int | None:
    """The fewest samples from which on d changes by at most the share `change`; None if there are none.

    Example:
      >>> enough_samples({4: 3, 8: 7, 16: 8, 32: 8}), enough_samples({4: 3, 8: 7, 16: 15})
      (16, None)
    """
    last = list(d.values())[-1]
    counts = list(d)
    good = [c for i, c in enumerate(counts[:-1]) if all(abs(d[x] - last) <= change * last for x in counts[i:])]
    return good[0] if good else None


def random_basis(k: int, d: int, seed: int = 2018) -> np.ndarray:
    """Orthonormal columns in random directions, f64[k, d]: the control."""
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((k, d)))[0]


def slices(flat: np.ndarray, k: int) -> np.ndarray:
    """The layer's complete slices: [S, n] -> [S, n // k, k]."""
    return flat[:, : flat.shape[1] // k * k].reshape(len(flat), -1, k)


def energy(x: np.ndarray) -> np.ndarray:
    """|g|^2 in each step, all slices together: [S, M, K] -> f64[S].

    Example:
      >>> energy(np.array([[[3.0, 4.0]], [[1.0, 0.0]]]))
      array([25.,  1.])
    """
    return np.concatenate([_squares(part.astype(np.float64)) for part in _chunks(x)])


def lost(x: np.ndarray, mean: np.ndarray, *bases: np.ndarray) -> np.ndarray:
    """|decoded - g|^2 in each step, all slices together, (3) to (5): with only mu, and with each of some bases.

    U's columns are orthonormal, so the decoded slice loses |g - mu|^2 - |U'(g - mu)|^2.

    Args:
      x: slices [S, M, K].
      mean: mu of each slice, f64[M, K].
      *bases: U f64[K, d], each for all slices.

    Returns:
      f64[1 + bases, S]; the first is d = 0.
    """
    out = []
    for part in _chunks(x):
        left = part - mean
        flat, squares = left.reshape(-1, left.shape[-1]), _squares(left)
        captured = [_squares((flat @ u).reshape(*left.shape[:2], -1)) for u in bases]
        out.append(np.stack([squares, *(np.maximum(squares - energy, 0.0) for energy in captured)]))
    return np.concatenate(out, axis=1)


def _squares(x: np.ndarray) -> np.ndarray:
    """Sum of squares in each step: f64[S, M, K] -> f64[S]."""
    return np.einsum("smk,smk->s", x, x)


def _chunks(x: np.ndarray) -> list[np.ndarray]:
    return [x[i : i + _CHUNK] for i in range(0, len(x), _CHUNK)]


class Losses(NamedTuple):
    """Share of |g|^2 that is lost, over all steps and slices of a group.

    Attributes:
      mean_only: with only mu, d = 0.
      basis: with U of the first slice.
      random: with a random U of the same d.
    """

    mean_only: float
    basis: float
    random: float


class Size(NamedTuple):
    """A slice size in Figure 5.

    Attributes:
      k: K.
      aligned: "FD", "F" or "": the largest of F*D and F that divides K.
      slices: number of complete slices in the layer.
      d: axes of the first slice.
      first_samples, first_later: losses of the first slice, on the samples of its basis and on the steps after them.
      others_samples, others_later: of all other slices.
    """

    k: int
    aligned: str
    slices: int
    d: int
    first_samples: Losses
    first_later: Losses
    others_samples: Losses
    others_later: Losses


def sizes(shape: Sequence[int]) -> list[int]:
    """Slice sizes to try on a kernel (H, W, D, F), up to half of it: multiples of F*D and others between them.

    Example:
      >>> sizes((3, 3, 2, 8))
      [4, 8, 12, 16, 20, 28, 32, 36, 44, 48, 52, 60, 64, 68]
    """
    n, fd, f = int(np.prod(shape)), shape[-1] * shape[-2], shape[-1]
    small = [f // 2, *(f * 2**i for i in range(fd.bit_length()) if f * 2**i < fd), fd * 3 // 4]
    around = [fd * j + shift for j in range(1, n // fd + 1) for shift in (0, fd // 4, fd // 2 + f // 2, fd * 3 // 4)]
    return sorted({k for k in [*small, *around] if 2 <= k <= n // 2})


def sweep(flat: np.ndarray, shape: Sequence[int], samples: int, loss: float, ks: Sequence[int] = ()) -> list[Size]:
    """Figure 5: the loss of the first slice's basis by slice size.

    Args:
      flat: [S, n], steps of a layer's aggregated gradient.
      shape: (H, W, D, F).
      samples: L_t, the first steps.
      loss: lambda.
      ks: slice sizes; `sizes` if not given.
    """
    return [size(flat, shape, samples, loss, k) for k in ks or sizes(shape)]


def size(flat: np.ndarray, shape: Sequence[int], samples: int, loss: float, k: int) -> Size:
    """One slice size of `sweep`."""
    x = slices(flat, k)
    mean = x[:samples].mean(0, dtype=np.float64)
    u = basis(x[:samples, 0], loss)
    control, losses = random_basis(*u.shape), []
    for part, mu in ((x[:, :1], mean[:1]), (x[:, 1:], mean[1:])):
        whole, left = energy(part), lost(part, mu, u, control)
        for steps in (slice(samples), slice(samples, None)):
            losses.append(Losses(*(share(losses_of[steps], whole[steps]) for losses_of in left)))
    first_samples, first_later, others_samples, others_later = losses
    return Size(
        k, _alignment(k, shape), x.shape[1], u.shape[1], first_samples, first_later, others_samples, others_later
    )


def _alignment(k: int, shape: Sequence[int]) -> str:
    depth, filters = shape[-2:]
    return "FD" if k % (filters * depth) == 0 else "F" if k % filters == 0 else ""


def share(left: np.ndarray, whole: np.ndarray) -> float:
    """Lost energy over energy, summed over steps; 0 if there is no energy."""
    return float(left.sum()) / float(whole.sum()) if whole.sum() else 0.0


def spared(left: float, without: float) -> float:
    """Share of the loss `without` that is spared if the loss is `left`; 0 if there is no loss.

    Example:
      >>> spared(0.25, 1.0)
      0.75
    """
    return 1 - left / without if without else 0.0


def shares(points: np.ndarray) -> np.ndarray:
    """Share of variance of each principal axis, largest first; zeros if nothing varies.

    Args:
      points: [..., S, 3], S steps of three values.

    Returns:
      f64[..., 3].

    Example:
      >>> shares(np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])).round(6)
      array([1., 0., 0.])
    """
    left = points - points.mean(-2, keepdims=True, dtype=np.float64)
    values = np.maximum(np.linalg.eigvalsh(np.swapaxes(left, -1, -2) @ left)[..., ::-1], 0.0)
    total = values.sum(-1, keepdims=True)
    return values / np.where(total > 0, total, 1.0)


def two_axes(flat: np.ndarray, shuffled: bool = False, seed: int = 0) -> np.ndarray:
    """Share of variance in the first two principal axes of three neighbours, f64[T].

    T = n // 3, or about `TRIPLES` of them, evenly spread over the layer.

    Args:
      flat: steps of a layer's gradient, [S, n].
      shuffled: shuffle the steps of each value by itself first, which removes all correlation: the control. The excess
        over two thirds then comes from unequal variances and from few steps.
      seed: of the order.
    """
    every = max(1, flat.shape[1] // 3 // TRIPLES)
    triples = np.moveaxis(slices(flat, 3)[:, ::every], 0, 1)  # [T, S, 3]
    if shuffled:
        triples = np.random.default_rng(seed).permuted(triples, axis=1)
    return shares(triples)[:, :2].sum(1)
