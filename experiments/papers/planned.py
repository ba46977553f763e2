"""`python -m experiments papers_bytes`: bytes of a step and of a whole run next to the papers', from shapes."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.papers import reported
from experiments.papers.tables import paper_bytes
from jgc.lab.plan.needs import Plan, plans_of
from jgc.lab.plan.tables import heading, sent_bytes
from jgc.lab.plan.whole_run import whole_run
from jgc.lab.shared.choices import options_of, registered_name, variants_of, words
from jgc.lab.shared.page import publish
from jgc.lab.shared.tables import filled_table
from jgc.training.settings.workloads import DEFAULT

LEADER, WORKER, UP = 3, 5, 7  # columns of the plan's tables


@dataclass(frozen=True)
class PapersBytes:
    """Ratios of the last phase, and bytes of a whole run, next to the papers'.

    Nothing is trained, and no data is read.

        python -m experiments papers_bytes --workload cifar10_resnet50 --alpha 0.001 --methods lgc_ps \\
            --set model.stem=imagenet --set model.classes=1000 --set lgc_ps.positions=leader

        | method | leader ratio | worker ratio | whole run, all nodes up | paper: MB a step | paper: ratio |
        | lgc_ps | 840.7x | 1,703x | 9.1 GB | 0.017 / 0.012 | 5,709x / 8,616x |
    """

    workload: str = DEFAULT
    """model, data set, batch and settings"""
    nodes: int | None = None
    """data-parallel nodes; the workload's if not given"""
    methods: tuple[str, ...] = ("baseline", "topk", "dgc", "scalecom", "lgc_ps", "lgc_ring")
    """as in `jgc compare`, or all"""
    alpha: float | None = None
    """share of each layer that is selected; the workload's if not given"""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """any other option of train.py, as in `jgc compare`"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Count, and print the table."""
        variants = variants_of(words(self.methods))
        options = options_of(self.set, variants)
        plans = plans_of(variants, self.workload, self.nodes, None, "nothing", options, self.alpha)
        head = ["method", "leader ratio", "worker ratio", "whole run, all nodes up", "paper: MB a step",
                "paper: ratio", "paper: whole run"]  # fmt: skip
        page = f"{heading(plans[0])}.\n\n{filled_table(head, [row(plan) for plan in plans])}\n"
        publish(f"Bytes of {self.workload} next to the papers'", page, self.output, line)


def row(plan: Plan) -> list[str]:
    """A method's cells."""
    last, whole = sent_bytes([plan])[1][-1], whole_run([plan])[1]
    papers = reported.rows_of(plan.config.workload, registered_name(plan.method))
    total = ", ".join(f"{paper.terabytes} TB" for paper in papers if paper.terabytes is not None)
    return [plan.method, last[LEADER], last[WORKER], whole[-1][UP] if whole else "", *paper_bytes(*papers), total]
