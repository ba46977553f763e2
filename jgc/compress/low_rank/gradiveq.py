"""GradiVeQ: slices of convolution gradients in the coordinates of their principal components, which can be summed.

After an uncompressed warm-up, cycles of L_t sampling and L_c compressed steps, for the slices m of every convolution:

    sampling      all nodes get the mean gradient by 4-bit QSGD and keep its first slice, and the sum of every slice
    in between    mu_m = mean of slice m;  U_d = the d first principal components of the first slice's samples,
                  d the fewest that hold 1 - lambda of their energy                                            (6)
    compressed    g'_nm = U_d^T (g_nm - mu_m)        on each node n                                           (3)
                  g'_m  = mean over nodes of g'_nm   summed as it is, by a ring or an all-reduce              (4)
                  g_m   = U_d g'_m + mu_m            decompressed once                                        (5)

With `algorithm="ring"` this is the paper's Algorithm 1: a node makes the code of the next segment while the last one
travels. Other leaves (norms, biases, fully connected layers, kernels with more than `max_slice` values a place) go
uncompressed or by QSGD, and are counted.

Limits. Nodes find the same bases from the same samples by themselves: the same kind of device and the same versions, as
programs of several processes need anyway.

Source: Yu et al. 2018, "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
Training", NeurIPS; equation and section numbers are those of that paper.

Differs from the paper
  1. Means in place of sums: mu, codes and samples are of the mean over nodes, so (3) takes off mu_m and not mu_m / N.
  2. One d for all bases of a layer, rounded up to eighths of the largest that is possible, L_t - 1 or K: each set of
     sizes is a program of its own to compile.
  3. Summed segments come round by an all-gather of codes and are decompressed together, in place of lines 10 to 14 of
     Algorithm 1: XLA has no other way to know that all nodes hold the same. Bytes are the same.
  4. The loss (7) that nodes watch is taken relative to the node's gradient, smoothed, and its limit is a multiple of
     what the node saw at the beginning of the cycle: gradients shrink in training, and what a local gradient loses is
     mostly its noise, far above lambda, which is of the aggregate.
  5. `samples` is ours: bases can be made from the newest sampling steps of several cycles, and of the warm-up, so that
     cycles can be short and bases large.
  6. `error_feedback` is ours: what (3) loses is kept. Codes cannot carry it, for the bases stay as they are; it goes
     out in the next sampling phase, at once or over `feedback_steps` in equal shares. What QSGD loses is not kept:
     its rounding is unbiased, and feedback of that grows without bound.
"""

import dataclasses
from typing import Literal

from jgc import comm
from jgc.compress.dense import dense
from jgc.compress.low_rank import slices
from jgc.compress.low_rank.gradiveq_steps import BUCKET, convolutions, kept_samples
from jgc.compress.quantized.qsgd import qsgd
from jgc.compress.registry import Method
from jgc.method.per_layer import per_layer
from jgc.types import Compressor


@dataclasses.dataclass(frozen=True)
class Gradiveq:
    """Settings of `gradiveq`."""

    loss: float = 0.01
    """lambda, the share of the samples' energy that may be lost, in [0, 1)"""
    rank: int = 0
    """d of every layer; 0 to choose it by `loss`"""
    slice_taps: int = 3
    """K is so many times filters * depth, if `slice_size` is 0"""
    slice_size: int = 0
    """K of every layer, a multiple of its filters * depth; 0 for `slice_taps`"""
    max_slice: int = 65_536
    """the largest K; kernels with more values at one place are not compressed"""
    reuse: int = 0
    """s, how many slices of a layer share the first one's basis; 0 for all"""
    warmup_steps: int = 2500
    """uncompressed steps before the first cycle"""
    sampling_steps: int = 100
    """L_t, steps of a cycle from whose gradients bases are made, at least 2; 1 will do with `samples`"""
    compressed_steps: int = 400
    """L_c, steps of a cycle with codes, at least 1"""
    samples: int = 0
    """of how many of the newest steps without codes bases are made; 0 for those of the cycle, as in the paper"""
    sampling_bits: int = 4
    """QSGD's in sampling steps, 2 to 8; 0 for full precision"""
    others: Literal["dense", "qsgd"] = "dense"
    """how leaves that are no convolutions travel"""
    algorithm: Literal["psum", "ring"] = "psum"
    """what sums the codes: the runtime's all-reduce, or the paper's ring by `ppermute`; QSGD goes round a ring, too"""
    centred: bool = True
    """take mu, the mean of the samples, off first, as the paper does; if not, mu is 0 in (3), (5) and the components"""
    error_feedback: bool = False
    """add what was lost to the gradients of the next sampling phase; not with `centred`"""
    feedback_steps: int = 1
    """sampling steps over which that goes out in equal shares"""
    control_limit: float = 0.0
    """back to sampling when most nodes lose more than so many times what they lost first; 0 for never"""
    control_every: int = 10
    """compressed steps between two looks at that, and those in which nodes see what they lose first"""


def gradiveq(config: Gradiveq | None = None, **overrides) -> Compressor:
    """PCA codes of the slices of convolution gradients, averaged as they are.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: a setting out of range, or, when the method meets the model, a K that is no multiple of filters *
        depth of a layer or below the `rank` given.

    Example:
      >>> [phase.name for phase in gradiveq(warmup_steps=50, sampling_steps=20, compressed_steps=40).schedule]
      ['dense', 'sampling', 'compressed']

    References:
      Yu, Lin, Narra, Li, Li, Kim, Schwing, Annavaram, Avestimehr 2018, "GradiVeQ", NeurIPS.
    """
    config = dataclasses.replace(config or Gradiveq(), **overrides)
    check(config)
    by_qsgd = qsgd(bits=4, bucket=BUCKET, exchange="ring" if config.algorithm == "ring" else "gather")

    def goes_otherwise(path, leaf):
        return not slices.is_convolution(leaf, config.max_slice)

    rest = by_qsgd if config.others == "qsgd" else dense(algorithm=config.algorithm)
    return per_layer([(goes_otherwise, rest)], default=convolutions(config))


def check(config: Gradiveq) -> None:
    """Raise ValueError for a setting out of range."""
    if not 0 <= config.loss < 1:
        raise ValueError(f"loss (lambda) must be in [0, 1), got {config.loss}")
    if config.sampling_bits not in (0, *range(2, 9)):
        raise ValueError(f"sampling_bits must be 0 (full precision) or 2 to 8, got {config.sampling_bits}")
    if config.others not in ("dense", "qsgd"):
        raise ValueError(f"others must be 'dense' or 'qsgd', got {config.others!r}")
    if config.algorithm not in comm.MEANS:
        raise ValueError(f"algorithm must be 'psum' or 'ring', got {config.algorithm!r}")
    least = {"sampling_steps": 1 if config.samples else 2, "compressed_steps": 1, "slice_taps": 1, "max_slice": 1,
             "control_every": 1, "feedback_steps": 1}  # fmt: skip
    for name, bound in {**least, "rank": 0, "samples": 0, "slice_size": 0, "reuse": 0, "control_limit": 0}.items():
        if not getattr(config, name) >= bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(config, name)}")
    if config.feedback_steps > config.sampling_steps:
        raise ValueError(
            f"feedback_steps must be at most sampling_steps = {config.sampling_steps}, got {config.feedback_steps}"
        )
    fewest = max(2, config.sampling_steps)
    if config.samples and config.samples < fewest:
        raise ValueError(f"samples must be 0 (those of a cycle) or at least {fewest}, got {config.samples}")
    if config.rank > kept_samples(config) - 1:
        raise ValueError(
            f"rank must be at most the samples - 1 = {kept_samples(config) - 1} (so many directions do they have), "
            f"got {config.rank}"
        )
    if config.error_feedback and config.centred:
        raise ValueError(
            "error_feedback must be False with centred True, got True: samples hold what is given back, and their mean "
            "would be added in every compressed step"
        )
    if config.slice_size and config.rank > config.slice_size:
        raise ValueError(f"rank must be at most slice_size = {config.slice_size}, got {config.rank}")


METHOD = Method(
    "gradiveq", Gradiveq, gradiveq, "Yu et al. 2018", lossless=None,
    exempt={
        "conservation": "what components and rounding lose is not kept, as in the paper",
        "zeros": "mu, the mean of the samples, is there whatever comes",
    },
)  # fmt: skip
