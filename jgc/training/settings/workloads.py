"""Workloads: a data set and a model with the settings of a sensible run.

A workload fills in settings that neither the config file nor the command line sets. To add one, add it to `WORKLOADS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jgc.training.errors import UserError, did_you_mean
from jgc.training.models.base import Norm

Schedule = Literal["workload", "constant", "cosine", "step", "thirds", "halving", "poly", "validation"]

DEFAULT = "digits_convnet5"


@dataclass(frozen=True)
class Workload:
    """Settings of a run; weight_decay, momentum, optimizer, adam_beta2 and clip_norm as in `Config`."""

    dataset: str  # a name in `jgc.training.data.DATASETS`
    model: str  # a name in `jgc.training.models.MODELS`
    steps: int  # length of the run
    batch_size: int  # of all nodes together
    learning_rate: float  # its highest value
    schedule: Schedule  # how the learning rate falls, over `schedule_steps`
    schedule_steps: int  # length of the learning rate's schedule; does not follow --steps
    learning_rate_warmup: int  # steps of its linear warm-up
    weight_decay: float
    warmup_steps: int  # uncompressed steps before a method compresses
    autoencoder_steps: int  # steps after them in which an autoencoder trains
    evaluate_every: int  # steps between evaluations, in addition to those at the end of each phase
    diagnose_every: int  # steps between diagnose steps
    checkpoint_every: int  # steps between checkpoints
    nodes: int = 8  # data-parallel workers
    norm: Norm = "batch"  # of the model; "none" for a model without one
    momentum: float = 0.9
    optimizer: Literal["sgd", "adam"] = "sgd"
    adam_beta2: float = 0.999
    clip_norm: float = 0.0
    window: int = 0  # of a text; 0: that of the data set
    classes: int = 0  # outputs of the model; 0: the data set's
    # settings for every method that has them and leaves them at the default; those of `methods`, by name, come first
    compressor: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # patterns by method, instead of the method's


# A short run. A value is sent once in 1 / alpha steps: with alpha = 0.1 % once in 1,000 steps. A node's gradient of
# 16 images is mostly noise, and so are the positions of a single leader; if every node sends its positions, eight times
# as many values move in a step. Measured in docs/results/cifar10.md.
_SHORT = {"alpha": 0.005, "min_values": 16, "momentum_correction": True, "momentum_at_once": True}
# momentum_at_once suits values that wait. A value sent in every step gets the whole momentum series at once, and
# overshoots where the curvature is high. Norms and the head have few, large values, which one threshold over all layers
# or one node's positions select again and again: they go uncompressed (docs/results/cifar10_compare). Methods in which
# one node's positions serve for all move an eighth as many values in a step, so their alpha is higher. klt's residual
# after its coefficients is small, so its alpha is lower.
# GradiVeQ: every basis loses much in so short a run, and the loss must not wait for long. Hence cycles of 5 steps, a
# basis for each slice from the newest 40 uncompressed steps, and error feedback (docs/results/gradiveq.md).
_DENSE_NORMS = r"^stem/|/norm/"  # without the head: lgc_ring sends it as top-k, as in the paper
_SHORT_BY_METHOD: Mapping[str, Mapping[str, Any]] = {
    "scalecom": {"alpha": 0.05},
    "lgc_ring": {"alpha": 0.02},
    "klt": {"alpha": 0.001, "min_values": 4},
    "egc": {"min_values": 32},  # K = 1024 sends 0.1 % of a layer, too little to train it in 1,000 steps
    "gradiveq": {"sampling_steps": 2, "compressed_steps": 3, "samples": 40, "rank": 39, "reuse": 1, "centred": False,
                 "error_feedback": True},
}  # fmt: skip
_SHORT_LAYERS = {
    "gradient_dropping": {"dense": rf"{_DENSE_NORMS}|^head/"},
    "scalecom": {"dense": rf"{_DENSE_NORMS}|^head/"},
    "lgc_ring": {"dense": _DENSE_NORMS},
    "egc": {"dense": "^stem/conv/"},
}


def _long(dataset: str, model: str, steps: int, batch_size: int, **changes: Any) -> Workload:
    """Thousands of steps; unless `changes` say otherwise, He et al. 2016: 0.1, divided by 10 at 1/2 and 3/4."""
    usual = Workload(
        dataset, model, steps, batch_size, schedule_steps=steps, learning_rate=0.1, schedule="step",
        learning_rate_warmup=400, weight_decay=1e-4, warmup_steps=200, autoencoder_steps=300, evaluate_every=1000,
        diagnose_every=100, checkpoint_every=1000,
    )  # fmt: skip
    return replace(usual, **changes)


def _cifar(dataset: str, model: str, steps: int = 64_000, batch_size: int = 128, **changes: Any) -> Workload:
    """He et al. 2016, Section 4.2: batch 128, 64,000 steps."""
    return _long(dataset, model, steps, batch_size, **changes)


def _gpt(dataset: str, model: str, **changes: Any) -> Workload:
    """A GPT of a few thousand steps: AdamW with a warm-up and a cosine, 4 nodes of 8 windows of 128 tokens."""
    usual = _long(
        dataset, model, 3000, 32, nodes=4, optimizer="adam", adam_beta2=0.95, learning_rate=2e-3, schedule="cosine",
        learning_rate_warmup=100, weight_decay=0.1, clip_norm=1.0, norm="none", window=128, warmup_steps=0,
        autoencoder_steps=100, evaluate_every=500, checkpoint_every=500,
    )  # fmt: skip
    return replace(usual, **changes)


WORKLOADS: Mapping[str, Workload] = {
    # Smoke test. Short phases and a low learning rate: most is learned after compression starts.
    "digits_convnet5": _long(
        "digits", "convnet5", 300, 128, learning_rate=0.01, schedule="cosine", learning_rate_warmup=20,
        warmup_steps=20, autoencoder_steps=40, evaluate_every=20, diagnose_every=5, checkpoint_every=100,
    ),
    "cifar10_resnet20": _cifar(
        "cifar10", "resnet20", steps=1000, schedule="cosine", learning_rate=0.2, learning_rate_warmup=100,
        weight_decay=5e-4, warmup_steps=100, autoencoder_steps=150, evaluate_every=250, diagnose_every=25,
        checkpoint_every=250, compressor=_SHORT, methods=_SHORT_BY_METHOD, layers=_SHORT_LAYERS,
    ),
    "cifar10_resnet18": _cifar("cifar10", "resnet18"),
    "cifar10_resnet50": _cifar("cifar10", "resnet50", nodes=2),  # LGC paper, Section VI-C
    "cifar10_resnet101": _cifar("cifar10", "resnet101", nodes=4),
    "cifar10_convnet5": _cifar("cifar10", "convnet5", steps=14_000),
    # EGC paper, Section V: 4 nodes; it gives no batch, learning rate or length. These are the published recipes of the
    # two models for CIFAR: He et al.'s, except for the decay and AlexNet's learning rate
    "cifar10_alexnet": _cifar("cifar10", "alexnet", nodes=4, norm="none", learning_rate=0.01, weight_decay=5e-4),
    "cifar10_vgg19": _cifar("cifar10", "vgg19", nodes=4, weight_decay=5e-4),
    # EGC paper too, with He et al.'s batch and decay for ImageNet, 90 epochs of 391 steps. The stem is ImageNet's,
    # which leaves 2x2 pixels of a 64x64 image: PyTorch's model has it, and the paper's low accuracy of 36 % suggests
    # it. --model.stem cifar keeps more pixels and computes 18 times as much
    "tiny_imagenet_resnet18": _long("tiny_imagenet", "resnet18", 35_200, 256, nodes=4),
    # LGC paper, Section VI-E: SGD at 0.001, 14,000 steps of 128 images, which 22 nodes do not divide: here 6 images a
    # node, 132. The paper names no decay; this is He et al.'s
    "tinyimagenet_convnet5": _long(
        "tiny_imagenet", "convnet5", 14_000, 132, nodes=22, learning_rate=0.001, schedule="constant",
        learning_rate_warmup=0,
    ),
    # Section VI-G names the model and the nodes. Batch, length and learning rate are as for ResNet-18 above, the decay
    # is the VGG paper's, as for VGG-19
    "tinyimagenet_vgg16": _long("tiny_imagenet", "vgg16", 35_200, 256, nodes=32, weight_decay=5e-4),
    # Section VI-B: batch 256, 0.1 divided by 10 every 30 epochs. The 90 epochs of 5,004.6 steps are ours, as usual
    "imagenet_resnet50": _long(
        "imagenet", "resnet50", 450_411, 256, schedule="thirds", learning_rate_warmup=0, evaluate_every=5004,
        diagnose_every=500,
    ),
    # Section VI-E: SGD at 0.001, 25,000 steps of 128 images. "Each convolution is followed by a ReLU", so without a
    # norm. The paper's VGG11 has eleven convolutions, the VGG paper's eight (`models/vgg.py`). Decay: the VGG paper's
    "food101_vgg11": _long(
        "food101", "vgg14", 25_000, 128, nodes=16, norm="none", learning_rate=0.001, schedule="constant",
        learning_rate_warmup=0, weight_decay=5e-4, evaluate_every=2500,
    ),
    # GradiVeQ paper, Section 4: 6 nodes, converged after 45,000 steps; the batch is ours, 21 images a node
    "cifar100_resnet32": _cifar(
        "cifar100", "resnet32", 45_000, 126, nodes=6, methods={"gradiveq": {"warmup_steps": 2500}},
    ),
    "cifar100_resnet50": _cifar("cifar100", "resnet50", nodes=24, batch_size=120),  # Section VI-G, batch ours
    # Section VI-D: 2 nodes, batch 12, crops of 473; Section VI-A: phases of 200 steps each, and 83 % of all steps after
    # them, which makes 2,400. The rest is Zhao et al.'s, Section 5.1. Without an accelerator: --model.name
    # pspnet18_half --data.shrink 2 --data.crop 129
    "camvid_pspnet": _long(
        "camvid", "pspnet50", 2400, 12, nodes=2, learning_rate=0.01, schedule="poly", learning_rate_warmup=0,
        autoencoder_steps=200, evaluate_every=400, diagnose_every=50, checkpoint_every=200,
    ),
    # Zaremba et al. 2014, the small model: 13 epochs of 2,323 steps, the learning rate halved in each from the fifth
    # on. Theirs is 1, and the norm at which they clip 5, of a loss summed over the 20 words of a window; here it is
    # their mean, which makes 20 and 0.25. Here each node's gradient is clipped, to clip_norm / sqrt(4).
    "ptb_lstm": _long(
        "ptb", "lstm", 30_199, 20, learning_rate=20.0, schedule="halving", learning_rate_warmup=0, weight_decay=0.0,
        warmup_steps=500, evaluate_every=2323, diagnose_every=200, nodes=4, norm="none", momentum=0.0, clip_norm=0.5,
    ),
    # Characters of Penn Treebank under AdamW, to compare local steps with exchanges in every step. 0.8M parameters.
    "ptb_gpt": _gpt("ptb_characters", "gpt800k"),
    "ptb_gpt_3m": _gpt("ptb_characters", "gpt3m", learning_rate=1e-3),
    # GPT-2's size and number of tokens, for `plan` and for times on an accelerator: most of its tokens do not occur
    "gpt_124m": _gpt(
        "ptb_characters", "gpt124m", learning_rate=6e-4, learning_rate_warmup=300, window=1024, classes=50_257,
    ),
}  # fmt: skip


def workload_named(name: str) -> Workload:
    """The workload called `name`."""
    if name not in WORKLOADS:
        known = list(WORKLOADS)
        raise UserError(f"unknown workload {name!r}{did_you_mean(name, known)} (one of {', '.join(known)})")
    return WORKLOADS[name]
