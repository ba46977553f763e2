"""`python -m experiments select`: time of selecting the k largest of n values, next to other libraries.

All candidates take the same normally distributed values and run in turn in one process. Ratios are taken round by
round, so that a machine that slows down changes none of them. The floor is one read of the values: the largest
magnitude. `lax.approx_max_k` is exact only on CPU. `torch.topk` runs on JAX's GPU if torch can
use it, else on the CPU.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jgc.lab.shared.choices import words
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import check_repeats, publish
from jgc.lab.shared.progress import each
from jgc.lab.shared.tables import table
from jgc.lab.shared.timing import Times, rounds
from jgc.layout.pack import whole
from jgc.selection.chunks import CHUNK
from jgc.selection.ranges import Range
from jgc.selection.selector import check_alpha, make_selector
from jgc.selection.top_k import largest_in_ranges
from jgc.training.errors import values_of_the_user

OURS, TOP_K, APPROXIMATE, TORCH = "jgc, positions and values", "lax.top_k", "lax.approx_max_k", "torch.topk"
CHUNKS = "jgc, chunks of 4,096"
READ = "one read (max of magnitudes)"


@dataclass(frozen=True)
class Select:
    """Time to select the largest values, next to lax.top_k, lax.approx_max_k, torch.topk and one read.

    jgc's selections give positions in ascending order, and their values. Selection by chunks is measured for shares of
    at least 1/4096.

        python -m experiments select --sizes 1e6,2.56e7 --alpha 0.001

        | n | k |  | ms, median (quarter to three quarters) | of lax.top_k |
        | 1,000,000 | 1,000 | jgc, positions and values | 1.44 (1.18 to 1.62) | 0.26 |
        | 1,000,000 | 1,000 | lax.top_k | 4.62 (4.56 to 5.46) | 1.00 |
    """

    sizes: tuple[str, ...] = ("1e5", "1e6", "1e7", "2.56e7", "1e8")
    """numbers of values, separated by commas or spaces"""
    alpha: float = 0.001
    """share of the values that is selected"""
    repeats: int = 15
    """rounds; medians and quartiles are shown"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Measure, and print the page."""
        check_repeats(self.repeats)
        with values_of_the_user():
            check_alpha(self.alpha)
            counts = sizes_of(self.sizes)
        torch, before = find_torch(), load()
        measured = partial(measure, alpha=self.alpha, repeats=self.repeats, torch=torch)
        timings = each(counts, measured, "{:,} values".format)
        page = markdown(timings, describe(), torch, f"load average {before} before and {load()} after")
        publish("Selection of the largest values", page, self.output, line)


class Torch(NamedTuple):
    """PyTorch, and the name of the device that it computes on: "cuda" or "cpu"."""

    module: ModuleType
    device: str

    def topk(self, values: np.ndarray, k: int) -> Callable[[], Any]:
        """A function that selects the k largest magnitudes, and waits for the device."""
        there, cuda = self.module.from_numpy(values).to(self.device), self.module.cuda

        def run():
            chosen = self.module.topk(there.abs(), k)
            if self.device == "cuda":
                cuda.synchronize()
            return chosen

        return run

    def __str__(self) -> str:
        if self.device == "cuda":
            return f"torch {self.module.__version__} on {self.module.cuda.get_device_name()}"
        return f"torch {self.module.__version__} on the CPU, {self.module.get_num_threads()} threads"


class Timing(NamedTuple):
    """Seconds of each piece of work for one size, f64[repeats] by name."""

    size: int
    k: int
    seconds: dict[str, Times]


def sizes_of(options: Sequence[str]) -> list[int]:
    """Sizes from the command line.

    Raises:
      ValueError: one of them is not a whole number from 1 to 2^31 - 1.

    Example:
      >>> sizes_of(["1e5,2.56e7", "10"])
      [100000, 25600000, 10]
    """
    sizes = []
    for word in words(options):
        try:
            size = float(word)
        except ValueError:
            size = 0.0
        if not 1 <= size < 2**31 or size != int(size):
            raise ValueError(f"--sizes must be whole numbers from 1 to 2^31 - 1, such as 1e6, got {word!r}")
        sizes.append(int(size))
    if not sizes:
        raise ValueError("--sizes must be at least one number, such as 1e6, got none")
    return sizes


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> str:
    """The load average of the last minute.

    Example:
      >>> float(load()) >= 0
      True
    """
    return f"{os.getloadavg()[0]:.1f}"


def find_torch() -> Torch | None:
    """PyTorch on JAX's device if it can use it, else on the CPU with a thread for each core; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(cores())
    return Torch(torch, "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu")


def measure(size: int, alpha: float, repeats: int, torch: Torch | None) -> Timing:
    """Time everything for one size.

    Args:
      size: n.
      alpha: share of the values that is selected; at least one is.
      repeats: rounds that count.
      torch: None to leave it out.
    """
    k = max(1, round(alpha * size))
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    v = jnp.asarray(values)
    work: dict[str, Callable[[], Any]] = {
        OURS: partial(_ours, v, k),
        TOP_K: partial(_top_k, v, k),
        APPROXIMATE: partial(_approximate, v, k),
        READ: partial(_read, v),
    }
    if alpha * CHUNK >= 1:
        work[CHUNKS] = partial(_chunks, v, alpha)
    if torch is not None:
        work[TORCH] = torch.topk(values, k)
    return Timing(size, k, rounds(work, repeats))


@partial(jax.jit, static_argnums=1)
def _ours(v, k):
    positions = largest_in_ranges(v, [Range(0, v.size, k)])
    return positions, v[positions]


@partial(jax.jit, static_argnums=1)
def _chunks(v, alpha):
    positions = make_selector(alpha, selection="chunks").positions(v, (whole(v.size),))
    return positions, v[positions]


@partial(jax.jit, static_argnums=1)
def _top_k(v, k):
    return lax.top_k(jnp.abs(v), k)


@partial(jax.jit, static_argnums=1)
def _approximate(v, k):
    return lax.approx_max_k(jnp.abs(v), k)


@jax.jit
def _read(v):
    return jnp.max(jnp.abs(v))


def markdown(timings: Sequence[Timing], machine: str, torch: Torch | None, load: str) -> str:
    """The page."""
    repeats = next(iter(timings[0].seconds.values())).size
    head = ["n", "k", "", "ms, median (quarter to three quarters)", "of torch.topk", "of lax.top_k", "of one read"]
    rows = [row for timing in timings for row in _rows(timing)]
    missing = "" if torch else (
        "`torch.topk` is left out: torch is not installed (`pip install 'jgc[bench]'`; its CPU build suffices).\n\n"
    )  # fmt: skip
    return (
        f"{machine}; {torch or 'without torch'}; {load}.\n\n"
        f"{missing}{table(head, rows)}\n\n"
        f"Normally distributed f32 values, {repeats} rounds in turn. Ratios are medians over rounds. Only jgc's "
        "rows give positions in ascending order; all others give values and positions by magnitude. Chunks select the "
        "same share of every 4,096 values.\n"
    )


def _rows(timing: Timing) -> list[list[str]]:
    rows = []
    for name, seconds in timing.seconds.items():
        low, middle, high = (f"{1e3 * value:.2f}" for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
        ratios = [_ratio(seconds, timing.seconds.get(other)) for other in (TORCH, TOP_K, READ)]
        rows.append([f"{timing.size:,}", f"{timing.k:,}", name, f"{middle} ({low} to {high})", *ratios])
    return rows


def _ratio(seconds: Times, other: Times | None) -> str:
    return "-" if other is None else f"{np.median(seconds / other):.2f}"
