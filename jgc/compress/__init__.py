"""Gradient compression methods. Each is one file, one class of settings and one factory.

A new method is a new file here, one line in `METHODS` and one file in configs/. It then has the contract tests, the
byte audit and a row in every table.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jgc.compress.dense import Dense, dense
from jgc.compress.lgc.ring import RING_PAPER_RECIPE, LgcRing, lgc_ring
from jgc.compress.lgc.server import PAPER_RECIPE, LgcPs, lgc_ps
from jgc.compress.low_rank.gradiveq import Gradiveq, gradiveq
from jgc.compress.low_rank.klt import Klt, klt
from jgc.compress.low_rank.powersgd import PowerSgd, powersgd
from jgc.compress.quantized.cast import Cast, cast
from jgc.compress.quantized.natural import Natural, natural
from jgc.compress.quantized.onebit import OneBit, onebit
from jgc.compress.quantized.qsgd import Qsgd, qsgd
from jgc.compress.quantized.signsgd import SignSgd, signsgd
from jgc.compress.quantized.terngrad import TernGrad, terngrad
from jgc.compress.silent import Silent, silent
from jgc.compress.sparse.dgc import Dgc, dgc
from jgc.compress.sparse.egc import Egc, egc
from jgc.compress.sparse.gradient_dropping import GradientDropping, gradient_dropping
from jgc.compress.sparse.random_k import RandomK, random_k
from jgc.compress.sparse.scalecom import ScaleCom, scalecom
from jgc.compress.sparse.threshold_v import ThresholdV, threshold_v
from jgc.compress.sparse.topk import TopK, topk
from jgc.method.as_optax import as_optax
from jgc.method.compose import Codec, Exchange, compose, compose_phases
from jgc.method.per_layer import per_layer
from jgc.method.physical import step_on_nodes
from jgc.types import Compressor


class Method(NamedTuple):
    """A registered method.

    Attributes:
      name: as configuration files and reports show it.
      settings: its frozen dataclass of settings.
      factory: `(settings) -> Compressor`.
      paper: where it comes from.
      lossless: settings with which the last phase gives the exact mean; None where there are none.
    """

    name: str
    settings: type
    factory: Callable[..., Compressor]
    paper: str
    lossless: dict[str, Any] | None


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("dense", Dense, dense, "uncompressed baseline", {}),
        Method("topk", TopK, topk, "Strom 2015; Stich et al. 2018", {"alpha": 1.0}),
        Method("lgc_ps", LgcPs, lgc_ps, "Abrahamyan et al. 2021", {"alpha": 1.0, "innovation": 1.0}),
        Method("lgc_ring", LgcRing, lgc_ring, "Abrahamyan et al. 2021", None),
        # masking would restart the momentum of every value in every step
        Method("dgc", Dgc, dgc, "Lin et al. 2018", {"alpha": 1.0, "factor_masking": False}),
        Method("gradient_dropping", GradientDropping, gradient_dropping, "Aji and Heafield 2017", {"alpha": 1.0}),
        Method("scalecom", ScaleCom, scalecom, "Chen et al. 2020", {"alpha": 1.0}),
        Method("egc", Egc, egc, "Kuang et al. 2020", None),
        Method("random_k", RandomK, random_k, "Stich et al. 2018", {"alpha": 1.0}),
        Method(
            "threshold_v", ThresholdV, threshold_v, "Strom 2015; Xu et al. 2021", {"threshold": 0.0, "capacity": 1.0}
        ),
        Method("klt", Klt, klt, "ours", None),
        Method("gradiveq", Gradiveq, gradiveq, "Yu et al. 2018", None),
        # layers of which the factors would not be smaller go uncompressed: with such a rank, all of them
        Method("powersgd", PowerSgd, powersgd, "Vogels et al. 2019", {"rank": 65_536}),
        Method("qsgd", Qsgd, qsgd, "Alistarh et al. 2017", None),
        Method("terngrad", TernGrad, terngrad, "Wen et al. 2017", None),
        Method("onebit", OneBit, onebit, "Seide et al. 2014", None),
        Method("signsgd", SignSgd, signsgd, "Bernstein et al. 2018; Karimireddy et al. 2019", None),
        Method("natural", Natural, natural, "Horvath et al. 2019", None),
        Method("cast", Cast, cast, "Micikevicius et al. 2018, 2022", None),
        Method("silent", Silent, silent, "a control: sends nothing", None),
    )
}


def method_of(settings: Any) -> Method:
    """The method that a settings object belongs to.

    Raises:
      ValueError: it belongs to none.
    """
    for method in METHODS.values():
        if type(settings) is method.settings:
            return method
    known = ", ".join(method.settings.__name__ for method in METHODS.values())
    raise ValueError(f"{type(settings).__name__} is not the settings class of a method; there are {known}")


def build(settings: Any, **overrides: Any) -> Compressor:
    """The compressor of a settings object.

    Example:
      >>> build(TopK(alpha=0.01)).schedule[0].name
      'top-k'
    """
    return method_of(settings).factory(dataclasses.replace(settings, **overrides))


__all__ = [
    "METHODS", "PAPER_RECIPE", "RING_PAPER_RECIPE", "Cast", "Codec", "Dense", "Dgc", "Egc", "Exchange",
    "GradientDropping", "Gradiveq", "Klt", "LgcPs", "LgcRing", "Method", "Natural", "OneBit", "PowerSgd", "Qsgd",
    "RandomK", "ScaleCom", "SignSgd", "Silent", "TernGrad", "ThresholdV", "TopK", "as_optax", "build", "cast",
    "compose", "compose_phases", "dense", "dgc", "egc", "gradient_dropping", "gradiveq", "klt", "lgc_ps", "lgc_ring",
    "method_of", "natural", "onebit", "per_layer", "powersgd", "qsgd", "random_k", "scalecom", "signsgd", "silent",
    "step_on_nodes", "terngrad", "threshold_v", "topk",
]  # fmt: skip
