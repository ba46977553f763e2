"""docs/reproduction.md: every row has a command that exists and a verdict; what was not run says what it takes."""

import re
import shlex
from pathlib import Path

import pytest

import experiments.commands
import jgc.lab.commands
from jgc.compress import METHODS
from jgc.training.settings.options import read

ROOT = Path(__file__).parents[2]
PROGRAMS = {"jgc": jgc.lab.commands.PROGRAM, "experiments": experiments.commands.PROGRAM}
PAGE = ROOT / "docs" / "reproduction.md"


def sections() -> dict[str, list[list[str]]]:
    """The cells of every row, by paper."""
    found: dict[str, list[list[str]]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        elif line.startswith("| ") and not line.startswith("| of the paper"):
            found[list(found)[-1]].append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_the_page_has_the_papers_figures_and_tables():
    of = {name: " ".join(row[0] for row in rows) for name, rows in sections().items() if rows}
    assert set(of) == {"LGC", "LGC-conf", "GradiVeQ", "EGC"}
    for number in ("I", "II", "III", "IV", "V", "VI"):
        assert f"Table {number}" in of["LGC"]
    shown = {"LGC": (3, 4, 10, 11, 12, 13, 14), "GradiVeQ": range(1, 8), "EGC": (1, 2, 3, 4, 6, 8, 10)}
    for paper, figures in shown.items():
        for number in figures:
            assert re.search(rf"Figures? (\d+, )?{number}[ab]?\b", of[paper]), (paper, number)
    for number in ("I", "II", "III", "IV"):
        assert f"Table {number}" in of["EGC"]


def test_the_summary_counts_the_verdicts():
    verdicts = [row[5] for rows in sections().values() for row in rows]
    confirmed, denied, missing = (sum(v.startswith(word) for v in verdicts)
                                  for word in ("confirmed", "not confirmed", "not run"))  # fmt: skip
    counts = f"Of {len(verdicts)} rows {confirmed} are confirmed, {denied} are not, and {missing} have not been run."
    assert counts in PAGE.read_text()


@pytest.mark.parametrize("row", [row for rows in sections().values() for row in rows], ids=lambda row: row[0])
def test_every_row_has_a_command_and_a_verdict(row):
    assert len(row) == 6 and all(row)
    commands, verdict = re.findall(r"`([^`]+)`", row[4]), row[5]
    assert commands and verdict.startswith(("confirmed", "not confirmed", "not run"))
    if "not run" in verdict or row[2] == "none":
        assert re.search(r"needs? \d+(\.\d+)? (GPU|core) hours?", verdict), verdict
    for command in commands:
        check(command)


def check(command: str) -> None:
    """A command is one that runs as it stands, but for its data."""
    words = shlex.split(command)
    if "docs/results/gpu.sh" in words:
        named, script, runs, *_ = words
        assert script == "docs/results/gpu.sh" and runs == "RUNS"
        assert set(named.removeprefix("ROWS=").split()) <= rows_of("gpu"), command
    elif words[0] == "docs/results/row.sh":
        _, page, row, runs, *_ = words
        assert row in rows_of(page) and runs == "RUNS", command
    elif words[1] == "-m" and words[2] in PROGRAMS:
        program = PROGRAMS[words[2]]
        depth = next(n for n in (2, 1) if " ".join(words[3 : 3 + n]) in program.commands)
        name, given = " ".join(words[3 : 3 + depth]), words[3 + depth :]
        if given[-1:] != ["..."]:
            assert read(program.commands[name].load(), given, command)
    elif words[1:3] == ["-m", "pytest"]:
        assert [file for file in words[3:] if file.startswith("tests/") and not (ROOT / file).exists()] == []
    else:
        assert words[0] == "python" and (ROOT / words[1]).exists(), command
        method = next((words[i + 1] for i, word in enumerate(words) if word == "--method"), "topk")
        assert method in METHODS, command


def rows_of(page: str) -> set[str]:
    """Names of a page's rows."""
    return {line.split()[0] for line in (ROOT / "docs" / "results" / page / "rows.txt").read_text().splitlines()}


@pytest.mark.parametrize("page", ["docs/reproduction.md", "docs/results/papers_numbers.md"])
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / link).exists(), link
