"""The measurements of `experiments information`: pairs of nodes by step and layer, cosines of all pairs."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis.information import BITS, NEIGHBOURS, Pair, measure
from experiments.analysis.recorded import Recorded, Step, read

PAPER = 32
"""Bits of the paper's histogram."""
LEAST = 100
"""Values below which a layer, such as a norm's, is left out: no estimator says anything of so few."""
MOST = 2**20
"""Values of a layer that histograms take; of more, this number at random places, the same on both nodes."""
ALL = "all layers"
FIRST = (0, 1)
"""The pair of nodes that every step has measured in full."""


class Row(NamedTuple):
    """A pair of nodes in one layer at one step."""

    step: int
    phase: str
    layer: str
    values: int  # of the layer; the pair may have taken fewer
    nodes: tuple[int, int]
    pair: Pair

    @property
    def paper(self) -> Any:
        """The paper's histogram."""
        return self.at(PAPER)

    @property
    def few(self) -> Any:
        """The finest histogram with no more pairs of cells than values."""
        return self.at(few_bits(self.pair.n))

    def at(self, bits: int) -> Any:
        """The histogram of 2^bits cells."""
        return next(h for h in self.pair.histograms if h.bits == bits)


def few_bits(n: int) -> int:
    """The bits of `Row.few`.

    Example:
      >>> few_bits(100_000), few_bits(1_000), few_bits(10)
      (8, 4, 3)
    """
    return max((bits for bits in BITS if 4**bits <= n), default=BITS[0])


class Cosine(NamedTuple):
    """Cosines between the vectors of all pairs of nodes."""

    step: int
    phase: str
    layer: str  # or ALL
    kind: str  # "gradient" or "residual"
    mean: float
    lowest: float
    highest: float


class Measured(NamedTuple):
    """The measurements of a run.

    Attributes:
      run: the recorded run.
      first: nodes 0 and 1, every step and layer, all numbers of cells: Figures 3 and 4.
      random: distinct pairs, drawn anew at each step: Figure 12. Empty with two nodes.
      cosines: of gradients and residuals.
      left_out: layers of fewer than LEAST values.
    """

    run: Recorded
    first: list[Row]
    random: list[Row]
    cosines: list[Cosine]
    left_out: tuple[str, ...]

    @property
    def rows(self) -> list[Row]:
        """All pairs, each once."""
        return [*self.first, *(row for row in self.random if row.nodes != FIRST)]

    @property
    def has_sampled(self) -> bool:
        """Whether some layers were measured by a sample of their values."""
        return any(row.pair.n < row.values for row in self.first)

    @property
    def layers(self) -> list[str]:
        """The measured layers, in the model's order."""
        return [layer for layer in self.run.layers if layer not in self.left_out]


def measure_run(run: Recorded, pairs: int = 4, neighbours: int = NEIGHBOURS, seed: int = 0) -> Measured:
    """Measure a run.

    Args:
      run: with two nodes or more.
      pairs: random pairs at each step, if there are more than two nodes.
      neighbours: values for the nearest-neighbour estimate.
      seed: of the random pairs.
    """
    sizes = {layer: int(np.prod(run.shapes[layer])) for layer in run.layers}
    out = Measured(run, [], [], [], tuple(layer for layer in run.layers if sizes[layer] < LEAST))
    rng = np.random.default_rng(seed)
    for step in read(run):
        nodes = len(step.gradients[run.layers[0]])
        drawn = _draw(rng, nodes, pairs) if nodes > 2 else set()
        for layer in out.layers:
            x = step.gradients[layer]
            some = np.sort(rng.permutation(x.shape[1])[:MOST]) if x.shape[1] > MOST else slice(None)
            for a, b in sorted(drawn | {FIRST}):
                first, other = x[a, some], x[b, some]
                bits = BITS if (a, b) == FIRST else (few_bits(first.size), PAPER)
                measured = measure(first, other, bits, neighbours)
                row = Row(step.step, step.phase, layer, sizes[layer], (a, b), measured)
                if (a, b) == FIRST:
                    out.first.append(row)
                if (a, b) in drawn:
                    out.random.append(row)
        out.cosines.extend(cosines(step))
    return out


def _draw(rng: np.random.Generator, nodes: int, pairs: int) -> set[tuple[int, int]]:
    """Distinct random pairs of nodes, the lower number first; all pairs if there are no more."""
    every = list(combinations(range(nodes), 2))
    return {every[i] for i in rng.choice(len(every), min(pairs, len(every)), replace=False)}


def cosines(step: Step) -> Iterator[Cosine]:
    """Cosines of gradients and of residuals, by layer and over all layers; none for residuals of zeros.

    Where some layers have residuals, the gradients' cosine over all layers is that of these, to compare the two.
    """
    for kind, arrays in (("gradient", step.gradients), ("residual", step.residuals)):
        products = {layer: _products(x) for layer, x in arrays.items()}
        common = [products[layer] for layer in step.residuals or products]
        if len(common) > 1:
            products[ALL] = sum(common, np.zeros(()))
        for layer, gram in products.items():
            pairs = pairwise(gram)
            if pairs.size:
                yield Cosine(step.step, step.phase, layer, kind, *map(float, (pairs.mean(), pairs.min(), pairs.max())))


def _products(x: np.ndarray) -> np.ndarray:
    """Inner products of all nodes' vectors: [K, n] -> f64[K, K]."""
    x = x.astype(np.float64)
    return x @ x.T


def pairwise(gram: np.ndarray) -> np.ndarray:
    """Cosines of all pairs from inner products f64[K, K]; pairs with a vector of zeros are left out.

    Example:
      >>> pairwise(np.array([[1.0, 1.0, 0.0], [1.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))
      array([0.5])
    """
    norms = np.sqrt(np.diag(gram))
    a, b = np.triu_indices(len(gram), 1)
    there = norms[a] * norms[b] > 0
    return gram[a, b][there] / (norms[a] * norms[b])[there]


def histogram_table(measured: Measured) -> list[dict[str, Any]]:
    """A row for each pair and number of cells."""
    return [
        {**_of(row), "bits": h.bits, "entropy": h.entropy, "conditional_entropy": h.conditional, "mutual": h.mutual,
         "share": h.share, "mutual_shuffled": h.shuffled, "share_shuffled": h.shuffled_share,
         "mutual_corrected": h.corrected, "mutual_corrected_shuffled": h.corrected_shuffled, "alone_in_cell": h.alone}
        for row in measured.rows for h in row.pair.histograms
    ]  # fmt: skip


def pair_table(measured: Measured) -> list[dict[str, Any]]:
    """A row for each pair: the estimates without cells."""
    return [
        {**_of(row), "neighbours": row.pair.neighbours, "neighbours_shuffled": row.pair.neighbours_shuffled,
         "gaussian": row.pair.gaussian, "correlation": row.pair.correlation, "cosine": row.pair.cosine}
        for row in measured.rows
    ]  # fmt: skip


def _of(row: Row) -> dict[str, Any]:
    a, b = row.nodes
    return {"step": row.step, "phase": row.phase, "layer": row.layer, "values": row.values, "measured": row.pair.n,
            "node_1": a, "node_2": b}  # fmt: skip
