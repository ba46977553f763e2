"""`python -m experiments papers`: finished runs next to the LGC, EGC and GradiVeQ papers' tables and figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from experiments.papers import figures, wallclock
from experiments.papers.latency import latency_table, speed_up_table
from experiments.papers.tables import bytes_table, paper_section, score_table, time_table
from jgc.lab.report import plots
from jgc.lab.report.runs import Group, find, pool
from jgc.lab.shared.choices import refuse_given
from jgc.lab.shared.page import write_page
from jgc.lab.shared.rate import bytes_per_second
from jgc.training.errors import UserError, values_of_the_user

FIGURES = {
    10: ("Learning curves, as the LGC paper's Figure 10", plots.scores),
    11: ("Learning curves, as the LGC paper's Figure 11", plots.scores),
    13: ("Sparsification strategies, as the LGC paper's Figure 13", figures.strategies),
    14: ("Losses of the autoencoder, as the LGC paper's Figure 14", figures.autoencoder),
}
WALL_CLOCK = 7  # of the GradiVeQ paper


@dataclass(frozen=True)
class Papers:
    """Finished runs next to the papers' tables and figures; runs that differ only in their seed are one row.

    Writes papers.md and the pictures.

        python -m experiments papers runs/compare --output papers --latency --figure 10

        | method | test accuracy, % | paper |
        | baseline | 59.98 ± 0.71 | 91.88 (LGC, Table VI); 86.08 (EGC, Table II) |
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, or folders of them"""
    output: Path = Path("papers")
    """folder of the page"""
    figure: tyro.conf.UseAppendAction[tuple[Literal[7, 10, 11, 13, 14], ...]] = ()
    """draw this figure of the LGC paper as well, or 7 of the GradiVeQ paper; repeat for several. A figure that does not
    fit the runs is left out, with a line"""
    latency: bool = False
    """time the encoder and the decoder of LGC's autoencoder on this machine as well"""
    bandwidth: str = "1gbit"
    """of each node's link, such as 100mbit or 1gbit, for figure 7"""
    by_folder: bool = False
    """name rows after the folders that hold their runs"""
    baseline: str = ""
    """name of the row that all others are compared with; if not given, the uncompressed runs that differ only in the
    method"""

    def run(self, line: str) -> None:
        """Write the page, and print where it is."""
        if not self.runs:
            raise UserError("give the folders of runs, or a folder of them: python -m experiments papers RUN...")
        if WALL_CLOCK not in self.figure:
            refuse_given(self, ("bandwidth",), f"needs --figure {WALL_CLOCK}")
        groups = pool(find(self.runs)[0], self.by_folder, self.baseline)
        page = self.output / "papers.md"
        write_page(page, "Next to the papers", line, self.page(groups))
        print(page)

    def page(self, groups: Sequence[Group]) -> str:
        """Draw the figures, and return the text."""
        with values_of_the_user():
            rate = bytes_per_second(self.bandwidth)
        self.output.mkdir(parents=True, exist_ok=True)
        of_rate = partial(wallclock.draw, rate=rate, rate_name=self.bandwidth)
        known = FIGURES | {WALL_CLOCK: (f"Time at {self.bandwidth}, as Figure 7 of the GradiVeQ paper", of_rate)}
        drawn, left_out = figures.draw_fitting(groups, self.output, {number: known[number] for number in self.figure})
        blocks = list(left_out)
        for workload, shown in plots.by(groups, lambda group: group.workload).items():
            blocks += [f"## {workload}", *(table(shown, groups) for table in (score_table, bytes_table, time_table))]
            blocks += [speed_up_table(shown), latency_table(shown) if self.latency else ""]
        blocks += [f"### {title}\n\n![{title}]({name})" for name, title in drawn.items()]
        if f"figure{WALL_CLOCK}.png" in drawn:
            blocks.append(wallclock.section(groups, rate))
        blocks.append(paper_section({group.workload for group in groups}))
        return "\n\n".join(block for block in blocks if block) + "\n"
