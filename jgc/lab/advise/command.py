"""From the options of `jgc advise` to its answer."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from jgc.lab.advise import advise as answer, check as advise_check, measure as advise_measure, results as advise_results
from jgc.lab.advise.model import LATENCY, Link, rate_of
from jgc.lab.bench.machine import describe
from jgc.lab.bench.methods import names_of
from jgc.training.cli import load_config
from jgc.training.config import Config, method_name
from jgc.training.errors import UserError, values_of_the_user


class Question(NamedTuple):
    """What is asked.

    Attributes:
      config: a config file.
      workload: of `jgc.training.workloads`; the config's if None.
      bandwidth: of every host's link.
      hosts: K.
      latency: seconds of a message; fitted or `LATENCY` if None.
      computation: seconds of a host's gradients and update; measured if None.
      methods: names; all if there are none.
      batch_size: examples of all hosts in a step; the workload's if None.
      overhead: seconds of a collective.
      efficiency: of the bandwidth.
      host_limit: what a host's processor can send, as a rate; "unlimited" if not known.
      calibrate: a run of `bench network` to fit overhead, efficiency, limit and, if not given, latency to.
      calibrate_on: its cell for that, hosts/rate.
      run_dir: a run of `bench network` to take times of computing from.
      repeats: rounds of measuring.
    """

    config: Path | None
    workload: str | None
    bandwidth: str
    hosts: int
    latency: float | None
    computation: float | None
    methods: Sequence[str]
    batch_size: int | None
    overhead: float
    efficiency: float
    host_limit: str
    calibrate: Path | None
    calibrate_on: str
    run_dir: Path | None
    repeats: int


def predict(asked: Question) -> answer.Advice:
    """The answer, measured or from a run.

    Raises:
      UserError: what is wrong with an option.
    """
    check(asked)
    names = names_of(asked.methods)
    link = link_of(asked)
    if asked.run_dir is not None:
        return _from_run(asked, asked.run_dir, names, link)
    given = config_of(asked)
    found = advise_measure.measure(given, asked.hosts, names, asked.repeats, asked.computation)
    own = "measured" if asked.computation is None else "given"
    about = (
        f"Workload {given.workload}: {found.values:,} parameters, {found.batch} examples a host in a step, computation "
        f"{own}; {given_settings(given)}. {describe()}; medians of {asked.repeats} rounds."
    )
    return answer.advise(found.rows, asked.hosts, link, about, found.failed)


def check(asked: Question) -> None:
    """Raise UserError for an option that is out of range."""
    if asked.hosts < 2:
        raise UserError(f"--hosts must be at least 2, got {asked.hosts}")
    for name in ("latency", "overhead", "computation"):
        value = getattr(asked, name)
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"--{name} must be seconds, at least 0, got {value}")
    if not 0 < asked.efficiency <= 1:
        raise UserError(f"--efficiency must be above 0 and at most 1, got {asked.efficiency}")
    if asked.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {asked.repeats}")
    if asked.batch_size is not None and asked.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {asked.batch_size}")
    if asked.run_dir is None and asked.config is None:
        raise UserError("give --config FILE, or --run-dir of a run of bench network that has measured the times")
    if asked.run_dir is not None:
        for name in ("config", "workload", "batch_size"):
            if getattr(asked, name) is not None:
                option = name.replace("_", "-")
                raise UserError(f"--run-dir has a model and a batch of its own: give it or --{option}, not both")


def link_of(asked: Question) -> Link:
    """The link that is asked about, its hosts with a processor each."""
    with values_of_the_user():
        rate, limit = rate_of(asked.bandwidth), rate_of(asked.host_limit)
    if asked.calibrate is None:
        latency = LATENCY if asked.latency is None else asked.latency
        return Link(rate, latency, asked.overhead, asked.efficiency, limit)
    found = advise_results.read(asked.calibrate)
    on = advise_results.place_of(asked.calibrate_on)
    sent_of = advise_results.sent_in(found)
    fitted, free = advise_results.calibrated(found, on, sent_of), advise_results.limit(found, on.hosts, sent_of)
    latency = fitted.latency if asked.latency is None else asked.latency
    busy = fitted.limit if free == math.inf else free
    return fitted._replace(rate=rate, latency=latency, contention=1.0, limit=min(limit, busy))


def config_of(asked: Question) -> Config:
    """The config file's, with the workload and the batch of the command line, not yet resolved."""
    assert asked.config is not None
    given = load_config(asked.config)
    changes = {name: getattr(asked, name) for name in ("workload", "batch_size") if getattr(asked, name) is not None}
    return dataclasses.replace(given, **changes)


def given_settings(given: Config) -> str:
    """Whose settings count."""
    return f"{method_name(given.compressor)} as in the config file, other methods with the workload's settings"


def _from_run(asked: Question, run_dir: Path, names: list[str], link: Link) -> answer.Advice:
    found = advise_results.read(run_dir)
    prefer = advise_results.place_of(asked.calibrate_on).rate
    wanted = [*advise_measure.BASELINES, *names]
    rows, failed = advise_results.rows_from(found, asked.hosts, advise_results.sent_in(found), prefer, wanted)
    if asked.computation is not None:
        rows = [row._replace(computation=asked.computation) for row in rows]
    s = found["settings"]
    about = (
        f"Times of computing from a run of bench network: processor seconds of a host on one thread, {s.get('model')}, "
        f"{s.get('batch')} images a host in a step, {s.get('machine')}; methods as that benchmark sets them."
    )
    return answer.advise(rows, asked.hosts, link, about, failed)


def tell(asked: Question, output: Path | None, command: str) -> None:
    """Print the answer, and write it into a folder."""
    advice = predict(asked)
    answer.show(advice, Console())
    if output is not None:
        answer.write(output, "Does it pay?", command, answer.markdown(advice), answer.as_json(advice))


def tell_check(results: Path, calibrate_on: str, output: Path | None, command: str) -> None:
    """Print how far predictions are from a run of `bench network`, and write every cell into a folder."""
    found = advise_results.read(results)
    outcome = advise_check.check(found, advise_results.place_of(calibrate_on), advise_results.sent_in(found))
    page = advise_check.markdown(outcome, found)
    print(page)
    if output is not None:
        answer.write(output, "Advice against measurement", command, page, advise_check.as_json(outcome))
