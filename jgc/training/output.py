"""Where a run prints."""

from rich.console import Console

from jgc.training.errors import leave_stdout, say


class Output(Console):
    """A console that takes no markup, and whose reader may go: a run without one goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        leave_stdout()
        say("nobody reads standard output any more: the run goes on without it")
