"""Whole runs for a table: one for every variant and seed, in a folder of its own, none of them twice."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jgc.training.config import Config, DataConfig, resolve
from jgc.training.errors import UserError
from jgc.training.loop import run

Summary = dict[str, Any]


def train_all(
    variants: Mapping[str, Any],
    run_dir: Path,
    workload: str,
    seeds: Sequence[int],
    data_dir: str | None,
    steps: int | None = None,
) -> dict[str, list[Summary]]:
    """The summaries of one run for every variant and seed. A run that was stopped goes on where it was.

    Args:
      variants: a method's settings by the name of the variant, which is also part of the folder's name.
      run_dir: folder of the runs.
      workload: a name in `jgc.training.workloads`.
      seeds: one run of every variant for each.
      data_dir: folder of prepared data sets.
      steps: length of the runs; the workload's if not given.
    """
    out: dict[str, list[Summary]] = {name: [] for name in variants}
    for seed in seeds:
        for name, settings in variants.items():
            folder = run_dir / f"{name}-seed{seed}"
            if not (folder / "summary.json").exists():
                config = resolve(Config(settings, workload=workload, seed=seed, data=DataConfig(dir=data_dir)))
                resume = (folder / "config.json").exists()
                config = dataclasses.replace(config, run_dir=str(folder), resume=resume, steps=steps or config.steps)
                exit_code = run(config, console=Console(quiet=True))
                if exit_code:  # stopped by a signal: what is done is kept, the same command goes on
                    raise UserError(f"stopped; {folder} is kept, and the same command goes on", exit_code)
            out[name].append(json.loads((folder / "summary.json").read_text()))
    return out


def mean_of(summaries: Sequence[Summary], figure: str, digits: int = 3, scale: float = 1.0) -> str:
    """The mean of a figure over runs; n/a where one of them does not have it or it is not finite."""
    values = [summary[figure] for summary in summaries]
    if any(value is None or not np.isfinite(value) for value in values):
        return "n/a"
    return f"{scale * float(np.mean(values)):.{digits}f}"
