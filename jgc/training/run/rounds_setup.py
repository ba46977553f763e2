"""The set-up of a node of rounds through a bucket: its folder, its data, and the settings that nodes must share."""

import dataclasses
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import jgc.rounds
from jgc.rounds.bucket import BucketError, NoBucket
from jgc.rounds.names import CHECKPOINTS
from jgc.training.errors import FAILED, UserError
from jgc.training.output.metrics import read
from jgc.training.run.folder import CONFIG, ROUNDS
from jgc.training.run.periodic import batches
from jgc.training.run.setup import Setup
from jgc.training.settings.config import Config, as_json, method_name
from jgc.training.settings.rounds_config import outer_of
from jgc.training.settings.saved_config import FREE
from jgc.training.steps.step import Batch
from jgc.types import PyTree

# Settings that may differ between nodes, in addition to those that may change on --resume. `jgc.rounds` compares the
# outer optimiser and the quorum.
OF_A_NODE = frozenset(
    "rounds batch_size devices_per_node unroll_nodes deterministic local.outer_learning_rate "
    "local.outer_momentum".split()
)
FOREVER = 2**62  # steps


def begun(config: Config) -> Config:
    """The config with its run folder, resumed if that holds a run: the same command starts and resumes a node."""
    last = PurePosixPath(config.rounds.bucket).name or "bucket"
    path = Path(config.run_dir or f"runs/{last}-{config.rounds.node}")
    return dataclasses.replace(config, run_dir=str(path), resume=(path / CONFIG).exists())


def check_bucket(config: Config) -> None:
    """Raise UserError, before data and model are made, without a bucket or credentials, by a listing."""
    with one_line():
        try:
            jgc.rounds.open_bucket(config.rounds.bucket).list(CHECKPOINTS)
        except NoBucket:
            raise
        except BucketError:
            return  # it does not answer now: the node waits for it when it joins


def check(setup: Setup, folder: Path) -> None:
    """Raise UserError, before anything is compiled, if the bucket has a run that this node cannot take part in."""
    with one_line():
        try:
            token = jgc.rounds.check(**arguments_of(setup, setup.state.params))
        except ValueError as error:
            named = str(error).replace("the method", method_name(setup.parts.config.compressor), 1)
            raise UserError(named) from error
    before = {line["run"] for line in read(folder / ROUNDS)}
    if before and before != {token}:
        there = f"the run {token}" if token else "no run"
        raise UserError(
            f"{folder} is of the run {', '.join(sorted(before))}, and {setup.parts.config.rounds.bucket} has {there}: "
            "give a different --run-dir"
        )


def steps_so_far(folder: Path, saved: int) -> int:
    """Local steps of this node before this start; `saved` are those of its checkpoint."""
    return max([saved, *(line["step"] for line in read(folder / ROUNDS))])


def batches_of_node(setup: Setup, start: int) -> Generator[Batch]:
    """The batches of this node's steps from `start` on, without an end: a function of seed, node and step.

    Every node shuffles the data differently. In a text that keeps its order, nodes start at different places.
    """
    config = setup.parts.config
    seed = zlib.crc32(f"{config.seed} {config.rounds.node}".encode())
    return batches(setup, start, FOREVER, seed, seed % max(1, int(setup.source.epoch_steps(config.batch_size))))


@contextmanager
def one_line() -> Iterator[None]:
    """Turn errors of a bucket or a run into a UserError."""
    try:
        yield
    except (jgc.rounds.RoundsError, BucketError) as error:
        raise UserError(str(error), FAILED) from error


def arguments_of(setup: Setup, params: PyTree) -> dict[str, Any]:
    """The common arguments of `jgc.rounds.check` and `join`."""
    config = setup.parts.config
    return {
        "bucket": config.rounds.bucket, "node": config.rounds.node, "params": params,
        "compressor": setup.parts.compressor, "outer": outer_of(config), "settings": alike(setup), "seed": config.seed,
        "total": max(1, config.steps // (config.local.every or 1)), **config.rounds.rules(),
    }  # fmt: skip


def alike(setup: Setup) -> dict[str, Any]:
    """The settings that all nodes must share, named as train.py's options: `jgc.rounds` has a `seed`, too."""
    options = _flat(as_json(setup.parts.config), "")
    return {"data": setup.source.facts, **{f"--{name.replace('_', '-')}": x for name, x in options.items()}}


def _flat(settings: dict[str, Any], prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if path in FREE | OF_A_NODE:
            continue
        out |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return out
