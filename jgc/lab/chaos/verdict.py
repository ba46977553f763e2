"""Verdicts on the end of a run: survived, said, silent, hang or traceback."""

import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from jgc.lab.chaos.processes import Ended
from jgc.training.errors import UserError
from jgc.training.output.metrics import read
from jgc.training.run import checkpoint
from jgc.training.run.folder import METRICS

SURVIVED, SAID, SILENT, HANG, TRACEBACK = KINDS = ("survived", "said", "silent", "hang", "traceback")
GOOD = (SURVIVED, SAID)
DUMPS = ("Traceback (most recent call last)", "*** ", "Fatal Python error", "terminate called")


class Outcome(NamedTuple):
    """One of KINDS, and what happened in words.

    Survived: the run ended and is bit-equal to an uninterrupted one. Said: it ended with one line and an exit code that
    is not 0. Silent: it went on wrongly. Hang: it did not end within its limit. Traceback: a process ended with one,
    with a dump of C++, by a signal that nobody sent, or without its one line.
    """

    kind: str
    what: str


class CannotTest(Exception):
    """A fault that cannot be produced here, and why."""


def judge(
    ended: Sequence[Ended], run_dir: Path, whole: Path, killed: Collection[int] = (), mute: Collection[int] = ()
) -> Outcome:
    """The verdict on the ends of a run's processes.

    Args:
      ended: by process.
      run_dir: of the run.
      whole: folder of the uninterrupted run.
      killed: processes that were killed, which say nothing.
      mute: processes whose standard error cannot be read.
    """
    spared = {i: end for i, end in enumerate(ended) if i not in killed}
    for i, end in spared.items():
        if end.code is None:
            return Outcome(HANG, f"process {i} did not end; it printed: {_tail(end.output)}")
        if end.code < 0 or any(dump in end.output for dump in DUMPS):
            return Outcome(TRACEBACK, f"process {i} ended with code {named(end.code)}: {_tail(end.output)}")
        if end.code > 0 and len(end.errors) != 1 and i not in mute:
            return Outcome(TRACEBACK, f"process {i} ended with code {end.code} and {len(end.errors)} lines of errors: "
                                      f"{_tail(end.output)}")  # fmt: skip
    lines = [line for end in spared.values() for line in end.errors]
    if any(end.code for end in spared.values()):
        return Outcome(SAID, lines[0] if lines else "ended with nobody to say it to")
    if killed and len(killed) == len(ended):
        return Outcome(SAID, "all processes were killed")
    different = difference(run_dir, whole)
    return Outcome(SILENT, different) if different else Outcome(SURVIVED, "bit-equal")


def named(code: int) -> str:
    """An exit code in words.

    Example:
      >>> named(-9), named(1)
      ('SIGKILL', '1')
    """
    return signal.Signals(-code).name if code < 0 else f"{code}"


def difference(run_dir: Path, whole: Path) -> str:
    """How a finished run differs from an undisturbed one, bit for bit: last checkpoint and all losses; "" if not."""
    try:
        got, expected = (checkpoint.restore(checkpoint.open_manager(path)) for path in (run_dir, whole))
    except UserError as error:
        return str(error)
    if got is None or expected is None or got.step != expected.step:
        return f"the last checkpoint is that of step {got.step if got else 'none'}, not {expected and expected.step}"
    if got.arrays.keys() != expected.arrays.keys():
        return f"the arrays are {sorted(got.arrays)}"
    for name, x in got.arrays.items():
        if x.tobytes() != expected.arrays[name].tobytes():
            return f"{name} differs from an uninterrupted run"
    losses, whole_losses = (
        [(line["step"], line["loss"]) for line in read(path / METRICS)] for path in (run_dir, whole)
    )
    return "" if losses == whole_losses else "losses in metrics.jsonl differ from an uninterrupted run's"


def _tail(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-8:])[-600:] or "nothing"
