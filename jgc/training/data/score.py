"""Scores: figures that evaluate a model, each with a name, a direction and a readable form.

A run writes the figure under the score's name, and that name into summary.json, so reports work for any data set.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Score(NamedTuple):
    """A figure that evaluates a model."""

    name: str  # in metrics.jsonl and summary.json
    title: str  # in tables and plots
    higher_is_better: bool  # its direction
    scale: float = 1.0  # factor of the displayed figure, such as 100 for percent
    unit: str = ""  # of the displayed figure
    point: str = ""  # unit of differences, in the singular
    tolerance: float = 0.0  # points below the baseline that still count as equally good
    digits: int = 2  # decimals of the displayed figure

    def text(self, value: float | None) -> str:
        """A displayed value; a dash for None.

        Example:
            >>> ACCURACY.text(0.98056)
            '98.06 %'
        """
        return "-" if value is None else f"{self.scale * value:.{self.digits}f} {self.unit}".rstrip()

    @property
    def heading(self) -> str:
        """The title with the unit, for an axis or a column."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def is_as_good(self, difference: float) -> bool:
        """Whether a difference in points from the baseline is no loss beyond the tolerance.

        Example:
            >>> ACCURACY.is_as_good(-1.5), PERPLEXITY.is_as_good(-1.5)
            (False, True)
        """
        # a difference of two rounded figures of just the tolerance may lie below it by a rounding error
        return (difference if self.higher_is_better else -difference) >= -self.tolerance - 1e-9


ACCURACY = Score("test_accuracy", "test accuracy", True, 100.0, "%", "point", 1.0)
PERPLEXITY = Score("validation_perplexity", "validation perplexity", False, tolerance=2.0)
NATS = Score("validation_nats", "validation loss", False, unit="nats", point="nat", tolerance=0.02, digits=3)
BITS = Score("validation_bits", "validation bits a character", False, unit="bits", point="bit", digits=3)
PIXEL_ACCURACY = Score("test_pixel_accuracy", "test pixel accuracy", True, 100.0, "%", "point", 1.0)
MEAN_IOU = Score("test_mean_iou", "test mean IoU", True, 100.0, "%", "point", 1.0)

SCORES: Mapping[str, Score] = MappingProxyType(
    {score.name: score for score in (ACCURACY, PERPLEXITY, NATS, BITS, PIXEL_ACCURACY, MEAN_IOU)}
)
KEY, FURTHER = "score", "further_scores"  # keys of summary.json


def score_of(summary: Mapping[str, Any]) -> Score:
    """The score of a run, from its summary; the accuracy for old summaries that do not name it."""
    return _named(summary.get(KEY, ACCURACY.name), KEY)


def _named(name: str, key: str) -> Score:
    if name not in SCORES:
        raise ValueError(f"`{key}` must be one of {', '.join(SCORES)}, got {name!r}")
    return SCORES[name]


def further_of(summary: Mapping[str, Any]) -> tuple[Score, ...]:
    """The further scores of a run, from its summary.

    Example:
        >>> [score.title for score in further_of({"further_scores": ["test_mean_iou"]})]
        ['test mean IoU']
    """
    return tuple(_named(name, FURTHER) for name in summary.get(FURTHER, ()))


def final(summary: Mapping[str, Any], phase: Mapping[str, Any] | None = None) -> float:
    """The displayed score of a run, or of a phase in its summary; NaN for one that is not finite."""
    score = score_of(summary)
    value = (summary if phase is None else phase)[score.name]
    return math.nan if value is None else score.scale * value
