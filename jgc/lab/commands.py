"""The commands of `jgc` and `python -m jgc`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jgc.lab.program import Program

COMMANDS = {
    "train": "jgc.lab.commands.train",
    "compare": "jgc.lab.report.compare.Compare",
    "sweep": "jgc.lab.report.sweep.Sweep",
    "report": "jgc.lab.report.page.Report",
    "plan": "jgc.lab.plan.command.Plan",
    "advise": "jgc.lab.advise.command.Advise",
    "bench methods": "jgc.lab.bench.methods.Methods",
    "bench network": "jgc.lab.bench.network.command.Network",
    "doctor": "jgc.lab.doctor.command.Doctor",
    "chaos": "jgc.lab.chaos.command.Chaos",
    "rounds show": "jgc.lab.rounds.show.Show",
    "rounds demo": "jgc.lab.rounds.demo.Demo",
    "rounds close": "jgc.lab.rounds.by_hand.Close",
    "rounds clean": "jgc.lab.rounds.by_hand.Clean",
}
PROGRAM = Program("jgc" if Path(sys.argv[0]).stem == "jgc" else "python -m jgc", COMMANDS)

main = PROGRAM.main


def train(argv: Sequence[str]) -> int:
    """Train a network with compressed gradients, as train.py of a clone does."""
    from jgc.training.settings import cli

    return cli.main(argv, f"{PROGRAM.name} train")
