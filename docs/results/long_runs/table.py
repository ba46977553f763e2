"""Fill the tables of README.md from the runs in rows/: `python docs/results/long_runs/table.py`.

The first two columns, a row's name and what it runs, are kept. A row moves on to the table that its seeds belong to.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from jgc.lab.report.runs import Group, find, pool
from jgc.lab.report.tables import difference_text, fewest_bytes_table, figures, plus_minus
from jgc.training.output.summary import uplink
from jgc.training.output.table import size

FOLDER = Path(__file__).parent
LONGER = "baseline_20000"  # what runs of 20,000 steps are compared with
HEADS = ("| row, three seeds |", "| row, one seed |", "| row, not trained yet |")
SECONDS = 0.3  # of a step, on one idle core


def cells(group: Group, groups: Sequence[Group]) -> list[str]:
    """Seeds, accuracy, difference from the baseline, bytes of a step, two ratios, bytes of a run, hours."""
    f, first = figures(group, groups), group.runs[0].summary
    wire, dense = first["phases"][-1]["wire"]["logical"], 4.0 * first["parameters"]
    up = [role for role in ("leader", "worker") if role in wire]

    def sent(role: str) -> float:
        return uplink(first["parameters"], first["compression_ratio"][role])

    nodes = {"leader": 1, "worker": group.runs[0].config["nodes"] - ("leader" in up)}
    each_selects = "leader" not in up or group.runs[0].config["compressor"].get("positions") == "own"

    def each(figure: Callable[[str], str]) -> str:
        names = {"leader": " (leader)", "worker": " (others)" if "leader" in up else ""}
        return ", ".join(figure(role) + names[role] for role in up)

    def as_papers_count(role: str) -> str:
        # a node at the leader's positions sends only the last layer's, which are not deflated
        counted = (each_selects or role == "leader") and first["deflate_position_bytes"]
        longer = first["deflate_position_bytes"] - first["position_bytes"] if counted else 0.0
        return times(dense / (sent(role) + longer))

    return [
        ", ".join(map(str, group.seeds)), plus_minus(f.result), difference_text(group, f),
        each(lambda role: size(sent(role))), size(sum(nodes[role] * sent(role) for role in up)),
        each(lambda role: times(first["compression_ratio"][role])),
        each(as_papers_count), size(f.total), f"{sum(run.hours for run in group.runs):.1f}",
    ]  # fmt: skip


def times(ratio: float) -> str:
    """A ratio in whole numbers, except below 1: 0.94 is not 1."""
    return f"{ratio:.0f}" if ratio >= 1 else f"{ratio:.2f}"


def table_at(lines: Sequence[str], head: str) -> slice:
    """Where the table lies whose first line begins with `head`."""
    first = next(i for i, line in enumerate(lines) if line.startswith(head))
    return slice(first, next(i for i in range(first, len(lines)) if not lines[i].startswith("|")))


def hours_needed(words: Sequence[str]) -> str:
    """Hours of one core that a row's seed takes, from its number of steps."""
    last = max(i for i, word in enumerate(words) if word == "--steps")  # a row's comes after the one common to all rows
    return f"{SECONDS * int(words[last + 1]) / 3600:.1f}"


def main() -> None:
    """Rewrite the rows of all tables; a new row of rows.txt has no words yet."""
    page = FOLDER / "README.md"
    groups = pool(find(sorted((FOLDER / "rows").iterdir()))[0], by_folder=True, baseline="baseline")
    groups = [group._replace(baseline=LONGER) if group.label.endswith("_20000") else group for group in groups]
    named = {group.label: group for group in groups}
    lines = page.read_text().splitlines()
    what = {}
    for line in (line for head in HEADS for line in lines[table_at(lines, head)][2:]):
        _, name, text, *_ = line.split("|")
        what[name.strip("` ")] = text.strip()
    common, *rows = [line.split() for line in (FOLDER / "rows.txt").read_text().splitlines()]
    filled: tuple[list[list[str]], ...] = [], [], []
    for row, *words in rows:
        group = named.get(row)
        numbers = [hours_needed([*common, *words])] if group is None else cells(group, groups)
        table = 2 if group is None else 0 if len(group.seeds) > 2 else 1
        filled[table].append([f"`{row}`", what.get(row, ""), *numbers])
    for head, shown in zip(HEADS, filled, strict=True):
        at = table_at(lines, head)
        lines[at] = lines[at][:2] + [f"| {' | '.join(row)} |" for row in shown]
    shorter = [group for group in groups if not group.label.endswith("_20000")]
    lines[table_at(lines, "| method |")] = fewest_bytes_table(shorter, shorter).splitlines()
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
