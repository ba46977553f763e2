"""Conclusions of `experiments correlation` in sentences, chosen by thresholds.

For instance, observation 2 (the first slice's basis serves the others) "holds" if the basis spares more than 0.9 of the
loss of as many random axes, and holds "in part" from 0.4.
"""

from collections.abc import Sequence

import numpy as np

from experiments.analysis.correlation import Size, spared
from experiments.analysis.correlation_age import Ageing, losses_by_age

FIRST_AGES = (1, 11, 51, 101, 201, 401, 801)  # of the ranges of ages


def on_neighbours(shares: np.ndarray, shares_found: np.ndarray, shuffled: np.ndarray) -> str:
    """Figure 4.

    Args:
      shares: of variance along each principal axis, for the triple in the picture, f64[3].
      found: shares of the first two axes together, for many triples, f64[T].
      shuffled: the same of the control.
    """
    usual, chance = float(np.median(shares_found)), float(np.median(shuffled))
    gain = spared(1 - usual, 1 - chance)
    say = "strong" if gain > 0.5 else "present, but weak" if gain > 0.1 else "hardly any"
    return (
        f"**Linear correlation of neighbours (observation 1): {say}.** In the three values of Figure 4 two principal "
        f"axes of three hold {shares[:2].sum():.1%} of the variance; in the layer's triples {usual:.1%} at the median. "
        f"Values that vary as much, but without any correlation (each one's steps shuffled), have {chance:.1%}. So the "
        f"third axis holds {1 - usual:.1%}, where it would hold {1 - chance:.1%} without correlation."
    )


def on_slices(rows: Sequence[Size], samples: int) -> list[str]:
    """Figure 5: the first slice's basis on the others, multiples of F*D against other sizes, the ratio."""
    aligned = [row for row in rows if row.aligned == "FD"]
    if not aligned:
        return ["**Other slices:** the layer has fewer than two slices of F·D values; nothing can be said of them."]
    row = aligned[0]
    on, after = row.others_samples, row.others_later
    gain = spared(after.basis, after.random)
    say = "holds" if gain > 0.9 else "holds in part" if gain > 0.4 else "does not hold here"
    return [
        f"**Spatial consistency (observation 2) {say}.** At K = F·D = {row.k:,} the first slice's {row.d} axes lose "
        f"{on.basis:.1%} of the other slices' energy on the samples and {after.basis:.1%} on later steps; as many "
        f"random axes {on.random:.1%} and {after.random:.1%}, only the means {on.mean_only:.1%} and "
        f"{after.mean_only:.1%}. So they spare {spared(on.basis, on.random):.1%} and {gain:.1%} of what random axes "
        f"lose. The first slice itself loses {row.first_samples.basis:.1%} on the samples and "
        f"{row.first_later.basis:.1%} on later steps.",
        _on_multiples(rows),
        _on_ratio(row, samples),
    ]


def _on_multiples(rows: Sequence[Size]) -> str:
    """Whether the loss drops at multiples of F*D, compared with the sizes next to them."""
    at, near = [], []
    for i, row in enumerate(rows):
        neighbours = [rows[j] for j in (i - 1, i + 1) if 0 <= j < len(rows) and rows[j].aligned != "FD"]
        if row.aligned == "FD" and neighbours:
            at.append(_figures(row))
            near.append(np.mean([_figures(other) for other in neighbours], axis=0))
    here, there = np.mean(at, axis=0), np.mean(near, axis=0)
    drop = here[1] / there[1] if there[1] else 1.0
    say = "sharply" if drop < 0.5 else "clearly" if drop < 0.9 else "a little" if drop < 0.995 else "not at all"
    return (
        f"**At multiples of F·D the loss drops {say}.** Other slices, mean over the {len(at)} multiples tried: "
        f"{here[0]:.1%} on the samples and {here[1]:.1%} on later steps; at the sizes next to them {there[0]:.1%} and "
        f"{there[1]:.1%}. On later steps the first slice's axes spare {here[2]:.1%} of what random ones lose at the "
        f"multiples, {there[2]:.1%} next to them."
    )


def _figures(row: Size) -> tuple[float, float, float]:
    after = row.others_later
    return row.others_samples.basis, after.basis, spared(after.basis, after.random)


def _on_ratio(row: Size, samples: int) -> str:
    ratio, floor = row.k / row.d, row.k / (samples - 1)
    if floor <= 1:
        return f"**Ratio.** K/d = {ratio:.1f} at K = F·D; the number of samples forces none."
    return (
        f"**Ratio.** K/d = {ratio:.1f} at K = F·D. {samples} samples of any data would give at least "
        f"{floor:.1f}, because they span at most {samples - 1} axes; what the data add is a factor of "
        f"{ratio / floor:.2f}. The loss on later steps shows whether a basis is worth anything."
    )


def on_age(age: Ageing, loss: float) -> list[str]:
    """Observation 3: the jump from the samples to later steps, and the change after it."""
    table = by_age(age)
    (_, on), (soon, early), (late, end) = table[0], table[1], table[-1]
    carries = early["first"] < 2 * max(on["first"], loss)
    say = "carries over to the next steps" if carries else "loses far more on the next steps than on its samples"
    excuse = "" if carries else " That is not age: axes made from few samples suit those samples best."
    out = [
        f"**A slice's basis {say}.** First slice: {on['first']:.1%} lost on the samples (lambda = {loss:g}), "
        f"{early['first']:.1%} at ages {soon}. Other slices, each with its basis (s = 1): {on['others own']:.1%} "
        f"and {early['others own']:.1%}.{excuse}"
    ]
    if len(table) < 3:
        return [*out, "**Time-domain invariance (observation 3):** too few later steps to say."]
    before, after = (spared(x["first"], x["first mean"]) for x in (early, end))
    say = "hardly age" if after > 0.9 * before else "age slowly" if after > 0.6 * before else "age fast"
    at_first, at_last = (max(x["first"], x["others own"]) for x in (early, end))
    if max(at_first, at_last) > 1:  # that a loss above 100 % stays where it is says nothing for the basis
        say = "are no good at any age" if at_first > 1 else "age fast"
    worse = " A mean that loses more than 100 % is a worse guess than zeros." if end["first mean"] > 1 else ""
    if max(early["others"], end["others"]) > 1:
        worse += " With the first slice's axes the others lose more than 100 %, more than zeros would."
    return [
        *out,
        f"**Time-domain invariance (observation 3): the axes {say}.** From ages {soon} to ages {late} the first "
        f"slice's loss goes from {early['first']:.1%} to {end['first']:.1%}, with only the mean from "
        f"{early['first mean']:.1%} to {end['first mean']:.1%}: the axes spare {before:.0%} of what the mean leaves, "
        f"then {after:.0%}. Axes and mean renewed just before would lose {end['first renewed']:.1%} there. Other "
        f"slices with their bases go from {early['others own']:.1%} to {end['others own']:.1%} (renewed: "
        f"{end['others renewed']:.1%}), with the first's from {early['others']:.1%} to {end['others']:.1%}, "
        f"with only the means from {early['others mean']:.1%} to {end['others mean']:.1%}.{worse}",
    ]


def by_age(age: Ageing) -> list[tuple[str, dict[str, float]]]:
    """Label and losses of the samples and of each range of ages with steps."""
    last = int(age.age[-1])
    firsts = [a for a in FIRST_AGES if a <= last]
    lasts = [*(a - 1 for a in firsts[1:]), last]
    ranges = [(f"{a} to {b}", losses_by_age(age, a, b)) for a, b in zip(firsts, lasts, strict=True)]
    return [("the samples", losses_by_age(age, int(age.age[0]), 0)), *ranges]
