"""Settings of LGC, of the parameter server and of the ring, and their checks."""

import dataclasses
from typing import Any, ClassVar, Literal

from jgc.compress.registry import check_idle
from jgc.compress.settings import Chunked, ErrorFeedback, selector_of
from jgc.wire.values import ValueCode

TOP_K, COMPRESSED = "top-k", "compressed"  # the phases after the dense one


@dataclasses.dataclass(frozen=True)
class Lgc(Chunked, ErrorFeedback):
    """Settings that both variants have."""

    positions: ClassVar[str] = "leader"  # a setting only of the parameter server
    alpha: float = 0.001
    """share of each layer's values that is selected, in (0, 1]"""
    warmup_steps: int = 200
    """uncompressed steps, the first phase"""
    autoencoder_steps: int = 300
    """top-k steps while the autoencoder trains, the second phase"""
    feedback: Literal["exact", "paper"] = "exact"
    """exact: the residual keeps the decoding error; paper: the error is lost"""
    momentum_correction: bool = True
    """accumulate each node's momentum (DGC), not plain gradients; the optimiser then has none"""
    fold_signs: bool = True
    """multiply values by their signs, or by the leader's at its positions; a sign costs one bit"""
    send_means: bool = True
    """every node sends the mean of its values per layer; the code encodes deviations from it"""
    scale: Literal["layer", "none"] = "layer"
    """divide by the mean magnitude of each layer: the node's, or the leader's at its positions"""
    autoencoder_optimizer: Literal["adam", "sgd"] = "adam"
    """optimiser of the autoencoder"""
    autoencoder_learning_rate: float = 0.001
    """learning rate of the autoencoder"""
    autoencoder_loss: Literal["mean", "sum"] = "mean"
    """mean: losses are means over their terms; sum: the paper's sums, which grow with mu and K"""


@dataclasses.dataclass(frozen=True)
class LgcPs(Lgc):
    """Settings of `lgc_ps`."""

    # a class variable of the base
    positions: Literal["leader", "own"] = "own"  # type: ignore[misc]
    """own: every node sends its positions (Algorithm 1); leader: all use the leader's"""
    leader: Literal["fixed", "rotating"] = "fixed"
    """fixed: node 0; rotating: the nodes take turns, and every node gets the encoder. With
    positions="leader" and "fixed", a value without gradient on node 0 is never sent: only for nodes
    with similar data"""
    innovation: float = 0.1
    """share of the selected values that every node sends exactly, in [0, 1]; if not 0, at least one
    value"""
    innovation_by: Literal["error", "magnitude", "layer"] = "error"
    """error: those with the largest error of signs and means, over all layers together; magnitude:
    the largest; layer: the largest of each layer, at least one, as in the paper"""
    overwrite: bool = True
    """innovations replace decoded values; if not, they only enter the decoder, as in the paper"""
    lambda_similarity: float = 0.5
    """weight of the similarity loss (5); the reconstruction loss (6) has the weight 1"""
    code_dtype: ValueCode | Literal["none"] = "float32"
    """value code of the code: floats of some width, or a few bits per value with a scale for either
    sign; none: no code is sent, and values are decoded from signs, means and innovations, as a
    control of what the code is worth"""


PAPER_RECIPE: dict[str, Any] = {
    "fold_signs": False,
    "send_means": False,
    "scale": "none",
    "innovation_by": "layer",
    "overwrite": False,
    "feedback": "paper",
    "autoencoder_optimizer": "sgd",
    "autoencoder_learning_rate": 0.001,
    "autoencoder_loss": "sum",
}
"""The autoencoder as the paper trains and uses it: `lgc_ps(**PAPER_RECIPE)`. Every node selects its
positions.

SGD on sums over raw values diverges where gradients are large: with values of the order of 1 its
weights, and with them the aggregate, become NaN.
"""


@dataclasses.dataclass(frozen=True)
class LgcRing(Lgc):
    """Settings of `lgc_ring`."""

    algorithm: Literal["psum", "ring"] = "ring"
    """how codes are averaged: an explicit ring by ppermute, or the runtime's all-reduce"""
    decoder: Literal["linear", "leaky_relu"] = "linear"
    """linear: the mean of codes decodes to the mean of decoded vectors; leaky_relu: the paper's"""
    code_dtype: Literal["int32", "int16", "float32"] = "int32"
    """dtype of codes and means: fixed point, steps of 2**-16 or 2**-8 of a scale, or floats"""


RING_PAPER_RECIPE: dict[str, Any] = {
    name: x for name, x in PAPER_RECIPE.items() if name not in ("innovation_by", "overwrite")
} | {"decoder": "leaky_relu", "code_dtype": "float32"}
"""The autoencoder as the paper trains and uses it: `lgc_ring(**RING_PAPER_RECIPE)`."""


def check_common(config: Lgc) -> None:
    """Raise ValueError, naming the setting, unless the settings of both variants are in range."""
    selector_of(config, config.alpha)
    rate = config.autoencoder_learning_rate
    if not 0 < rate < float("inf"):
        raise ValueError(f"autoencoder_learning_rate must be finite and positive, got {rate}")
    if config.autoencoder_steps == 0:
        check_idle(config, "with autoencoder_steps=0", *_of_learning(config))


def _of_learning(config: Lgc) -> list[str]:
    """The settings of the autoencoder's training; top-k steps (`autoencoder_steps`) need none."""
    names = [field.name for field in dataclasses.fields(config)]
    return [name for name in names if name.startswith(("autoencoder_", "lambda_"))
            and name != "autoencoder_steps"]  # fmt: skip


def check(config: LgcPs) -> None:
    """Raise ValueError, naming the setting, unless `lgc_ps` can run with these."""
    check_common(config)
    if not 0 <= config.innovation <= 1:
        raise ValueError(
            f"innovation must be in [0, 1] (0.1 sends 10 % of mu), got {config.innovation}")
    if not 0 <= config.lambda_similarity < float("inf"):
        raise ValueError(
            f"lambda_similarity must be finite, 0 or positive, got {config.lambda_similarity}")
    if config.innovation == 0:
        check_idle(config, "with innovation=0", "innovation_by", "overwrite")
        if config.feedback == "exact" and not config.fold_signs:
            raise ValueError(
                'fold_signs must be True with feedback "exact" and innovation=0: else the decoding '
                "error exceeds the values, and the residual grows without bound; use feedback "
                '"paper"')
    if config.code_dtype != "none":
        return
    if not (config.fold_signs and config.send_means):
        raise ValueError(
            "code_dtype='none' needs fold_signs and send_means, or only innovations would be sent")
    without = "with code_dtype='none'"
    check_idle(config, f"{without}, which has no decoder for innovations to enter", "overwrite")
    check_idle(config, without, *_of_learning(config))
    if config.positions == "own":
        check_idle(config, f"{without} and positions='own'", "leader")


def check_ring(config: LgcRing) -> None:
    """Raise ValueError, naming the setting, unless `lgc_ring` can run with these."""
    check_common(config)
    exact = config.feedback == "exact"
    if exact and config.decoder != "linear":
        raise ValueError(
            f'decoder must be linear with feedback "exact", got {config.decoder}: with any '
            'other, no node can compute its share of the decoded mean; use feedback "paper"')
    if exact and not (config.fold_signs and config.send_means):
        raise ValueError(
            'fold_signs and send_means must be True with feedback "exact": without them the '
            "decoding error exceeds the values, and the residual grows without bound; use "
            'feedback "paper"')
    if config.scale == "none" and config.code_dtype != "float32":
        raise ValueError(f'code_dtype must be float32 with scale "none", got {config.code_dtype}: '
                         "it needs scales")  # fmt: skip
