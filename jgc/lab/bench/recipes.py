"""How well LGC's autoencoder reconstructs, by recipe: whole runs that differ in nothing else.

    python -m jgc bench autoencoder --run-dir runs/recipes
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jgc.compress import PAPER_RECIPE, LgcPs
from jgc.lab.launch import Summary, mean_of, train_all
from jgc.training.config import Config, resolve
from jgc.training.data import score_of

PAPER = {name: value for name, value in PAPER_RECIPE.items() if name != "feedback"}

RECIPES: dict[str, dict[str, Any]] = {
    "the paper's: index order, raw values, SGD 0.001": PAPER,
    "one scale a layer, SGD 0.001": PAPER | {"scale": "layer"},
    "one scale a layer, ours to train": {"fold_signs": False, "send_means": False, "innovation_by": "magnitude"},
    "and the leader's signs": {"send_means": False, "innovation_by": "magnitude"},
    "and each node's means": {"innovation_by": "magnitude"},
    "ours: and innovations where signs and means fail": {},
    "ours without innovations": {"innovation": 0.0},
    "ours, all but untrained": {"autoencoder_learning_rate": 1e-9},
}
"""Settings of `LgcPs` by what the row of the table says. All with exact feedback."""

FIGURES = (
    "reconstruction_cosine",
    "reconstruction_cosine_p5",
    "ceiling_cosine",
    "signs_means_cosine",
    "without_code_cosine",
    "relative_error",
)


def measure(
    run_dir: Path, workload: str, seeds: Sequence[int], data_dir: str | None, steps: int | None
) -> dict[str, list[Summary]]:
    """The summaries of one run for every recipe and seed."""
    defaults = resolve(Config(LgcPs(), workload=workload)).compressor
    changed = [dataclasses.replace(defaults, **changes) for changes in RECIPES.values()]
    variants = {f"recipe{number}": settings for number, settings in enumerate(changed)}
    summaries = train_all(variants, run_dir, workload, seeds, data_dir, steps)
    return dict(zip(RECIPES, summaries.values(), strict=True))


def markdown(summaries: dict[str, list[Summary]], workload: str, seeds: Sequence[int], machine: str) -> str:
    """A row for every recipe: means over the seeds."""
    score = score_of(next(iter(summaries.values()))[0])
    lines = [
        f"`{workload}`, seeds {', '.join(map(str, seeds))}; {machine}.",
        "",
        "Cosines with the true mean at the positions sent, means over phase 3 and over seeds; the ceiling has the",
        "leader's exact values in place of its code. `n/a`: values were not finite.",
        "",
        "| recipe | cosine | 5th percentile | ceiling | signs, means | signs, means, innovations | relative error "
        f"| {score.title} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in summaries.items():
        cells = [mean_of(runs, figure) for figure in FIGURES]
        result = mean_of(runs, score.name, digits=2, scale=score.scale)
        lines.append(f"| {name} | {' | '.join(cells)} | {result} {score.unit} |")
    return "\n".join(lines) + "\n"
