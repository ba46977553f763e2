"""Quality of a code's reconstruction of the mean gradient, as columns of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FIGURES = {
    "reconstruction_cosine": "cosine with the true mean",
    "reconstruction_cosine_p5": "5th percentile",
    "ceiling_cosine": "ceiling",
    "signs_means_cosine": "signs, means",
    "without_code_cosine": "signs, means, innovations",
    "relative_error": "relative error",
}
"""Headings by the figure's name in a run's summary.json."""


def figures_of(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of a row: means over the runs."""
    return [mean_of(summaries, figure) for figure in FIGURES]


def mean_of(summaries: Sequence[Mapping[str, Any]], figure: str, digits: int = 3, scale: float = 1.0) -> str:
    """The mean of a figure over runs; n/a if one of them does not have it or it is not finite.

    Example:
      >>> mean_of([{"loss": 1.0}, {"loss": 2.0}], "loss"), mean_of([{"loss": None}], "loss")
      ('1.500', 'n/a')
    """
    values = [summary.get(figure) for summary in summaries]
    known = [value for value in values if value is not None and np.isfinite(value)]
    return f"{scale * float(np.mean(known)):.{digits}f}" if known and len(known) == len(values) else "n/a"
