"""`python -m jgc chaos --rounds`: the options, checked, and the campaign."""

import math
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from jgc.lab.chaos.rounds import page
from jgc.lab.chaos.rounds.campaign import Results, run
from jgc.lab.chaos.rounds.faults import FAULTS
from jgc.lab.chaos.rounds.node import Settings
from jgc.lab.chaos.rounds.nodes import NAMES, Place
from jgc.lab.chaos.rounds.run import Plan
from jgc.lab.shared.page import publish
from jgc.lab.shared.seaweed import Seaweed
from jgc.lab.shared.stopping import stoppable
from jgc.training.errors import FAILED, UserError, did_you_mean

FOLDER, SEAWEED = SERVERS = ("folder", "seaweedfs")
LEAST = 3  # nodes: a quorum of two goes on while one is hit


def plan_of(
    faults: Sequence[str], seconds: float, between: float, nodes: int, seed: int, limit: float, overlap: int
) -> Plan:
    """The plan, checked.

    Raises:
      UserError: a value out of range, or an unknown fault.
    """
    for name in faults:
        if name not in FAULTS:
            hint = did_you_mean(name, list(FAULTS))
            raise UserError(f"--faults: unknown {name!r}{hint} (there are {', '.join(FAULTS)})")
    for option, value in (("--seconds or --minutes", seconds), ("--between", between), ("--limit", limit)):
        if not 0 < value < math.inf:
            raise UserError(f"{option} must be above 0, got {value:g}")
    if not LEAST <= nodes <= len(NAMES):
        raise UserError(f"--processes must be from {LEAST} to {len(NAMES)} with --rounds, got {nodes}")
    if overlap not in (0, 1):
        raise UserError(f"--overlap must be 0 or 1, got {overlap}")
    settings = Settings("", "", "", quorum=2, overlap=overlap)
    return Plan(tuple(faults) or tuple(FAULTS), seconds, between, nodes, seed, limit, settings)


def campaign(plan: Plan, server: str, run_dir: Path | None, output: Path | None, line: str) -> None:
    """Run a campaign, and print its page.

    Raises:
      UserError: something was silent, hung or ended in a traceback; the server is not installed.
    """
    if server not in SERVERS:
        raise UserError(f"--server must be one of {', '.join(SERVERS)}, got {server!r}")
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
    folder, results = Path(tempfile.mkdtemp(prefix="jgc-chaos-rounds-", dir=run_dir)), Results()
    try:
        with stoppable(), ExitStack() as stack:
            place = Place(folder, stack.enter_context(Seaweed(folder)) if server == SEAWEED else None)
            try:
                run(plan, place, folder, results, lambda text: print(text, flush=True))
            finally:  # after Ctrl-C, too
                where = "SeaweedFS" if place.server else "a folder"
                text = page.markdown(plan, where, results)
                publish("Faults of rounds, and what became of them", text, output, line)
        if bad := page.bad(results):
            raise UserError(
                f"{len(bad)} outcomes were silent, hung or ended in a traceback; the run is in {folder}",
                FAILED,
            )
    except (KeyboardInterrupt, SystemExit):  # after an error its logs are needed
        _remove(folder, results)
        raise
    _remove(folder, results)


def _remove(folder: Path, results: Results) -> None:
    """Remove the folder of a campaign, unless something went badly."""
    if not page.bad(results):
        shutil.rmtree(folder, ignore_errors=True)
