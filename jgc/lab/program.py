"""A program of commands: from a command line to one of them.

A command is a frozen dataclass next to the code that it runs. Its fields are its options, its docstring is its help,
and `run(line)` runs it. A module is imported when its command runs. A command may also be a function that takes the
remaining words and returns the exit code.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import isclass
from typing import Any, NamedTuple, Protocol

from jgc.training.errors import BAD_INPUT, did_you_mean
from jgc.training.settings.cli import exit_code_of, in_company, quiet
from jgc.training.settings.options import read


class Command(Protocol):
    """The classes of `Program.commands`."""

    def run(self, line: str) -> None:
        """Run the command; `line` is the command line, for pages of results."""


class Program(NamedTuple):
    """The commands of a program.

    Attributes:
      name: how it is called, such as "python -m jgc".
      commands: the path of each command's class, by the words of the command: one or two.

    Example:
      >>> program = Program("prog", {"rounds show": "x.Show", "rounds close": "x.Close", "plan": "x.Plan"})
      >>> program.groups, program.usage(), program.usage("rounds")
      (['rounds'], 'usage: prog {rounds,plan} --help', 'usage: prog rounds {show,close} --help')
    """

    name: str
    commands: Mapping[str, str]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run a command line and return the exit code."""
        words = list(sys.argv[1:] if argv is None else argv)
        quiet()
        depth = 2 if words and words[0] in self.groups else 1
        name, rest = " ".join(words[:depth]), words[depth:]
        if name in self.commands:
            return in_company(lambda: self._run(name, rest))
        group = words[0] if depth == 2 else ""
        if words[depth - 1 :] and words[depth - 1] in ("-h", "--help"):
            text = "\n".join([self.usage(group), *self.summaries(group)])
            return exit_code_of(lambda: print(text, flush=True) or 0)
        if words[depth - 1 :]:
            hint = did_you_mean(name, [*self.commands, *self.groups])
            print(f"error: unknown command {name!r}{hint}", file=sys.stderr)
        print(self.usage(group), file=sys.stderr)
        return BAD_INPUT

    def _run(self, name: str, rest: Sequence[str]) -> int:
        prog, entry = f"{self.name} {name}", self.load(name)
        if not isclass(entry):
            return entry(rest)
        command: Command = read(entry, rest, prog)
        command.run(f"{prog} {shlex.join(rest)}")
        return 0

    def load(self, name: str) -> Any:
        """The class or function of a command."""
        module, _, entry = self.commands[name].rpartition(".")
        return getattr(import_module(module), entry)

    @property
    def groups(self) -> list[str]:
        """First words of commands of two words."""
        return list(dict.fromkeys(name.split()[0] for name in self.commands if " " in name))

    def usage(self, group: str = "") -> str:
        """How to call the commands, or those of a group."""
        if group:
            words = [name.split()[1] for name in self.commands if name.split()[0] == group]
        else:
            words = list(dict.fromkeys(name.split()[0] for name in self.commands))
        return f"usage: {' '.join([self.name, group]).strip()} {{{','.join(words)}}} --help"

    def summaries(self, group: str = "") -> list[str]:
        """A line on each command, or on each of a group: the first of its docstring."""
        names = [name for name in self.commands if name.split()[0] == (group or name.split()[0])]
        width = max(map(len, names))
        return [f"  {name:{width}}  {(self.load(name).__doc__ or '').splitlines()[0]}" for name in names]
