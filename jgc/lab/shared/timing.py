"""Interleaved timings: candidates run in turn, so that a drifting machine changes all alike."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]  # f64[repeats], seconds of each round
Work = Mapping[str, Callable[[], Any]]


def rounds(work: Work, repeats: int) -> dict[str, Times]:
    """Seconds of each piece of work in each round, in turn; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(1 + repeats):
        for name, run in work.items():
            started = perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(perf_counter() - started)
    return {name: np.array(times[1:]) for name, times in seconds.items()}


def interleaved(work: Work, repeats: int) -> dict[str, float]:
    """Median seconds of each piece of work over so many rounds.

    Example:
      >>> sorted(interleaved({"a": lambda: 1, "b": lambda: 2}, repeats=3))
      ['a', 'b']
    """
    return {name: float(np.median(times)) for name, times in rounds(work, repeats).items()}
