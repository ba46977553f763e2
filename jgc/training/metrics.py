"""What a run writes as it goes: metrics.jsonl, one object a step, and the same for TensorBoard."""

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from jgc.training.errors import cannot_write
from jgc.training.rundir import METRICS

Line = dict[str, Any]


class Metrics:
    """Both writers behind one call. Files are written in this thread, so that a full disk is noticed here.

    `step` in a line is the number of updates made with it: the first line has step 1.
    """

    def __init__(self, run_dir: Path, resumed_at: int = 0):
        self.path = run_dir / METRICS
        try:
            truncate(self.path, resumed_at)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed on __exit__)
            (run_dir / "tensorboard").mkdir(exist_ok=True)
            self._events = EventsWriter(str(run_dir / "tensorboard" / "events"), f".{resumed_at}")
            # tells TensorBoard to forget what a killed run wrote after its last checkpoint
            restart = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=resumed_at + 1, session_log=restart, wall_time=time.time()))
        except OSError as error:
            raise cannot_write(run_dir, error) from error

    def write(self, line: Line, tensorboard: bool = True) -> None:
        """Write one step's line.

        Raises:
          UserError: a full disk.
        """
        try:
            self._file.write(json.dumps({k: _plain(v) for k, v in line.items()}, allow_nan=False) + "\n")
            self._file.flush()
            if tensorboard:
                self._write_events(line)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _write_events(self, line: Line) -> None:
        for name, value in line.items():
            if name != "step" and isinstance(value, (int, float)):
                event = Event(step=line["step"], summary=scalar(name, value), wall_time=time.time())
                self._events.write_event(event)
        self._events.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        """Close both files; a disk that is full has been reported by then."""
        for file in (self._file, self._events):
            with contextlib.suppress(OSError):
                file.close()


class NoMetrics:
    """In place of `Metrics` in a process that writes none."""

    def write(self, line: Line, tensorboard: bool = True) -> None:
        """Drop the line."""

    def __enter__(self) -> "NoMetrics":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _plain(value: Any) -> Any:
    """JSON has no NaN: None stands for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> list[Line]:
    """The whole lines of a metrics file; what a kill left half-written is passed over."""
    lines: list[Line] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines


def truncate(path: Path, step: int) -> None:
    """Keep the lines up to a step, so that a resumed run writes no step twice."""
    if not path.exists():
        return
    kept = "".join(json.dumps(line) + "\n" for line in read(path) if line["step"] <= step)
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(kept, encoding="utf-8")
    os.replace(beside, path)
