"""Run a cell between real processes, each on a host with a slow link."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.rounds import node_bucket, node_gloo
from experiments.rounds.cells import (
    BUCKET,
    GLOO,
    TORCH,
    TORCHFT,
    Cell,
    Measured,
    add_cell,
)
from experiments.rounds.figures import measured_of
from experiments.rounds.links import LEAST_BURST, links
from jgc.lab.bench.network.namespaces import UNLIMITED, remove_leftovers, set_rate, why_not
from jgc.lab.bench.network.workers import ask, scratch, workers
from jgc.lab.shared.progress import count
from jgc.lab.shared.stopping import stoppable
from jgc.training.errors import FAILED, UserError, say

AHEAD = 0.5  # seconds from the request for a run to its first step
PROGRAMS = {  # framework and module of a node's process
    BUCKET: ("jax", node_bucket.__name__),
    GLOO: ("jax", node_gloo.__name__),
    TORCH: ("torch", "experiments.rounds.node_torch"),
    TORCHFT: ("torch", "experiments.rounds.node_torchft"),
}


def measure(cells: Sequence[Cell], folder: Path, data_dir: str | None) -> None:
    """Run cells one by one; each result is in the folder's file before the next begins.

    Raises:
      UserError: not root, no iproute2, no SeaweedFS, or a process that failed.
    """
    with stoppable():
        reason = why_not()
    if reason:
        raise UserError(reason, FAILED)
    remove_leftovers()
    began = time.monotonic()
    with stoppable(), scratch() as place:
        for i, cell in enumerate(cells):
            say(f"{count(i, len(cells), time.monotonic() - began)} {cell.label}")
            result = run(cell, place, data_dir)
            add_cell(folder, cell, result)
            say(f"  utilisation {result['utilisation']:.3f}, loss {result['loss']:.3f}")


def run(cell: Cell, place: Path, data_dir: str | None) -> Measured:
    """The figures of one cell.

    Args:
      cell: the cell.
      place: a folder for logs and compiled programs, which later cells use again.
      data_dir: folder of prepared data sets.
    """
    framework, module = PROGRAMS[cell.via]
    folder = Path(tempfile.mkdtemp(dir=place))
    (folder / "server").mkdir()
    with links(cell, place, folder / "server") as (net, opened):
        options = {
            "cell": cell._asdict(), "folder": str(folder), "data_dir": data_dir, **opened,
        }  # fmt: skip
        with workers(framework, net, options, module) as team:
            joined = ask(team, "join")  # the links have no rate yet: joining is not measured here
            set_rate(net, cell.rate, LEAST_BURST)
            ran = ask(team, "run", at=time.monotonic() + AHEAD)
            set_rate(net, UNLIMITED)
            curve = ask(team, "losses")[0]
    return measured_of(cell, joined, ran, curve)
