"""Metrics of each step, fetched one step late so that logging never blocks the device."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jgc.training.errors import NonFinite
from jgc.training.output.metrics import Line, Metrics, NoMetrics
from jgc.training.output.progress import Display
from jgc.training.run.sane import Proof
from jgc.training.steps.costs import Costs
from jgc.types import Array


class Recorder:
    """Fetches, shows and writes each step's metrics once the next step has been started."""

    def __init__(
        self, metrics: Metrics | NoMetrics, display: Display, costs: Costs, nodes: int, proof: Proof,
        last_good: Callable[[], str], diverges: Callable[[int, float, bool], str] = lambda step, loss, finite: "",
    ):  # fmt: skip
        """`last_good()` names the last good checkpoint; `diverges(step, loss, finite)` says why a run diverges."""
        self.metrics, self.display, self.proof, self.last_good = metrics, display, proof, last_good
        self._nodes, self._costs, self._diverges = nodes, costs, diverges
        self._pending: Line | None = None
        self._outputs: dict[str, Array] | None = None
        self._added, self._started = False, time.perf_counter()

    def push(self, step: int, phase: Any, outputs: dict[str, Array], **extra: Any) -> None:
        """Add a step that has just been started. `step` counts from 0, the line's from 1.

        `extra`: other bytes than the phase's, or further figures, whose line goes to TensorBoard too.
        """
        self.write()
        cost = self._costs[phase.value]
        self._pending = {
            "step": step + 1,
            "phase": phase.name,
            "bytes": cost.up + (cost.once if step == phase.start else 0.0),
            "bytes_uncompressed": cost.dense * self._nodes,
            "bytes_up_leader": cost.leader,
            "bytes_up_worker": cost.worker,
        }
        self._outputs, self._added = outputs, not extra.keys() <= self._pending.keys()  # figures of a diagnose step
        self._pending.update(extra)

    def add(self, **fields: Any) -> None:
        """Add fields to the newest step's line, which then goes to TensorBoard too."""
        assert self._pending is not None, "no step to add to"
        self._pending.update(fields)
        self._added = True

    def fetch(self) -> None:
        """Wait for the newest step and fetch its metrics."""
        if self._pending is None or self._outputs is None:
            return
        for x in self._outputs.values():
            x.copy_to_host_async()  # all of them: float(x) would wait for one copy after the other
        values = {name: _value(x) for name, x in self._outputs.items()}
        now = time.perf_counter()
        finite = values.pop("finite") == 1
        self._outputs = None
        self._pending.update(values, seconds=now - self._started)
        self._started = now
        step, loss = self._pending["step"], values["loss"]
        why = self._diverges(step, loss, finite)
        if why or not finite or not math.isfinite(loss):
            self._write_pending()
            what = f"the loss is {loss:.4g}"
            if not finite:
                what = f"a gradient of some node is NaN, infinite or of norm 1e15 or more (loss {loss:.4g})"
            raise NonFinite(step, f"{what}: {why}" if why else what, self.last_good())
        self.proof.follow(step, loss)

    def write(self) -> None:
        """Fetch, show and write the newest step, if that has not been done."""
        self.fetch()
        self._write_pending()

    def _write_pending(self) -> None:
        if self._pending is not None:
            line, self._pending = self._pending, None
            self.metrics.write(line, tensorboard=line["step"] % self.display.log_every == 0 or self._added)
            self.display.update(line)

    @contextmanager
    def untimed(self, wait_for: Any = None) -> Iterator[None]:
        """For work between steps: waits for the device first, and leaves the block's time out of the step's."""
        self.fetch()
        jax.block_until_ready(wait_for)
        begun = time.perf_counter()
        yield
        self._started += time.perf_counter() - begun


def _value(x: Array) -> float:
    """A scalar; of an array [K] the mean over the nodes of this process, which needs no message."""
    if x.ndim == 0:
        return float(x)
    return float(np.mean(np.concatenate([np.asarray(shard.data, np.float64) for shard in x.addressable_shards])))
