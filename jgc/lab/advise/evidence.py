"""Accuracy on record, by method and kind of data: the difference from uncompressed runs of the same seeds.

A fast method that trains badly is no advice. So `advise` recommends only methods whose accuracy is on record here for
data of the same kind; a new record is a line, with the page that measures it. Of several the longest counts.
"""

from typing import NamedTuple

from jgc.training.data.score import ACCURACY, NATS, PERPLEXITY, PIXEL_ACCURACY, Score

KINDS = {"camvid": "scenes", "ptb": "text", "ptb_characters": "text"}  # by data set; all others are images
ALTERNATE = "alternate=true"  # a powersgd with an accuracy different from plain powersgd's
SMALL = {"images": "cifar10_resnet20", "scenes": "camvid_pspnet", "text": "ptb_gpt"}
"""A workload of each kind that a CPU can train."""


class Evidence(NamedTuple):
    """A comparison with uncompressed runs of the same seeds.

    Attributes:
      method: its name.
      kind: of the data: "images", "scenes" or "text".
      score: the figure that was compared.
      difference: of the score, method less uncompressed.
      seeds: pairs of runs.
      runs: workload, steps and settings.
      page: where it is measured.
      every: steps between two exchanges.
    """

    method: str
    kind: str
    score: Score
    difference: float
    seeds: int
    runs: str
    page: str
    every: int = 1

    @property
    def text(self) -> str:
        """The record in a clause."""
        points = f" {self.score.point}s" if self.score.point else ""
        seeds = "one seed" if self.seeds == 1 else f"{self.seeds} seeds"
        runs = f"{self.runs}, an exchange every {self.every} steps" if self.every > 1 else self.runs
        return f"{self.score.title} {self.difference:+.2f}{points} ({runs}, {seeds}; {self.page})"


_LONGEST, _RUNS = "cifar10_resnet20, 6,000 steps", "docs/results/long_runs/README.md"
_LONG, _SHORT = "cifar10_resnet20, 1,000 steps", "cifar10_resnet20, 500 steps"
_SEVEN = "docs/results/cifar10_compare/README.md"
_SCENES, _CAMVID = "camvid_pspnet, reduced", "docs/results/camvid/README.md"
_GPT, _ROWS = "ptb_gpt, AdamW, 3,000 steps", "docs/results/local_steps/README.md"
RECORD = (
    Evidence("topk", "images", ACCURACY, 0.35, 3, f"{_LONGEST}, 0.1 % in 1 bit, momentum at once", _RUNS),
    Evidence("learned_topk", "images", ACCURACY, 0.27, 3, f"{_LONGEST}, 0.1 % in 1 bit, momentum at once", _RUNS),
    Evidence("lgc_ps", "images", ACCURACY, 0.63, 3, f"{_LONGEST}, 0.5 %, momentum at once", _RUNS),
    Evidence("egc", "images", ACCURACY, -0.48, 3, _LONG, "docs/results/egc/README.md"),
    Evidence("gradient_dropping", "images", ACCURACY, 2.76, 3, f"{_LONG}, 1 %", "docs/results/egc/README.md"),
    Evidence("dgc", "images", ACCURACY, -2.43, 3, f"{_LONGEST}, 0.1 %, its paper's recipe", _RUNS),
    Evidence("scalecom", "images", ACCURACY, -1.78, 3, f"{_SHORT}, 5 %", _SEVEN),
    Evidence("lgc_ring", "images", ACCURACY, -3.27, 3, f"{_SHORT}, 2 %", _SEVEN),
    Evidence("qsgd", "images", ACCURACY, 0.02, 3, f"{_SHORT}, 4 bits, ring", "docs/results/gradiveq.md"),
    Evidence("gradiveq", "images", ACCURACY, -1.03, 3, _SHORT, "docs/results/gradiveq.md"),
    Evidence("klt", "images", ACCURACY, -2.86, 1, _SHORT, "docs/results/codecs.md"),
    Evidence("lgc_ps", "scenes", PIXEL_ACCURACY, -0.75, 1, f"{_SCENES}, the leader's positions", _CAMVID),
    Evidence("lgc_ring", "scenes", PIXEL_ACCURACY, -1.51, 1, _SCENES, _CAMVID),
    Evidence("dgc", "scenes", PIXEL_ACCURACY, -2.80, 1, _SCENES, _CAMVID),
    Evidence("gradient_dropping", "text", PERPLEXITY, 0.25, 1, "ptb_lstm, 1 %", "docs/results/egc/ptb/report.md"),
    Evidence("egc", "text", PERPLEXITY, 13.08, 1, "ptb_lstm", "docs/results/egc/ptb/report.md"),
    Evidence("demo", "text", NATS, 0.10, 3, "ptb_gpt, 3,000 steps, sign", _ROWS),
    Evidence("powersgd", "text", NATS, 0.13, 3, f"{_GPT}, rank 4", _ROWS),
    Evidence("powersgd:alternate=true", "text", NATS, 0.50, 1, f"{_GPT}, rank 4, one all-reduce", _ROWS),
    Evidence("topk", "text", NATS, 0.52, 3, f"{_GPT}, 1.6 % in 2 bits", _ROWS),
    Evidence("ef21", "text", NATS, 1.37, 3, f"{_GPT}, 1.6 %", _ROWS),
    Evidence("dense", "text", NATS, 0.04, 3, f"{_GPT}, DiLoCo", _ROWS, every=30),
    Evidence("qsgd", "text", NATS, 0.04, 3, f"{_GPT}, DiLoCo with 4 bits", _ROWS, every=30),
    Evidence("topk", "text", NATS, 0.49, 3, f"{_GPT}, SparseLoCo", _ROWS, every=30),
    Evidence("klt", "text", NATS, 0.85, 1, _GPT, _ROWS, every=30),
    Evidence("lgc_ps", "text", NATS, 1.20, 1, f"{_GPT}, the leader's positions", _ROWS, every=30),
)


def kind_of(dataset: str) -> str:
    """The kind of a data set.

    Example:
      >>> kind_of("ptb"), kind_of("cifar10")
      ('text', 'images')
    """
    return KINDS.get(dataset, "images")


def on_record(method: str, kind: str, local: bool = False) -> Evidence | None:
    """The record of a method on a kind of data, with local steps or with an exchange in every step.

    Settings after a colon, as of bench network, do not matter, except those with a separate record.

    Example:
      >>> on_record("topk:alpha=0.01", "images").difference, on_record("random_k", "images")
      (0.35, None)
      >>> [on_record(f"powersgd:rank=4{more}", "text").difference for more in ("", ":alternate=true")]
      [0.13, 0.5]
    """
    first, *settings = method.split(":")
    name = ":".join([first, *(setting for setting in settings if setting == ALTERNATE)])
    wanted = (name, kind, local)
    return next((record for record in RECORD if (record.method, record.kind, record.every > 1) == wanted), None)


def keeps_accuracy(method: str, kind: str, local: bool = False) -> bool:
    """Whether a method's accuracy is on record, within tolerance. Without a kind nothing is asked for.

    With local steps it is compared with uncompressed exchanges that are as rare: their price is one for local steps.

    Example:
      >>> keeps_accuracy("topk", "images"), keeps_accuracy("qsgd", "text"), keeps_accuracy("qsgd", "text", local=True)
      (True, False, True)
    """
    record, rare = on_record(method, kind, local), on_record("dense", kind, local)
    price = rare.difference if rare is not None else 0.0
    return not kind or (record is not None and record.score.is_as_good(record.difference - price))
