"""`python -m jgc compare`: train methods over seeds, and report on them."""

from dataclasses import dataclass
from pathlib import Path

from jgc.lab.launch import Runs, launch
from jgc.lab.report.page import write
from jgc.lab.shared.choices import options_of, variants_of, words
from jgc.training.settings.workloads import workload_named


@dataclass(frozen=True, kw_only=True)
class Compare(Runs):
    """Train each method for each seed, unless that has been done, and report on the runs.

    The folder of the runs gets report.md and report.html. A run that was stopped is resumed by the same command.

        python -m jgc compare --methods baseline,topk,lgc_ps --run-dir runs/compare

        | method | leader up, a step | worker up, a step | leader ratio | worker ratio |
        | baseline | 1.08 MB | 1.08 MB | 1x | 1x |
        | topk | 8.96 kB | 8.96 kB | 120.5x | 120.5x |
        | lgc_ps | 5.78 kB | 4.38 kB | 186.8x | 246x |
    """

    def run(self, line: str) -> None:
        """Train, and print where the report is."""
        print(compare(self))


def compare(asked: Compare) -> Path:
    """Train what has not been trained yet, and return the path of the report.

    Raises:
      UserError: an unknown name, a bad number or setting, a folder with other settings; or runs diverged: the others
        are trained and reported all the same.
    """
    workload_named(asked.workload)
    variants = variants_of(words(asked.methods))
    outcome = launch(asked, variants, options_of(asked.set, variants))
    finished = [folder for folders in outcome.folders.values() for folder in folders]
    page = write(finished, asked.run_dir, remarks=outcome.remarks)
    outcome.check(page)
    return page
