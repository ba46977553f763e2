"""masks.png: example images, their labels and the trained model's predictions, side by side."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jgc.training.data import VOID, Pictures
from jgc.training.run.folder import MASKS, write_figure

BLACK = (0, 0, 0)  # pixels without a label


def draw(run_dir: Path, title: str, pictures: Pictures, predicted: npt.NDArray[np.int32]) -> None:
    """Write masks.png; `predicted` int32[m, h, w], where classes that the data set does not have are black."""
    rows, (h, w) = len(pictures.images), pictures.labels.shape[1:]
    figure = Figure(figsize=(12, 4 * rows * h / w + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(rows, 3, squeeze=False)
    truth, guess = (coloured(labels, pictures.colours) for labels in (pictures.labels, predicted))
    for row, images in zip(panels, zip(pictures.images, truth, guess, strict=True), strict=True):
        for axes, image in zip(row, images, strict=True):
            axes.imshow(image, interpolation="nearest")
            axes.set_axis_off()
    for axes, name in zip(panels[0], ("image", "labels", "prediction"), strict=True):
        axes.set_title(name, fontsize=10)
    named = [*zip(pictures.classes, pictures.colours, strict=True), ("no label", BLACK)]
    patches = [Patch(color=tuple(np.array(colour) / 255), label=name) for name, colour in named]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, fontsize=9)
    write_figure(run_dir / MASKS, figure)


def coloured(labels: npt.NDArray[np.int32], colours: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.uint8]:
    """Labels int32[..., h, w] as colours uint8[..., h, w, 3]; pixels without a label are black."""
    known = (labels != VOID) & (labels < len(colours))
    return np.array([*colours, BLACK], np.uint8)[np.where(known, labels, len(colours))]
