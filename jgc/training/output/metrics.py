"""metrics.jsonl, one JSON object a step, and the same figures for TensorBoard."""

import contextlib
import gzip
import json
import math
import os
import time
import zlib
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from jgc.training.errors import UserError, cannot_write
from jgc.training.run.folder import METRICS, write_whole

Line = dict[str, Any]


class Metrics:
    """Writes both, in the calling thread, so that a full disk raises. `step` in a line counts updates, from 1."""

    def __init__(self, run_dir: Path, resumed_at: int = 0):
        self.path = run_dir / METRICS
        try:
            truncate(self.path, resumed_at)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed on __exit__)
            (run_dir / "tensorboard").mkdir(exist_ok=True)
            self._events = EventsWriter(str(run_dir / "tensorboard" / "events"), f".{resumed_at}")
            # TensorBoard then drops the steps that a killed run wrote after its last checkpoint
            restart = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=resumed_at + 1, session_log=restart, wall_time=time.time()))
        except OSError as error:
            raise cannot_write(run_dir, error) from error

    def write(self, line: Line, tensorboard: bool = True) -> None:
        """Write one step's line."""
        try:
            self._file.write(json.dumps({k: _plain(v) for k, v in line.items()}, allow_nan=False) + "\n")
            self._file.flush()
            if not tensorboard:
                return
            for name, value in line.items():
                if name != "step" and isinstance(value, (int, float)):
                    event = Event(step=line["step"], summary=scalar(name, value), wall_time=time.time())
                    self._events.write_event(event)
            self._events.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def sync(self) -> None:
        """Write the lines so far to the disk itself: a checkpoint that outlives a power cut needs them."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        """Close both files, without errors: `write` has reported a full disk."""
        for file in (self._file, self._events):
            with contextlib.suppress(OSError):
                file.close()


class NoMetrics:
    """`Metrics` of a process that writes no files."""

    def write(self, line: Line, tensorboard: bool = True) -> None:
        """Drop the line."""

    def sync(self) -> None:
        """Nothing to do."""

    def __enter__(self) -> "NoMetrics":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _plain(value: Any) -> Any:
    """None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> list[Line]:
    """The lines of a metrics file, or of its `.gz`, without a last one that a kill left half-written."""
    lines: list[Line] = []
    texts = _stored(path).split(b"\n")
    for number, text in enumerate(texts, start=1):
        line = _line(text)
        if line is not None:
            lines.append(line)
        elif any(_line(later) for later in texts[number:]):
            raise UserError(
                f"{path} is damaged: its line {number} is no step; delete it (totals will say that a step is missing)"
            )
    return lines


def _stored(path: Path) -> bytes:
    """The content of a metrics file, or of its `.gz`; b"" without one."""
    if path.exists():
        return path.read_bytes()
    packed = path.with_name(f"{path.name}.gz")  # as published runs have it
    if not packed.exists():
        return b""
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {packed}: {error}") from error


def _line(text: bytes) -> Line | None:
    """A line of a metrics file; None for other text."""
    try:
        line = json.loads(text)
    except ValueError:  # no JSON, or not even text
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def truncate(path: Path, step: int) -> None:
    """Keep the lines up to a step: a resumed run writes the later ones again."""
    if not path.exists():
        return
    remaining = "".join(json.dumps(line) + "\n" for line in read(path) if line["step"] <= step)
    write_whole(path, remaining.encode())
