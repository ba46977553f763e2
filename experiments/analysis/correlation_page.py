"""`experiments correlation`: one page, its pictures and its numbers, from a recording of mean gradients."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import correlation_conclusions as conclusions, correlation_plots as plots
from experiments.analysis.correlation import POINTS, Size, by_samples, enough_samples, shares, sweep, two_axes
from experiments.analysis.correlation_age import CURVES, RENEWED, Ageing, ageing
from experiments.analysis.mean_gradients import MeanGradients
from experiments.analysis.tables import without_places
from jgc.lab.shared.tables import table
from jgc.training.errors import UserError
from jgc.training.run.folder import write_json, write_whole

PAGE, NUMBERS, FIGURE4, FIGURE5, AGE = "correlation.md", "correlation.json", "figure4.png", "figure5.png", "age.png"


class Found(NamedTuple):
    """The measurements of a recording.

    Attributes:
      points: Figure 4, f64[at most 150, 3].
      two_axes: share of variance in two axes of the layer's triples, f64[T].
      shuffled: the same of the control.
      rows: Figure 5.
      age: observation 3.
      needed: d by the number of samples.
    """

    points: np.ndarray
    two_axes: np.ndarray
    shuffled: np.ndarray
    rows: list[Size]
    age: Ageing
    needed: dict[int, int]


def check_settings(steps: int, samples: int, loss: float) -> None:
    """Raise UserError for a number of samples or a loss out of range."""
    if not 0 <= loss < 1:
        raise UserError(f"--loss must be in [0, 1), got {loss:g}")
    if samples < 2:
        raise UserError(f"--samples must be at least 2, got {samples}")
    if steps < samples + 1:
        raise UserError(f"--samples {samples} needs at least {samples + 1} recorded steps, got {steps}")


def write(output: Path, recording: MeanGradients, samples: int, loss: float, command: str) -> Path:
    """Measure, draw and write everything into a folder.

    Args:
      output: the folder.
      recording: to measure.
      samples: L_t.
      loss: lambda.
      command: the command line, for the page.

    Returns:
      The page.
    """
    check_settings(len(recording.flat), samples, loss)
    output.mkdir(parents=True, exist_ok=True)
    measured = measure(recording, samples, loss)
    run = f"{recording.config['workload']}, {recording.config['nodes']} nodes, {recording.layer} {recording.shape}"
    three = f"Figure 4: linear correlation of three neighbours over {len(measured.points)} steps ({run})"
    plots.figure4(output / FIGURE4, measured.points, measured.two_axes, measured.shuffled, three)
    size = f"Figure 5: slice size against compression loss and ratio ({run})"
    plots.figure5(output / FIGURE5, measured.rows, recording.shape, samples, loss, size)
    plots.age(
        output / AGE, measured.age, loss, f"Observation 3: loss as the basis grows old, K = {measured.age.k:,} ({run})"
    )
    write_json(output / NUMBERS, numbers(recording, measured, samples, loss))
    write_whole(output / PAGE, markdown(recording, measured, samples, loss, command).encode())
    return output / PAGE


def measure(recording: MeanGradients, samples: int, loss: float) -> Found:
    """All measurements of the page; the age is that of a basis of F*D values."""
    flat, shape, steps = recording.flat, recording.shape, recording.flat[:POINTS]
    k = min(shape[-1] * shape[-2], flat.shape[1] // 2)
    points = steps[:, :3].astype(np.float64)
    rows = sweep(flat, shape, samples, loss)
    age, needed = ageing(flat, k, samples, loss), by_samples(flat, k, loss)
    return Found(points, two_axes(steps), two_axes(steps, shuffled=True), rows, age, needed)


def numbers(recording: MeanGradients, measured: Found, samples: int, loss: float) -> dict[str, Any]:
    """The page's figures as plain data; null for a missing one."""
    about = {name: value for name, value in recording._asdict().items() if name != "flat"}
    age = measured.age
    each = {name: left / np.maximum(age.energy[name.split()[0]], 1e-300) for name, left in age.lost.items()}
    return {
        "recording": about | {"steps": len(recording.flat)},
        "samples": samples,
        "loss": loss,
        "figure4": {
            "steps": len(measured.points),
            "shares": shares(measured.points).tolist(),
            "two_axes": _quantiles(measured.two_axes),
            "two_axes_shuffled": _quantiles(measured.shuffled),
        },
        "figure5": [
            {name: value._asdict() if hasattr(value, "_asdict") else value for name, value in row._asdict().items()}
            | {"ratio": row.k / row.d}
            for row in measured.rows
        ],
        "samples_needed": {"d": measured.needed, "enough": enough_samples(measured.needed)},
        "age": {
            "k": age.k,
            "d": age.d,
            "d_own": age.d_own,
            "age": age.age.tolist(),
            "losses": {name: [_plain(x) for x in losses.tolist()] for name, losses in each.items()},
            "by_age": [
                {"ages": label} | {name: _plain(x) for name, x in losses.items()}
                for label, losses in conclusions.by_age(age)
            ],
        },
    }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {f"{q} %": float(np.percentile(values, q)) for q in (10, 50, 90)}


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value


def markdown(recording: MeanGradients, measured: Found, samples: int, loss: float, command: str) -> str:
    """The page."""
    lines = [
        conclusions.on_neighbours(shares(measured.points), measured.two_axes, measured.shuffled),
        *conclusions.on_slices(measured.rows, samples),
        *conclusions.on_age(measured.age, loss),
    ]
    age = measured.age
    paragraphs = [
        "# Linear correlation of gradients",
        _commands(recording, command),
        _about(recording, samples, loss),
        "After Figures 4 and 5 and observations 1 to 3 of Yu et al., GradiVeQ, NeurIPS 2018. A loss is |decoded - g|² "
        "/ |g|², energies summed over the steps and slices in question: 0 is exact, 1 no better than zeros. *Means "
        "only* sends nothing (d = 0): each slice's mean over the samples stands in for it. *Random axes* are as many "
        "as the basis has, in random directions.",
        "## Conclusions",
        "\n".join(f"- {line}" for line in lines),
        "## Figure 4: three neighbours",
        f"![Three neighbouring gradient values over {len(measured.points)} steps]({FIGURE4})",
        "## Figure 5: slice size",
        f"![Slice size against compression loss and ratio]({FIGURE5})",
        "Losses with the first slice's basis; the last two columns are of other slices on later steps. The rest "
        "behind the last complete slice is not measured.",
        _size_table(measured.rows),
        "## Observation 3: age",
        f"![Loss against the age of the basis]({AGE})",
        f"K = {age.k:,}; d = {age.d} in the first slice, {age.d_own:.1f} on average in the others' bases. Renewed: "
        f"basis and means of the {samples} steps just before each block of {RENEWED}; a rise in those columns is not "
        "age.",
        _age_table(age),
        "## How many samples",
        _samples_needed(measured.needed, age.k, loss),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _samples_needed(d: dict[int, int], k: int, loss: float) -> str:
    """d by L_t, and the L_t from which on d is stable: the paper's way to choose L_t."""
    enough = enough_samples(d)
    sentence = (
        f"From {enough} samples on d changes by no more than 10 %: L_t = {enough}."
        if enough
        else "d grows with the samples to the last, so that by the paper's rule no number up to "
        "here is enough."
    )
    counted = table(("samples L_t", "d", "the most there can be"), ((c, n, min(c - 1, k)) for c, n in d.items()))
    return f"The first slice's d for lambda = {loss:g}, from the first L_t steps; K = {k:,}. {sentence}\n\n{counted}"


def _commands(recording: MeanGradients, command: str) -> str:
    """The command line without the data's folder, and the command of the recording if that was a different one."""
    config = recording.config
    lines = [without_places(command)]
    if "--from-recording" in command.replace("_", "-"):
        run = " ".join(f"--{name} {config[name]}" for name in ("workload", "nodes", "seed"))
        span = f"--start {recording.start} --steps {len(recording.flat)} --layer '^{recording.layer}$'"
        lines.append(f"python -m experiments correlation {run} {span}  # the recording")
    return "\n".join(f"    {line}" for line in lines)


def _about(recording: MeanGradients, samples: int, loss: float) -> str:
    config, shape, first = recording.config, recording.shape, recording.start
    last = first + len(recording.flat) - 1
    return (
        f"`{config['workload']}`, {config['nodes']} nodes, batch {config['batch_size']}, seed {config['seed']}; layer "
        f"`{recording.layer}`, (H, W, D, F) = {shape}, n = {math.prod(shape):,} values, F·D = "
        f"{shape[-1] * shape[-2]:,}. Mean over nodes of the gradients of steps {first} to {last} of an uncompressed "
        f"run; the first L_t = {samples} are the samples; lambda = {loss:g}. One seed, one layer. Recorded on "
        f"{recording.machine}; measured with numpy {np.__version__}."
    )


def _size_table(rows: Sequence[Size]) -> str:
    head = ("K", "multiple of", "slices", "d", "K/d", "first, samples", "first, later", "others, samples",
            "others, later", "random axes", "means only")  # fmt: skip

    def cells(row: Size) -> tuple[Any, ...]:
        first, others = (row.first_samples, row.first_later), (row.others_samples, row.others_later)
        losses = (*(x.basis for x in (*first, *others)), row.others_later.random, row.others_later.mean_only)
        size = f"{row.k:,}", row.aligned.replace("FD", "F·D"), f"{row.slices:,}", row.d, f"{row.k / row.d:.1f}"
        return *size, *(f"{x:.4f}" for x in losses)

    return table(head, map(cells, rows))


def _age_table(age: Ageing) -> str:
    rows = conclusions.by_age(age)
    body = ((label, *("" if math.isnan(losses[c]) else f"{losses[c]:.3f}" for c in CURVES)) for label, losses in rows)
    return table(("age, steps", *CURVES.values()), body)
