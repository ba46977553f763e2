"""The entry of a method, and checks of its settings. Each method's file defines one as `METHOD`;
`jgc.compress` collects them."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import numpy as np

from jgc.checks.argument_types import fits, words
from jgc.types import Compressor

T = TypeVar("T")


class Entry(NamedTuple):
    """A registered method.

    Attributes:
      name: as configuration files and reports show it.
      settings: its frozen dataclass of settings.
      factory: `(settings) -> Compressor`.
      paper: its source.
      lossless: settings with which the last phase returns the exact mean; None if there are none.
      exempt: laws of the contract suite that the method breaks after its warm-up, with the reason:
        "conservation" (residual and aggregate conserve gradients) and "zeros" (zero gradients give
        a zero aggregate).
      layers: which layers comparisons send in a different way, as in Section VI-A of the LGC paper:
        `FIRST_DENSE`, `FIRST_DENSE_LAST_TOP_K`, or none.
      citation: keys of its papers in papers.bib; none for jgc's methods.
    """

    name: str
    settings: type
    factory: Callable[..., Compressor]
    paper: str
    lossless: Mapping[str, Any] | None
    exempt: Mapping[str, str] = MappingProxyType({})
    layers: Mapping[str, str] = MappingProxyType({})
    citation: tuple[str, ...] = ()


FIRST, LAST = "first", "last"  # instead of a pattern: a model's first and last layer
FIRST_DENSE: Mapping[str, str] = MappingProxyType({"dense": FIRST})
FIRST_DENSE_LAST_TOP_K: Mapping[str, str] = MappingProxyType({"dense": FIRST, "top_k": LAST})


def settings_of(settings_type: type[T], config: T | None, overrides: Mapping[str, Any]) -> T:
    """The settings that a factory got, with single fields replaced, and NumPy's numbers plain.

    Raises:
      TypeError: `config` is something else, such as a share; settings go by name; or an unknown
        setting.
      ValueError: a value of the wrong type, or none of the setting's choices.
    """
    config = settings_type() if config is None else config
    names = [field.name for field in dataclasses.fields(cast(Any, settings_type))]
    title, all_names = settings_type.__name__, ", ".join(names)
    if not isinstance(config, settings_type):
        raise TypeError(
            f"expected settings {title}, or single ones by name ({all_names}), got {config!r}")
    unknown = [name for name in overrides if name not in names]
    if unknown:
        raise TypeError(f"{title} has no setting {unknown[0]!r}; there are {all_names}")
    config = dataclasses.replace(cast(Any, config), **overrides)
    hints = get_type_hints(settings_type)
    for name in names:
        value, hint = getattr(config, name), hints[name]
        if not fits(hint, value):
            raise ValueError(f"{name} must be {words(hint)}, got {value!r}")
        if name in ("warmup_steps", "autoencoder_steps") and value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    plain = {name: _plain(getattr(config, name)) for name in names}
    return cast(T, dataclasses.replace(cast(Any, config), **plain))


def _plain(x: Any) -> Any:
    """A setting without NumPy's numbers, which JSON cannot write."""
    if isinstance(x, tuple | list):
        return type(x)(map(_plain, x))
    return x.item() if isinstance(x, np.generic) else x


def check_idle(config: Any, why: str, *names: str) -> None:
    """Raise ValueError if one of these settings is not at its default, since it does nothing `why`.

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
