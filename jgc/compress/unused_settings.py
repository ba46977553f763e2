"""Refuse settings that do nothing beside another one."""

import dataclasses
from typing import Any


def check_idle(config: Any, why: str, *names: str) -> None:
    """Raise ValueError if one of these settings is not at its default; `why` says beside what it
    does nothing.

    Example:
      >>> from jgc.compress import TopK
      >>> check_idle(TopK(momentum=0.5), "without momentum_correction=True", "momentum")
      Traceback (most recent call last):
      ValueError: momentum=0.5 does nothing without momentum_correction=True
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in names and value != field.default:
            raise ValueError(f"{field.name}={value!r} does nothing {why}")
