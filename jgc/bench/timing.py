"""Medians of interleaved timings: what is compared is measured in turn, so that a drifting machine hits all alike."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax


def interleaved(work: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each piece of work over `repeats` rounds, after one round that is not counted.

    Example:
      >>> sorted(interleaved({"a": lambda: 1, "b": lambda: 2}, repeats=3))
      ['a', 'b']
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for name in work:
        jax.block_until_ready(work[name]())
    for _ in range(repeats):
        for name, run in work.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - started)
    return {name: median(times) for name, times in seconds.items()}
