"""For a page: its tables as CSV, and its command line without paths of this machine."""

import csv
import gzip
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jgc.training.run.folder import write_whole


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV packed by gzip, floats with 6 digits; no file for no rows."""
    if not rows:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    write_whole(path, gzip.compress(text.getvalue().encode(), mtime=0))


def without_places(command: str) -> str:
    """A command line without paths of this machine: DIR for the data's folder, the last part of other absolute paths.

    Example:
      >>> without_places("jgc --data-dir /somewhere/data --nodes 2 /somewhere/runs/a --output=/elsewhere/b")
      'jgc --data-dir DIR --nodes 2 a --output=b'
    """
    command = re.sub(r"(--data[-_.]dir[= ])\S+", r"\1DIR", command)
    return re.sub(r"(^|[ =])/\S*?([^/ ]+)/?(?= |$)", r"\1\2", command)
