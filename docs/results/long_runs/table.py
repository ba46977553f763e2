"""Fill the table of README.md from the runs beside it: `python docs/results/long_runs/table.py`.

The first two columns, a row's name and what it runs, are kept. A row without a finished run has no figures.
"""

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

from jgc.training.table import size

FOLDER = Path(__file__).parent
Runs = dict[int, dict[str, Any]]


def runs_of(row: str) -> Runs:
    """The summaries of a row's finished runs by seed, with the hours of their steps."""
    found: Runs = {}
    for path in sorted((FOLDER / "rows" / row).glob("*-seed*/summary.json")):
        summary = json.loads(path.read_text())
        with gzip.open(path.with_name("metrics.jsonl.gz"), "rt") as lines:
            summary["hours"] = sum(json.loads(line).get("seconds") or 0 for line in lines) / 3600
        found[summary["seed"]] = summary
    return found


def spread(values: list[float], sign: str = "") -> str:
    """Mean and sample standard deviation."""
    mean = f"{statistics.mean(values):{sign}.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def cells(row: str, baseline: Runs) -> list[str]:
    """Seeds, accuracy, difference from the baseline, bytes of a step, two ratios, bytes of a run, hours."""
    runs = runs_of(row)
    if not runs:
        return [""] * 8
    scores = {seed: 100 * run["test_accuracy"] for seed, run in runs.items()}
    pairs = [score - 100 * baseline[seed]["test_accuracy"] for seed, score in scores.items() if seed in baseline]
    against = f"{spread(pairs, '+')} ({len(pairs)} pair{'s' * (len(pairs) > 1)})" if pairs and runs != baseline else ""
    first = next(iter(runs.values()))
    wire, dense = first["phases"][-1]["wire"]["logical"], 4.0 * first["parameters"]
    up = {role: wire[role]["up"] for role in ("leader", "worker") if role in wire}

    def each(figure: Any) -> str:
        names = {"leader": " (leader)", "worker": " (others)" if "leader" in up else ""}
        return ", ".join(figure(kinds) + names[role] for role, kinds in up.items())

    def as_papers_count(kinds: dict[str, float]) -> str:
        positions = kinds.get("positions", 0.0)
        # a node at the leader's positions sends those of the last layer alone
        deflated = first["deflate_position_bytes"] if positions > 8 else None
        return f"{dense / (sum(kinds.values()) - positions + (deflated or positions)):.0f}"

    return [
        ", ".join(map(str, sorted(runs))), spread(list(scores.values())), against,
        each(lambda kinds: size(sum(kinds.values()))), each(lambda kinds: f"{dense / sum(kinds.values()):.0f}"),
        each(as_papers_count), size(statistics.mean(run["total_bytes"] for run in runs.values())),
        f"{sum(run['hours'] for run in runs.values()):.1f}",
    ]  # fmt: skip


def main() -> None:
    """Rewrite the rows of the table; a row of rows.txt that is not there yet comes last."""
    page, baseline = FOLDER / "README.md", runs_of("baseline")
    lines = page.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| row |")) + 2
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    what = {name.strip("` "): said.strip() for _, name, said, *_ in (line.split("|") for line in lines[first:last])}
    rows = [line.split()[0] for line in (FOLDER / "rows.txt").read_text().splitlines()][1:]
    lines[first:last] = [
        f"| {' | '.join([f'`{row}`', what.get(row, ''), *cells(row, baseline)])} |" for row in rows
    ]
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
