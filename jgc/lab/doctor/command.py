"""`python -m jgc doctor`: one line on each thing that a run needs, and exit code 1 if one is wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jgc.compress import Dense
from jgc.lab.doctor import collectives, places
from jgc.lab.doctor.places import Words
from jgc.nodes.layouts import make_nodes
from jgc.training.errors import FAILED, UserError, values_of_the_user
from jgc.training.output.summary import versions
from jgc.training.processes.distributed import Team, join
from jgc.training.settings.config import Config, DataConfig, DistributedConfig, check, resolve
from jgc.training.settings.workloads import DEFAULT


@dataclass(frozen=True)
class Doctor:
    """Check devices, versions, run folder and data, and that every collective computes the right values.

    With the options that train.py gets on each host, all processes check together, and process 0 prints a line on each
    thing. Exit code 0 if all is well, 1 if something is wrong.

        python -m jgc doctor
        python -m jgc doctor --run-dir /shared/run1 --distributed.coordinator host-a:5555 \\
            --distributed.num-processes 2 --distributed.process-id 0

    It prints:

        ok     descriptors: 20,000 of a process
        WRONG  run folder: process 1: /shared/run1 is not the folder of process 0, or not on a shared file system: ...
        ok     all-reduce of float32: right; 4.2 MB of a node in 4.0 ms
    """

    run_dir: Path | None = None
    """folder of the run: whether all processes see the same one, and how much space there is"""
    workload: str = DEFAULT
    """whose data are looked for"""
    data_dir: str | None = None
    """folder of prepared data sets"""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def run(self, line: str) -> None:
        """Check all, and print a line on each."""
        config = Config(
            Dense(), workload=self.workload, data=DataConfig(dir=self.data_dir), distributed=self.distributed
        )
        with values_of_the_user():
            config = resolve(config)
        check(config)
        with join(config) as team:
            lines = []
            for lines_of_check in examine(team, config, self.run_dir):
                lines.append(lines_of_check)
                if team.leads:
                    print(lines_of_check, flush=True)  # now: a later check may end all processes
        wrong = sum(lines_of_check.startswith("WRONG") for lines_of_check in lines)
        if wrong:
            checked = sum(not lines_of_check.startswith("-") for lines_of_check in lines)
            raise UserError(f"{wrong} of {checked} checks failed", FAILED)


class Check(NamedTuple):
    """A thing that every process looks at.

    Attributes:
      name: of the thing.
      look: returns the error, or "", and the finding.
      show: "each" different statement, the one of process "0", or "equal" ones, where a difference is wrong.
    """

    name: str
    look: Callable[[], Words]
    show: Literal["each", "0", "equal"] = "each"


def examine(team: Team, config: Config, run_dir: Path | None) -> Iterator[str]:
    """The lines of all processes on each thing."""
    shown = ("jgc", "jax", "jaxlib", "numpy", "python")
    checks = [
        Check("versions", lambda: ("", ", ".join(f"{name} {versions()[name]}" for name in shown))),
        Check("devices", partial(places.devices, team)),
        Check("descriptors", places.descriptors),
        Check("data", partial(places.data, config), "equal"),
    ]
    if team.count > 1:
        checks.append(Check("strangers", places.token, "0"))
        checks.append(Check("address", partial(places.address, team)))
    if run_dir is not None:
        checks.append(Check("run folder", partial(places.run_folder, run_dir, team)))
    for test in checks:
        yield from _lines(team, test)
    if run_dir is None:
        yield "-      run folder: give --run-dir to have it checked"
    if jax.device_count() == 1:
        yield "ok     collectives: one device has nobody to exchange with"
        return
    nodes = make_nodes(jax.device_count())
    for kind in collectives.KINDS:
        yield from _lines(team, Check(f"{kind.name} of {kind.dtype}", partial(collectives.check, kind, nodes), "0"))


def _lines(team: Team, check: Check) -> list[str]:
    """Run a check in all processes, and print their findings."""
    words = check.look()
    answers = [words] if team.meeting is None else team.meeting.gather(f"doctor {check.name}", words)
    prefixes = [f"{check.name}: " if team.count == 1 else f"{check.name}: process {i}: " for i in range(len(answers))]
    wrong = [f"WRONG  {prefix}{text}" for prefix, (text, _) in zip(prefixes, answers, strict=True) if text]
    texts = [text for _, text in answers]
    if not wrong and check.show == "equal":
        differ = [i for i, text in enumerate(texts) if text != texts[0]]
        wrong = [f"WRONG  {check.name}: process {i} has {texts[i]}, process 0 has {texts[0]}" for i in differ[:1]]
    told = dict.fromkeys(texts) if check.show == "each" else texts[:1]
    return wrong or [f"ok     {check.name}: {text}" for text in told]
