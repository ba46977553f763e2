"""Where a run prints."""

from rich.console import Console

from jgc.training.errors import leave_stdout, say


class Output(Console):
    """A console whose reader may go away: the run goes on without one."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        leave_stdout()
        say("nobody reads standard output any more: the run goes on without it")
