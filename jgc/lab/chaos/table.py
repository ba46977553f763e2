"""The table of faults. Each entry is a function `(lab, dice) -> Outcome`; its docstring describes it on the page."""

from collections.abc import Callable
from random import Random

from jgc.lab.chaos import disks, files, kills, replicas, stops, strangers
from jgc.lab.chaos.lab import Lab
from jgc.lab.chaos.verdict import Outcome

Fault = Callable[[Lab, Random], Outcome]

FAULTS: dict[str, Fault] = {
    "kill": kills.kill,
    "power-cut": kills.power_cut,
    "terminate": kills.terminate,
    "resume": kills.resume,
    "closed-pipe": kills.closed_pipe,
    "stop-0": stops.stop_process_0,
    "stop-another": stops.stop_another,
    "strangers": strangers.strangers,
    "missing": strangers.missing,
    "no-descriptors": strangers.no_descriptors,
    "full-files": disks.files_cannot_grow,
    "full-disk": disks.small_disk,
    "flip-file": files.flipped_file,
    "cut-file": files.cut_file,
    "rename": files.renamed,
    "change-key": files.changed_key,
    "flip-replica": replicas.flipped_replica,
    "two-at-once": files.two_at_once,
}
FLIPS = "flips"  # many flips in one group of processes: it needs --count
