"""`python -m experiments codecs`: bytes against error on recorded gradients, methods next to trivial codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.codecs.measure import Row, front, measure, measure_methods
from experiments.codecs.plot import draw
from experiments.codecs.recorded import load
from experiments.record import Recording, record
from jgc import compress
from jgc.lab.shared.choices import refuse_given, settings_from
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import publish
from jgc.lab.shared.tables import table
from jgc.selection.selector import check_alpha
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.settings.workloads import DEFAULT


@dataclass(frozen=True)
class Codecs:
    """Bytes against error of every method and of trivial codes, on recorded gradients.

    They come from an uncompressed run that this command starts (--run-dir), or from any run with a recording
    (--recorded).

        python -m experiments codecs --run-dir runs/codecs --alphas 0.001 0.01

        | family | code | setting | bits per parameter | cosine | relative error |
        | method | lgc_ps | alpha 0.001, positions leader | 0.01040 | 0.0885 | 0.9960 |
        | trivial | 1-bit values at each node's positions | alpha 0.001 | 0.01351 | 0.2014 | 0.9796 |
    """

    run_dir: Path | None = None
    """folder for a new recording, which the same command uses again"""
    recorded: Path | None = None
    """folder of a run with a recording (train.py --record.every N), of pseudo-gradients if it has local steps; takes
    the place of --run-dir and of the options from --workload to --steps"""
    workload: str = DEFAULT
    """model, data set, batch and settings"""
    nodes: int = 8
    """data-parallel nodes"""
    seed: int = 0
    """of the run that is recorded"""
    start: int = 20
    """uncompressed steps before the first that is recorded"""
    steps: int = 45
    """how many are recorded"""
    hold_out: int = 5
    """the last of them are held out and compressed; codes learn from the others"""
    alphas: tuple[float, ...] = (0.001, 0.005, 0.02, 0.1)
    """shares of each layer that are selected"""
    methods: tuple[str, ...] = ()
    """only these, with settings after colons, such as qsgd:bits=4:bucket=128; without any, all methods,
    trivial codes and learned bases"""
    passes: int = 1
    """how often a method that learns sees the steps to learn from"""
    data_dir: str | None = None
    """folder of prepared data sets"""
    output: Path | None = None
    """Markdown file to write as well, with a picture of the same name"""

    def run(self, line: str) -> None:
        """Record, measure, and print the page."""
        with values_of_the_user():
            for alpha in self.alphas:
                check_alpha(alpha)
            for text in self.methods:
                refuse_given(self, ["alphas"], "does nothing with --methods, which name their shares")
                compress.build(settings_from(text))
        recording = self._recording()
        if self.methods:
            rows = measure_methods(recording, self.hold_out, self.methods, self.passes)
        else:
            rows = measure(recording, self.hold_out, self.alphas, self.passes)
        page = markdown(rows, recording, self.hold_out, describe())
        title = f"What a code makes of one step's gradients, and what it costs\n{recording.title}"
        publish("Bytes against error", page, self.output, line, partial(draw, rows=rows, title=title),
                "Cosine and relative error against bits per parameter")  # fmt: skip

    def _recording(self) -> Recording:
        if self.run_dir is not None and self.recorded is None:
            self._check(self.steps)
            return record(self.run_dir, self.workload, self.nodes, self.seed, self.start, self.steps, self.data_dir)
        if self.recorded is not None and self.run_dir is None:
            recording = load(self.recorded)
            self._check(len(recording.flat))
            return recording
        raise UserError("give either --run-dir, a folder for a new recording, or --recorded, a run that has one")

    def _check(self, steps: int) -> None:
        if self.passes < 1:
            raise UserError(f"--passes must be at least 1, got {self.passes}")
        if steps < 2:
            raise UserError(f"at least 2 steps must be recorded, one of them to be held out, got {steps}")
        if not 0 < self.hold_out < steps:
            raise UserError(f"--hold-out must be between 1 and {steps - 1}, all steps but one, got {self.hold_out}")


def markdown(rows: Sequence[Row], recording: Recording, hold_out: int, machine: str) -> str:
    """The table as a page, fewest bits first."""
    on = {by: set(front(rows, by)) for by in ("cosine", "error")}
    order = sorted(range(len(rows)), key=lambda i: rows[i].bits)

    cells = [_cells(rows[i], [by for by in ("cosine", "error") if i in on[by]]) for i in order]
    about = (
        f"{recording.title}; {recording.flat.shape[-1]:,} parameters; the last {hold_out} held out, those before "
        f"learned from; {machine}."
    )
    head = ["family", "code", "setting", "bits per parameter", "cosine", "relative error", "on the front by"]
    return f"{about}\n\n{table(head, cells)}\n"


def _cells(row: Row, best_by: list[str]) -> list[str]:
    figures = [f"{row.bits:.5f}", f"{row.cosine:.4f}", f"{row.error:.4f}"]
    return [row.family, row.name, row.setting, *figures, " and ".join(best_by)]
