"""Colours and figures of every picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jgc.training.run.folder import write_figure

# Okabe and Ito 2008, but their yellow, which is hard to see on white
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
MARKERS = "osD^vPX<>"  # two more than colours, so that both together tell 63 methods apart
BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY = COLOURS


def look(labels: Sequence[str], label: str) -> tuple[str, Any, str]:
    """Colour, line style and marker: no two of the first 28 labels share both colour and style.

    Example:
      >>> names = [str(i) for i in range(28)]
      >>> len({str(look(names, name)[:2]) for name in names})
      28
    """
    at, again = labels.index(label), labels.index(label) // len(COLOURS)
    return COLOURS[at % len(COLOURS)], STYLES[(at + 2 * again) % len(STYLES)], MARKERS[at % len(MARKERS)]


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=12)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all."""
    write_figure(path, figure, dpi=120)
