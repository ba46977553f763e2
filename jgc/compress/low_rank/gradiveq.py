"""GradiVeQ: slices of convolution gradients as linear codes in their principal components, summed without decoding.

After an uncompressed warm-up come cycles of L_t sampling and L_c compressed steps. For the slices m (of K values) of
every convolution:

    sampling      all nodes get the mean gradient by 4-bit QSGD, store its first slice and add up every slice
    in between    mu_m = mean of slice m;  U_d = the first d principal components of the first slice's samples,
                  with the smallest d that holds 1 - lambda of their energy                                    (6)
    compressed    g'_nm = U_d^T (g_nm - mu_m)        on each node n                                           (3)
                  g'_m  = mean over nodes of g'_nm   of the codes themselves, by a ring or an all-reduce      (4)
                  g_m   = U_d g'_m + mu_m            decompressed once                                        (5)

With `algorithm="ring"` this is the paper's Algorithm 1: a node encodes the next segment while the last one is sent.
With `overlapped=False` it encodes all segments before it sends the first, to compare with (Figure 2a).
Other leaves (norms, biases, fully connected layers, kernels with more than `max_slice` values per tap) are sent
uncompressed or by QSGD, and are counted.

Limits. Every node computes the bases by itself, from the same samples. So all nodes need the same kind of device and
the same software versions, as programs of several processes do anyway.

Source: Yu et al. 2018, "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
Training", NeurIPS; equation and section numbers are those of that paper.

Differs from the paper
  1. Means in place of sums: mu, codes and samples refer to the mean over nodes, so (3) subtracts mu_m, not mu_m / N.
  2. All bases of a layer share one d, rounded up to a multiple of an eighth of the largest possible d (L_t - 1 or K):
     each set of sizes compiles to a program of its own.
  3. An all-gather of codes replaces lines 10 to 14 of Algorithm 1, and all segments are decompressed together. XLA has
     no other way to know that all nodes hold equal values. The bytes are the same.
  4. The loss (7) is relative to the node's gradient and smoothed, and its limit is a multiple of its value at the
     beginning of the cycle. Gradients shrink in training, and the loss of a local gradient is mostly noise, far above
     lambda, which refers to the aggregate.
  5. `samples` is ours: bases can be computed from the newest sampling steps of several cycles, and of the warm-up, so
     that cycles can be short and bases large. mu is then still the mean over the newest sampling phase alone.
  6. `error_feedback` is ours: the residual keeps the error of (3). Codes cannot carry it, because the bases do not
     change within a cycle. It is sent in the next sampling phase, at once or over `feedback_steps` in equal shares. The
     error of QSGD is not kept: its rounding is unbiased, and its residual would grow without bound.
"""

import dataclasses
import warnings
from typing import Literal

import jax

from jgc import comm
from jgc.compress.dense import dense
from jgc.compress.low_rank import slices
from jgc.compress.low_rank.gradiveq_steps import BUCKET, convolutions, kept_samples
from jgc.compress.quantized.qsgd import qsgd
from jgc.compress.registry import Method, settings_of
from jgc.compress.unused_settings import check_idle
from jgc.layout.pack import leaf_paths
from jgc.method.compressor import compressor_of
from jgc.method.per_layer import per_layer
from jgc.types import Compressor, PyTree


@dataclasses.dataclass(frozen=True)
class Gradiveq:
    """Settings of `gradiveq`."""

    loss: float = 0.01
    """lambda, the share of the samples' energy that may be lost, in [0, 1)"""
    rank: int = 0
    """d of every layer; 0 to choose it by `loss`"""
    slice_taps: int = 3
    """K / (filters * depth), if `slice_size` is 0"""
    slice_size: int = 0
    """K of every layer, a multiple of its filters * depth; 0 for `slice_taps`"""
    max_slice: int = 65_536
    """the largest K; kernels with more values per tap are not compressed, and `init` warns of them"""
    reuse: int = 0
    """s, how many slices of a layer share the first one's basis; 0 for all"""
    warmup_steps: int = 2500
    """uncompressed steps before the first cycle"""
    sampling_steps: int = 100
    """L_t, sampling steps of a cycle, at least 2; with `samples`, at least 1"""
    compressed_steps: int = 400
    """L_c, compressed steps of a cycle, at least 1"""
    samples: int = 0
    """number of newest steps without codes that bases are computed from; 0 for those of the cycle, as in the paper"""
    sampling_bits: int = 4
    """bits of QSGD in sampling steps, 2 to 8; 0 for full precision"""
    others: Literal["dense", "qsgd"] = "dense"
    """how leaves that are not convolutions are sent, in all phases: qsgd quantises them in the phase "dense", too"""
    algorithm: Literal["psum", "ring"] = "psum"
    """how codes are averaged: the runtime's all-reduce, or the paper's ring by `ppermute`, which QSGD then uses, too"""
    overlapped: bool = True
    """with algorithm="ring", encode a segment while the one before it is sent (Figure 2b); if not, all of them first"""
    centred: bool = True
    """subtract mu, the mean of the samples, as the paper does; if not, mu is 0 in (3), (5) and the components"""
    error_feedback: bool = False
    """add the residual to the gradients of the next sampling phase; not with `centred`"""
    feedback_steps: int = 1
    """sampling steps over which the residual is sent in equal shares"""
    control_limit: float = 0.0
    """return to sampling when the loss (7) of most nodes exceeds this multiple of their first loss; 0 for never"""
    control_every: int = 10
    """compressed steps between two checks of `control_limit`; the first loss is the mean over as many steps"""


def gradiveq(config: Gradiveq | None = None, **overrides) -> Compressor:
    """PCA codes of the slices of convolution gradients, averaged without decoding.

    Args:
      config: settings; `overrides` replace single fields.

    Raises:
      ValueError: a setting out of range, or, when the method meets the model, a K that is not a multiple of a
        layer's filters * depth, or is below `rank`.

    Warns:
      UserWarning: in `init`, if there are no kernels of convolutions, or some wider than `max_slice`.

    Example:
      >>> [phase.name for phase in gradiveq(warmup_steps=50, sampling_steps=20, compressed_steps=40).schedule]
      ['dense', 'sampling', 'compressed']

    References:
      Yu, Lin, Narra, Li, Li, Kim, Schwing, Annavaram, Avestimehr 2018, "GradiVeQ", NeurIPS.
    """
    config = settings_of(Gradiveq, config, overrides)
    check(config)
    by_qsgd = qsgd(bits=4, bucket=BUCKET, exchange="ring" if config.algorithm == "ring" else "gather")

    def goes_otherwise(path, leaf):
        return not slices.is_convolution(leaf, config.max_slice)

    rest = by_qsgd if config.others == "qsgd" else dense(algorithm=config.algorithm)
    method = per_layer([(goes_otherwise, rest)], default=convolutions(config)).method

    def check_and_warn(params):
        method.check(params)
        warn_of_wide(config, params)

    return compressor_of(method._replace(check=check_and_warn))


def warn_of_wide(config: Gradiveq, params: PyTree) -> None:
    """Warn if there are no kernels, or some too wide to be compressed: most values may be in them."""
    sizes = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    kernels = {path: leaf for path, leaf in sizes.items() if slices.is_convolution(leaf, 2**62)}
    wide = {path: leaf for path, leaf in kernels.items() if not slices.is_convolution(leaf, config.max_slice)}
    if not kernels:
        warnings.warn(
            "gradiveq compresses kernels of convolutions, [..., depth, filters], and the parameters have none: all is "
            f"sent as others={config.others!r} says. Use topk or powersgd",
            stacklevel=2,
        )
    if not wide:
        return
    total = sum(leaf.size for leaf in sizes.values())
    left = sum(leaf.size for leaf in kernels.values()) - sum(leaf.size for leaf in wide.values())
    blocks = [slices.block_of(leaf.shape) for leaf in wide.values()]
    held = 8.0 * kept_samples(config) * sum(blocks)  # samples and directions, f32, of one basis a layer
    warnings.warn(
        f"gradiveq compresses {left:,} of the model's {total:,} values: {len(wide)} convolutions, {next(iter(wide))} "
        f"first, have more than max_slice = {config.max_slice:,} values per tap. With max_slice={max(blocks)} it "
        f"compresses them as well, for {held / 1e9:.2g} GB more of state on every device",
        stacklevel=2,
    )


def check(config: Gradiveq) -> None:
    """Raise ValueError for a setting out of range."""
    if not 0 <= config.loss < 1:
        raise ValueError(f"loss (lambda) must be in [0, 1), got {config.loss}")
    if config.sampling_bits not in (0, *range(2, 9)):
        raise ValueError(f"sampling_bits must be 0 (full precision) or 2 to 8, got {config.sampling_bits}")
    if config.others not in ("dense", "qsgd"):
        raise ValueError(f"others must be 'dense' or 'qsgd', got {config.others!r}")
    comm.mean_by(config.algorithm)  # refuses an unknown one
    if not config.overlapped and config.algorithm != "ring":
        raise ValueError(f"overlapped must be True without algorithm='ring', got False with {config.algorithm!r}")
    for name, beside in (("feedback_steps", "error_feedback"), ("control_every", "control_limit")):
        if not getattr(config, beside):
            check_idle(config, f"without {beside}", name)
    if config.rank:
        check_idle(config, f"with rank={config.rank}", "loss")
    if config.slice_size:
        check_idle(config, f"with slice_size={config.slice_size}", "slice_taps")
    least = {"sampling_steps": 1 if config.samples else 2, "compressed_steps": 1, "slice_taps": 1, "max_slice": 1,
             "control_every": 1, "feedback_steps": 1}  # fmt: skip
    for name, bound in {**least, "rank": 0, "samples": 0, "slice_size": 0, "reuse": 0, "control_limit": 0}.items():
        if not getattr(config, name) >= bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(config, name)}")
    if config.feedback_steps > config.sampling_steps:
        raise ValueError(
            f"feedback_steps must be at most sampling_steps = {config.sampling_steps}, got {config.feedback_steps}"
        )
    if config.samples and config.warmup_steps + config.sampling_steps < 2:
        raise ValueError("the first bases need two samples: sampling_steps=1 needs warmup_steps of at least 1, got 0")
    fewest = max(2, config.sampling_steps)
    if config.samples and config.samples < fewest:
        raise ValueError(f"samples must be 0 (those of a cycle) or at least {fewest}, got {config.samples}")
    if config.rank > kept_samples(config) - 1:
        raise ValueError(
            f"rank must be at most the samples - 1 = {kept_samples(config) - 1} (the directions that they span), "
            f"got {config.rank}"
        )
    if config.error_feedback and config.centred:
        raise ValueError(
            "error_feedback must be False with centred True, got True: samples include the sent residual, "
            "and their mean would be added in every compressed step"
        )
    if config.slice_size > config.max_slice:
        raise ValueError(f"slice_size must be at most max_slice = {config.max_slice}, got {config.slice_size}")
    if config.slice_size and config.rank > config.slice_size:
        raise ValueError(f"rank must be at most slice_size = {config.slice_size}, got {config.rank}")


CITATION = """@inproceedings{yu2018gradiveq,
  title = {{GradiVeQ}: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed {CNN}
    Training},
  author = {Yu, Mingchao and Lin, Zhifeng and Narra, Krishna and Li, Songze and Li, Youjie and Kim, Nam Sung and
    Schwing, Alexander and Annavaram, Murali and Avestimehr, Salman},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2018},
}"""

METHOD = Method(
    "gradiveq", Gradiveq, gradiveq, "Yu et al. 2018", lossless=None,
    exempt={
        "conservation": "what components and rounding lose is not kept, as in the paper",
        "zeros": "mu, the mean of the samples, is there whatever comes",
    },
    citation=CITATION,
)  # fmt: skip
