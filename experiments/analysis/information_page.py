"""`experiments information`: one page with its pictures and tables, from the recordings of one run or several."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis import information_plots as plots
from experiments.analysis.information import BITS
from experiments.analysis.information_conclusions import conclusions, mean
from experiments.analysis.information_rows import (
    ALL,
    LEAST,
    MOST,
    PAPER,
    Cosine,
    Measured,
    Row,
    histogram_table,
    measure_run,
    pair_table,
)
from experiments.analysis.recorded import Recorded, find
from experiments.analysis.tables import without_places, write_csv
from jgc.lab.shared.tables import table
from jgc.training.errors import UserError
from jgc.training.run.folder import write_whole

PAGE, HISTOGRAMS, PAIRS, COSINES = "information.md", "histograms.csv.gz", "pairs.csv.gz", "cosines.csv.gz"


def write(output: Path, folders: Sequence[Path], layers: str, pairs: int, neighbours: int, command: str) -> Path:
    """Measure, draw and write everything into a folder.

    Args:
      output: the folder.
      folders: of runs with recordings.
      layers: pattern of the layers to measure; all that were recorded if empty.
      pairs: random pairs at each step, if there are more than two nodes.
      neighbours: values of a layer for the nearest-neighbour estimate.
      command: the command line, for the page.

    Returns:
      The page.

    Raises:
      UserError: a setting is wrong, or a run's recording is missing or too small.
    """
    if pairs < 1 or neighbours < 100:
        raise UserError(f"--pairs must be at least 1 and --neighbours at least 100, got {pairs} and {neighbours}")
    runs = check_runs("information", [find(folder, layers) for folder in folders])
    output.mkdir(parents=True, exist_ok=True)
    by_run = dict(zip(names_of(runs), (measure_run(run, pairs, neighbours) for run in runs), strict=True))
    for name, measured in by_run.items():
        draw(output, name, measured)
    for file, lines in ((HISTOGRAMS, histogram_table), (PAIRS, pair_table), (COSINES, _cosine_table)):
        rows = [{"run": name, **row} for name, measured in by_run.items() for row in lines(measured)]
        write_csv(output / file, rows)
    write_whole(output / PAGE, markdown(by_run, neighbours, command).encode())
    return output / PAGE


def check_runs(what: str, runs: Sequence[Recorded]) -> Sequence[Recorded]:
    """The runs; UserError if there are none, or one has recorded too little."""
    if not runs:
        raise UserError(f"give the folders of runs that have recorded: python -m experiments {what} RUN...")
    for run in runs:
        if run.nodes < 2:
            raise UserError(f"{run.folder} has one node: what two have in common cannot be measured")
        if all(np.prod(run.shapes[layer]) < LEAST for layer in run.layers):
            raise UserError(f"{run.folder} has recorded no layer of {LEAST} values or more: {', '.join(run.layers)}")
    return runs


def names_of(runs: Sequence[Recorded]) -> list[str]:
    """A short name for each run's files: the folder's, with a number if two are the same."""
    names: list[str] = []
    for run in runs:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", run.folder.resolve().name)
        tries = [stem, *(f"{stem}-{i}" for i in range(2, len(runs) + 1))]
        names.append(next(name for name in tries if name not in names))
    return names


def draw(output: Path, name: str, measured: Measured) -> None:
    """The pictures of one run."""
    title, nodes = measured.run.title, measured.run.nodes
    plots.cells(output / f"cells-{name}.png", measured, f"Common information by the number of cells ({title})")
    plots.figure3(output / f"figure3-{name}.png", measured, f"Figure 3: information of nodes 0 and 1 ({title})")
    plots.figure4(output / f"figure4-{name}.png", measured, f"Figure 4: means over {_steps(measured)} steps ({title})")
    if measured.random:
        plots.figure12(output / f"figure12-{name}.png", measured, f"Figure 12: random pairs of {nodes} nodes ({title})")
    plots.similarity(output / f"similarity-{name}.png", measured.cosines, f"Similarity between nodes ({title})")


def _steps(measured: Measured) -> int:
    return len(measured.run.steps)


def _cosine_table(measured: Measured) -> list[dict[str, Any]]:
    return [cosine._asdict() for cosine in measured.cosines]


def markdown(by_run: dict[str, Measured], neighbours: int, command: str) -> str:
    """The page."""
    paragraphs = [
        "# What the gradients of two nodes have in common",
        f"    {without_places(command)}",
        "After Section III and Figures 3, 4 and 12 of Abrahamyan et al., Learned Gradient Compression, TNNLS 2021, "
        f"which finds about 80 % of a layer's information common to two nodes, by histograms of up to 2^{PAPER} cells. "
        "All figures are in bits a value, at one step, of the gradients that a compressor gets. *Shuffled*: the same "
        "estimate with the values of one node in a random order, so that nothing is shared. *Nearest neighbours*: "
        f"Kraskov's estimate by scikit-learn, of {neighbours:,} values of a layer at random places. *Gaussian*: -1/2 "
        "log2(1 - rho²), rho the correlation. *Bias-corrected*: Miller and Madow, first order: right only where "
        f"cells have many values each. Cells tried: 2^{', 2^'.join(map(str, BITS))}.",
        "Two independent Gaussian vectors of 100,000 values get these shares: 2^8 cells 0.03, 2^12 0.47, 2^16 0.86, "
        "2^24 and more 1.00.",
    ]
    for name, measured in by_run.items():
        paragraphs += _section(name, measured)
    paragraphs.append(f"In full: [{HISTOGRAMS}]({HISTOGRAMS}), [{PAIRS}]({PAIRS}), [{COSINES}]({COSINES}).")
    return "\n\n".join(paragraphs) + "\n"


def _section(name: str, measured: Measured) -> list[str]:
    run = measured.run
    several = f"; {len(measured.layers)} layers of {LEAST} values or more" if measured.left_out else ""
    if measured.has_sampled:
        several += f"; of layers of more than {MOST:,} values histograms take so many at random places"
    if run.dtype != "float32":
        several += (
            f". **Written in {run.dtype}**, which has few different values: with many cells the entropy is less than "
            "it was in training, and says nothing of it"
        )
    recording = f"every {run.config['record']['every']} {run.unit}, steps {run.steps[0]} to {run.steps[-1]}"
    out = [
        f"## {run.title}",
        f"`{name}`: seed {run.config['seed']}, recorded {recording}: {_steps(measured)} steps{several}.",
        "\n".join(f"- {line}" for line in conclusions(measured)),
        "The number of cells decides the estimate:",
        f"![Share of common information against the number of cells](cells-{name}.png)",
        "Figure 3: above as the paper draws it, with the shuffled pair; below by other estimates:",
        f"![Entropy and mutual information over the steps](figure3-{name}.png)",
        "Figure 4, means over the recorded steps, nodes 0 and 1:",
        f"![Entropy and mutual information by layer](figure4-{name}.png)",
        _layer_table(measured),
    ]
    if measured.random:
        out += ["Figure 12, pairs of nodes drawn at random at each step:",
                f"![Information of random pairs](figure12-{name}.png)"]  # fmt: skip
    return [*out, *_similarity(name, measured.cosines)]


_COLUMNS: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
    ("H", ".2f", lambda r: r.paper.entropy),
    ("H(g_2 given g_1)", ".2f", lambda r: r.paper.conditional),
    ("I", ".2f", lambda r: r.paper.mutual),
    ("I / H", ".1%", lambda r: r.paper.share),
    ("shuffled", ".1%", lambda r: r.paper.shuffled_share),
    ("I / H, few cells", ".1%", lambda r: r.few.share),
    ("shuffled", ".1%", lambda r: r.few.shuffled_share),
    ("I, few cells, corrected", ".3f", lambda r: r.few.corrected),
    ("nearest neighbours", ".3f", lambda r: r.pair.neighbours),
    ("shuffled", ".3f", lambda r: r.pair.neighbours_shuffled),
    ("Gaussian", ".3f", lambda r: r.pair.gaussian),
    ("correlation", ".3f", lambda r: r.pair.correlation),
    ("cosine", ".3f", lambda r: r.pair.cosine),
)


def _layer_table(measured: Measured) -> str:
    """Means over the steps, nodes 0 and 1."""
    body = []
    for layer in measured.layers:
        rows = [r for r in measured.first if r.layer == layer]
        cells = (f"{mean(rows, value):{how}}" for _, how, value in _COLUMNS)
        body.append((f"`{layer}`", f"{rows[0].values:,}", *cells))
    layers = table(("layer", "values", *(name for name, *_ in _COLUMNS)), body)
    sentence = (
        f"H, I and the first I / H are with the paper's 2^{PAPER} cells. *Few cells*: the most of those tried of which "
        "the pair has no more than there are values."
    )
    return f"{layers}\n\n{sentence}"


def _similarity(name: str, cosines: Sequence[Cosine]) -> list[str]:
    picture = f"![Cosines between nodes over the steps](similarity-{name}.png)"
    chosen = [c for c in cosines if c.kind == "residual"] or cosines
    layer = ALL if any(c.layer == ALL for c in chosen) else chosen[0].layer
    residuals, gradients = (
        {c.step: c for c in cosines if (c.kind, c.layer) == (kind, layer)} for kind in ("residual", "gradient")
    )
    if not residuals:
        how = "`--record.residuals`, with a method that keeps some, for ScaleCom's similarity of residuals"
        return [f"Cosines between the nodes' gradients ({how}):", picture]
    head = ("step", "phase", "residuals: mean cosine", "lowest to highest pair", "gradients: mean cosine")
    body = (
        (step, c.phase, f"{c.mean:.3f}", f"{c.lowest:.3f} to {c.highest:.3f}", f"{gradients[step].mean:.3f}")
        for step, c in residuals.items()
    )
    sentence = "ScaleCom's similarity: cosines between the nodes' residuals, and between their gradients:"
    return [sentence, picture, f"Of {layer}{' that have residuals' if layer == ALL else ''}:", table(head, body)]
