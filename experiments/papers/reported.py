"""The papers' results as data: LGC (Abrahamyan et al. 2021, IEEE TNNLS), Section VI, Tables IV to VI; GradiVeQ (Yu
et al. 2018, NeurIPS), Section 4; EGC (Kuang et al. 2020), Section V, Tables I to IV."""

from typing import NamedTuple


class Reported(NamedTuple):
    """A row of Table IV or VI of the LGC paper, or II or IV of the EGC paper.

    Attributes:
      table: its number.
      workload: as we call it.
      method: as we call it: a name in `jgc.compress.METHODS`.
      name: as the paper calls it.
      accuracy: top-1 or pixel accuracy in percent; of "ptb_lstm" the perplexity.
      ratio: compression ratios as printed: leader and worker, or one for all nodes.
      megabytes: sent by a node in a step, in the same order; empty if the table has none.
      terabytes: sent by all nodes in the whole training; None if the table has none.
      paper: "LGC", which counts bytes, or "EGC", which counts values.
    """

    table: str
    workload: str
    method: str
    name: str
    accuracy: float
    ratio: tuple[float, ...]
    megabytes: tuple[float, ...] = ()
    terabytes: float | None = None
    paper: str = "LGC"


WORKLOADS = {
    "imagenet_resnet50": "ResNet50 on ImageNet, 8 nodes",
    "cifar10_resnet50": "ResNet50 on CIFAR-10, 2 nodes (LGC) or 4 (EGC)",
    "cifar10_resnet101": "ResNet101 on CIFAR-10, 4 nodes",
    "camvid_pspnet": "PSPNet on CamVid, 2 nodes (pixel accuracy)",
    "cifar10_alexnet": "AlexNet on CIFAR-10, 4 nodes",
    "cifar10_vgg19": "VGG-19 on CIFAR-10, 4 nodes",
    "tiny_imagenet_resnet18": "ResNet-18 on Tiny ImageNet, 4 nodes",
    "ptb_lstm": "two-layer LSTM of 200 units on Penn Treebank (perplexity)",
}
"""The papers' workloads, by our names."""

_IV, _VI, _50, _101, _PSP = "IV", "VI", "cifar10_resnet50", "cifar10_resnet101", "camvid_pspnet"


def _egc(table: str, workload: str, baseline: float, dropping: float, egc: float, ratio: float) -> tuple[Reported, ...]:
    """The EGC paper's three rows for a workload."""
    rows = (("dense", "Baseline", baseline, 1), ("gradient_dropping", "Gradient Dropping", dropping, 100),
            ("egc", "EGC", egc, ratio))  # fmt: skip
    return tuple(Reported(table, workload, method, name, value, (count,), paper="EGC")
                 for method, name, value, count in rows)  # fmt: skip


REPORTED = (
    Reported(_IV, "imagenet_resnet50", "dense", "Baseline", 75.98, (1,), terabytes=351),
    Reported(_IV, "imagenet_resnet50", "lgc_ps", "LGC (parameter server)", 75.88, (386, 2800), terabytes=0.4),
    Reported(_IV, "imagenet_resnet50", "lgc_ring", "LGC (ring-allreduce)", 75.91, (202,), terabytes=1.9),
    Reported(_IV, "imagenet_resnet50", "scalecom", "ScaleCom", 75.98, (96,), terabytes=3.6),
    Reported(_IV, "imagenet_resnet50", "dgc", "DGC", 76.01, (277,), terabytes=1.2),
    Reported(_IV, "imagenet_resnet50", "topk", "Sparse GD", 75.54, (277,), terabytes=1.2),
    Reported(_VI, _50, "dense", "Baseline", 91.88, (1,), (102.2,)),
    Reported(_VI, _50, "topk", "Sparse GD", 91.82, (1000,), (0.102,)),
    Reported(_VI, _50, "dgc", "DGC", 93.2, (1000,), (0.102,)),
    Reported(_VI, _50, "lgc_ring", "LGC (RAR)", 91.4, (3193,), (0.032,)),
    Reported(_VI, _50, "lgc_ps", "LGC (PS)", 93.27, (5709, 8616), (0.017, 0.012)),
    Reported(_VI, _101, "dense", "Baseline", 93.75, (1,), (170,)),
    Reported(_VI, _101, "topk", "Sparse GD", 92.75, (1000,), (0.17,)),
    Reported(_VI, _101, "dgc", "DGC", 93.87, (1000,), (0.17,)),
    Reported(_VI, _101, "lgc_ring", "LGC (RAR)", 93.07, (2297,), (0.074,)),
    Reported(_VI, _101, "lgc_ps", "LGC (PS)", 93.57, (8095, 17000), (0.021, 0.01)),
    Reported(_VI, _PSP, "dense", "Baseline", 46.3, (1,), (120,)),
    Reported(_VI, _PSP, "topk", "Sparse GD", 41, (413,), (0.29,)),
    Reported(_VI, _PSP, "dgc", "DGC", 46.5, (413,), (0.29,)),
    Reported(_VI, _PSP, "lgc_ring", "LGC (RAR)", 47.6, (459,), (0.261,)),
    Reported(_VI, _PSP, "lgc_ps", "LGC (PS)", 46.3, (693, 722), (0.17, 0.16)),
    *_egc("II", "cifar10_alexnet", 71.3, 71.22, 72.62, 1041),
    *_egc("II", "cifar10_vgg19", 89.22, 89.15, 89.13, 1153),
    *_egc("II", _50, 86.08, 87.32, 86.47, 1052),
    *_egc("II", "tiny_imagenet_resnet18", 35.75, 36.11, 36.81, 1030),
    *_egc("IV", "ptb_lstm", 69.48, 67.84, 69.40, 1098),
)

EGC_SWEEPS: dict[str, dict[str, dict[str, tuple[float, float]]]] = {
    "ratio": {"egc": {"256": (74.57, 269), "512": (74.46, 524), "1024": (74.62, 1041), "2048": (70.56, 2077)}},
    "nodes": {
        "baseline": {"2": (72.92, 1), "4": (71.30, 1), "8": (69.17, 1)},
        "gradient_dropping": {"2": (73.34, 100), "4": (71.22, 100), "8": (69.96, 100)},
        "egc": {"2": (74.40, 1038), "4": (72.62, 1041), "8": (70.03, 1044)},
    },
}
"""AlexNet on CIFAR-10 by setting, method and value: accuracy in percent and ratio in elements. Tables I and III."""

SECONDS: dict[str, dict[str, float]] = {
    "lgc_ps": {"dense": 1.0, "top-k": 1.6, "compressed": 0.6},
    "lgc_ring": {"dense": 1.0, "top-k": 0.9, "compressed": 0.4},
}
"""Table V: seconds of an iteration by method and phase; ResNet50 on ImageNet, 8 nodes on four RTX 2080 Ti."""

ENCODER_MS = {"lgc_ps": 0.01, "lgc_ring": 0.007}
DECODER_MS = {"lgc_ps": 1.0, "lgc_ring": 1.0}
SPEED_UP = {"lgc_ps": 1.7, "lgc_ring": 2.56}
"""Section VI-B."""

GRADIVEQ = (
    "The GradiVeQ paper, Section 4 and Figure 7 (ResNet-32 on CIFAR-100, 6 nodes, CPU): top-1 accuracy 0.676 for the "
    "uncompressed ring, 0.667 for 4-bit QSGD, 0.666 for GradiVeQ; of 500 steps about 650 s are computation in all "
    "three, and aggregation takes 850 s uncompressed and 162 s with GradiVeQ (5.25x), which makes the whole 46 % "
    "shorter. On GPUs 4x over the uncompressed ring and 1.40x over 4-bit QSGD. (850 of 1,500 s are 57 %, the text's "
    "\"60 %\".)"
)
"""Figure 7 of the GradiVeQ paper."""

NOTES = (
    "Tables IV and VI give one network at one share two ratios each: LGC's leader 386 and 5,709, its other nodes 2,800 "
    "and 8,616, its ring 202 and 3,193, DGC 277 and 1,000. Row by row: docs/results/papers_numbers.md.",
    "Table VI, CIFAR-10: the baseline's 102.2 MB is the size of the ResNet50 with 1,000 classes, not of one with 10; "
    "the ratios are taken against it.",
    "Table VI: the 0.102 MB of DGC and Sparse GD are only the values, 0.1 % of 102.2 MB, without their positions.",
    "Table VI: LGC's 0.017 MB is less than its code in 32-bit floats (a quarter of the values selected, 0.0256 "
    "MB), before any position.",
    "Table VI, CamVid: 120 MB are 30 million values. PSPNet with ResNet-50 has 46.6 million (186 MB), and 49.0 million "
    "with its auxiliary head.",
    "Sizes and ratios are as printed; they are rounded, and a ratio need not be the quotient of two sizes.",
)

EGC_NOTES = (
    "Tables I and III are of AlexNet in far longer runs than docs/results/egc: compare their shape only.",
    "EGC's ratios count values, not bytes: positions are not in them.",
    "Tables I and II give AlexNet with K = 1024 on 4 nodes 0.7462 and 0.7262, by the text the same run.",
    "Table III: the difference printed next to Gradient Dropping on 2 nodes (+0.38) is not that of its accuracies "
    "(73.34 - 72.92 = 0.42).",
    "Table IV is for 2 nodes by its title, for 4 by the text. 69.48 is far less than the 120.7 of Zaremba et al. "
    "(2014) with an LSTM of 200 units on validation data, so it probably is no validation perplexity.",
)


PAPERS = {
    "LGC": ("Abrahamyan et al. 2021, IEEE TNNLS, Section VI.", NOTES),
    "EGC": ("Kuang et al. 2020, Section V.", EGC_NOTES),
}
"""Where the rows of `REPORTED` come from, and notes on them."""


def figure(workload: str) -> str:
    """The score that the papers report for a workload."""
    return "perplexity, probably not of validation data" if workload == "ptb_lstm" else "accuracy, %"


def rows_of(workload: str, method: str) -> tuple[Reported, ...]:
    """The papers' rows for a workload and a method; there may be rows of two papers.

    Example:
      >>> [(row.paper, row.accuracy) for row in rows_of("cifar10_resnet50", "dense")]
      [('LGC', 91.88), ('EGC', 86.08)]
    """
    return tuple(row for row in REPORTED if (row.workload, row.method) == (workload, method))
