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
        hint, value, name = (
            hints[field.name],
            getattr(settings, field.name),
            f"{prefix}{field.name}",
        )
        inner = get_origin(hint) or hint
        # the compressor's settings are of any class
        if dataclasses.is_dataclass(inner) or isinstance(hint, TypeVar):
            kind = inner if dataclasses.is_dataclass(inner) else object
            is_settings = dataclasses.is_dataclass(value) and not isinstance(value, type)
            if not is_settings or not isinstance(value, kind):  # type: ignore[arg-type]
                what = (
                    getattr(kind, "__name__", "")
                    if kind is not object
                    else "the settings of a method, as TopK()"
                )
                return f"{name} must be {what}, got {value!r}"
            wrong = wrong_value(value, f"{name}.")
        else:
            wrong = "" if fits(hint, value) else f"{name} must be {words(hint)}, got {value!r}"
        if wrong:
            return wrong
    return ""
