"""The commands of `jgc` and `python -m jgc`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jgc.lab.program import Entry, Program

COMMANDS = {
    "train": Entry(
        "jgc.lab.commands.train",
        "Train a network with compressed gradients, as train.py of a clone does.",
    ),
    "compare": Entry(
        "jgc.lab.report.compare.Compare",
        "Train each method for each seed, unless that has been done, and report on the runs.",
    ),
    "sweep": Entry(
        "jgc.lab.report.sweep.Sweep",
        "Train with several values of one setting: a table and a picture.",
    ),
    "report": Entry(
        "jgc.lab.report.page.Report",
        "Tables and pictures of finished runs; runs that differ only in their seed are one row.",
    ),
    "plan": Entry(
        "jgc.lab.plan.command.Plan",
        "Memory of a device, bytes of a step and of a whole run, before it starts.",
    ),
    "advise": Entry(
        "jgc.lab.advise.command.Advise",
        "Does compression pay? Seconds and bytes of a step with every method, on a network that you describe.",
    ),
    "bench methods": Entry(
        "jgc.lab.bench.methods.Methods",
        "Time of every method and phase compared with the dense step; bytes of its state and its messages.",
    ),
    "bench network": Entry(
        "jgc.lab.bench.network.command.Network",
        "Time and bytes of every method between real processes, next to PyTorch's; needs root and iproute2.",
    ),
    "doctor": Entry(
        "jgc.lab.doctor.command.Doctor",
        "Check devices, versions, run folder and data, and that every collective computes the right values.",
    ),
    "chaos": Entry(
        "jgc.lab.chaos.command.Chaos",
        "Kill, stop and corrupt real runs of several processes, and count how each try ends.",
    ),
    "rounds show": Entry(
        "jgc.lab.rounds.show.Show",
        "List a bucket's rounds: which nodes took part, which are late, goodput and digests.",
    ),
    "rounds demo": Entry(
        "jgc.lab.rounds.demo.Demo",
        "Train in processes that share a folder; one is killed and comes back.",
    ),
    "rounds close": Entry(
        "jgc.lab.rounds.by_hand.Close",
        "Close the open round with the messages that have arrived, whatever quorum and grace say.",
    ),
    "rounds clean": Entry(
        "jgc.lab.rounds.by_hand.Clean",
        "Delete old messages and checkpoints of a run.",
    ),
}
PROGRAM = Program("jgc" if Path(sys.argv[0]).stem == "jgc" else "python -m jgc", COMMANDS)

main = PROGRAM.main


def train(argv: Sequence[str]) -> int:
    """Train a network with compressed gradients, as train.py of a clone does."""
    from jgc.training.settings import cli

    return cli.main(argv, f"{PROGRAM.name} train")
