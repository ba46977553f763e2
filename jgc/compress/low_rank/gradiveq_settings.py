"""Settings of GradiVeQ, their checks and warnings; symbols as in `gradiveq`."""

import dataclasses
import warnings
from typing import Literal

import jax

from jgc import comm
from jgc.compress.low_rank.slices import block_of, is_convolution
from jgc.compress.registry import check_idle
from jgc.layout.pack import leaf_paths
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
    """the largest K; kernels with more values per tap are not compressed, and `init` warns of
    them"""
    reuse: int = 0
    """s, how many slices of a layer share the first one's basis; 0 for all"""
    warmup_steps: int = 2500
    """uncompressed steps before the first cycle"""
    sampling_steps: int = 100
    """L_t, sampling steps of a cycle, at least 2; with `samples`, at least 1"""
    compressed_steps: int = 400
    """L_c, compressed steps of a cycle, at least 1"""
    samples: int = 0
    """number of newest steps without codes that bases are computed from; 0 for the cycle's steps,
    as in the paper"""
    sampling_bits: int = 4
    """bits of QSGD in sampling steps, 2 to 8; 0 for full precision"""
    algorithm: Literal["psum", "ring"] = "psum"
    """how codes are averaged: the runtime's all-reduce, or the paper's ring by `ppermute`, which
    QSGD then uses, too"""
    overlapped: bool = True
    """with algorithm="ring", encode a segment while the one before it is sent (Figure 2b); if not,
    all of them first"""
    centred: bool = True
    """subtract mu, the mean of the samples, as the paper does; if not, mu is 0 in (3), (5) and the
    components"""
    error_feedback: bool = False
    """add the residual to the gradients of the next sampling phase; not with `centred`"""


def kept_samples(config: Gradiveq) -> int:
    """Number of steps from which bases are computed."""
    return config.samples or config.sampling_steps


def check(config: Gradiveq) -> None:
    """Raise ValueError for a setting out of range."""
    if not 0 <= config.loss < 1:
        raise ValueError(f"loss (lambda) must be in [0, 1), got {config.loss}")
    if config.sampling_bits not in (0, *range(2, 9)):
        raise ValueError(
            f"sampling_bits must be 0 (full precision) or 2 to 8, got {config.sampling_bits}"
        )
    comm.mean_by(config.algorithm)  # refuses an unknown one
    if not config.overlapped and config.algorithm != "ring":
        raise ValueError(
            f"overlapped must be True without algorithm='ring', got False with {config.algorithm!r}"
        )
    if config.rank:
        check_idle(config, f"with rank={config.rank}", "loss")
    least = {"sampling_steps": 1 if config.samples else 2, "compressed_steps": 1, "slice_taps": 1,
             "max_slice": 1, "rank": 0, "samples": 0, "reuse": 0}  # fmt: skip
    for name, bound in least.items():
        if getattr(config, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(config, name)}")
    if config.samples and config.warmup_steps + config.sampling_steps < 2:
        raise ValueError(
            "the first bases need two samples: sampling_steps=1 needs warmup_steps of at least 1, "
            "got 0"
        )
    fewest = max(2, config.sampling_steps)
    if config.samples and config.samples < fewest:
        raise ValueError(
            f"samples must be 0 (those of a cycle) or at least {fewest}, got {config.samples}"
        )
    if config.rank > kept_samples(config) - 1:
        raise ValueError(
            f"rank must be at most the samples - 1 = {kept_samples(config) - 1} (the directions "
            f"that they span), got {config.rank}"
        )
    if config.error_feedback and config.centred:
        raise ValueError(
            "error_feedback must be False with centred True, got True: samples include the sent "
            "residual, and their mean would be added in every compressed step"
        )


def warn_of_wide(config: Gradiveq, params: PyTree) -> None:
    """Warn if there are no kernels, or some too wide to compress: they may hold most values."""
    sizes = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    kernels = {path: x for path, x in sizes.items() if is_convolution(x, 2**62)}
    most = config.max_slice
    wide = {path: x for path, x in kernels.items() if not is_convolution(x, most)}
    if not kernels:
        warnings.warn(
            "gradiveq compresses kernels of convolutions, [..., depth, filters], and the "
            "parameters have none: all is sent uncompressed. Use topk or powersgd",
            stacklevel=2,
        )
    if not wide:
        return
    total = sum(x.size for x in sizes.values())
    left = sum(x.size for x in kernels.values()) - sum(x.size for x in wide.values())
    blocks = [block_of(x.shape) for x in wide.values()]
    held = 8.0 * kept_samples(config) * sum(blocks)  # samples and directions of a basis a layer
    warnings.warn(
        f"gradiveq compresses {left:,} of the model's {total:,} values: {len(wide)} convolutions, "
        f"{next(iter(wide))} first, have more than max_slice = {most:,} values per tap. With "
        f"max_slice={max(blocks)} it compresses them as well, for {held / 1e9:.2g} GB more of "
        "state on every device",
        stacklevel=2,
    )


CITATION = """@inproceedings{yu2018gradiveq,
  title = {{GradiVeQ}: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in
    Distributed {CNN} Training},
  author = {Yu, Mingchao and Lin, Zhifeng and Narra, Krishna and Li, Songze and Li, Youjie and
    Kim, Nam Sung and Schwing, Alexander and Annavaram, Murali and Avestimehr, Salman},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2018},
}"""
