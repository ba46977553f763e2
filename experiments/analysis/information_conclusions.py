"""Conclusions of `experiments information` in sentences, chosen by thresholds.

For instance, the paper's histogram says nothing of the gradients if a shuffled pair has more than 0.95 of the pair's
share.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.analysis.information import correlation_of
from experiments.analysis.information_rows import ALL, MOST, PAPER, Cosine, Measured, Row

MUCH, SOME, LITTLE = 0.5, 0.1, 0.02  # bits a value
NAMES = ((MUCH, "much"), (SOME, "something"), (LITTLE, "little"), (-math.inf, "next to nothing"))


def conclusions(measured: Measured) -> list[str]:
    """The conclusions of a run."""
    first = measured.first
    sentences = [on_histogram(first), on_common(first), *on_layers(measured), *on_training(first)]
    return [*sentences, *on_pairs(measured), *on_residuals(measured.cosines)]


def mean(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    """Mean over rows, without infinite Gaussian values."""
    values = [x for x in map(value, rows) if math.isfinite(x)]
    return float(np.mean(values)) if values else math.nan


def beyond(row: Row) -> float:
    """The nearest-neighbour estimate minus that of the shuffled pair, bits a value."""
    return row.pair.neighbours - row.pair.neighbours_shuffled


def on_histogram(rows: Sequence[Row]) -> str:
    """How far the paper's histogram depends on the number of samples."""
    share, control = mean(rows, lambda r: r.paper.share), mean(rows, lambda r: r.paper.shuffled_share)
    alone = mean(rows, lambda r: r.paper.alone)
    coarse, chance = mean(rows, lambda r: r.few.share), mean(rows, lambda r: r.few.shuffled_share)
    left = control / share if share > 0 else 1.0
    if left > 0.95:
        say = "says nothing of the gradients"
        why = "A shuffled pair shares nothing, so that this figure comes from the estimator."
    elif left > 0.5:
        say = "comes mostly from the estimator"
        why = "More than half of it is found where nothing is shared."
    else:
        say = "does not come only from the estimator"
        why = "Less than half of it is found where nothing is shared."
    return (
        f"**The paper's estimate {say}.** With 2^{PAPER} cells {share:.1%} of the entropy is common; of the same "
        f"values with one vector shuffled {control:.1%}. {why} {alone:.1%} of the values have a cell of the joint "
        "histogram for themselves. With no more cells of the pair than values it is "
        f"{coarse:.1%}, shuffled {chance:.1%}."
    )


def on_common(rows: Sequence[Row]) -> str:
    """Information shared by two nodes' gradients, by estimates without cells."""
    bits, normal = mean(rows, beyond), mean(rows, lambda r: r.pair.gaussian)
    if math.isnan(normal):
        return "**The two nodes' gradients are the same but for a factor**: everything is common to them."
    rho = math.sqrt(mean(rows, lambda r: r.pair.correlation**2))
    say = next(name for least, name in NAMES if bits >= least)
    more = bits - normal
    shape = (
        "Beyond the linear part sizes are shared: values large on one node tend to be large on the other"
        if more > max(LITTLE, 0.25 * normal)
        else "A Gaussian pair of this correlation shares about as much: what is common is its linear part"
        if more > -max(LITTLE, 0.25 * normal)
        else "The nearest neighbours find less than a Gaussian pair of this correlation shares: a few large values "
        "carry the correlation"
    )
    return (
        f"**Two nodes share {say}: {max(bits, 0.0):.3f} bits a value**, the mean over layers, by "
        f"nearest neighbours (minus that of shuffled pairs), {normal:.3f} by the correlation. A Gaussian "
        f"pair of correlation {correlation_of(bits):.2f} shares as much. The gradients' correlation is "
        f"{rho:.2f} (root mean square): one node's values predict {rho * rho:.1%} of the variance of the other's. "
        f"{shape}."
    )


def on_layers(measured: Measured) -> list[str]:
    """Figure 4: the entropy against the size, and which layers share most and least."""
    if len(measured.layers) < 3:
        return []
    by_layer = {layer: [r for r in measured.first if r.layer == layer] for layer in measured.layers}
    sentences = on_entropy(measured, by_layer) if measured.run.dtype == "float32" else []
    shared = {layer: mean(rows, beyond) for layer, rows in by_layer.items()}
    ranked = sorted(shared, key=lambda layer: shared[layer])
    least = f"Least: `{ranked[0]}` {shared[ranked[0]]:.3f}; most: `{ranked[-1]}` {shared[ranked[-1]]:.3f}."
    ends = measured.run.ends
    if ends is None or not set(ends) <= set(ranked):
        return [*sentences, f"**What layers share by nearest neighbours**, bits a value. {least}"]
    places = [ranked.index(end) + 1 for end in ends]
    holds = "holds here" if set(places) == {1, 2} else "does not hold here"
    return [
        *sentences,
        f"**The paper's claim that the first and the last layer share least {holds}.** `{ends[0]}` "
        f"{shared[ends[0]]:.3f} and `{ends[1]}` {shared[ends[1]]:.3f} bits a value by nearest neighbours, places "
        f"{places[0]} and {places[1]} of {len(ranked)} from below. {least}",
    ]


def on_entropy(measured: Measured, by_layer: Mapping[str, Sequence[Row]]) -> list[str]:
    """Whether a layer's entropy is more than the logarithm of its size."""
    sizes = [math.log2(rows[0].pair.n) for rows in by_layer.values()]
    entropies = [mean(rows, lambda r: r.paper.entropy) for rows in by_layer.values()]
    missing = [size - h for size, h in zip(sizes, entropies, strict=True)]
    far = max(missing)
    near = "is the number of its values" if far < 1 else "is near the number of its values"
    say = near if far < 3 else "depends on its values"
    so = ": its growth with the index of the layer is the layers' size" if far < 3 else ""
    some = f", of the {MOST:,} values that are taken of larger layers" if measured.has_sampled else ""
    return [
        f"**The entropy of a layer (Figure 4) {say}.** With 2^{PAPER} cells it is at most {far:.1f} bits from log2 n, "
        f"the highest that n values can have{some}{so}."
    ]


def on_training(rows: Sequence[Row]) -> list[str]:
    """Figure 3: how the shared information changes in training."""
    steps = sorted({row.step for row in rows})
    if len(steps) < 3:
        return []
    third = max(1, len(steps) // 3)
    early, late = ([r for r in rows if r.step in part] for part in (steps[:third], steps[-third:]))
    a, b = mean(early, beyond), mean(late, beyond)
    by_layer = {r.layer: mean([x for x in rows if x.layer == r.layer], beyond) for r in rows}  # no noise: layers differ
    spread = math.sqrt(sum((beyond(r) - by_layer[r.layer]) ** 2 for r in rows) / (len(rows) - len(by_layer)))
    noise = spread * math.sqrt(1 / len(early) + 1 / len(late))
    say = "stays about the same" if abs(a - b) < max(0.2 * a, 3 * noise) else "falls" if b < a else "rises"
    if max(a, b) < LITTLE:
        say = "is next to nothing throughout"
    rho = [math.sqrt(mean(part, lambda r: r.pair.correlation**2)) for part in (early, late)]
    return [
        f"**In training the shared information {say}.** Steps {steps[0]} to {steps[third - 1]}: {a:.3f} bits a value "
        f"by nearest neighbours, correlation {rho[0]:.2f}; steps {steps[-third]} to {steps[-1]}: {b:.3f} bits, "
        f"{rho[1]:.2f}. The paper's estimate goes from {mean(early, lambda r: r.paper.share):.1%} to "
        f"{mean(late, lambda r: r.paper.share):.1%}."
    ]


def on_pairs(measured: Measured) -> list[str]:
    """Figure 12: whether the choice of the two nodes matters."""
    rows = measured.random
    if not rows:
        return []
    groups = [[r for r in rows if (r.layer, r.step) == (layer, step)]
              for layer in measured.layers for step in measured.run.steps]  # fmt: skip
    spread = _within(groups, lambda r: r.pair.neighbours)
    noise = _within(groups, lambda r: r.pair.neighbours_shuffled)
    differ = (
        f"; pairs in the same layer and step differ by {spread:.3f} (standard deviation), shuffled pairs, which share "
        f"nothing, by {noise:.3f}"
        if spread is not None
        else ""
    )
    share, control = mean(rows, lambda r: r.paper.share), mean(rows, lambda r: r.paper.shuffled_share)
    return [
        f"**Random pairs of {measured.run.nodes} nodes (Figure 12)** share {mean(rows, beyond):.3f} bits a value by "
        f"nearest neighbours{differ}. The paper's estimate: {share:.1%} of the entropy, shuffled {control:.1%}."
    ]


def _within(groups: Sequence[Sequence[Row]], value: Callable[[Row], float]) -> float | None:
    """Standard deviation within groups of rows; None if each group has one row."""
    variances = [np.var([value(r) for r in rows], ddof=1) for rows in groups if len(rows) > 1]
    return math.sqrt(np.mean(variances)) if variances else None


def on_residuals(cosines: Sequence[Cosine]) -> list[str]:
    """ScaleCom's similarity: whether the nodes' residuals are alike, compared with their gradients."""
    residuals = [c for c in cosines if c.kind == "residual"]
    if not residuals:
        return []
    name = ALL if any(c.layer == ALL for c in residuals) else residuals[0].layer
    of = {kind: [c for c in cosines if c.kind == kind and c.layer == name] for kind in ("residual", "gradient")}
    start, end = of["residual"][0], of["residual"][-1]
    gradient = float(np.mean([c.mean for c in of["gradient"] if c.step >= start.step]))
    average = float(np.mean([c.mean for c in of["residual"]]))
    say = "alike" if average > 0.7 else "partly alike" if average > 0.3 else "hardly alike"
    return [
        f"**The nodes' residuals are {say}** (ScaleCom's similarity): the mean cosine between two nodes is "
        f"{average:.2f}, at step {start.step} {start.mean:.2f}, at step {end.step} {end.mean:.2f}; that of their "
        f"gradients {gradient:.2f} over the same steps. One node's largest residuals stand for all nodes' as far as "
        "this cosine is near 1."
    ]
