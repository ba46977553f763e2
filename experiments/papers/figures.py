"""Figures 13 and 14 of the LGC paper, and which figures fit the runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jgc.lab.report.plots import by, draw_line, loss_axis, panels_of, points, save
from jgc.lab.report.runs import Group
from jgc.lab.shared.pictures import look
from jgc.training.errors import UserError, say


class DoesNotFit(UserError):
    """A figure needs other runs than these."""


def draw_fitting(groups: Sequence[Group], output: Path, asked: dict[int, Any]) -> tuple[dict[str, Any], list[str]]:
    """Draw the papers' figures that fit the runs.

    Args:
      groups: of runs.
      output: folder of the pictures.
      asked: title and function by number.

    Returns:
      Title and function by file of those drawn, and a line for each that does not fit, which is printed as well.
    """
    drawn, left_out = {}, []
    for number, (title, draw) in asked.items():
        name = f"figure{number}.png"
        try:
            draw(groups, output / name)
            drawn[name] = title, draw
        except DoesNotFit as error:
            left_out.append(f"Figure {number} is left out: {error}")
            say(left_out[-1])
    return drawn, left_out


def strategies(groups: Sequence[Group], path: Path) -> None:
    """The paper's Figure 13: training loss by sparsification strategy, a panel for each model.

    Raises:
      DoesNotFit: the runs do not differ in their strategy.
    """
    chosen = [group for group in groups if group.settings.get("compressor.strategy") is not None]
    if len({group.settings["compressor.strategy"] for group in chosen}) < 2:
        raise DoesNotFit("figure 13 compares runs that differ in compressor.strategy (fixed, exponential, warmup): "
                         "these do not")  # fmt: skip
    parts = by(chosen, lambda group: f"{group.settings['model.name']}, {group.settings['data.name']}")
    of = {id(group): str(group.settings["compressor.strategy"]) for group in chosen}
    alone = {
        id(g) for shown in parts.values() for g in shown if [of[id(other)] for other in shown].count(of[id(g)]) == 1
    }
    names = {id(g): of[id(g)] if id(g) in alone else f"{of[id(g)]}, {g.label}" for g in chosen}
    figure, panels, _ = panels_of(parts, "Training loss by sparsification strategy")
    shared = list(dict.fromkeys(names.values()))
    for axes, shown in panels:
        for group in shown:
            draw_line(axes, points(group, "loss", smoothed=True), *look(shared, names[id(group)]), names[id(group)])
        loss_axis(axes)
    save(figure, panels, path)


def autoencoder(groups: Sequence[Group], path: Path) -> None:
    """The paper's Figure 14: the autoencoder's losses over the steps in which it is trained.

    Raises:
      DoesNotFit: no run has them.
    """
    keys = {"autoencoder_reconstruction": "reconstruction loss, equations (6) and (11)",
            "autoencoder_similarity": "similarity loss, equation (5)"}  # fmt: skip
    chosen = [group for group in groups if any(len(points(group, key)[0]) for key in keys)]
    if not chosen:
        raise DoesNotFit(f"figure 14 needs runs whose metrics have {' or '.join(keys)}: none of these has")
    models = len({group.settings["model.name"] for group in chosen}) > 1
    names = [_autoencoder_name(group, models) for group in chosen]
    labels = [name if names.count(name) == 1 else f"{name}, {g.label}" for name, g in zip(names, chosen, strict=True)]
    figure, panels, _ = panels_of(dict.fromkeys(keys.values(), chosen), "Losses of the autoencoder in training")
    for (axes, shown), (key, text) in zip(panels, keys.items(), strict=True):
        for group, label in zip(shown, labels, strict=True):
            draw_line(axes, points(group, key), *look(labels, label), label)
        axes.set_ylabel(f"{text.partition(',')[0]}, mean over terms")
        if axes.lines and all(np.all(np.asarray(line.get_ydata()) > 0) for line in axes.lines):
            axes.set_yscale("log")
    save(figure, panels, path)


def _autoencoder_name(group: Group, models: bool) -> str:
    settings = group.settings
    weight = settings.get("compressor.lambda_similarity")
    words = [group.method, *([] if weight is None else [f"lambda_similarity {weight:g}"]), f"{settings['nodes']} nodes"]
    return ", ".join([*words, *([str(settings["model.name"])] if models else [])])
