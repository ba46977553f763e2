"""One writer a run folder: a lock file with host, process and time, also where hosts share the file system.

The lock is the file `.lock-N` with the highest N; `.lock-N.free` has been given back. Whoever takes it creates the
next number, which a file system, a shared one too, lets only one process do (O_EXCL). Numbers never fall, so a process
that was slow to take over from a dead one finds a higher number, and withdraws.

The holder touches its file every few seconds. Processes on its host look whether it lives; those on other hosts, or in
other containers, see it only by these touches, in times of the file system, never of a host's clock.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from jgc.training.errors import FAILED, UserError, cannot_write

TOUCH = 5.0  # seconds between two signs of life
STALE = 60.0  # seconds without one after which the holder on a different host counts as dead
FREE = ".free"


class Holder(NamedTuple):
    """The process that took a lock."""

    host: str
    process: int
    since: str
    space: str  # where the process's number means this process: the host, its boot, the container
    started: str  # when the process started; tells it from a later one of the same number

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


@contextmanager
def sole_writer(folder: Path, tell: Callable[[str], object], lost: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock of a run folder, which is created if needed, and removed again if nothing else came into it.

    `tell` gets a line about a dead process whose lock is taken over, or whose signs of life this one waits for; `lost`,
    in a thread, if another process takes the lock over. Raises UserError: another process holds the lock.
    """
    try:
        new = not folder.exists()
        path = _take(folder, tell)
    except OSError as error:
        raise cannot_write(folder, error) from error
    over = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, over, lost), daemon=True)
    toucher.start()
    try:
        yield
    finally:
        over.set()
        toucher.join()
        _give_back(path, new)


def _take(folder: Path, tell: Callable[[str], object]) -> Path:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        last = max(_locks(folder), default=(0, None))
        dead = None
        if last[1] is not None and last[1].suffix != FREE:
            try:
                dead = _dead_holder(last[1], tell)
            except FileNotFoundError:
                continue  # given back, or taken over, since we looked
        lock = folder / f".lock-{last[0] + 1}"
        try:
            with open(lock, "x") as file:
                json.dump(_this_process()._asdict(), file)
        except (FileExistsError, FileNotFoundError):  # somebody else was faster; or removed the folder
            continue
        except OSError:
            lock.unlink(missing_ok=True)
            raise
        others = [other for other in _locks(folder) if other[1] != lock]
        if any(number > last[0] for number, _ in others):  # we were slow: the number had been used before
            lock.unlink(missing_ok=True)
            continue
        for _, path in others:
            path.unlink(missing_ok=True)
        if dead:
            tell(f"took {folder} over from {dead}, which is dead")
        return lock


def _locks(folder: Path) -> list[tuple[int, Path]]:
    numbers = ((path.name.removesuffix(FREE)[6:], path) for path in folder.glob(".lock-*"))
    return [(int(number), path) for number, path in numbers if number.isdecimal()]


def _dead_holder(path: Path, tell: Callable[[str], object]) -> str:
    """The dead holder of a lock, in words. UserError if it lives; FileNotFoundError if the lock was given back."""
    holder = _holder(path)
    name = str(holder or "an unknown process")
    if holder and holder.space == _space():
        alive = _started(holder.process) == holder.started
    else:
        alive = _shows_life(path, lambda: tell(f"waiting for signs of life of {name}"))
    if alive:
        cure = "wait for its end, stop it, or give a different --run-dir"
        raise UserError(f"{path.parent} is in use by {name}: {cure}", FAILED)
    return name


def _holder(path: Path) -> Holder | None:
    """The process that took a lock; None if the file does not say."""
    for _ in range(5):  # it is empty at the moment of its creation
        try:
            return Holder(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            time.sleep(0.1)
    return None


def _shows_life(path: Path, begin: Callable[[], object]) -> bool:
    """Whether a lock's file is touched within `STALE` seconds; does not wait if the last touch is long ago."""
    first, now = _touched(path), _now(path.parent)
    if now - first > STALE:
        return False
    begin()
    deadline = time.monotonic() + STALE - max(0.0, now - first)
    while time.monotonic() < deadline:
        time.sleep(min(1.0, TOUCH))
        if _touched(path) != first:
            return True
    return False


def _touched(path: Path) -> float:
    with open(path) as file:  # opened: NFS then asks the server, and does not answer from its cache
        return os.fstat(file.fileno()).st_mtime


def _now(folder: Path) -> float:
    """The time by the file system's clock."""
    probe = folder / f".clock-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.write_text("")
        return _touched(probe)
    finally:
        probe.unlink(missing_ok=True)


def _touch(path: Path, over: threading.Event, lost: Callable[[str], object]) -> None:
    while not over.wait(TOUCH):
        try:
            os.utime(path)
        except FileNotFoundError:
            if not over.is_set():
                lost(f"a different process has taken {path.parent} over: this one showed no life for {STALE:g} s")
            return
        except OSError:
            continue  # the disk may come back


def _give_back(path: Path, new: bool) -> None:
    with contextlib.suppress(OSError):  # a disk that is gone; the next process sees that this one is dead
        if new and [child.name for child in path.parent.iterdir()] == [path.name]:
            path.unlink()
            path.parent.rmdir()
        else:
            path.rename(f"{path}{FREE}")  # takes no space on a full disk


def _this_process() -> Holder:
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return Holder(socket.gethostname(), os.getpid(), now, _space(), _started(os.getpid()))


def _space() -> str:
    """Names host, boot and container: two processes of one space see each other's numbers."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # only Linux has these
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _started(process: int) -> str:
    """When a process of this host started, in the kernel's words; "" if there is none, "?" if unknown."""
    if Path("/proc/self/stat").exists():
        try:
            state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return "" if state == "Z" else rest[18]  # a killed process stays as Z until its parent has asked for it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "?"
