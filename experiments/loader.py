"""`python -m experiments loader`: images per second of a workload's loader, by the number of threads that decode."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from jgc.compress import Dense
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import publish
from jgc.lab.shared.tables import table
from jgc.training.data import MissingDataError, Source, Streamed, streamed_source
from jgc.training.data.files import pictures_in
from jgc.training.data.streamed import processors
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.run.setup import data_of
from jgc.training.settings.config import Config, DataConfig, check, resolve

# ImageNet's mean, and a quality and a noise at which the files have about its mean size, 110 kB
WIDTH, HEIGHT, QUALITY, NOISE = 482, 415, 92, 12

STREAMED = ("food101", "imagenet")


@dataclass(frozen=True)
class Loader:
    """Images per second that a workload's loader makes, by the number of threads that decode.

    Nothing trains meanwhile. A run needs its batch size divided by the seconds of a step.

        python -m experiments loader --workload imagenet_resnet50 --data-dir ~/data
    """

    workload: str = "imagenet_resnet50"
    """which images, batch and crops"""
    data_dir: str | None = None
    """folder of prepared data sets"""
    threads: tuple[int, ...] = ()
    """numbers of threads that decode; 1, 2, 4 and so on up to the processors if not given"""
    steps: int = 4
    """batches that are timed, after one that is not"""
    made: int = 0
    """generate so many photographs of ImageNet's mean size, and read them instead of the data set"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Measure, and print the page."""
        if self.steps < 1 or self.made < 0 or any(count < 1 for count in self.threads):
            raise UserError(f"--steps and --threads must be at least 1 and --made at least 0, got {self.steps}, "
                            f"{' '.join(map(str, self.threads)) or 'none'} and {self.made}")  # fmt: skip
        with values_of_the_user():
            rates = measure(self.workload, self.data_dir, self.threads, self.steps, self.made)
        publish("Rate of the loader", markdown(rates, describe()), self.output, line)


class Rate(NamedTuple):
    """Images per second with `threads` threads."""

    threads: int
    images: float


class Rates(NamedTuple):
    """Outcome of the benchmark: the images in words, and each rate."""

    workload: str
    what: str
    batch_size: int
    rates: tuple[Rate, ...]


def measure(workload: str, data_dir: str | None, threads: Sequence[int], steps: int, made: int) -> Rates:
    """Time batches.

    Args:
      workload: a name in `jgc.training.settings.workloads`.
      data_dir: folder of prepared data sets.
      threads: numbers of threads; powers of two up to the processors if empty.
      steps: batches timed, after one that is not.
      made: images to generate instead of reading the data set; 0 to read it.

    Raises:
      UserError: the data set is not there, or not one that is decoded while training.
    """
    config = resolve(Config(Dense(), workload=workload, data=DataConfig(dir=data_dir)))
    check(config)
    if config.data.name not in STREAMED:
        raise UserError(f"{config.data.name} of {workload} is decoded once, not while training; take a workload of one "
                        f"of {', '.join(STREAMED)}")  # fmt: skip
    threads = threads or [2**i for i in range(processors().bit_length())]
    if not made:
        sources: Callable[[int], Source] = partial(_source, config)
        try:
            what = sources(1).facts
        except MissingDataError as error:
            raise UserError(str(error)) from error
        return Rates(workload, what, config.batch_size, _rates(sources, config, threads, steps))
    with tempfile.TemporaryDirectory() as folder:
        dataset, what = made_up(Path(folder), made)
        rates = _rates(lambda count: streamed_source(dataset._replace(threads=count)), config, threads, steps)
    return Rates(workload, what, config.batch_size, rates)


def _source(config: Config, threads: int) -> Source:
    return data_of(dataclasses.replace(config, data=dataclasses.replace(config.data, threads=threads)))


def _rates(
    source: Callable[[int], Source], config: Config, threads: Sequence[int], steps: int
) -> tuple[Rate, ...]:
    """The rate of each number of threads."""
    images_per_second(source(max(threads)), config, steps)  # not counted: all read the same files, then from memory
    return tuple(Rate(count, images_per_second(source(count), config, steps)) for count in threads)


def images_per_second(source: Source, config: Config, steps: int) -> float:
    """The rate of one loader."""
    source.batch(config.seed, 0, config.nodes, config.batch_size)
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        source.batch(config.seed, step, config.nodes, config.batch_size)
    return steps * config.batch_size / (time.perf_counter() - begun)


def made_up(folder: Path, count: int) -> tuple[Streamed, str]:
    """JPEG files that take as long to decode as photographs (patches of colour with noise), and a description."""
    rng, files = np.random.default_rng(0), [f"{i}.jpg" for i in range(count)]
    for name in files:
        patches = Image.fromarray(rng.integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), np.uint8))
        smooth = np.asarray(patches.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
        noisy = smooth + rng.normal(0, NOISE, smooth.shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / name, "JPEG", quality=QUALITY)
    size = sum((folder / name).stat().st_size for name in files) / count
    pictures = pictures_in(folder, files, np.zeros(count, np.int32))
    what = f"{count} made-up JPEG files of {WIDTH}x{HEIGHT} pixels and {size / 1000:.0f} kB"
    return Streamed("made up", pictures, pictures, 1), what


def markdown(rates: Rates, machine: str) -> str:
    """The page."""
    first = rates.rates[0].images
    rows = [[str(r.threads), f"{r.images:,.0f}", f"{r.images / first:.2f}"] for r in rates.rates]
    return (
        f"`{rates.workload}`, batch {rates.batch_size}; {rates.what}; {processors()} processors; {machine}.\n\n"
        f"{table(['threads', 'images per second', 'of the first'], rows)}\n"
    )
