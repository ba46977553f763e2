"""Accuracy and bytes beside the uncompressed baseline and beside a control that sends nothing, over seeds.

    python -m jgc bench accuracy --workload cifar10_resnet20 --run-dir runs/accuracy
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jgc.compress import Dense, LgcPs, Silent, TopK
from jgc.lab.launch import Summary, mean_of, train_all
from jgc.training.data import final, score_of

VARIANTS: dict[str, Any] = {"baseline": Dense(), "lgc_ps": LgcPs(), "control": Silent(), "topk": TopK()}
"""What can be compared, with each method's defaults for the workload."""


def measure(
    run_dir: Path, methods: Sequence[str], workload: str, seeds: Sequence[int], data_dir: str | None
) -> dict[str, list[Summary]]:
    """The summaries of one run for every method and seed."""
    return train_all({name: VARIANTS[name] for name in methods}, run_dir, workload, seeds, data_dir)


def markdown(summaries: dict[str, list[Summary]], workload: str, seeds: Sequence[int], machine: str) -> str:
    """A row for every method, then the reconstruction of those that have one."""
    first = next(iter(summaries.values()))[0]
    lines = [
        f"`{workload}`, {len(seeds)} seeds ({', '.join(map(str, seeds))}), mean and standard deviation; {machine}.",
        "",
        f"| method | {score_of(first).title} | against the baseline | before compression | leader, bytes up a step "
        "| ratio | worker, bytes up a step | ratio | whole run, less than dense |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(name, runs, summaries.get("baseline")) for name, runs in summaries.items()),
    ]
    watched = {name: runs for name, runs in summaries.items() if runs[0].get("ceiling_cosine") is not None}
    if watched:
        lines += [
            "",
            "| method | cosine with the true mean | 5th percentile | ceiling | share of it | signs, means "
            "| signs, means, innovations | relative error |",
            "|---|---|---|---|---|---|---|---|",
            *(_reconstruction(name, runs) for name, runs in watched.items()),
        ]
    return "\n".join(lines) + "\n"


def _row(name: str, runs: list[Summary], baseline: list[Summary] | None) -> str:
    results, unit = np.array([final(run) for run in runs]), score_of(runs[0]).unit
    reference = None if baseline is None else np.mean([final(run) for run in baseline])
    against = "" if reference is None else f"{results.mean() - reference:+.2f}"
    last = runs[0]["phases"][-1]
    up = {role: sum(table.get("up", {}).values()) for role, table in last["wire"]["logical"].items()}
    worker, ratio = up.get("worker", 0.0), runs[0]["compression_ratio"]
    several = len(runs[0]["phases"]) > 1
    first = f"{np.mean([final(run, run['phases'][0]) for run in runs]):.2f} {unit}" if several else ""
    saved = np.mean([run["dense_total_bytes"] / run["total_bytes"] for run in runs])
    return (
        f"| {name} | {results.mean():.2f} ± {results.std(ddof=1) if len(runs) > 1 else 0:.2f} {unit} | {against} "
        f"| {first} | {up.get('leader', worker):,.0f} | {ratio['leader']:.0f}x "
        f"| {worker:,.0f} | {ratio['worker']:.0f}x | {saved:.1f}x |"
    )


def _reconstruction(name: str, runs: list[Summary]) -> str:
    share = np.mean([run["reconstruction_cosine"] / run["ceiling_cosine"] for run in runs])
    figures = {figure: mean_of(runs, figure) for figure in (
        "reconstruction_cosine", "reconstruction_cosine_p5", "ceiling_cosine", "signs_means_cosine",
        "without_code_cosine", "relative_error")}  # fmt: skip
    cells = list(figures.values())
    return f"| {name} | {' | '.join(cells[:3])} | {share:.3f} | {' | '.join(cells[3:])} |"
