"""A warning where many steps in a row are skipped. It never waits for a device."""

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jgc.types import Array

# loss scaling in f16, which halves its scale until gradients fit, skips fewer at its start
IN_A_ROW = 20


class SkippedStepsWarning(UserWarning):
    """Many steps in a row were skipped: gradients not finite, or with a norm of 1e15 or more.

    Example:
      >>> import warnings
      >>> warnings.filterwarnings("error", category=SkippedStepsWarning)  # to end such a run
    """


def make_skip_warning(steps: str = "steps") -> Callable[[int, Array], None]:
    """Make `warn_of_skips(step, finite)`, to call after every step; `finite` bool[] or bool[K].

    It reads 20 values together, after the device has computed them, so the warning comes up to 40
    steps late, or more if the host is far ahead. It comes once. `steps` names the skipped steps.
    """
    waiting: deque[tuple[int, Any]] = deque()
    skipped: Any = np.int64(0)  # in a row, of every node
    last, warned = -1, False

    def warn_of_skips(step: int, finite: Array) -> None:
        nonlocal skipped, last, warned
        if warned:
            return
        waiting.append((step, finite))
        # a device computes in order, so with the 20th all are there
        if len(waiting) < IN_A_ROW or not waiting[IN_A_ROW - 1][1].is_ready():
            return
        numbers, values = zip(*(waiting.popleft() for _ in range(IN_A_ROW)), strict=True)
        for number, fine in zip(numbers, jax.device_get([_here(x) for x in values]), strict=True):
            before = skipped if number == last + 1 else 0  # a different state, or a restored one
            skipped, last = np.where(np.ravel(fine), 0, before + 1), number
            if warned := bool(np.max(skipped) >= IN_A_ROW):
                warnings.warn(_message(number, steps), SkippedStepsWarning, stacklevel=3)
                return

    return warn_of_skips


def _here(x: Array) -> Any:
    """This process's part of an array."""
    if x.is_fully_replicated:
        return x.addressable_data(0)
    return [shard.data for shard in x.addressable_shards]


def _message(last: int, steps: str) -> str:
    return (
        f"step {last} and the {IN_A_ROW - 1} {steps} before it were skipped: gradients were not "
        "finite or had a norm of 1e15 or more. Likely reasons: parameters had diverged (too high a "
        "rate, or an optimiser that does not suit a sparse method: docs/composing.md), NaN in the "
        "data, an overflow of f16. See metrics.loss before these steps; restart from a checkpoint"
    )
