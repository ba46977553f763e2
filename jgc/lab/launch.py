"""Launch whole runs: one for each variant and seed, each in its folder, none trained twice."""

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tyro
from rich.console import Console

from jgc import compress
from jgc.lab.shared.choices import seeds_of
from jgc.lab.shared.progress import left
from jgc.nodes.layouts import make_nodes
from jgc.training.data import MissingDataError, Source, score_of
from jgc.training.errors import FAILED, NonFinite, UserError
from jgc.training.output.recording import matching
from jgc.training.output.summary import read_summary
from jgc.training.run.folder import CONFIG, SUMMARY, changes_since, read_object
from jgc.training.run.loop import run
from jgc.training.run.setup import data_of, make_parts, model_of, with_epoch
from jgc.training.settings.cli import with_options
from jgc.training.settings.config import Config, DataConfig, check, resolve
from jgc.training.settings.workloads import DEFAULT

Summary = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs to train: the options that `compare` and `sweep` have in common."""

    run_dir: Path
    """folder of the runs and of the page on them; finished runs in it are not trained again"""
    methods: tuple[str, ...] = ("baseline", "topk", "lgc_ps", "control")
    """baseline, topk, control and names of methods, by commas or spaces; all: each registered method"""
    workload: str = DEFAULT
    """model, data set, batch and settings"""
    seeds: tuple[str, ...] = ("0", "1", "2")
    """one run of each method for each seed, separated by commas or spaces"""
    data_dir: str | None = None
    """folder of prepared data sets"""
    steps: int | None = None
    """length of the runs; like all below, the workload's if not given"""
    schedule_steps: int | None = None
    """steps over which the learning rate falls"""
    learning_rate_warmup: int | None = None
    """steps over which the learning rate first rises"""
    warmup_steps: int | None = None
    """uncompressed steps before a method compresses"""
    autoencoder_steps: int | None = None
    """steps in which an autoencoder trains"""
    evaluate_every: int | None = None
    """steps between evaluations"""
    nodes: int | None = None
    """data-parallel nodes"""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """any other option of train.py, for all runs (learning_rate=0.1) or for one method (dgc.learning_rate=0.05, or a
    setting of the method, dgc.clip_norm=1); repeat for several; overrides the options above"""

    @property
    def changes(self) -> dict[str, Any]:
        """The options of the runs that were given."""
        names = ("steps", "schedule_steps", "learning_rate_warmup", "warmup_steps", "autoencoder_steps",
                 "evaluate_every", "nodes")  # fmt: skip
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Stopped(UserError):
    """A signal stopped a run, with its checkpoint saved."""


class Outcome(NamedTuple):
    """The outcome of the wanted runs.

    Attributes:
      folders: of the finished runs, by variant.
      failed: by folder, why a run did not finish.
      stopped: the signal that stopped the others.
    """

    folders: dict[str, list[Path]]
    failed: dict[str, str]
    stopped: Stopped | None = None

    @property
    def remarks(self) -> list[str]:
        """A sentence on each run that did not finish."""
        return [f"Did not finish: `{Path(folder).name}`, {error}." for folder, error in self.failed.items()]

    def check(self, page: Path) -> None:
        """Raise UserError if a run did not finish, once `page` on the others is written."""
        if self.stopped:
            raise Stopped(f"{self.stopped}; {page} is on the finished runs", self.stopped.exit_code)
        if self.failed:
            wanted = len(self.failed) + sum(map(len, self.folders.values()))
            raise UserError(f"{len(self.failed)} of {wanted} runs did not finish; {page} is on the others", FAILED)


def launch(asked: Runs, variants: Mapping[str, Any], options: Mapping[str, Sequence[str]]) -> Outcome:
    """Train what has not been trained yet, one line of progress for each run. A run that diverges stops no other.

    Args:
      asked: the options.
      variants: settings by the name of the variant.
      options: words of `train.py`'s command line by the name of the variant.

    Raises:
      UserError: a setting that no run can have, a folder that holds a different run, or no run finished.
    """
    seeds, failed = seeds_of(asked.seeds), dict[str, str]()
    stopped = None
    try:
        train_all(variants, asked.run_dir, asked.workload, seeds, asked.data_dir, asked.changes, options, say, failed)
    except Stopped as error:
        stopped = error
    wanted = {name: [asked.run_dir / f"{name}-seed{seed}" for seed in seeds] for name in variants}
    folders = {name: [folder for folder in runs if str(folder) not in failed] for name, runs in wanted.items()}
    if stopped:
        folders = {name: [folder for folder in runs if (folder / SUMMARY).exists()] for name, runs in folders.items()}
    if not any(folders.values()):
        raise stopped or UserError(f"no run finished: {next(iter(failed.values()))}", FAILED)
    return Outcome(folders, failed, stopped)


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


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
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Sequence[str]] | None = None,
    say: Callable[[str], None] = lambda line: None,
    failed: dict[str, str] | None = None,
) -> dict[str, list[Summary]]:
    """Train one run for each variant and seed, and return their summaries. A run that was stopped is resumed.

    Args:
      variants: a method's settings by the name of the variant, which is also part of the folder's name.
      run_dir: folder of the runs.
      workload: a name in `jgc.training.settings.workloads`.
      seeds: one run of every variant for each.
      data_dir: folder of prepared data sets.
      changes: settings of the run, or of the methods that have them, instead of the workload's.
      options: words of `train.py`'s command line by the name of the variant; they override `changes`.
      say: called with a line when a run starts and when it ends.
      failed: if given, the error of a run that diverges is put there by its folder, and the others are trained.

    Raises:
      UserError: a bad setting or a folder that holds a run with other settings, before anything is trained; or a run
        that cannot be resumed.
    """
    known = {field.name for settings in (Config, *variants.values()) for field in dataclasses.fields(settings)}
    for name, value in (changes or {}).items():
        if name not in known:
            raise UserError(f"--{name.replace('_', '-')} {value}: neither the run nor {' or '.join(variants)} has it")
    jobs = [
        Job(name, seed, folder := run_dir / f"{name}-seed{seed}",
            configure(settings, workload, seed, data_dir, folder, changes or {}, (options or {}).get(name, ())))
        for seed in seeds for name, settings in variants.items()
    ]  # fmt: skip
    for job in jobs:
        check_settings(job)
        check_folder(job)
    check_parts([job for job in jobs if not (job.folder / SUMMARY).exists()])
    out: dict[str, list[Summary]] = {name: [] for name in variants}
    took: list[float] = []  # seconds of runs trained now
    for number, job in enumerate(jobs, 1):
        begun, done = time.monotonic(), (job.folder / SUMMARY).exists()
        waiting = sum(not (later.folder / SUMMARY).exists() for later in jobs[number - 1 :])
        rest = left(len(took), len(took) + waiting, sum(took))
        try:
            out[job.name].append(train_one(job, say, f"[{number}/{len(jobs)}] {job.name}, seed {job.seed}", rest))
            took += [] if done else [time.monotonic() - begun]
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
    """The resolved config of a run: `changes` where the run or its method has such a setting, then `options`."""
    config = resolve(Config(settings, workload=workload, seed=seed, data=DataConfig(dir=data_dir)))
    of_config = {name: value for name, value in changes.items() if hasattr(config, name)}
    of_compressor = {
        name: value for name, value in changes.items() if hasattr(config.compressor, name) and name not in of_config
    }
    compressor = dataclasses.replace(config.compressor, **of_compressor)
    resume = (folder / CONFIG).exists()
    config = dataclasses.replace(config, compressor=compressor, run_dir=str(folder), resume=resume, **of_config)
    return with_options(config, options) if options else config


def check_settings(job: Job) -> None:
    """Raise UserError for a value that the run or its method cannot have."""
    try:
        check(job.config)
        compress.build(with_epoch(job.config.compressor, 1))
    except (UserError, ValueError) as error:
        raise UserError(f"{job.name}: {error}") from error


def check_parts(jobs: Sequence[Job]) -> None:
    """Raise UserError for data, a model or an optimiser that a run cannot have. Equal data sets are read once."""
    sources: dict[Any, Source] = {}
    for job in jobs:
        config = job.config
        try:
            alike = (config.data, config.schedule, config.correction.every > 0)
            if alike not in sources:
                sources[alike] = data_of(config)
            source, nodes = sources[alike], make_nodes(config.nodes, devices_per_node=config.devices_per_node)
            make_parts(config, nodes, model_of(config, source), source, jax.random.key(config.seed))
            matching((), config.record.layers, "--record.layers")
        except (UserError, ValueError, MissingDataError) as error:
            raise UserError(f"{job.name}: {error}") from error


def check_folder(job: Job) -> None:
    """Raise UserError if a run's folder holds a different experiment. A setting that the old run did not know is no
    difference."""
    path = job.folder / CONFIG
    if not path.exists():
        if (job.folder / SUMMARY).exists():
            raise UserError(f"{job.folder} has a {SUMMARY} and no {CONFIG}: give a new --run-dir")
        return
    old = read_object(path)
    changed = changes_since(old, job.config)
    for name in ("steps", "nodes"):
        if old.get(name) != getattr(job.config, name):
            changed.append(f"{name} was {old.get(name)}, is {getattr(job.config, name)}")
    if changed:
        raise UserError(f"{job.folder} holds a run with other settings: {'; '.join(changed)}; give a new --run-dir")


def train_one(job: Job, say: Callable[[str], None] = lambda line: None, title: str = "", rest: str = "") -> Summary:
    """Train or resume a run unless it has finished, and return its summary.

    Raises:
      UserError: it cannot be trained.
      Stopped: a signal stopped it.
    """
    done = (job.folder / SUMMARY).exists()
    if not done:
        say(f"{title}: {'resumed' if job.config.resume else 'started'}{rest}")
        exit_code = run(job.config, console=Console(quiet=True))
        if exit_code:  # stopped by a signal, with its checkpoint saved
            raise Stopped(f"stopped; {job.folder} is kept, and the same command goes on", exit_code)
        jax.clear_caches()  # the next run compiles other steps
        gc.collect()
    summary = read_summary(job.folder)
    score = score_of(summary)
    say(f"{title}: {score.title} {score.text(summary[score.name])} after {summary['steps']} steps"
        f"{', finished before' if done else f', {minutes(summary):.1f} min'}")  # fmt: skip
    return summary


def minutes(summary: Summary) -> float:
    """Minutes of a run's steps, from the medians of its phases."""
    return sum((phase["seconds_per_step"] or 0.0) * phase["steps"] for phase in summary["phases"]) / 60
