"""Gradient compression methods. Each is one file: settings, factory and `METHOD`, its entry.

A factory takes its settings object, single settings by name, which replace its fields, or both. A
new method is a file in its family's folder and a line here; the contract tests, the byte audit and
every table then include it.
"""

import dataclasses
import difflib
from typing import Any

from jgc.compress.dense import METHOD as _dense, Dense, dense
from jgc.compress.lgc.ring import METHOD as _lgc_ring, RING_PAPER_RECIPE, LgcRing, lgc_ring
from jgc.compress.lgc.server import METHOD as _lgc_ps, PAPER_RECIPE, LgcPs, lgc_ps
from jgc.compress.low_rank.gradiveq import METHOD as _gradiveq, gradiveq
from jgc.compress.low_rank.gradiveq_settings import Gradiveq
from jgc.compress.low_rank.klt import METHOD as _klt, Klt, klt
from jgc.compress.low_rank.powersgd import METHOD as _powersgd, PowerSgd, powersgd
from jgc.compress.quantized.cast import METHOD as _cast, Cast, cast
from jgc.compress.quantized.natural import METHOD as _natural, Natural, natural
from jgc.compress.quantized.onebit import METHOD as _onebit, OneBit, onebit
from jgc.compress.quantized.qsgd import METHOD as _qsgd, Qsgd, qsgd
from jgc.compress.quantized.signsgd import METHOD as _signsgd, SignSgd, signsgd
from jgc.compress.quantized.terngrad import METHOD as _terngrad, TernGrad, terngrad
from jgc.compress.registry import Entry
from jgc.compress.silent import METHOD as _silent, Silent, silent
from jgc.compress.sparse.demo import METHOD as _demo, Demo, demo
from jgc.compress.sparse.dgc import METHOD as _dgc, Dgc, dgc
from jgc.compress.sparse.ef21 import METHOD as _ef21, Ef21, ef21
from jgc.compress.sparse.egc import METHOD as _egc, Egc, egc
from jgc.compress.sparse.gradient_dropping import (
    METHOD as _gradient_dropping,
    GradientDropping,
    gradient_dropping,
)
from jgc.compress.sparse.learned_topk import METHOD as _learned_topk, LearnedTopK, learned_topk
from jgc.compress.sparse.random_k import METHOD as _random_k, RandomK, random_k
from jgc.compress.sparse.scalecom import METHOD as _scalecom, ScaleCom, scalecom
from jgc.compress.sparse.threshold_v import METHOD as _threshold_v, ThresholdV, threshold_v
from jgc.compress.sparse.topk import METHOD as _topk, TopK, topk
from jgc.method import Codec, Exchange, compose, compose_phases, per_layer
from jgc.method.as_optax import as_optax, init_optax
from jgc.method.stacked import stacked
from jgc.method.whole_step import step_of_shapes, step_on_nodes
from jgc.types import Compressor

METHODS: dict[str, Entry] = {x.name: x for x in list(globals().values()) if isinstance(x, Entry)}
"""All methods by name, in the order of the imports above."""


def method_of(settings: Any) -> Entry:
    """The registered method of a settings object.

    Raises:
      ValueError: no method has settings of this class.
    """
    if any(settings is method.settings for method in METHODS.values()):
        name = settings.__name__
        raise ValueError(f"expected settings, got the class {name}: call it, {name}()")
    for method in METHODS.values():
        if type(settings) is method.settings:
            return method
    known = ", ".join(method.settings.__name__ for method in METHODS.values())
    raise ValueError(
        f"{type(settings).__name__} is not the settings class of a method; there are {known}")


def build(settings: Any, **overrides: Any) -> Compressor:
    """The compressor of a settings object.

    Args:
      settings: of any method, such as `TopK()`.
      overrides: replace single fields.

    Raises:
      TypeError: an unknown setting.
      ValueError: no method has settings of this class, or a setting outside its range.

    Example:
      >>> build(TopK(alpha=0.01)).schedule[0].name
      'top-k'
    """
    return method_of(settings).factory(settings, **overrides)


def __getattr__(name: str) -> Any:
    """Raise AttributeError for an unknown method, with the nearest name."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else "."
    raise AttributeError(
        f"jgc.compress has no method {name!r}{hint} There are {', '.join(METHODS)}")
