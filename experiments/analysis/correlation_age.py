"""Observation 3 of GradiVeQ, time-domain invariance: the loss of a basis by its age, the steps since its samples.

Symbols and reference as in `experiments.analysis.correlation`.
"""

from typing import NamedTuple

import numpy as np

from experiments.analysis.correlation import basis, energy, lost, random_basis, share, slices

RENEWED = 25  # steps until a basis is renewed


class Ageing(NamedTuple):
    """Losses over the age of the basis.

    Attributes:
      k: slice size.
      d: axes of the first slice.
      d_own: number of axes of the other slices' bases, their mean.
      age: steps since the last sample, i[S]; the samples have ages up to 0.
      energy: |g|^2 in each step of the first slice and of the others, {"first", "others"}: f64[S].
      lost: |decoded - g|^2 in each step, {curve: f64[S]}; curves are named in `CURVES`. NaN where a curve has no value.
    """

    k: int
    d: int
    d_own: float
    age: np.ndarray
    energy: dict[str, np.ndarray]
    lost: dict[str, np.ndarray]


CURVES = {
    "first": "first slice, its basis",
    "first mean": "first slice, means only",
    "first renewed": f"first slice, basis and mean renewed every {RENEWED} steps",
    "others": "other slices, the first's basis",
    "others own": "other slices, each its basis (s = 1)",
    "others mean": "other slices, means only",
    "others random": "other slices, a random basis",
    "others renewed": f"other slices, bases and means renewed every {RENEWED} steps",
}


def ageing(flat: np.ndarray, k: int, samples: int, loss: float) -> Ageing:
    """Observation 3: the loss of a basis by its age.

    The renewed curves are the losses of bases of the `samples` steps just before. A rise in them as well is not due to
    age.

    Args:
      flat: [S, n].
      k: slice size.
      samples: L_t, the first steps.
      loss: lambda.
    """
    x = slices(flat, k)
    mean = x[:samples].mean(0, dtype=np.float64)
    bases = [basis(x[:samples, m], loss) for m in range(x.shape[1])]
    first, others = x[:, :1], x[:, 1:]
    first_mean, first_basis = lost(first, mean[:1], bases[0])
    others_mean, others_basis, others_random = lost(others, mean[1:], bases[0], random_basis(*bases[0].shape))
    left = {
        "first": first_basis,
        "first mean": first_mean,
        "others": others_basis,
        "others own": sum(lost(x[:, m : m + 1], mean[m : m + 1], bases[m])[1] for m in range(1, x.shape[1])),
        "others mean": others_mean,
        "others random": others_random,
    }
    renewed = _renewed(x, samples, loss)
    left |= {"first renewed": renewed[:, 0], "others renewed": renewed[:, 1:].sum(1)}
    whole = {"first": energy(first), "others": energy(others)}
    d_own = float(np.mean([u.shape[1] for u in bases[1:]]))
    return Ageing(k, bases[0].shape[1], d_own, np.arange(len(x)) - samples + 1, whole, left)


def _renewed(x: np.ndarray, samples: int, loss: float) -> np.ndarray:
    """Energy lost by each slice, f64[S, M], with bases of the `samples` steps before each block of `RENEWED`."""
    out = np.full(x.shape[:2], np.nan)
    for start in range(samples, len(x), RENEWED):
        before, block = x[start - samples : start], x[start : start + RENEWED]
        for m in range(x.shape[1]):
            mu = before[:, m].mean(0, dtype=np.float64)[None]
            out[start : start + RENEWED, m] = lost(block[:, m : m + 1], mu, basis(before[:, m], loss))[1]
    return out


def losses_by_age(ages: Ageing, lowest: int, highest: int) -> dict[str, float]:
    """Loss of each curve over the steps of ages `lowest` to `highest`; NaN if it has none."""
    at = (ages.age >= lowest) & (ages.age <= highest)
    return {
        name: share(left[at], ages.energy[name.split()[0]][at]) if at.any() else float("nan")
        for name, left in ages.lost.items()
    }
