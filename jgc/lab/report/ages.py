"""Ages of residuals, for runs with `track_age`. They expose a layer that is never sent, which helps any ratio."""

from collections.abc import Sequence

from jgc.lab.report.runs import Group, Run, spread
from jgc.lab.shared.tables import table

OLDEST, MEAN = "oldest/", "mean_age/"  # figures of diagnose steps, and the layer's name
EXPLANATION = (
    "Steps for which values of a layer have waited at the last comparison with the true mean: the oldest of all nodes, "
    "and the mean over values and nodes. A value as old as the compressed phase has never been sent."
)


def last_ages(run: Run, figure: str = OLDEST) -> dict[str, float]:
    """A figure of each layer at the last diagnose step that has it; empty if none has."""
    for line in reversed(run.lines):
        ages = {name.removeprefix(figure): value for name, value in line.items() if name.startswith(figure)}
        if ages:
            return ages
    return {}


def age_table(groups: Sequence[Group]) -> str:
    """The oldest and the mean age of each layer's residuals, a column for each method; "" if no run has ages."""
    columns = {}
    for group in groups:
        oldest, mean = ([last_ages(run, figure) for run in group.runs] for figure in (OLDEST, MEAN))
        if all(oldest):
            columns[group.label] = {layer: _cell(layer, oldest, mean) for layer in oldest[0]}
    layers = dict.fromkeys(layer for column in columns.values() for layer in column)
    if not layers:
        return ""
    rows = [[layer, *(column.get(layer, "") for column in columns.values())] for layer in layers]
    return table(["layer", *(f"{label}: oldest / mean" for label in columns)], rows)


def _cell(layer: str, oldest: Sequence[dict[str, float]], mean: Sequence[dict[str, float]]) -> str:
    """Means over seeds. Runs of older versions have only the oldest age."""
    first = f"{spread([ages[layer] for ages in oldest]).mean:.0f}"
    return f"{first} / {spread([ages[layer] for ages in mean]).mean:.0f}" if all(mean) else first
