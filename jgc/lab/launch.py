"""Whole runs for a table: one for every variant and seed, in a folder of its own, none of them twice."""

import dataclasses
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jgc import compress
from jgc.nodes import make_nodes
from jgc.training.cli import with_options
from jgc.training.config import Config, DataConfig, check, resolve
from jgc.training.data import MissingDataError, Source, score_of
from jgc.training.errors import NonFinite, UserError
from jgc.training.loop import run
from jgc.training.rundir import CONFIG, SUMMARY, changes_since, read_config
from jgc.training.setup import data_of, make_parts, model_of, with_epoch

Summary = dict[str, Any]


class Job(NamedTuple):
    """A run that is wanted."""

    name: str
    seed: int
    folder: Path
    config: Config


def train_all(
    variants: Mapping[str, Any],
    run_dir: Path,
    workload: str,
    seeds: Sequence[int],
    data_dir: str | None,
    steps: int | None = None,
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Sequence[str]] | None = None,
    say: Callable[[str], None] = lambda line: None,
    failed: dict[str, str] | None = None,
) -> dict[str, list[Summary]]:
    """The summaries of one run for every variant and seed. A run that was stopped goes on where it was.

    Args:
      variants: a method's settings by the name of the variant, which is also part of the folder's name.
      run_dir: folder of the runs.
      workload: a name in `jgc.training.workloads`.
      seeds: one run of every variant for each.
      data_dir: folder of prepared data sets.
      steps: length of the runs; the workload's if not given.
      changes: settings of the run, or of the methods that have them, in place of the workload's.
      options: words of `train.py`'s command line by the name of the variant; they have the last word.
      say: gets a line when a run starts and when it ends.
      failed: if given, takes the folder and the error of a run that diverges, and the others go on.

    Raises:
      UserError: a bad setting, or a folder that holds a run with other settings, before anything is trained; or a run
        cannot go on.
    """
    changes = {**(changes or {}), **({"steps": steps} if steps else {})}
    jobs = [
        Job(name, seed, folder := run_dir / f"{name}-seed{seed}",
            configure(settings, workload, seed, data_dir, folder, changes, (options or {}).get(name, ())))
        for seed in seeds for name, settings in variants.items()
    ]  # fmt: skip
    for job in jobs:
        check_settings(job)
        check_folder(job)
    check_parts([job for job in jobs if not (job.folder / SUMMARY).exists()])
    out: dict[str, list[Summary]] = {name: [] for name in variants}
    for number, job in enumerate(jobs, 1):
        try:
            out[job.name].append(train_one(job, say, f"[{number}/{len(jobs)}] {job.name}, seed {job.seed}"))
        except NonFinite as error:
            if failed is None:
                raise
            failed[str(job.folder)] = str(error)
            say(f"[{number}/{len(jobs)}] {job.name}, seed {job.seed}: failed, {error}")
    return out


def configure(
    settings: Any,
    workload: str,
    seed: int,
    data_dir: str | None,
    folder: Path,
    changes: Mapping[str, Any],
    options: Sequence[str] = (),
) -> Config:
    """The resolved config of a run, with `changes` where the run or its method has such a setting, then `options`."""
    config = resolve(Config(settings, workload=workload, seed=seed, data=DataConfig(dir=data_dir)))
    ours = {name: value for name, value in changes.items() if hasattr(config, name)}
    theirs = {name: value for name, value in changes.items() if hasattr(config.compressor, name) and name not in ours}
    compressor = dataclasses.replace(config.compressor, **theirs)
    resume = (folder / CONFIG).exists()
    config = dataclasses.replace(config, compressor=compressor, run_dir=str(folder), resume=resume, **ours)
    return with_options(config, options) if options else config


def check_settings(job: Job) -> None:
    """Raise UserError for a value that the run or its method cannot have."""
    try:
        check(job.config)
        compress.build(with_epoch(job.config.compressor, 1))
    except (UserError, ValueError) as error:
        raise UserError(f"{job.name}: {error}") from error


def check_parts(jobs: Sequence[Job]) -> None:
    """Raise UserError for data, a model or an optimiser that a run cannot have; data are read once for all alike."""
    sources: dict[Any, Source] = {}
    for job in jobs:
        config = job.config
        try:
            alike = (config.data, config.schedule)
            if alike not in sources:
                sources[alike] = data_of(config)
            source = sources[alike]
            make_parts(config, make_nodes(config.nodes), model_of(config, source), source, jax.random.key(config.seed))
        except (UserError, ValueError, MissingDataError) as error:
            raise UserError(f"{job.name}: {error}") from error


def check_folder(job: Job) -> None:
    """Raise UserError where a run's folder holds another experiment; settings newer than the run do not count."""
    path = job.folder / CONFIG
    if not path.exists():
        return
    old = read_config(path)
    changed = changes_since(old, job.config)
    for name in ("steps", "nodes"):
        if old.get(name) != getattr(job.config, name):
            changed.append(f"{name} was {old.get(name)}, is {getattr(job.config, name)}")
    if changed:
        raise UserError(f"{job.folder} holds a run with other settings: {'; '.join(changed)}; give another --run-dir")


def train_one(job: Job, say: Callable[[str], None] = lambda line: None, title: str = "") -> Summary:
    """The summary of a run, which is trained, or trained on, if it has not finished.

    Raises:
      UserError: it cannot be trained, or a signal stopped it.
    """
    done = (job.folder / SUMMARY).exists()
    if not done:
        say(f"{title}: {'resumed' if job.config.resume else 'started'}")
        exit_code = run(job.config, console=Console(quiet=True))
        if exit_code:  # stopped by a signal: what is done is kept, the same command goes on
            raise UserError(f"stopped; {job.folder} is kept, and the same command goes on", exit_code)
        jax.clear_caches()  # the next run compiles its own steps
        gc.collect()
    summary = json.loads((job.folder / SUMMARY).read_text())
    score = score_of(summary)
    say(f"{title}: {score.title} {score.text(summary[score.name])} after {summary['steps']} steps"
        f"{', finished before' if done else f', {minutes(summary):.1f} min'}")  # fmt: skip
    return summary


def minutes(summary: Summary) -> float:
    """How long the steps of a run took, from the medians of its phases."""
    return sum((phase["seconds_per_step"] or 0.0) * phase["steps"] for phase in summary["phases"]) / 60


def mean_of(summaries: Sequence[Summary], figure: str, digits: int = 3, scale: float = 1.0) -> str:
    """The mean of a figure over runs; n/a where one of them does not have it or it is not finite."""
    values = [summary[figure] for summary in summaries]
    if any(value is None or not np.isfinite(value) for value in values):
        return "n/a"
    return f"{scale * float(np.mean(values)):.{digits}f}"
