"""A disk that is full: files that cannot grow, and a small tmpfs."""

import contextlib
import os
import resource
import subprocess
from pathlib import Path
from random import Random

from jgc.lab.chaos.lab import STEPS, Lab
from jgc.lab.chaos.verdict import CannotTest, Outcome

LEAST = 4096  # bytes: the process's output has to fit


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def files_cannot_grow(lab: Lab, dice: Random) -> Outcome:
    """After a random moment no file of process 0 can grow beyond a random size; then there is space again."""
    if not hasattr(resource, "prlimit"):
        raise CannotTest("needs Linux")
    largest = max(path.stat().st_size for path in lab.whole.run_dir.rglob("*") if path.is_file())
    size = int(LEAST * (largest / LEAST) ** dice.random())
    group = lab.start()
    lab.at_step(group, dice.randrange(0, STEPS))
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(group.running[0].process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(group.running[0].process.pid, resource.RLIMIT_FSIZE, (size, hard))
    outcome = lab.verdict(group)
    return lab.resumed(group, outcome._replace(what=f"no file above {size:,} bytes: {outcome.what}"))


def small_disk(lab: Lab, dice: Random) -> Outcome:
    """A run folder on a tmpfs that is too small; then it is made larger."""
    if os.geteuid() != 0:
        raise CannotTest("mounting a tmpfs needs root")
    disk = lab.folder / "disk"
    disk.mkdir()
    size = int(size_of(lab.whole.run_dir) * dice.uniform(0.05, 1.1))
    if _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)) != 0:
        raise CannotTest("this container may not mount a tmpfs")
    try:
        group = lab.start(disk / "run")
        outcome = lab.verdict(group)
        _mount("-o", f"remount,size={100 * size}", str(disk))
        return lab.resumed(group, outcome._replace(what=f"a disk of {size:,} bytes: {outcome.what}"))
    finally:
        lab.kill()
        subprocess.run(["umount", "-l", str(disk)], check=False, capture_output=True)


def _mount(*words: str) -> int:
    try:
        return subprocess.run(["mount", *words], check=False, capture_output=True).returncode
    except FileNotFoundError:
        return 1
