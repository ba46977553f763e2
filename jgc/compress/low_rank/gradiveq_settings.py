"""Settings of GradiVeQ, their checks and warnings; symbols as in `gradiveq`."""

import dataclasses
import warnings
from typing import Literal

from jgc.checks.misuse import leaves_by_path
from jgc.compress.low_rank.slices import block_of, is_convolution
from jgc.compress.registry import check_idle
from jgc.types import PyTree


@dataclasses.dataclass(frozen=True)
class Gradiveq:
    """Settings of `gradiveq`."""

    loss: float = 0.01
    """lambda, the share of the samples' energy that may be lost, in [0, 1)"""
    rank: int = 0
    """d of every layer; 0 to choose it by `loss`"""
    slice_taps: int = 3
    """K / (filters * depth)"""
    max_slice: int = 65_536
    """the largest K; `init` warns of kernels with more values per tap, which go uncompressed"""
    reuse: int = 0
    """s, how many slices of a layer share the first one's basis; 0 for all"""
    warmup_steps: int = 2500
    """uncompressed steps before the first cycle"""
    sampling_steps: int = 100
    """L_t, sampling steps of a cycle, at least 2; with `samples`, at least 1"""
    compressed_steps: int = 400
    """L_c, compressed steps of a cycle, at least 1"""
    samples: int = 0
    """newest steps without codes from which bases are computed; 0: the cycle's, as in the paper"""
    sampling_bits: int = 4
    """bits of QSGD in sampling steps, 2 to 8; 0 for full precision"""
    algorithm: Literal["psum", "ring"] = "psum"
    """how codes are averaged: the runtime's all-reduce, or the paper's ring, also for QSGD"""
    overlapped: bool = True
    """with algorithm="ring", encode a segment while the one before it is sent (Figure 2b); if not,
    all of them first"""
    centred: bool = True
    """subtract mu, the mean of the samples, as in the paper; if not, mu is 0"""
    error_feedback: bool = False
    """add the residual to the gradients of the next sampling phase; not with `centred`"""

    @property
    def kept_samples(self) -> int:
        """Number of steps from which bases are computed."""
        return self.samples or self.sampling_steps


def check(config: Gradiveq) -> None:
    """Raise ValueError for a setting out of range."""
    if not 0 <= config.loss < 1:
        raise ValueError(f"loss (lambda) must be in [0, 1), got {config.loss}")
    if config.sampling_bits not in (0, *range(2, 9)):
        raise ValueError(
            f"sampling_bits must be 0 (full precision) or 2 to 8, got {config.sampling_bits}")
    if not config.overlapped and config.algorithm != "ring":
        raise ValueError("overlapped must be True without algorithm='ring', got False with "
                         f"{config.algorithm!r}")  # fmt: skip
    if config.rank:
        check_idle(config, f"with rank={config.rank}", "loss")
    least = {"sampling_steps": 1 if config.samples else 2, "compressed_steps": 1, "slice_taps": 1,
             "max_slice": 1, "rank": 0, "samples": 0, "reuse": 0}  # fmt: skip
    for name, bound in least.items():
        if getattr(config, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(config, name)}")
    if config.samples and config.warmup_steps + config.sampling_steps < 2:
        raise ValueError("the first bases need two samples: sampling_steps=1 needs warmup_steps of "
                         "at least 1, got 0")  # fmt: skip
    fewest, most = max(2, config.sampling_steps), config.kept_samples - 1
    if config.samples and config.samples < fewest:
        raise ValueError(f"samples must be 0 (the samples of a cycle) or at least {fewest}, got "
                         f"{config.samples}")  # fmt: skip
    if config.rank > most:
        raise ValueError(f"rank must be at most the samples - 1 = {most} (the directions that they "
                         f"span), got {config.rank}")  # fmt: skip
    if config.error_feedback and config.centred:
        raise ValueError(
            "error_feedback must be False with centred True, got True: samples include the sent "
            "residual, and their mean would be added in every compressed step")


def warn_of_wide(config: Gradiveq, params: PyTree) -> None:
    """Warn if there are no kernels, or some too wide to compress: they may hold most values."""
    leaves, most = leaves_by_path(params), config.max_slice
    kernels = {path: x for path, x in leaves.items() if is_convolution(x, 2**62)}
    wide = {path: x for path, x in kernels.items() if not is_convolution(x, most)}
    if not kernels:
        warnings.warn(
            "gradiveq compresses kernels of convolutions, [..., depth, filters], and the "
            "parameters have none: all is sent uncompressed. Use topk or powersgd", stacklevel=2)
    if not wide:
        return
    total = sum(x.size for x in leaves.values())
    left = sum(x.size for path, x in kernels.items() if path not in wide)
    blocks = [block_of(x.shape) for x in wide.values()]
    held = 8.0 * config.kept_samples * sum(blocks)  # samples and directions of a basis a layer
    warnings.warn(
        f"gradiveq compresses {left:,} of the model's {total:,} values: {len(wide)} convolutions, "
        f"{next(iter(wide))} first, have more than max_slice = {most:,} values per tap. With "
        f"max_slice={max(blocks)} it compresses them as well, for {held / 1e9:.2g} GB more of "
        "state on every device", stacklevel=2)
