"""`python -m jgc plan`."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from jgc.lab.plan.for_target import Asked, plan_for
from jgc.lab.plan.memory import Measure
from jgc.lab.plan.needs import plans_of
from jgc.lab.plan.tables import markdown, show
from jgc.lab.plan.target_files import known_of, write_csv, write_json
from jgc.lab.plan.target_page import TargetPlan, draw, markdown as target_markdown, show as show_target
from jgc.lab.plan.targets import known, spec_of, stay_on_cpu, target_of
from jgc.lab.shared.choices import options_of, refuse_given, variants_of, words
from jgc.lab.shared.page import write_page
from jgc.lab.shared.rate import bytes_per_second
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.settings.workloads import DEFAULT, workload_named

WITH_SGD = ("baseline", "dgc", "scalecom", "lgc_ps", "lgc_ring")
WITH_ADAM = ("baseline", "topk", "scalecom", "qsgd", "powersgd")  # without a momentum, which Adam has


@dataclass(frozen=True)
class Plan:
    """Memory of a device, bytes of a step and of a whole run, before it starts.

    Nothing is trained, and no data is read.

        python -m jgc plan --workload imagenet_resnet50 --nodes 8 --devices 8 --methods dgc,lgc_ps

                           leader up    ratio   worker up    ratio
        dgc      top-k             -        -      178 kB   574.3x
        lgc_ps   compressed   122 kB   840.7x     98.1 kB   1,042x

    With `--link bucket`, also what an exchange through a bucket sends, takes and costs:

        python -m jgc plan --workload ptb_gpt --methods topk,qsgd --link bucket --bandwidth 10mbit --measure nothing

    With `--target`, every phase of every method is compiled for machines that are not here, by their compiler:

        python -m jgc plan --target h100:4x8,v5e:2x4x2slices --params 25M --bandwidth 100gbit

    plan.json is written after each program. A call that was stopped goes on where it was if it is given again.
    """

    workload: str = DEFAULT
    """model, data set, batch and settings"""
    nodes: int | None = None
    """data-parallel nodes; the workload's if not given"""
    methods: tuple[str, ...] = ()
    """as in compare, or all; if not given, five that go with the workload's optimiser"""
    alpha: float | None = None
    """share of each layer that is selected; the workload's if not given"""
    devices: int | None = None
    """over which the nodes are spread; as training would on this machine if not given"""
    measure: Measure = "node"
    """what to compile: step, the whole program of each phase, which takes minutes for large models; node, the gradients
    of one node, from which the others' follow; nothing: all temporaries are estimates. With --target nothing:
    only bytes, of steps that are traced"""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """any other option of train.py, as in compare"""
    output: Path | None = None
    """Markdown file to write as well, with bytes to the last digit; with --target also a picture and all figures as CSV
    next to it"""
    target: tuple[str, ...] = ()
    """machines to compile for, separated by commas: h100:8 (one host), h100:4x8 (hosts x GPUs), v5e:2x4 (a slice),
    v5e:2x4x2slices, v5p:2x2x1, v6e:2x4 and the like. A node is a device, or one of several hosts or slices"""
    params: str = ""
    """with --target: a transformer with that number of parameters, such as 25M, instead of the workload's model"""
    shard: bool = False
    """with --target: shard the parameters over the devices of a host or slice (FSDP); each compresses its shards"""
    link: Literal["network", "bucket"] = "network"
    """bucket: also what an exchange through a bucket sends, takes and costs (docs/rounds.md)"""
    bandwidth: str = ""
    """with --target: of the link out of a host or slice, such as 100gbit, for the time that it needs; with --link
    bucket: of a node's link"""
    phases: Literal["all", "last"] = "all"
    """with --target: compile all phases of every method, or the last one only"""
    json: Path = Path("plan.json")
    """with --target: file for all figures; programs that it holds already are not compiled again"""

    def run(self, line: str) -> None:
        """Plan, and print the tables."""
        of_sgd = workload_named(self.workload).optimizer == "sgd"
        variants = variants_of(words(self.methods) or (WITH_SGD if of_sgd else WITH_ADAM))
        if self.alpha is not None and not any(hasattr(settings, "alpha") for settings in variants.values()):
            raise UserError(f"--alpha {self.alpha}: none of {', '.join(variants)} has it")
        options = options_of(self.set, variants)
        if self.target:
            self._compile(line, variants, options)
            return
        refuse_given(self, ("params", "shard", "phases", "json"), "goes with --target only")
        bucket = self.link == "bucket"
        if not bucket:
            refuse_given(self, ("bandwidth",), "goes with --target or --link bucket only")
        with values_of_the_user():
            rate = bytes_per_second(self.bandwidth) if self.bandwidth else math.inf
        plans = plans_of(variants, self.workload, self.nodes, self.devices, self.measure, options, self.alpha, bucket)
        show(plans, rate=rate)
        if self.output is not None:
            write_page(self.output, f"Plan of {self.workload}", line, markdown(plans, rate))

    def _compile(self, line: str, variants: dict[str, Any], options: dict[str, list[str]]) -> None:
        """Compile for the targets, and print their tables."""
        refuse_given(self, ("link",), "does not go with --target, whose hosts have a network")
        useful = ("nodes", "devices") if self.measure == "nothing" else ("nodes", "devices", "measure")
        refuse_given(self, useful, "does not go with --target, which has its nodes and devices")
        if self.measure == "nothing" and self.shard:
            raise UserError("--measure nothing does not go with --shard: a traced step does not say which link is used")
        with values_of_the_user():
            gbits = 8 * bytes_per_second(self.bandwidth) / 1e9 if self.bandwidth else 0.0
        if self.output is not None and self.output.suffix in (".png", ".csv"):
            raise UserError(f"--output must be a Markdown file, got {self.output}: picture and figures lie next to it")
        stay_on_cpu()
        names = words(self.target)
        if not names:
            raise UserError(f"--target names none: known are {known()}, and the like")
        for name in names:  # all of them first: a compiler may be missing
            spec_of(name)
        targets = [target_of(name) for name in names]
        asked = Asked(variants, options, self.workload, self.params, self.alpha, self.shard, self.phases == "last",
                      self.measure == "nothing")  # fmt: skip
        console, errors = Console(markup=False), Console(stderr=True, markup=False)
        progress = partial(errors.print, highlight=False, soft_wrap=True)
        before = known_of(self.json)
        plans: list[TargetPlan] = []

        def write(plan: TargetPlan) -> None:
            write_json(self.json, [*plans, plan], line, before)

        for target in targets:
            plan = plan_for(target, asked, gbits, progress, before, write)
            plans.append(plan)
            show_target(plan, console)
        write_json(self.json, plans, line, before)
        console.print(f"all figures: {self.json}", highlight=False)
        if self.output is not None:
            picture, lines = self.output.with_suffix(".png"), self.output.with_suffix(".csv")
            text = target_markdown(plans, f"All figures: [{lines.name}]({lines.name}).")
            text += f"\n![Bytes of a step by method]({picture.name})\n"
            write_page(self.output, f"Plan for {', '.join(words(self.target))}", line, text)
            write_csv(lines, plans)
            draw(picture, plans)
