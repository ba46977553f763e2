"""`python -m experiments autoencoder`: how well LGC's autoencoder reconstructs, by recipe."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgc.compress import PAPER_RECIPE, LgcPs
from jgc.lab.launch import Summary, say, train_all
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import publish
from jgc.lab.shared.reconstruction import FIGURES, figures_of, mean_of
from jgc.lab.shared.tables import table
from jgc.training.data import score_of
from jgc.training.errors import UserError
from jgc.training.settings.config import Config, resolve
from jgc.training.settings.workloads import DEFAULT

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
"""Settings of `LgcPs` by the name of the row. All have exact feedback and the leader's positions."""


@dataclass(frozen=True)
class Autoencoder:
    """Reconstruction by the LGC paper's recipe for the autoencoder, by jgc's and by those between.

    In all of them the leader's positions serve for all nodes.

    The runs differ in nothing but the recipe. Those that have finished are not trained again.

        python -m experiments autoencoder --run-dir runs/recipes --seeds 0 --steps 150

        | recipe | cosine | ceiling | signs, means | test accuracy |
        | the paper's: index order, raw values, SGD 0.001 | 0.758 | 0.847 | 0.000 | 96.94 % |
        | ours: and innovations where signs and means fail | 0.989 | 0.989 | 0.967 | 97.78 % |
    """

    run_dir: Path
    """folder of the runs"""
    workload: str = DEFAULT
    """model, data set, batch and settings"""
    seeds: tuple[int, ...] = (0, 1, 2)
    """one run of each recipe for each seed"""
    data_dir: str | None = None
    """folder of prepared data sets"""
    steps: int | None = None
    """length of the runs; the workload's if not given"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Train, and print the table."""
        page = markdown(measure(self), self.workload, self.seeds, describe())
        publish("Recipes of the autoencoder", page, self.output, line)


def measure(asked: Autoencoder) -> dict[str, list[Summary]]:
    """The summaries of one run for each recipe and seed."""
    defaults = resolve(Config(LgcPs(positions="leader"), workload=asked.workload)).compressor  # one view for all nodes
    changed = [dataclasses.replace(defaults, **changes) for changes in RECIPES.values()]
    variants = {f"recipe{number}": settings for number, settings in enumerate(changed)}
    steps = {} if asked.steps is None else {"steps": asked.steps}
    seeds = tuple(dict.fromkeys(asked.seeds))
    if not seeds:
        raise UserError("--seeds names none: give at least one, such as 0")
    summaries = train_all(variants, asked.run_dir, asked.workload, seeds, asked.data_dir, steps, say=say)
    return dict(zip(RECIPES, summaries.values(), strict=True))


def markdown(summaries: dict[str, list[Summary]], workload: str, seeds: Sequence[int], machine: str) -> str:
    """The page: a row for each recipe, means over the seeds."""
    score = score_of(next(iter(summaries.values()))[0])
    rows = [[name, *figures_of(runs), f"{mean_of(runs, score.name, digits=2, scale=score.scale)} {score.unit}"]
            for name, runs in summaries.items()]  # fmt: skip
    return "\n\n".join([
        f"`{workload}`, seeds {', '.join(map(str, seeds))}; {machine}.",
        "Cosines with the true mean at the leader's positions, which all nodes use, means over phase 3 and over seeds. "
        "Ceiling: with the leader's exact values instead of its code. `n/a`: values were not finite.",
        table(["recipe", *FIGURES.values(), score.title], rows),
    ]) + "\n"  # fmt: skip
