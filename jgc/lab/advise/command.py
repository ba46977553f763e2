"""`python -m jgc advise`."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from jgc.lab.advise import measure, page, results
from jgc.lab.advise.advice import Advice, advise
from jgc.lab.advise.evidence import kind_of
from jgc.lab.advise.model import BUCKET_LATENCY, LATENCY, Link, rate_of
from jgc.lab.bench.methods import names_of
from jgc.lab.bench.network.models import task_named
from jgc.lab.shared.choices import refuse_given, words
from jgc.lab.shared.machine import describe
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.settings.cli import given_config
from jgc.training.settings.config import Config, method_name, resolve


@dataclass(frozen=True)
class Advise:
    """Does compression pay? Seconds and bytes of a step with every method, on a network that you describe.

    Computation and compression are measured on this device; communication is estimated.

        python -m jgc advise --workload cifar10_resnet20 --bandwidth 1gbit --hosts 16

    With `--run-dir`, computation and compression are read from a run of `bench network`:

        python -m jgc advise --run-dir docs/results/network --bandwidth 100mbit --hosts 2

    With `--parameters`, the model is a transformer of that size, and you give the seconds that your step takes:

        python -m jgc advise --parameters 350e6 --computation 0.4 --bandwidth 10gbit --hosts 8 --methods topk,powersgd

    With `--link bucket`, hosts meet in a bucket, as `train.py --rounds.bucket` does; `--every` is H:

        python -m jgc advise --workload ptb_gpt --link bucket --bandwidth 10mbit --hosts 4 --every 30

        yes: topk takes 0.264 s a step, 15.5 times faster than uncompressed f32 (4.1 s) and 8.13 times faster than
        uncompressed f16 (2.15 s). On record for topk on images: test accuracy +0.35 points (...)

    Recommended are only methods whose accuracy is on record for data of the workload's kind, however fast others are.
    """

    method: str | None = None
    """name of a method; it brings its workload along, digits_convnet5, unless --workload is given"""
    config: Path | None = None
    """config file instead of --method; its settings count for its method, the workload's for the others"""
    workload: str | None = None
    """model, data set, batch and settings; that of --method or --config if not given"""
    parameters: float | None = None
    """of your model, such as 350e6: 12 layers of a transformer of that size replace the workload's model, and other
    settings are ptb_gpt's unless --workload is given; needs --computation"""
    link: Literal["network", "bucket"] = "network"
    """what connects the hosts: collectives over a network, or a bucket (docs/rounds.md)"""
    bandwidth: str = "1gbit"
    """of each host's link in both directions, such as 100mbit or 1gbit, or unlimited"""
    hosts: int = 4
    """how many, one node each"""
    latency: float | None = None
    """seconds that a message travels, or of a request to the bucket; if not given, 0.0001, of a bucket 0.05, or
    fitted by --calibrate"""
    computation: float | None = None
    """seconds of a host's gradients and update, if the hosts have other devices; measured on this one if not given"""
    methods: tuple[str, ...] = ()
    """separated by commas or spaces; all if not given. Compiling LGC's takes minutes for large models"""
    batch_size: int | None = None
    """examples of all hosts in a step; the workload's if not given"""
    every: int | None = None
    """H, local steps from one exchange to the next; the config's --local.every if not given"""
    overhead: float | None = None
    """seconds of a collective of any size; if not given, 0.001, of a bucket 0, or fitted by --calibrate"""
    efficiency: float | None = None
    """share of the bandwidth left for messages; if not given, 0.9415, TCP's over Ethernet, or fitted by --calibrate"""
    host_limit: str = "unlimited"
    """the most that a host's processor can send, as a rate"""
    calibrate: Path | None = None
    """results.json of bench network, or its folder: fit overhead, efficiency and host limit to it"""
    calibrate_on: str = "4/100mbit"
    """hosts and rate of that run to fit to"""
    run_dir: Path | None = None
    """a run of bench network to take the times of computing from, instead of measuring"""
    repeats: int = 10
    """rounds; medians are taken"""
    output: Path | None = None
    """folder of advise.md and advise.json"""

    def run(self, line: str) -> None:
        """Print the advice, and write it into a folder."""
        if self.link == "bucket":
            no_bucket = "does not go with --link bucket: a run of bench network has collectives"
            refuse_given(self, ("run_dir", "calibrate"), no_bucket)
        advice = predict(self)
        page.show(advice, Console(markup=False))
        if self.output is not None:
            page.write(self.output, "Does it pay?", line, page.markdown(advice), page.as_json(advice))


def predict(asked: Advise) -> Advice:
    """The advice, measured or from a run.

    Raises:
      UserError: an option is wrong.
    """
    check(asked)
    names = names_of(words(asked.methods))
    link = link_of(asked)
    if asked.run_dir is not None:
        return _from_run(asked, asked.run_dir, names, link)
    config = config_of(asked)
    bucket = asked.link == "bucket"
    size = None if asked.parameters is None else round(asked.parameters)
    measured = measure.measure(config, asked.hosts, names, asked.repeats, asked.computation, bucket, size)
    origin = "measured" if asked.computation is None else "given"
    model = f"{measured.values:,} parameters"
    if size is None:
        model = f"Workload {config.workload}: {model}, {measured.batch} examples a host in a step"
    else:
        model = f"A transformer of {model}"
    about = f"{model}, computation {origin}; {given_settings(config)}. {describe()}; medians of {asked.repeats} rounds."
    return advise(measured.rows, asked.hosts, link, about, measured.failed, kind_of(resolve(config).data.name))


def check(asked: Advise) -> None:
    """Raise UserError for an option that is out of range."""
    if asked.hosts < 2:
        raise UserError(f"--hosts must be at least 2, got {asked.hosts}")
    for name in ("latency", "overhead", "computation"):
        value = getattr(asked, name)
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"--{name} must be seconds, at least 0, got {value}")
    if asked.efficiency is not None and not 0 < asked.efficiency <= 1:
        raise UserError(f"--efficiency must be above 0 and at most 1, got {asked.efficiency}")
    if asked.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {asked.repeats}")
    if asked.batch_size is not None and asked.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {asked.batch_size}")
    models = (asked.run_dir, asked.config, asked.method, asked.workload, asked.parameters)
    if all(x is None for x in models):
        raise UserError(
            "give --workload NAME, --method NAME, --config FILE or --parameters N, or --run-dir of a run of bench "
            "network"
        )
    if asked.run_dir is not None:
        unused = ("method", "config", "workload", "parameters", "batch_size", "every")
        refuse_given(asked, unused, "does not go with --run-dir, which has a model and steps already")
        refuse_given(asked, ("repeats",), "does not go with --run-dir, which measures nothing")
    elif asked.calibrate is None:
        refuse_given(asked, ("calibrate_on",), "needs --calibrate or --run-dir")
    if asked.parameters is not None:
        if not 1e4 <= asked.parameters <= 1e12:
            raise UserError(f"--parameters must be from 1e4 to 1e12, such as 350e6, got {asked.parameters:g}")
        if asked.computation is None:
            raise UserError("--parameters needs --computation, the seconds that a step of your model takes on one host")
        refuse_given(asked, ("batch_size",), "does not go with --parameters: --computation is of your batch")


def link_of(asked: Advise) -> Link:
    """The link in question, between hosts with a processor each."""
    with values_of_the_user():
        rate, limit = rate_of(asked.bandwidth), rate_of(asked.host_limit)
    names = ("latency", "overhead", "efficiency")
    options = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if asked.calibrate is None:
        defaults = {"latency": LATENCY}
        if asked.link == "bucket":
            defaults = {"latency": BUCKET_LATENCY, "overhead": 0.0}
        return Link(rate, limit=limit, **{**defaults, **options})
    measured = results.read(asked.calibrate)
    on = results.place_of(asked.calibrate_on)
    sent_of = results.sent_in(measured)
    fitted, free = results.calibrated(measured, on, sent_of), results.limit(measured, on.hosts, sent_of)
    busy = fitted.limit if free == math.inf else free
    return fitted._replace(rate=rate, contention=1.0, limit=min(limit, busy), **options)


def config_of(asked: Advise) -> Config:
    """The method's or the config file's, with the command line's changes, not yet resolved."""
    config = given_config(asked.config, asked.method or (None if asked.config else "dense"))
    changes = {name: getattr(asked, name) for name in ("workload", "batch_size") if getattr(asked, name) is not None}
    if asked.parameters is not None:  # nothing is computed on a batch: an example a host
        changes = {"batch_size": asked.hosts, **({} if asked.config else {"workload": "ptb_gpt"}), **changes}
    if asked.every is not None:
        changes["local"] = dataclasses.replace(config.local, every=asked.every)
    return dataclasses.replace(config, **changes)


def given_settings(config: Config) -> str:
    """The settings in effect, in words."""
    return f"{method_name(config.compressor)} as given, other methods with the workload's settings"


def _from_run(asked: Advise, run_dir: Path, names: list[str], link: Link) -> Advice:
    measured = results.read(run_dir)
    prefer = results.place_of(asked.calibrate_on).rate
    wanted = [*measure.BASELINES, *names]
    rows, failed = results.rows_from(measured, asked.hosts, results.sent_in(measured), prefer, wanted)
    if asked.computation is not None:
        rows = [row._replace(computation=asked.computation) for row in rows]
    s = measured["settings"]
    task = task_named(str(s.get("model")))
    exception = "" if asked.computation is None else ", but for the given seconds of the gradients"
    about = (
        f"Times of computing from a run of bench network{exception}: processor seconds of a host on one thread, "
        f"{task.name}, {s.get('batch')} {task.examples} a host in a step, {s.get('machine')}; methods as that "
        "benchmark sets them."
    )
    return advise(rows, asked.hosts, link, about, failed, "text" if task.window else "images")
