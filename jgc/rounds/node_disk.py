"""A node's file on its disk: its unsent progress, and the message that it is sending.

It is written before each message. It is valid for the round that it names, until a later list
counts a message of this node.
"""

import logging
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jgc.rounds.arithmetic import Arrays, Vector
from jgc.rounds.context import RoundsError
from jgc.rounds.messages import BadObject, opened, sealed

log = logging.getLogger("jgc.rounds")


class Pending(NamedTuple):
    """A node in the middle of a round."""

    round: int  # the round
    data: bytes | None  # its message, or None if it sends none in this round
    before: Arrays  # the memory, if the message does not count
    after: Arrays  # the memory, if it does
    difference: Vector  # f32[n], which the next message must contain if this one does not count
    sha256: str = ""  # of the message, "" without one
    further: Vector | None = None  # f32[n], movement since, which the next one always contains

    def with_further(self, moved: Vector) -> "Pending":
        """The same with further movement."""
        return self._replace(further=self.since() + moved)

    def since(self) -> Vector:
        """f32[n]: the further movement."""
        return np.zeros_like(self.difference) if self.further is None else self.further


class Disk:
    """The file of one node, in a folder that no other process may use at the same time."""

    def __init__(self, folder: str | os.PathLike, run: str, node: str):
        self.path = Path(folder) / f"{node}.rounds"
        self.run, self.node = run, node
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RoundsError(f"folder {folder} cannot be used: {error.strerror}") from None
        self._lock = _locked(self.path.with_suffix(".lock"), node)

    def write(self, pending: Pending) -> None:
        """Replace the file. After an OSError the old file is gone: it would be sent twice."""
        arrays: Arrays = {"difference": pending.difference}
        arrays |= {f"before/{name}": x for name, x in pending.before.items()}
        arrays |= {f"after/{name}": x for name, x in pending.after.items()}
        if pending.further is not None:
            arrays["further"] = pending.further
        if pending.data is not None:
            arrays["data"] = np.frombuffer(pending.data, np.uint8)
        header = {
            "run": self.run, "node": self.node, "round": pending.round, "sha256": pending.sha256,
        }  # fmt: skip
        new = self.path.with_suffix(".new")
        try:
            with open(new, "wb") as file:
                file.write(sealed(header, arrays, None))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
        except OSError:
            self.path.unlink(missing_ok=True)
            new.unlink(missing_ok=True)
            raise

    def read(self) -> Pending | None:
        """The content of the file; None without a valid file of this run and node."""
        try:
            header, arrays = opened(self.path.read_bytes(), None)
        except FileNotFoundError:
            return None
        except BadObject as error:
            log.warning("%s: %s; %s comes back without its residual", self.path, error, self.node)
            return None
        except OSError as error:
            raise RoundsError(f"{self.path} cannot be read: {error.strerror}") from None
        if (header.get("run"), header.get("node")) != (self.run, self.node):
            return None
        data = arrays.pop("data", None)
        difference = np.array(arrays.pop("difference"))
        further = np.array(arrays.pop("further")) if "further" in arrays else None
        memory: dict[str, Arrays] = {"before": {}, "after": {}}
        for name, x in arrays.items():
            when, _, field = name.partition("/")
            memory[when][field] = np.array(x)
        message = None if data is None else data.tobytes()
        return Pending(
            header["round"], message, memory["before"], memory["after"], difference,
            header["sha256"], further,
        )  # fmt: skip

    def close(self) -> None:
        """Release the folder to other processes."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class NoDisk:
    """The disk of a node that restarts without its residual."""

    def write(self, pending: Pending) -> None:
        """Nothing."""

    def read(self) -> Pending | None:
        """Nothing."""
        return None

    def close(self) -> None:
        """Nothing."""


def _locked(path: Path, node: str) -> int | None:
    """A lock that ends with this process; None where the system has no such locks."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise RoundsError(
            f"{path.parent}: a different process on this machine runs as node {node!r}; stop it, "
            "or give this one a different name"
        ) from None
    return file
