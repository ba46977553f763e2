"""Check arguments, and the fields of settings, against their type annotations."""

import numbers
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "True or False",
          NoneType: "None"}  # fmt: skip


def fits(hint: Any, value: Any) -> bool:
    """Whether a value is of a type. NumPy's numbers are numbers; True and False are not.

    Example:
      >>> fits(float, 1), fits(int, True), fits(int | None, None), fits(Literal["sgd"], "sdg")
      (True, False, True, False)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(part, value) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(fits(parts[0], x) for x in value)
    if hint in (int, float):
        number = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def check_type(name: str, hint: Any, value: Any) -> None:
    """Raise TypeError, naming the argument, unless its value is of a type.

    Example:
      >>> check_type("every", int, 2.5)
      Traceback (most recent call last):
      TypeError: every must be a whole number, got 2.5
    """
    if not fits(hint, value):
        raise TypeError(f"{name} must be {words(hint)}, got {value!r}")


def words(hint: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(words(part) for part in parts)
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is tuple:
        return f"a tuple, each {words(parts[0])}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
