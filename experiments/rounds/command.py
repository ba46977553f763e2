"""`python -m experiments rounds`."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from experiments.rounds import newcomer, overlap, page
from experiments.rounds.cells import (
    BUCKET,
    LEARNED,
    MESSAGES,
    TORCH,
    TORCHFT,
    VIAS,
    Cell,
    Outer,
    add_line,
    lacking,
    merge_of,
    outer_of,
    read_cells,
    read_lines,
)
from experiments.rounds.measure import measure
from jgc.lab.bench.network.models import IMAGES, MODELS
from jgc.lab.bench.network.namespaces import check_rate
from jgc.lab.shared.choices import refuse_given, seeds_of, words
from jgc.lab.shared.rate import bytes_per_second
from jgc.training.errors import UserError, did_you_mean, say, values_of_the_user

Part = Literal["chart", "overlap", "newcomer", "page"]
LONGEST = 900.0  # seconds of a run
SETUP = 60.0  # seconds of a cell before and after its run; roughly, for --plan
OF_CHART = (
    "via", "methods", "rates", "delays_ms", "every", "overlaps", "steps", "merge", "outer_rate",
    "outer_momentum",
)  # fmt: skip


@dataclass(frozen=True)
class Rounds:
    """Utilisation, loss, bytes and requests of rounds through a bucket on slow links; needs root.

    Nodes are processes in network namespaces (iproute2), and the bucket is SeaweedFS (extra
    rounds-test). What the folder already holds is not run again: a run that is stopped goes on with
    the same line.

        python -m experiments rounds --run-dir runs/rounds --methods qsgd --rates 10mbit --every 30

        | | H | overlap | 10 Mbit/s, 0 ms | 10 Mbit/s, 100 ms |
        | rounds: QSGD, 4 bits | 30 | no | 0.913 | 0.892 |
    """

    run_dir: Path
    """folder of the results, the page and the picture"""
    part: Part = "chart"
    """chart: a run for each combination of the options; overlap: with it and without at equal
    seconds, 4-bit QSGD at 10mbit with H = 10; newcomer: what a newcomer reads, and requests by the
    number of nodes; page: only write it"""
    via: tuple[str, ...] = ("bucket",)
    """how nodes meet: bucket, gloo (jgc.local_steps), torch (PyTorch's local SGD) or torchft (its
    LocalSGD, which averages), these two with dense only"""
    methods: tuple[str, ...] = ("dense", "qsgd", "sparseloco")
    """dense, qsgd (4 bits), sparseloco (its message), learned (learned_topk, with gloo only)"""
    rates: tuple[str, ...] = ("1mbit", "10mbit", "100mbit")
    """of each node's link in both directions"""
    delays_ms: tuple[float, ...] = (0.0, 100.0)
    """milliseconds that a request waits before the server; with collectives, of a packet there and
    back"""
    every: tuple[int, ...] = (10, 30, 100)
    """H, local steps of a round"""
    overlaps: tuple[int, ...] = (0, 1)
    """rounds of overlap, 0 and 1; 1 only through a bucket"""
    seeds: tuple[str, ...] = ("0",)
    """of parameters, batches and random rounding"""
    nodes: int = 4
    """processes"""
    steps: int = 300
    """local steps of a run"""
    seconds: float = 300.0
    """a run ends after these seconds if its steps are not done; all runs of --part overlap last as
    long"""
    step_seconds: float = 0.0
    """a local step lasts at least so long: 0.4 lets two cores keep up with four nodes"""
    merge: str = ""
    """with overlap, the share of its movement that a node keeps, or eager; the method's default if
    not given"""
    outer_rate: float | None = None
    """outer learning rate; the method's default if not given"""
    outer_momentum: float | None = None
    """outer Nesterov momentum; the method's default if not given"""
    workload: str = "ptb_gpt"
    """a GPT; on random tokens where Penn Treebank is missing"""
    data_dir: str | None = None
    """folder of prepared data sets"""
    where: str = newcomer.MEMORY
    """with --part newcomer, the bucket of its threads: memory or folder"""
    values: int = 800_000
    """with --part newcomer, floats of the parameters; growth with nodes is measured with a tenth"""
    counts: tuple[int, ...] = (1, 2, 8, 32)
    """with --part newcomer, numbers of nodes"""
    most: int = 0
    """runs of this call; 0 for all"""
    plan: bool = False
    """only print which runs are missing, and about how long they take"""

    def run(self, line: str) -> None:
        """Measure what lacks, write the page and print it."""
        self._check()
        if self.part in ("newcomer", "page"):
            refuse_given(self, ("most", "plan"), "is for runs between processes")
        if self.part == "newcomer":
            self._newcomers()
        elif self.part != "page" and (not self._runs() or self.plan):
            return
        if self.part != "page":
            page.note_command(self.run_dir, line)
        print(page.write(self.run_dir, line))

    def _check(self) -> None:
        """Raise UserError for a value out of range, or an option that does nothing."""
        if not 2 <= self.nodes <= 32:
            raise UserError(f"--nodes must be from 2 to 32, got {self.nodes}")
        if self.steps < 1 or self.most < 0 or any(h < 1 for h in self.every):
            raise UserError("--steps and --every must be at least 1, --most at least 0")
        if not 0 < self.seconds <= LONGEST:
            raise UserError(
                f"--seconds must be above 0 and at most {LONGEST:g}, got {self.seconds:g}"
            )
        if not 0 <= self.step_seconds < 60 or not all(0 <= x <= 1000 for x in self.delays_ms):
            raise UserError("--step-seconds must be in [0, 60), --delays-ms in [0, 1000]")
        if self.outer_rate is not None and not 0 < self.outer_rate < math.inf:
            raise UserError(f"--outer-rate must be finite and above 0, got {self.outer_rate:g}")
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise UserError(f"--outer-momentum must be in [0, 1), got {self.outer_momentum:g}")
        if self.part == "page" and not self.run_dir.is_dir():
            raise UserError(f"--run-dir {self.run_dir} is no folder: there is nothing to show")
        if self.part != "chart":
            refuse_given(self, OF_CHART, f"does nothing with --part {self.part}")
        if self.part != "newcomer":
            refuse_given(self, ("where", "values", "counts"), "is for --part newcomer")
        if self.where not in (newcomer.MEMORY, "folder"):
            raise UserError(f"--where must be memory or folder, got {self.where!r}")
        if not self.counts or min(self.counts) < 1 or max(self.counts) > 64 or self.values < 100:
            raise UserError("--counts must be from 1 to 64, --values at least 100")
        if self.workload in IMAGES or self.workload not in MODELS:
            raise UserError(f"--workload must be a GPT such as ptb_gpt, got {self.workload!r}")

    def _runs(self) -> bool:
        """Run the cells that lack; False if they were only printed."""
        if self.part == "chart":
            cells = list(self.cells())
            if not cells:
                raise UserError("these options name no run: --methods, --every and the like need values that go with "
                                "--via")
            return self._some(cells)
        like = self._cell(BUCKET, "qsgd", "10mbit", 0.0, 10, 0, seeds_of(self.seeds)[0])
        if not self._some(overlap.searched(like)):
            return False
        results = read_cells(self.run_dir)
        if lacking(overlap.searched(like), results):  # --most
            return True
        return self._some(overlap.repeated(results, like, seeds_of(self.seeds)))

    def _some(self, cells: Sequence[Cell]) -> bool:
        missing = lacking(cells, read_cells(self.run_dir))
        if self.plan:
            for cell in missing:
                print(f"{estimate(cell):6.0f} s  {cell.label}")
            total = sum(map(estimate, missing)) / 60
            print(f"{len(missing)} of {len(cells)} runs are missing; about {total:.0f} minutes (estimated)")
            return not missing
        if missing:
            check_installed(missing)
            measure(missing[: self.most or None], self.run_dir, self.data_dir)
        return True

    def cells(self) -> Iterator[Cell]:
        """The runs that the options name.

        Raises:
          UserError: an unknown name, or a combination that cannot be.
        """
        vias, methods = words(self.via), words(self.methods)
        _known("--via", vias, VIAS)
        _known("--methods", methods, tuple(MESSAGES))
        if any(x not in (0, 1) for x in self.overlaps):
            raise UserError(f"--overlaps must be 0 and 1, got {', '.join(map(str, self.overlaps))}")
        if LEARNED in methods and vias == [BUCKET]:
            raise UserError(
                "--methods learned: its positions follow from the other nodes' messages while it "
                "encodes, which rounds refuse; give --via gloo"
            )
        with values_of_the_user():
            rates = [check_rate(rate) for rate in words(self.rates)]
            for rate in rates:
                bytes_per_second(rate)
        axes: Any = product(
            vias, methods, rates, self.delays_ms, self.every, self.overlaps, seeds_of(self.seeds)
        )
        for axis in axes:
            cell = self._cell(*axis)
            if exists(cell):
                yield cell

    def _cell(
        self,
        via: str,
        method: str,
        rate: str,
        delay_ms: float,
        every: int,
        overlapped: int,
        seed: int,
    ) -> Cell:
        changes = {"rate": self.outer_rate, "momentum": self.outer_momentum}
        outer = outer_of(method, overlapped, changes | {"merge": merge_of(self.merge)})
        outer = Outer(1.0, 0.0) if via == TORCHFT else outer
        return Cell(
            via, method, rate, float(delay_ms), every, overlapped, outer, self.steps, self.seconds,
            self.step_seconds, seed, self.nodes, self.workload,
        )  # fmt: skip

    def _newcomers(self) -> None:
        """Measure what lacks of a newcomer, and of the growth with nodes."""
        before = read_lines(self.run_dir, newcomer.SCALING)
        for count in self.counts:
            values = max(10, self.values // 10)
            if any(_same(x, count, values, self.where) for x in before):
                continue
            say(f"{count} nodes, {self.where}")
            with newcomer.empty_bucket(self.where) as url:
                result = newcomer.scaling(count, values, url, pace=0.5, rounds=12)
            add_line(self.run_dir, result | {"where": self.where}, newcomer.SCALING)
        before = read_lines(self.run_dir, newcomer.NEWCOMERS)
        for count in (count for count in self.counts if count <= 8):
            if any(_same(x, count, self.values, self.where) for x in before):
                continue
            say(f"a newcomer among {count} nodes, {self.where}")
            with newcomer.empty_bucket(self.where) as url:
                result = newcomer.newcomer(count, self.values, url, pace=0.5, after=31)
            add_line(self.run_dir, result | {"where": self.where}, newcomer.NEWCOMERS)


def _same(line: dict, count: int, values: int, where: str) -> bool:
    return (line["nodes"], line["values"], line["where"]) == (count, values, where)


def _known(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            hint = did_you_mean(name, list(known))
            raise UserError(f"{option}: unknown {name!r}{hint} (one of {', '.join(known)})")
    if not names:
        raise UserError(f"{option} must be one or more of {', '.join(known)}, got none")


def check_installed(cells: Sequence[Cell]) -> None:
    """Raise UserError if a package is missing that these runs need."""
    for via, package in ((TORCH, "'jgc[bench]'"), (TORCHFT, "torchft")):
        if any(cell.via == via for cell in cells) and importlib.util.find_spec(via) is None:
            raise UserError(f"--via {via} needs {via}: pip install {package}")


def exists(cell: Cell) -> bool:
    """Whether there is such a run: PyTorch's send 32 bits, and collectives do not overlap."""
    if cell.via in (TORCH, TORCHFT) and cell.method != "dense":
        return False
    if cell.via == BUCKET:
        return cell.method != LEARNED
    return not cell.overlap


def estimate(cell: Cell) -> float:
    """About how many seconds a cell takes: its steps, or its limit if that comes first."""
    local = cell.rounds * cell.every * max(cell.step_seconds, 0.3)
    return SETUP + (min(cell.seconds, local) if cell.seconds else local)
