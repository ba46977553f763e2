"""The registry entry of a method. Each method's file defines one as `METHOD`; `jgc.compress` collects them."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from jgc.types import Compressor

T = TypeVar("T")


class Method(NamedTuple):
    """A registered method.

    Attributes:
      name: as configuration files and reports show it.
      settings: its frozen dataclass of settings.
      factory: `(settings) -> Compressor`.
      paper: its source.
      lossless: settings with which the last phase returns the exact mean; None if there are none.
      exempt: laws of the contract suite that the method breaks after its warm-up, with the reason: "conservation"
        (residual and aggregate conserve gradients) and "zeros" (zero gradients give a zero aggregate).
      layers: which layers comparisons send in another way, as in Section VI-A of the LGC paper: `FIRST_DENSE`,
        `FIRST_DENSE_LAST_TOP_K`, or none.
      citation: its papers in BibTeX; empty for what is jgc's own.
    """

    name: str
    settings: type
    factory: Callable[..., Compressor]
    paper: str
    lossless: Mapping[str, Any] | None
    exempt: Mapping[str, str] = MappingProxyType({})
    layers: Mapping[str, str] = MappingProxyType({})
    citation: str = ""


FIRST, LAST = "first", "last"  # a model's own first and last layer, in place of a pattern
FIRST_DENSE: Mapping[str, str] = MappingProxyType({"dense": FIRST})
FIRST_DENSE_LAST_TOP_K: Mapping[str, str] = MappingProxyType({"dense": FIRST, "top_k": LAST})


def settings_of(own: type[T], config: T | None, overrides: Mapping[str, Any]) -> T:
    """The settings that a factory got, with single fields replaced.

    Raises:
      TypeError: `config` is something else, such as a share; settings go by name.
    """
    config = own() if config is None else config
    if not isinstance(config, own):
        names = ", ".join(field.name for field in dataclasses.fields(cast(Any, own)))
        raise TypeError(f"expected settings {own.__name__}, or single ones by name ({names}), got {config!r}")
    return dataclasses.replace(cast(Any, config), **overrides)
