"""The worth of correlation between nodes: how well one node's largest values predict the mean gradient.

A leader selects its largest values of each layer, and all nodes send theirs at its positions (ScaleCom, `lgc_ring`,
`lgc_ps` with `positions="leader"`). The question is how well the leader's values predict the mean over nodes there.
Symbols: x_k, node k's values at these positions; s, the leader's signs; m_k = mean of s x_k, how far node k follows
these signs; t, the mean of x_k over all nodes. Predictions of t, each scored by its cosine with t; cosine^2 is the
share of |t|^2 that it can explain:

    leader        the leader's values, exact;
    signs         s times the mean of m_k: the leader's signs and one number a node and layer, no values at all;
    innovations   node k is s m_k + f_k (x_leader - s m_leader), f_k = m_k / m_leader between 0 and 1, with the tenth of
                  its values that this misses most exact; the leader exact: LGC there with a lossless code;
    chance        the leader's values, if the other nodes' have random signs: the leader's share in the mean,
                  without correlation.

Also: the share of the mean gradient's energy at the leader's positions, and at the best positions of equal number.

A recording of K nodes also serves for fewer nodes, by subsets, and for larger batches: the mean of m nodes' gradients
is that of one node with m times the batch, except for norms' statistics.

Source: DESIGN.md, fact 15; the rule for f_k is that of `ceiling_cosine` of `lgc_ps` with `positions="leader"`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.analysis.information_rows import ALL, LEAST
from experiments.analysis.recorded import Recorded, Step, read

ALPHAS = (0.001, 0.01, 0.1)
"""Shares of a layer's values that the leader picks."""
INNOVATIONS = 0.1
"""Share of the picked values that every node sends exactly."""
DRAWS = 4
"""Random subsets of nodes, and with them leaders, for each setting."""
FEWEST = 10
"""Picked values below which a layer has no separate row: a cosine of fewer is chance."""


class Setting(NamedTuple):
    """A case made from the recorded nodes: `nodes` nodes, each the mean of `merged` recorded ones."""

    nodes: int
    merged: int


class Worth(NamedTuple):
    """How well the mean over nodes is predicted in a layer at a step; means over draws.

    Attributes:
      step: updates made before.
      layer: its path, or ALL.
      alpha: share of the values that the leader selects.
      setting: nodes, and recorded nodes merged into each.
      picked: number of values selected.
      leader, signs, innovations, chance: cosines with the true mean at the leader's positions.
      covered: share of the mean gradient's energy at the leader's positions.
      best: the same at the mean's largest values.
    """

    step: int
    layer: str
    alpha: float
    setting: Setting
    picked: int
    leader: float
    signs: float
    innovations: float
    chance: float
    covered: float
    best: float


def settings(nodes: int) -> list[Setting]:
    """Powers of two of nodes and of merged nodes that K recorded nodes allow, and all K.

    Example:
      >>> settings(6)
      [Setting(nodes=2, merged=1), Setting(nodes=2, merged=2), Setting(nodes=4, merged=1), Setting(nodes=6, merged=1)]
    """
    powers = [2**i for i in range(nodes.bit_length()) if 2**i <= nodes]
    choices = {Setting(k, m) for k in powers[1:] for m in powers if k * m <= nodes}
    return sorted(choices | {Setting(nodes, 1)})


def measure_worth(run: Recorded, alphas: Sequence[float] = ALPHAS, draws: int = DRAWS, seed: int = 0) -> list[Worth]:
    """Measure each step, layer, alpha and setting of a run; layers of fewer than LEAST values are left out.

    Args:
      run: with two nodes or more.
      alphas: in (0, 1].
      draws: random subsets for each setting.
      seed: of the subsets.
    """
    rng = np.random.default_rng(seed)
    return [row for step in read(run) for row in _of_step(step, alphas, draws, rng)]


def _of_step(step: Step, alphas: Sequence[float], draws: int, rng: np.random.Generator) -> Iterator[Worth]:
    layers = {layer: x for layer, x in step.gradients.items() if x.shape[1] >= LEAST}
    nodes = len(next(iter(layers.values())))
    for setting in settings(nodes):
        subsets = [rng.permutation(nodes)[: setting.nodes * setting.merged] for _ in range(draws)]
        values = {  # f64[draws, alphas, 12]
            layer: np.stack([_products(merge(x, subset, setting), alphas, rng) for subset in subsets])
            for layer, x in layers.items()
        }
        for i, alpha in enumerate(alphas):
            for layer, sums in values.items():
                picked = count(alpha, layers[layer].shape[1])
                if picked >= FEWEST:
                    yield _worth(step.step, layer, alpha, setting, picked, sums[:, i])
            everything = sum(count(alpha, x.shape[1]) for x in layers.values())
            yield _worth(step.step, ALL, alpha, setting, everything, np.sum([s[:, i] for s in values.values()], axis=0))


def merge(x: np.ndarray, subset: np.ndarray, setting: Setting) -> np.ndarray:
    """Gradients of `nodes` nodes, each the mean of `merged` recorded nodes: f32[K, n] -> f64[nodes, n].

    Example:
      >>> merge(np.array([[1.0], [3.0], [5.0], [7.0]]), np.array([0, 1, 2, 3]), Setting(2, 2))
      array([[2.],
             [6.]])
    """
    return x[subset].astype(np.float64).reshape(setting.nodes, setting.merged, -1).mean(1)


def count(alpha: float, n: int) -> int:
    """Number of values that the leader selects of n."""
    return max(1, round(alpha * n))


def _products(x: np.ndarray, alphas: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Of each alpha: p.t and p.p of three predictions, t.t, and the leader's with the mean of chance; energies.

    Args:
      x: f64[K, n], the leader first.
      alphas: shares.
      rng: for signs.

    Returns:
      f64[alphas, 12]: (p.t, p.p) of leader, signs, innovations; t.t; (leader.c, c.c) with c the mean if other nodes'
      signs are random; energies of the mean gradient at the leader's positions, at the best, and everywhere.
    """
    order, mean = np.argsort(-np.abs(x[0]), kind="stable"), x.mean(0)
    largest = np.cumsum(np.sort(mean**2)[::-1])
    out = []
    for alpha in alphas:
        mu = count(alpha, x.shape[1])
        at = x[:, order[:mu]]
        lead, t = at[0], at.mean(0)
        random = at * np.where(np.arange(len(at))[:, None] == 0, 1, rng.choice((-1.0, 1.0), at.shape))
        c = random.mean(0)
        predicted = (lead, *predictions(at))
        pairs = [value for p in predicted for value in (p @ t, p @ p)]
        out.append([*pairs, t @ t, lead @ c, c @ c, t @ t, largest[mu - 1], largest[-1]])
    return np.array(out)


def predictions(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`signs` and `innovations` of the values f64[K, mu] at the leader's positions, the leader first: f64[mu] each.

    Example:
      >>> signs, innovations = predictions(np.array([[2.0, -1.0], [2.0, -1.0]]))
      >>> signs.tolist(), innovations.tolist()
      ([1.5, -1.5], [2.0, -1.0])
    """
    s = np.where(at[0] < 0, -1.0, 1.0)
    means = (at * s).mean(1, keepdims=True)
    follows = np.clip(means / means[0], 0, 1) if means[0] > 0 else np.zeros_like(means)
    guess = s * means + follows * (at[0] - s * means[0])
    missed = np.abs(at - guess)
    exact = np.argsort(-missed, axis=1, kind="stable")[:, : max(1, round(INNOVATIONS * at.shape[1]))]
    np.put_along_axis(guess, exact, np.take_along_axis(at, exact, 1), 1)
    guess[0] = at[0]
    return s * means.mean(), guess.mean(0)


def _worth(step: int, layer: str, alpha: float, setting: Setting, picked: int, sums: np.ndarray) -> Worth:
    """A row from sums of products f64[draws, 12]."""
    tt, covered, best, whole = sums[:, 6], sums[:, 9], sums[:, 10], sums[:, 11]
    leader, signs, innovations = (_mean_ratio(sums[:, i], np.sqrt(sums[:, i + 1] * tt)) for i in (0, 2, 4))
    chance = _mean_ratio(sums[:, 7], np.sqrt(sums[:, 1] * sums[:, 8]))
    shares = _mean_ratio(covered, whole), _mean_ratio(best, whole)
    return Worth(step, layer, alpha, setting, picked, leader, signs, innovations, chance, *shares)


def _mean_ratio(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over draws of a / b, with 0 for b = 0."""
    return float(np.mean(np.divide(a, b, out=np.zeros_like(a), where=b > 0)))
