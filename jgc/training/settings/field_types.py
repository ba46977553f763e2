"""Check settings by the types of their fields."""

import dataclasses
from typing import Any, TypeVar, get_origin, get_type_hints

from jgc.checks.argument_types import fits, words


def wrong_value(settings: Any, prefix: str = "") -> str:
    """The first field whose value is not of its type, in words; "" if all are right.

    Example:
      >>> from jgc.compress import TopK
      >>> wrong_value(TopK(min_values="many"), "topk.")
      "topk.min_values must be a whole number, got 'many'"
    """
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        hint, value, name = hints[field.name], getattr(settings, field.name), f"{prefix}{field.name}"
        inner = object if isinstance(hint, TypeVar) else get_origin(hint) or hint  # object: any method's settings
        if inner is not object and not dataclasses.is_dataclass(inner):
            wrong = "" if fits(hint, value) else f"{name} must be {words(hint)}, got {value!r}"
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and isinstance(value, inner):  # type: ignore[arg-type]
            wrong = wrong_value(value, f"{name}.")
        else:
            what = "the settings of a method, as TopK()" if inner is object else getattr(inner, "__name__", "")
            wrong = f"{name} must be {what}, got {value!r}"
        if wrong:
            return wrong
    return ""
