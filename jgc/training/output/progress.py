"""Progress of a run: a bar on a terminal, elsewhere one line every few steps."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jgc.training.data import Score
from jgc.training.output.metrics import Line
from jgc.training.output.table import size


class Display:
    """The bar or the lines. A context manager that restores the terminal."""

    def __init__(self, console: Console, steps: int, start: int, log_every: int, score: Score, lines: bool = True):
        """`lines`: print steps where there is no bar."""
        self._lines = lines
        self.console, self.steps, self.log_every, self.score = console, steps, log_every, score
        self._bar = _bar(console) if console.is_terminal else None
        bar = self._bar
        self._task = bar.add_task("starting", total=steps, completed=start, loss="", sent="") if bar else None

    def __enter__(self) -> "Display":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(text, highlight=False)

    def update(self, line: Line) -> None:
        """Show a step."""
        loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
        score = self.score
        evaluated = f", {score.title} {score.text(line[score.name])}" if score.name in line else ""
        step, phase, sent = line["step"], line["phase"], size(line["bytes"])
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, description=phase, loss=loss, sent=sent)
        elif not self._lines:
            if evaluated:
                self.say(f"step {step}  {phase}  loss {loss}{evaluated}")
        elif step % self.log_every == 0 or step == self.steps or evaluated:
            self.say(f"step {step}/{self.steps}  {phase}  loss {loss}  {sent} up from all nodes{evaluated}")


def _bar(console: Console) -> Progress:
    loss, sent = TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[sent]}/step")
    return Progress(
        TextColumn("{task.description:12}"), BarColumn(bar_width=20), MofNCompleteColumn(), loss, sent,
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console, refresh_per_second=4,
    )  # fmt: skip
