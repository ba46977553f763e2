"""The commands of `python -m jgc`: their registry, and from a command line to one of them.

A command is a frozen dataclass beside the code that it runs. Its fields are its options, its docstring is its help, and
`run(line)` runs it. A module is imported when its command runs.
"""

import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from jgc.training.errors import BAD_INPUT, did_you_mean
from jgc.training.settings.cli import exit_code_of, in_company, quiet
from jgc.training.settings.options import read

COMMANDS = {
    "report": "jgc.lab.report.page.Report",
    "compare": "jgc.lab.report.compare.Compare",
    "sweep": "jgc.lab.report.sweep.Sweep",
    "plan": "jgc.lab.plan.command.Plan",
    "bench methods": "jgc.lab.bench.methods.Methods",
    "bench scaling": "jgc.lab.bench.scaling.Scaling",
    "bench autoencoder": "jgc.lab.bench.recipes.Autoencoder",
    "bench codecs": "jgc.lab.bench.codecs.command.Codecs",
    "bench exchanges": "jgc.lab.bench.exchanges.Exchanges",
    "bench select": "jgc.lab.bench.select.Select",
    "bench loader": "jgc.lab.bench.loader.Loader",
    "bench loop": "jgc.lab.bench.loop.Loop",
    "bench network": "jgc.lab.bench.network.command.Network",
    "analyze correlation": "jgc.lab.analysis.commands.Correlation",
    "analyze information": "jgc.lab.analysis.commands.Information",
    "analyze worth": "jgc.lab.analysis.commands.Worth",
    "advise": "jgc.lab.advise.command.Advise",
    "doctor": "jgc.lab.doctor.command.Doctor",
    "chaos": "jgc.lab.chaos.command.Chaos",
    "rounds show": "jgc.lab.rounds.show.Show",
    "rounds demo": "jgc.lab.rounds.demo.Demo",
    "rounds close": "jgc.lab.rounds.by_hand.Close",
    "rounds clean": "jgc.lab.rounds.by_hand.Clean",
}
"""Class by the words of the command."""


class Command(Protocol):
    """What the classes of the registry have in common."""

    def run(self, line: str) -> None:
        """Run the command; `line` is the command line, for pages of results."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    quiet()
    depth = 2 if words and words[0] in groups() else 1
    name, rest = " ".join(words[:depth]), words[depth:]
    if name in COMMANDS:
        return in_company(lambda: _run(name, rest))
    group = words[0] if depth == 2 else ""
    if words[depth - 1 :] and words[depth - 1] in ("-h", "--help"):
        text = "\n".join([usage(group), *summaries(group)])
        return exit_code_of(lambda: print(text, flush=True) or 0)
    if words[depth - 1 :]:
        hint = did_you_mean(name, [*COMMANDS, *groups()])
        print(f"error: unknown command {name!r}{hint}", file=sys.stderr)
    print(usage(group), file=sys.stderr)
    return BAD_INPUT


def _run(name: str, rest: Sequence[str]) -> int:
    prog = f"python -m jgc {name}"
    command: Command = read(load(name), rest, prog)
    command.run(f"{prog} {shlex.join(rest)}")
    return 0


def load(name: str) -> type[Command]:
    """The class of a command."""
    module, _, kind = COMMANDS[name].rpartition(".")
    return getattr(import_module(module), kind)


def groups() -> list[str]:
    """First words of commands of two words.

    Example:
      >>> groups()
      ['bench', 'analyze', 'rounds']
    """
    return list(dict.fromkeys(name.split()[0] for name in COMMANDS if " " in name))


def usage(group: str = "") -> str:
    """How to call the commands, or those of a group.

    Example:
      >>> usage("analyze")
      'usage: python -m jgc analyze {correlation,information,worth} --help'
    """
    if group:
        words = [name.split()[1] for name in COMMANDS if name.split()[0] == group]
    else:
        words = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    return f"usage: {' '.join(['python -m jgc', group]).strip()} {{{','.join(words)}}} --help"


def summaries(group: str = "") -> list[str]:
    """A line on each command, or on those of a group: the first of its docstring."""
    names = [name for name in COMMANDS if name.split()[0] == (group or name.split()[0])]
    width = max(map(len, names))
    return [f"  {name:{width}}  {(load(name).__doc__ or '').splitlines()[0]}" for name in names]
