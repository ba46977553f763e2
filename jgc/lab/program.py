"""A program of commands: from a command line to one of them.

A command is a frozen dataclass next to the code that it runs. Its fields are its options, its docstring is its help,
and `run(line)` runs it. It may also be a function that takes the remaining words and returns the exit code. A module is
imported when its command runs, so `--help` needs none of the packages that commands need.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import isclass
from typing import Any, NamedTuple, Protocol

from jgc.training.errors import BAD_INPUT, FAILED, did_you_mean, leave_stdout, say
from jgc.training.requirements import explain


class Command(Protocol):
    """The classes of `Program.commands`."""

    def run(self, line: str) -> None:
        """Run the command; `line` is the command line, for pages of results."""


class Entry(NamedTuple):
    """A command: the path of its class or function, and the first line of its docstring."""

    path: str
    summary: str

    def load(self) -> Any:
        """The class or function."""
        module, _, name = self.path.rpartition(".")
        return getattr(import_module(module), name)


class Program(NamedTuple):
    """The commands of a program.

    Attributes:
      name: how it is called, such as "python -m jgc".
      commands: by the words of each command, one or two.

    Example:
      >>> commands = {name: Entry("x.X", "About it.") for name in ("rounds show", "rounds close", "plan")}
      >>> program = Program("prog", commands)
      >>> program.groups, program.usage(), program.usage("rounds")
      (['rounds'], 'usage: prog {rounds,plan} --help', 'usage: prog rounds {show,close} --help')
    """

    name: str
    commands: Mapping[str, Entry]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run a command line and return the exit code."""
        words = list(sys.argv[1:] if argv is None else argv)
        depth = 2 if words and words[0] in self.groups else 1
        name, rest = " ".join(words[:depth]), words[depth:]
        if name in self.commands:
            return self._run(name, rest)
        group = words[0] if depth == 2 else ""
        if words[depth - 1 :] and words[depth - 1] in ("-h", "--help"):
            return _show("\n".join([self.usage(group), *self.summaries(group)]))
        if words[depth - 1 :]:
            hint = did_you_mean(name, [*self.commands, *self.groups])
            say(f"error: unknown command {name!r}{hint}")
        say(self.usage(group))
        return BAD_INPUT

    def _run(self, name: str, rest: Sequence[str]) -> int:
        try:
            from jgc.training.settings import cli, options
        except ModuleNotFoundError as error:  # after `pip install jgc` without [train]
            say(explain(error))
            return FAILED
        prog = f"{self.name} {name}"

        def run() -> int:
            command = self.commands[name].load()
            if not isclass(command):
                return command(rest)
            asked: Command = options.read(command, rest, prog)
            asked.run(f"{prog} {shlex.join(rest)}")
            return 0

        cli.quiet()
        return cli.in_company(run)

    @property
    def groups(self) -> list[str]:
        """First words of commands of two words."""
        return list(dict.fromkeys(name.split()[0] for name in self.commands if " " in name))

    def usage(self, group: str = "") -> str:
        """How to call the commands, or a group's commands."""
        if group:
            words = [name.split()[1] for name in self.commands if name.split()[0] == group]
        else:
            words = list(dict.fromkeys(name.split()[0] for name in self.commands))
        return f"usage: {' '.join([self.name, group]).strip()} {{{','.join(words)}}} --help"

    def summaries(self, group: str = "") -> list[str]:
        """A line on each command, or on each of a group."""
        shown = {name: entry for name, entry in self.commands.items() if name.split()[0] == (group or name.split()[0])}
        width = max(map(len, shown))
        return [f"  {name:{width}}  {entry.summary}" for name, entry in shown.items()]


def _show(text: str) -> int:
    """Print help, whether or not anybody reads it to the end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave_stdout()
    return 0
