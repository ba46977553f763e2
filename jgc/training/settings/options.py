"""Read a command line by tyro, after checks whose errors are one line.

tyro prints errors as a box of many lines and has no public hook to change that. `check` therefore compares the options
with the type hints first.
"""

import inspect
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from jgc.training.errors import UserError, did_you_mean

UNLIMITED = 10**9


class Option(NamedTuple):
    """An option or a positional argument of a command."""

    name: str  # --compressor.alpha, or the plain name of a positional argument
    hint: Any  # its type, None for a flag
    required: bool  # whether it has no default
    most: int  # values that follow it at most


def read(
    target: Callable[..., Any], argv: Sequence[str], prog: str, default: Any = None, description: str | None = None
) -> Any:
    """Call a dataclass or function with the options of a command line.

    `default` is the instance of a dataclass that options change, `description` the first paragraph of --help, the
    docstring if not given. Raises UserError for an option or value that does not fit, SystemExit after --help.
    """
    wants_help = "--help" in argv or "-h" in argv
    if not wants_help:
        options = options_of(target if default is None else type(default), default)
        argv = split_commas(argv, options)
        check(argv, options, prog)
    settings = {} if default is None else {"default": default}
    try:
        return tyro.cli(
            target, args=list(argv), prog=prog, description=description, console_outputs=wants_help, **settings
        )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{shlex.join(argv)} does not fit together; {prog} --help lists all options") from None


def options_of(target: Callable[..., Any], default: Any = None, prefix: str = "") -> list[Option]:
    """Every option of a dataclass or function, nested ones as --outer.inner, and the negation of every flag."""
    hints, options = get_type_hints(target, include_extras=True), []
    for name, parameter in inspect.signature(target).parameters.items():
        hint, marks = _without_marks(hints[name])
        value = getattr(default, name, None)
        inner = type(value) if is_dataclass(value) else hint
        required = parameter.default is parameter.empty
        words = next((mark.name for mark in marks if getattr(mark, "prefix_name", True) is False), None)
        words = words or f"{prefix}{name.replace('_', '-')}"
        if is_dataclass(inner):
            options += options_of(inner, value, f"{words}.")  # type: ignore[arg-type]
        elif hint is bool:
            options += [Option(f"--{prefix}{no}{words[len(prefix) :]}", None, False, 0) for no in ("", "no-")]
        else:
            many = get_origin(hint) is tuple and tyro.conf.UseAppendAction not in marks
            positional = tyro.conf.Positional in marks
            required &= not (many and positional)  # no words give an empty tuple
            options.append(Option(words if positional else f"--{words}", hint, required, UNLIMITED if many else 1))
    return options


def split_commas(argv: Iterable[str], options: Iterable[Option]) -> list[str]:
    """The words of a command line, lists of numbers with a word for each number.

    Example:
      >>> options = [Option("--every", tuple[int, ...], False, UNLIMITED)]
      >>> split_commas(["--every", "10,30"], options), split_commas(["--every=10,30", "a,b"], options)
      (['--every', '10', '30'], ['a,b', '--every', '10', '30'])
    """
    lists = {option.name for option in options if option.hint in (tuple[int, ...], tuple[float, ...])}
    words: list[str] = []
    last: list[str] = []  # of --every=10,30, which takes no further words
    inside = False
    for word in argv:
        name, equals, values = word.partition("=")
        if not word.startswith("--"):
            words += word.split(",") if inside else [word]
            continue
        is_list = name.replace("_", "-") in lists
        inside = is_list and not equals
        if is_list and equals:
            last += [name, *values.split(",")]
        else:
            words.append(word)
    return words + last


def _without_marks(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type hint without `Annotated`, and what it was annotated with."""
    return (get_args(hint)[0], hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def check(argv: Sequence[str], options: Iterable[Option], prog: str) -> None:
    """Check a command line against the options.

    Example:
      >>> check(["--stpes", "3"], [Option("--steps", int, False, 1)], "train.py")
      Traceback (most recent call last):
      jgc.training.errors.UserError: unknown option --stpes; did you mean --steps?
    """
    known = {option.name: option for option in options}
    words, seen, spare = deque(argv), set(), []
    while words:
        word = words.popleft()
        if not word.startswith("--"):
            spare.append(word)
            continue
        name, equals, value = word.partition("=")
        option = _named(name.replace("_", "-"), known)
        seen.add(option.name)
        values = [value] if equals else []
        while not equals and words and len(values) < option.most and not words[0].startswith("--"):
            values.append(words.popleft())
        _check_values(option, values)
    _check_rest(spare, seen, known, prog)


def _named(name: str, known: dict[str, Option]) -> Option:
    if name in known and name.startswith("--"):
        return known[name]
    names = [*(word for word in known if word.startswith("--")), "--config", "--method", "--help"]
    names = [word for word in names if word != name]  # --method is no option of `--set`: no hint for itself
    raise UserError(f"unknown option {name}{did_you_mean(name, names) or '; --help lists them all'}")


def _check_values(option: Option, values: Sequence[str]) -> None:
    if option.most == 0 and values:
        raise UserError(f"{option.name} takes no value, got {values[0]!r}")
    if option.most == 1 and not values:
        raise UserError(f"{option.name} needs a value")
    for value in values:
        right = wanted(option.hint, value)
        if right:
            raise UserError(f"{option.name} must be {right}, got {value!r}")


def _check_rest(spare: list[str], seen: set[str], known: dict[str, Option], prog: str) -> None:
    """Check the number of positional arguments, and required options."""
    places = [option for option in known.values() if not option.name.startswith("-")]
    if single := next((word for word in spare if word.startswith("-") and not _converts(float, word)), ""):
        near = did_you_mean(f"-{single}", [word for word in known if word.startswith("--")])
        raise UserError(f"unknown option {single}{near or '; --help lists them all'}")
    if len(spare) > sum(option.most for option in places):
        raise UserError(f"{prog} takes {'fewer arguments' if places else 'only options'}, got {spare[-1]!r}")
    seen |= {option.name for option, _ in zip(places, spare, strict=False)}
    missing = [option.name for option in known.values() if option.required and option.name not in seen]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be given; see {prog} --help")


def wanted(hint: Any, text: str) -> str:
    """The values that a type hint allows, in words; "" if `text` is one of them.

    Example:
      >>> wanted(int | None, "many"), wanted(Literal["sgd", "adam"], "sgd"), wanted(float, "1e-3")
      ('a whole number', '', '')
    """
    hint, _ = _without_marks(hint)
    parts = get_args(hint)
    if get_origin(hint) is tuple:
        return wanted(parts[0], text)
    if get_origin(hint) in (Union, UnionType):
        words = [wanted(part, text) for part in parts if part is not NoneType]
        return "" if "" in words or (NoneType in parts and text == "None") else words[0]
    if get_origin(hint) is Literal:
        choices = [str(part) for part in parts]
        return "" if text in choices else f"one of {', '.join(map(repr, choices))}"
    for kind, name in ((int, "a whole number"), (float, "a number")):
        if hint is kind and not _converts(kind, text):
            return name
    return ""


def _converts(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
