"""`python -m jgc plan`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from jgc.lab.plan.memory import Measure
from jgc.lab.plan.needs import plans_of
from jgc.lab.plan.tables import markdown, show
from jgc.lab.shared.choices import options_of, variants_of, words
from jgc.lab.shared.page import write_page
from jgc.training.workloads import DEFAULT


@dataclass(frozen=True)
class Plan:
    """What a run will need: memory of a device, and bytes that each method sends beside the papers' figures.

    Nothing is trained, and no data is read.

        python -m jgc plan --workload imagenet_resnet50 --nodes 8 --devices 8 --methods dgc,lgc_ps
    """

    workload: str = DEFAULT
    """model, data set, batch and settings"""
    nodes: int | None = None
    """data-parallel nodes; the workload's if not given"""
    methods: tuple[str, ...] = ("baseline", "dgc", "scalecom", "lgc_ps", "lgc_ring")
    """as in compare, or all"""
    alpha: float | None = None
    """share of each layer that is selected; the workload's if not given"""
    devices: int | None = None
    """over which the nodes are spread; as training would on this machine if not given"""
    measure: Measure = "node"
    """what to compile: step, the whole program of each phase, which takes minutes for large models; node, the gradients
    of one node, from which the others' follow; nothing: all temporaries are estimates"""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """any other option of train.py, as in compare"""
    output: Path | None = None
    """Markdown file to write as well, with bytes to the last digit"""

    def run(self, line: str) -> None:
        """Plan, and print the tables."""
        variants = variants_of(words(self.methods))
        options = options_of(self.set, variants)
        plans = plans_of(variants, self.workload, self.nodes, self.devices, self.measure, options, self.alpha)
        show(plans)
        if self.output is not None:
            write_page(self.output, f"Plan of {self.workload}", line, markdown(plans))
