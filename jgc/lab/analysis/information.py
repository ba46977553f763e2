"""How much two vectors of gradients have in common: the LGC paper's histograms, and what has to stand beside them.

Symbols, as in the paper's equation (1): g_1 and g_2 are the gradients of one layer on two nodes, n values each; the two
values at the same place are one sample. All is in bits a value:

    H(g_2) = -sum p log2 p,   H(g_2 | g_1) = H(g_1, g_2) - H(g_1),   I(g_1; g_2) = H(g_2) - H(g_2 | g_1)     (1)

with p the shares of the samples in the cells of a histogram, each vector's range cut into 2^b equal cells (the paper: b
up to 32). The share I / H(g_2) is what the paper calls common information.

What such a histogram measures depends on n. With far fewer samples than cells nearly every sample has a cell for
itself. Then H(g_1), H(g_2) and H(g_1, g_2) are all close to log2 n whatever the data, so I is close to log2 n as well
and the share close to 1: of independent vectors, too. Therefore every estimate has beside it

    the same of a pair whose order is shuffled: what is left when nothing is shared;
    Miller and Madow's correction of the bias, (occupied cells - 1) / 2n nats for each entropy, good to first order;
    a nearest-neighbour estimate, which has no cells (Kraskov et al. 2004, as scikit-learn has it);
    -1/2 log2(1 - rho^2): what a Gaussian pair of the same correlation shares.

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
    """What a histogram of 2^bits cells a vector says of a pair; in bits a value.

    Attributes:
      bits: b.
      entropy: H(g_2).
      conditional: H(g_2 | g_1).
      mutual: I(g_1; g_2).
      shuffled: I of the same vectors, one of them in another order.
      corrected: I with Miller and Madow's correction.
      corrected_shuffled: likewise of the shuffled pair.
      alone: share of the samples that have a cell of the joint histogram for themselves.
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
        """Of the entropy that is common, as the paper counts; 0 where there is no entropy."""
        return self.mutual / self.entropy if self.entropy > 0 else 0.0

    @property
    def shuffled_share(self) -> float:
        """The same of the shuffled pair."""
        return self.shuffled / self.entropy if self.entropy > 0 else 0.0


class Pair(NamedTuple):
    """All that is measured of two nodes' gradients of a layer.

    Attributes:
      n: values.
      histograms: by number of cells.
      neighbours: I by nearest neighbours, bits a value.
      neighbours_shuffled: the same of the shuffled pair.
      gaussian: I of a Gaussian pair with this correlation; inf where it is 1.
      correlation: rho, Pearson's.
      cosine: of the two vectors, whose means are not subtracted.
    """

    n: int
    histograms: tuple[Histogram, ...]
    neighbours: float
    neighbours_shuffled: float
    gaussian: float
    correlation: float
    cosine: float


def measure(a: np.ndarray, b: np.ndarray, bits: Sequence[int] = BITS, neighbours: int = NEIGHBOURS) -> Pair:
    """Everything about a pair.

    Args:
      a: g_1, f32[n], finite.
      b: g_2, f32[n], finite.
      bits: of the histograms.
      neighbours: values that the nearest-neighbour estimate takes, spread over the layer at random.

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
    """The cell of each value, i64[n]: x's range cut into 2^bits equal ones, from 0.

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
    found = [np.unique(cells(x, bits), return_inverse=True, return_counts=True) for x in (a, b)]
    (_, i, of_a), (_, j, of_b) = found
    joint, mixed = _joint(i, j, len(of_b)), _joint(i, j[order], len(of_b))
    h_a, h_b, h_ab, h_mixed = (entropy(counts) for counts in (of_a, of_b, joint, mixed))
    # each entropy lacks (occupied - 1) / 2n nats
    lacks = [(len(of_a) + len(of_b) - len(x) - 1) / (2 * a.size * math.log(2)) for x in (joint, mixed)]
    mutual, shuffled = h_a + h_b - h_ab, h_a + h_b - h_mixed
    alone = float(np.mean(joint == 1) * len(joint) / a.size)
    return Histogram(bits, h_b, h_ab - h_a, mutual, shuffled, mutual + lacks[0], shuffled + lacks[1], alone)


def _joint(i: np.ndarray, j: np.ndarray, width: int) -> np.ndarray:
    """Samples in each occupied cell of the joint histogram: ranks of occupied cells, so that their product fits."""
    codes = np.sort(i.astype(np.int64) * width + j)
    ends = np.flatnonzero(np.diff(codes, append=-1))
    return np.diff(ends, prepend=-1)


def entropy(counts: np.ndarray) -> float:
    """Of a histogram with these counts, in bits.

    Example:
      >>> entropy(np.array([2, 1, 1]))
      1.5
    """
    p = counts / counts.sum()
    return float(abs(np.sum(p * np.log2(p))))


def by_neighbours(a: np.ndarray, b: np.ndarray) -> float:
    """I by the distances to the three nearest neighbours, in bits; never below 0. Ties are broken by noise.

    Its standard deviation is about 1 / sqrt(n) bits where little is shared. Of two vectors that are equal, whose I is
    infinite, it finds what n values can show: some bits less than log2 n.
    """
    from sklearn.feature_selection import mutual_info_regression

    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(mutual_info_regression(a[:, None], b, random_state=0)[0]) / math.log(2)


def gaussian(rho: float) -> float:
    """-1/2 log2(1 - rho^2), the bits a value that a Gaussian pair of that correlation shares; inf for 1 and -1.

    Example:
      >>> round(gaussian(0.5), 4), gaussian(1.0)
      (0.2075, inf)
    """
    return -0.5 * math.log2(1 - rho * rho) if rho * rho < 1 else math.inf


def correlation_of(bits: float) -> float:
    """The correlation of a Gaussian pair that shares so many bits a value: the inverse of `gaussian`.

    Example:
      >>> round(correlation_of(gaussian(0.5)), 6)
      0.5
    """
    return math.sqrt(max(0.0, 1 - 2.0 ** (-2 * bits)))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; 0 where one does not vary."""
    return cosine(a - a.mean(), b - b.mean())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """From -1 to 1; 0 where one is zero.

    Example:
      >>> cosine(np.array([1.0, 0.0]), np.array([1.0, 1.0])).__round__(4)
      0.7071
    """
    norms = math.sqrt(float(a @ a) * float(b @ b))
    return max(-1.0, min(1.0, float(a @ b) / norms)) if norms > 0 else 0.0
