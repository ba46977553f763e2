"""`experiments worth`: one page, its pictures and its table, from the recordings of one run or several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis import worth_plots as plots
from experiments.analysis.information_page import check_runs, names_of
from experiments.analysis.information_rows import ALL
from experiments.analysis.recorded import Recorded, find
from experiments.analysis.tables import without_places, write_csv
from experiments.analysis.worth import ALPHAS, FEWEST, Setting, Worth, measure_worth
from experiments.analysis.worth_plots import select
from jgc.lab.shared.tables import table
from jgc.training.errors import UserError
from jgc.training.run.folder import write_whole

PAGE, TABLE, PICTURE = "worth.md", "worth.csv.gz", "worth.png"


def write(output: Path, folders: Sequence[Path], layers: str, alpha: float, draws: int, command: str) -> Path:
    """Measure, draw and write everything into a folder.

    Args:
      output: the folder.
      folders: of runs with recordings.
      layers: pattern of the layers to measure; all that were recorded if empty.
      alpha: share of values selected, where the share is not what varies.
      draws: random subsets of nodes for each setting.
      command: the command line, for the page.

    Returns:
      The page.

    Raises:
      UserError: a setting is wrong, or a run's recording is missing or too small.
    """
    if not 0 < alpha <= 1 or draws < 1:
        raise UserError(f"--alpha must be in (0, 1] and --draws at least 1, got {alpha:g} and {draws}")
    runs = check_runs("worth", [find(folder, layers) for folder in folders])
    output.mkdir(parents=True, exist_ok=True)
    alphas = sorted({*ALPHAS, alpha})
    measured = dict(zip(names_of(runs), ((run, measure_worth(run, alphas, draws)) for run in runs), strict=True))
    titles = {name: f"{run.title} ({name})" for name, (run, _) in measured.items()}
    batches = {titles[name]: run.config["batch_size"] // run.nodes for name, (run, _) in measured.items()}
    title = "How far one node's largest values predict the mean gradient there (all layers together)"
    plots.overview(output / PICTURE, {titles[n]: rows for n, (_, rows) in measured.items()}, batches, alpha, title)
    for name, (run, rows) in measured.items():
        base = _base(rows, alpha)
        if layers_of(run, base):
            title = f"By layer, {base[0].setting.nodes} nodes, alpha = {alpha:.2%} ({run.title})"
            plots.by_layer(output / f"worth-{name}.png", base, layers_of(run, base), title)
    write_csv(output / TABLE, [_line(name, row, run) for name, (run, rows) in measured.items() for row in rows])
    write_whole(output / PAGE, markdown(measured, alpha, draws, command).encode())
    return output / PAGE


def _base(rows: Sequence[Worth], alpha: float) -> list[Worth]:
    """The rows of all recorded nodes, unmerged, at that alpha."""
    return select(rows, alpha=alpha, setting=Setting(max(row.setting.nodes for row in rows), 1))


def layers_of(run: Recorded, rows: Sequence[Worth]) -> list[str]:
    """Layers with separate rows, in the model's order."""
    return [layer for layer in run.layers if select(rows, layer=layer)]


def _line(name: str, row: Worth, run: Recorded) -> dict[str, Any]:
    out = row._asdict()
    setting = out.pop("setting")
    batch = run.config["batch_size"] // run.nodes * setting.merged
    return {"run": name, "step": out.pop("step"), "layer": out.pop("layer"), "nodes": setting.nodes,
            "batch_per_node": batch, **out}  # fmt: skip


def markdown(measured: dict[str, tuple[Recorded, list[Worth]]], alpha: float, draws: int, command: str) -> str:
    """The page."""
    paragraphs = [
        "# What the correlation between nodes is worth",
        f"    {without_places(command)}",
        "A leader picks the share alpha of each layer's values that are largest in its gradient, and all nodes "
        "send theirs at its positions. The cosine with the mean over nodes there says how much of it the leader's "
        "values can tell, whatever the code: cosine² is the share of its energy. *Leader*: the leader's exact "
        "values. *Signs*: its signs and every node's mean of each layer. *Innovations*: the leader exact, the others "
        "by their means and a tenth of their values exact. *Chance*: the leader's exact values if the other nodes' "
        "had random signs; what lies above it is correlation. Gradients as recorded, or pseudo-gradients of local "
        "steps; residuals would add to them. More nodes or larger batches than recorded cannot be shown; fewer nodes "
        f"are subsets, {draws} at random for each case, and larger batches are means of several nodes' gradients.",
        f"![Cosines against alpha, nodes, batch and step]({PICTURE})",
    ]
    for name, (run, rows) in measured.items():
        base = _base(rows, alpha)
        paragraphs += [
            f"## {run.title}",
            "\n".join(f"- {line}" for line in conclusions(rows, alpha)),
            _table(select(rows, layer=ALL)),
        ]
        if layers_of(run, base):
            paragraphs += [f"By layer, for layers with at least {FEWEST} selected values:",
                           f"![Cosines by layer](worth-{name}.png)"]  # fmt: skip
    return "\n\n".join([*paragraphs, f"In full: [{TABLE}]({TABLE})."]) + "\n"


def _table(rows: Sequence[Worth]) -> str:
    """Means over the steps by alpha and setting."""
    head = ("alpha", "nodes", "recorded nodes merged into each", "values selected", "innovations", "leader", "signs",
            "chance", "energy covered", "best")  # fmt: skip
    body = []
    for alpha, setting in sorted({(row.alpha, row.setting) for row in rows}):
        selected = select(rows, alpha=alpha, setting=setting)
        cosines = (f"{_mean(selected, name):.3f}" for name in ("innovations", "leader", "signs", "chance"))
        shares = (f"{_mean(selected, name):.1%}" for name in ("covered", "best"))
        body.append((f"{alpha:.2%}", setting.nodes, setting.merged, f"{selected[0].picked:,}", *cosines, *shares))
    return table(head, body)


def _mean(rows: Sequence[Worth], name: str) -> float:
    return float(np.mean([getattr(row, name) for row in rows]))


def conclusions(rows: Sequence[Worth], alpha: float) -> list[str]:
    """Conclusions in sentences that follow from the numbers."""
    everything = select(rows, layer=ALL)
    base = _base(everything, alpha)
    leader, signs, best, chance = (_mean(base, name) for name in ("leader", "signs", "innovations", "chance"))
    nodes, above = base[0].setting.nodes, leader - chance
    say = "nothing" if above < 0.05 else "a little" if above < 0.15 else "much"
    values = "more" if leader > signs + 0.02 else "less" if leader < signs - 0.02 else "no more"
    lines = [
        f"**With {nodes} nodes and alpha = {alpha:.2%} the correlation adds {say}** to the leader's share in "
        f"the mean: cosine {leader:.2f}, {chance:.2f} by chance. The leader's exact values tell {values} than "
        f"its signs and the layers' means ({signs:.2f}), which need no code of values. With a tenth of every node's "
        f"values exact it is {best:.2f}, as with LGC's rule and an exact code of the leader's values.",
    ]
    few = select(everything, alpha=alpha, setting=Setting(2, 1))
    if nodes > 2:
        lines.append(
            f"**Nodes.** From 2 to {nodes} nodes the leader's values go from {_mean(few, 'leader'):.2f} to "
            f"{leader:.2f}, chance from {_mean(few, 'chance'):.2f} to {chance:.2f}."
        )
    merged = max(row.setting.merged for row in everything if row.setting.nodes == 2)
    if merged > 1:
        large = select(everything, alpha=alpha, setting=Setting(2, merged))
        lines.append(
            f"**Batch.** With 2 nodes of {merged} times the batch: {_mean(large, 'leader'):.2f} instead of "
            f"{_mean(few, 'leader'):.2f} (chance {_mean(large, 'chance'):.2f} and {_mean(few, 'chance'):.2f})."
        )
    steps = sorted({row.step for row in base})
    if len(steps) > 2:
        third = max(1, len(steps) // 3)
        early, late = ([r for r in base if r.step in part] for part in (steps[:third], steps[-third:]))
        a, b = _mean(early, "leader"), _mean(late, "leader")
        say = "falls" if b < a - 0.05 else "rises" if b > a + 0.05 else "stays about the same"
        lines.append(
            f"**Training.** The prediction by the leader's values {say}: {a:.2f} in steps "
            f"{steps[0]} to {steps[third - 1]}, {b:.2f} in steps {steps[-third]} to {steps[-1]}."
        )
    share, most = _mean(base, "covered"), _mean(base, "best")
    return [
        *lines,
        f"**Positions.** The leader's hold {share:.1%} of the energy of the mean gradient, the best positions "
        f"of that number {most:.1%}; the rest stays in the residuals.",
    ]
