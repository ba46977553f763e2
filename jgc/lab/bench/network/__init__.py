"""Time and bytes of every method between real processes on hosts of one machine, with the network's rate set.

    python -m jgc bench network --hosts 4 --rates 100mbit,1gbit,unlimited --run-dir DIR

From below: `namespaces` are the hosts and their cables, `workers` the processes on them, `channel` how they hear the
parent, `worker_jax` and `worker_torch` what they do; `rounds` takes the steps of a `plan`, `results` keeps them,
`figures`, `tables` and `plot` show them.
"""

from pathlib import Path

from jgc.lab.bench.network import plot, tables
from jgc.lab.bench.network.plan import MODELS, Plan, plan_of, short
from jgc.lab.bench.network.rounds import measure
from jgc.training.errors import FAILED, UserError

PAGE = "network.md"


def run(plan: Plan, folder: Path, command: str) -> str:
    """Measure what a folder lacks of a plan, write its page and pictures, and return the page.

    Args:
      plan: see `plan_of`.
      folder: gets results.json, network.md and pictures.
      command: the command line, for the page.

    Raises:
      UserError: no root, no iproute2, an unknown method, or a process that failed.
    """
    found = measure(plan, folder)
    page = f"# Methods on a network\n\n    {command}\n\n{tables.page(found, plot.draw(folder, found))}"
    (folder / PAGE).write_text(page)
    if not tables.cells_of(found):
        raise UserError(f"nothing was measured, see {folder / PAGE}", FAILED)
    return page


__all__ = ["MODELS", "PAGE", "Plan", "measure", "plan_of", "run", "short"]
