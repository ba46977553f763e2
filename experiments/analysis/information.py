"""Information shared by two vectors of gradients: the LGC paper's histograms, and controls.

Symbols, as in the paper's equation (1): g_1 and g_2 are the gradients of one layer on two nodes, n values each; the two
values at one position are one sample. All figures are in bits a value:

    H(g_2) = -sum p log2 p,   H(g_2 | g_1) = H(g_1, g_2) - H(g_1),   I(g_1; g_2) = H(g_2) - H(g_2 | g_1)     (1)

with p the shares of the samples in the cells of a histogram, each vector's range cut into 2^b equal cells (the paper: b
up to 32). The share I / H(g_2) is what the paper calls common information.

Such a histogram depends on n. With far fewer samples than cells nearly every sample has a cell to itself. Then H(g_1),
H(g_2) and H(g_1, g_2) are all close to log2 n for any data, so I is close to log2 n and the share close to 1, even for
independent vectors. Therefore each estimate has controls:

    the same estimate of a shuffled pair, which shares nothing;
    Miller and Madow's correction of the bias, (occupied cells - 1) / 2n nats for each entropy, good to first order;
    a nearest-neighbour estimate, which has no cells (Kraskov et al. 2004, as scikit-learn has it);
    -1/2 log2(1 - rho^2): the information of a Gaussian pair with the same correlation.

References:
    Abrahamyan et al. 2021, "Learned Gradient Compression for Distributed Deep Learning", TNNLS, Section III.
    Miller 1955, "Note on the bias of information estimates"; Paninski 2003, "Estimation of entropy and mutual
    information"; Kraskov, Stoegbauer, Grassberger 2004, "Estimating mutual information".
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BITS = (3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
"""Cells tried, as powers of two; the last is the paper's."""
NEIGHBOURS = 10_000
"""Values of a layer that the nearest-neighbour estimate takes; it needs seconds for ten times as many."""


class Histogram(NamedTuple):
    """The figures of a pair by a histogram of 2^bits cells a vector, in bits a value.

    Attributes:
      bits: b.
      entropy: H(g_2).
      conditional: H(g_2 | g_1).
      mutual: I(g_1; g_2).
      shuffled: I of the shuffled pair.
      corrected: I with Miller and Madow's correction.
      corrected_shuffled: likewise of the shuffled pair.
      alone: share of the samples with a cell of the joint histogram to themselves.
    """

    bits: int
    entropy: float
    conditional: float
    mutual: float
    shuffled: float
    corrected: float
    corrected_shuffled: float
    alone: float

    @property
    def share(self) -> float:
        """Common share of the entropy, as the paper counts; 0 without entropy."""
        return self.mutual / self.entropy if self.entropy > 0 else 0.0

    @property
    def shuffled_share(self) -> float:
        """The same of the shuffled pair."""
        return self.shuffled / self.entropy if self.entropy > 0 else 0.0


class Pair(NamedTuple):
    """The measurements of two nodes' gradients of a layer.

    Attributes:
      n: values.
      histograms: by number of cells.
      neighbours: I by nearest neighbours, bits a value.
      neighbours_shuffled: the same of the shuffled pair.
      gaussian: I of a Gaussian pair with this correlation; inf for correlation 1.
      correlation: rho, Pearson's.
      cosine: of the two vectors, means included.
    """

    n: int
    histograms: tuple[Histogram, ...]
    neighbours: float
    neighbours_shuffled: float
    gaussian: float
    correlation: float
    cosine: float


def measure(a: np.ndarray, b: np.ndarray, bits: Sequence[int] = BITS, neighbours: int = NEIGHBOURS) -> Pair:
    """Measure a pair.

    Args:
      a: g_1, f32[n], finite.
      b: g_2, f32[n], finite.
      bits: of the histograms.
      neighbours: values for the nearest-neighbour estimate, drawn from the layer at random.

    Example:
      >>> x = np.random.default_rng(0).standard_normal(1000)
      >>> pair = measure(x, x, bits=(4,))
      >>> pair.histograms[0].share, pair.gaussian
      (1.0, inf)
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    rng = np.random.default_rng(a.size)
    order = rng.permutation(a.size)
    some = rng.permutation(a.size)[:neighbours]
    rho = correlation(a, b)
    return Pair(
        n=a.size,
        histograms=tuple(histogram(a, b, each, order) for each in bits),
        neighbours=by_neighbours(a[some], b[some]),
        neighbours_shuffled=by_neighbours(a[some], b[order][some]),
        gaussian=gaussian(rho),
        correlation=rho,
        cosine=cosine(a, b),
    )


def cells(x: np.ndarray, bits: int) -> np.ndarray:
    """The cell of each value, i64[n], from 0: 2^bits equal cells over x's range.

    Example:
      >>> cells(np.array([0.0, 0.4, 0.6, 1.0]), 1).tolist(), cells(np.ones(2), 32).tolist()
      ([0, 0, 1, 1], [0, 0])
    """
    low, width = x.min(), float(np.ptp(x))
    if width == 0:
        return np.zeros(x.shape, np.int64)
    return np.minimum((x - low) / width * 2.0**bits, 2**bits - 1).astype(np.int64)


def histogram(a: np.ndarray, b: np.ndarray, bits: int, order: np.ndarray) -> Histogram:
    """Equation (1) by histograms of 2^bits cells a vector, and its controls.

    Args:
      a: g_1, f64[n].
      b: g_2, f64[n].
      bits: from 1 to 32.
      order: i64[n], of b's values in the shuffled pair.
    """
    counted = [np.unique(cells(x, bits), return_inverse=True, return_counts=True) for x in (a, b)]
    (_, i, of_a), (_, j, of_b) = counted
    joint, mixed = _joint(i, j, len(of_b)), _joint(i, j[order], len(of_b))
    h_a, h_b, h_ab, h_mixed = (entropy(counts) for counts in (of_a, of_b, joint, mixed))
    # each entropy lacks (occupied - 1) / 2n nats
    lacks = [(len(of_a) + len(of_b) - len(x) - 1) / (2 * a.size * math.log(2)) for x in (joint, mixed)]
    mutual, shuffled = h_a + h_b - h_ab, h_a + h_b - h_mixed
    alone = float(np.mean(joint == 1) * len(joint) / a.size)
    return Histogram(bits, h_b, h_ab - h_a, mutual, shuffled, mutual + lacks[0], shuffled + lacks[1], alone)


def _joint(i: np.ndarray, j: np.ndarray, width: int) -> np.ndarray:
    """Samples in each occupied cell of the joint histogram. Cells are ranked first, so that pairs fit an integer."""
    codes = np.sort(i.astype(np.int64) * width + j)
    ends = np.flatnonzero(np.diff(codes, append=-1))
    return np.diff(ends, prepend=-1)


def entropy(counts: np.ndarray) -> float:
    """Entropy of a histogram with these counts, in bits.

    Example:
      >>> entropy(np.array([2, 1, 1]))
      1.5
    """
    p = counts / counts.sum()
    return float(abs(np.sum(p * np.log2(p))))


def by_neighbours(a: np.ndarray, b: np.ndarray) -> float:
    """I by the distances to the three nearest neighbours, in bits, at least 0. Noise breaks ties.

    The standard deviation is about 1 / sqrt(n) bits if little is shared. For equal vectors, whose I is infinite, the
    estimate is some bits less than log2 n.
    """
    from sklearn.feature_selection import mutual_info_regression

    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(mutual_info_regression(a[:, None], b, random_state=0)[0]) / math.log(2)


def gaussian(rho: float) -> float:
    """Information of a Gaussian pair in bits a value, -1/2 log2(1 - rho^2); inf for rho 1 and -1.

    Example:
      >>> round(gaussian(0.5), 4), gaussian(1.0)
      (0.2075, inf)
    """
    return -0.5 * math.log2(1 - rho * rho) if rho * rho < 1 else math.inf


def correlation_of(bits: float) -> float:
    """The inverse of `gaussian`: the correlation of a Gaussian pair from its information in bits a value.

    Example:
      >>> round(correlation_of(gaussian(0.5)), 6)
      0.5
    """
    return math.sqrt(max(0.0, 1 - 2.0 ** (-2 * bits)))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; 0 if a vector does not vary."""
    return cosine(a - a.mean(), b - b.mean())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two vectors; 0 if one is zero.

    Example:
      >>> cosine(np.array([1.0, 0.0]), np.array([1.0, 1.0])).__round__(4)
      0.7071
    """
    norms = math.sqrt(float(a @ a) * float(b @ b))
    return max(-1.0, min(1.0, float(a @ b) / norms)) if norms > 0 else 0.0
