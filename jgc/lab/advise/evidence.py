"""What is on record about accuracy: by method and kind of data, the difference from the uncompressed runs beside it.

A fast method that trains badly is no advice. So `advise` recommends only methods whose accuracy is on record here for
data of the same kind; a new record is a line, with the page that measures it.
"""

from typing import NamedTuple

from jgc.training.data.score import ACCURACY, PERPLEXITY, PIXEL_ACCURACY, Score

KINDS = {"camvid": "scenes", "ptb": "text", "ptb_characters": "text"}  # by data set; all others are images
SMALL = {"images": "cifar10_resnet20", "scenes": "camvid_pspnet", "text": "ptb_gpt"}
"""A workload of each kind that a CPU can train."""


class Evidence(NamedTuple):
    """A comparison with uncompressed runs of the same seeds.

    Attributes:
      method: its name.
      kind: of the data: "images", "scenes" or "text".
      score: what was compared.
      difference: of the score, method less uncompressed.
      seeds: pairs of runs.
      runs: workload, steps and settings.
      page: where it is measured.
    """

    method: str
    kind: str
    score: Score
    difference: float
    seeds: int
    runs: str
    page: str

    @property
    def keeps(self) -> bool:
        """Whether the method ends within the score's tolerance."""
        return self.score.is_as_good(self.difference)

    @property
    def text(self) -> str:
        """The record in a clause."""
        points = f" {self.score.point}s" if self.score.point else ""
        seeds = "one seed" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"{self.score.title} {self.difference:+.2f}{points} ({self.runs}, {seeds}; {self.page})"


_LONG, _SHORT = "cifar10_resnet20, 1,000 steps", "cifar10_resnet20, 500 steps"
_SEVEN = "docs/results/cifar10_compare/README.md"
RECORD = (
    Evidence("topk", "images", ACCURACY, -0.49, 3, f"{_LONG}, 0.2 %, momentum at once", "docs/results/cifar10.md"),
    Evidence("lgc_ps", "images", ACCURACY, 0.45, 3, _LONG, "docs/results/cifar10.md"),
    Evidence("egc", "images", ACCURACY, -0.48, 3, _LONG, "docs/results/egc/README.md"),
    Evidence("gradient_dropping", "images", ACCURACY, 2.76, 3, f"{_LONG}, 1 %", "docs/results/egc/README.md"),
    Evidence("dgc", "images", ACCURACY, 1.06, 3, f"{_SHORT}, 0.5 %", _SEVEN),
    Evidence("scalecom", "images", ACCURACY, -1.78, 3, f"{_SHORT}, 5 %", _SEVEN),
    Evidence("lgc_ring", "images", ACCURACY, -3.27, 3, f"{_SHORT}, 2 %", _SEVEN),
    Evidence("qsgd", "images", ACCURACY, 0.02, 3, f"{_SHORT}, 4 bits, ring", "docs/results/gradiveq.md"),
    Evidence("gradiveq", "images", ACCURACY, -1.03, 3, _SHORT, "docs/results/gradiveq.md"),
    Evidence("klt", "images", ACCURACY, -2.86, 1, _SHORT, "docs/results/codecs.md"),
    Evidence("lgc_ps", "scenes", PIXEL_ACCURACY, -0.75, 1, "camvid_pspnet, reduced", "docs/results/camvid/README.md"),
    Evidence("lgc_ring", "scenes", PIXEL_ACCURACY, -1.51, 1, "camvid_pspnet, reduced", "docs/results/camvid/README.md"),
    Evidence("dgc", "scenes", PIXEL_ACCURACY, -2.80, 1, "camvid_pspnet, reduced", "docs/results/camvid/README.md"),
    Evidence("gradient_dropping", "text", PERPLEXITY, 0.25, 1, "ptb_lstm, 1 %", "docs/results/egc/ptb/report.md"),
    Evidence("egc", "text", PERPLEXITY, 13.08, 1, "ptb_lstm", "docs/results/egc/ptb/report.md"),
)


def kind_of(dataset: str) -> str:
    """The kind of a data set.

    Example:
      >>> kind_of("ptb"), kind_of("cifar10")
      ('text', 'images')
    """
    return KINDS.get(dataset, "images")


def on_record(method: str, kind: str) -> Evidence | None:
    """What is known of a method on a kind of data; settings after a colon, as of bench network, do not matter.

    Example:
      >>> on_record("topk:alpha=0.01", "images").keeps, on_record("random_k", "images")
      (True, None)
    """
    name = method.partition(":")[0]
    return next((found for found in RECORD if (found.method, found.kind) == (name, kind)), None)


def keeps_accuracy(method: str, kind: str) -> bool:
    """Whether a method's accuracy is on record, within tolerance. Without a kind nothing is asked for."""
    found = on_record(method, kind)
    return not kind or (found is not None and found.keeps)
