"""Interleaved timings: candidates run in turn, so that a drifting machine changes all alike."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jgc.lab.shared.progress import each

Times = npt.NDArray[np.float64]  # f64[repeats], seconds of each round
Work = Mapping[str, Callable[[], Any]]


def rounds(work: Work, repeats: int) -> dict[str, Times]:
    """Seconds of each piece of work in each round, in turn; a first round is not counted."""
    return _times([_round(work) for _ in range(1 + repeats)])


def rounds_shown(work: Work, repeats: int) -> dict[str, Times]:
    """`rounds` with lines of progress; after Ctrl-C the rounds that are done, if one counts."""
    done = each(range(1 + repeats), lambda _: _round(work), lambda i: "round" if i else "a round that does not count")
    if len(done) == 1:
        raise KeyboardInterrupt
    return _times(done)


def _round(work: Work) -> dict[str, float]:
    seconds = {}
    for name, run in work.items():
        started = perf_counter()
        jax.block_until_ready(run())
        seconds[name] = perf_counter() - started
    return seconds


def _times(done: list[dict[str, float]]) -> dict[str, Times]:
    return {name: np.array([seconds[name] for seconds in done[1:]]) for name in done[0]}


def interleaved(work: Work, repeats: int) -> dict[str, float]:
    """Median seconds of each piece of work over `repeats` rounds.

    Example:
      >>> sorted(interleaved({"a": lambda: 1, "b": lambda: 2}, repeats=3))
      ['a', 'b']
    """
    return {name: float(np.median(times)) for name, times in rounds(work, repeats).items()}
