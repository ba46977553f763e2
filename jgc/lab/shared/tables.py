"""Markdown tables, and their cells for ratios."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; the first column to the left, the others to the right.

    Example:
      >>> print(table(["a", "b"], [["x|y", 1]]))
      | a | b |
      |:---|---:|
      | x\\|y | 1 |
    """
    lines = [head, [":---", *["---:"] * (len(head) - 1)], *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"|{'|'.join(line)}|" if i == 1 else f"| {' | '.join(line)} |" for i, line in enumerate(cells))


def filled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows without the columns that are empty in every row."""
    columns = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return [head[i] for i in columns], [[row[i] for i in columns] for row in rows]


def filled_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table without empty columns."""
    return table(*filled(head, rows))


def ratio(value: float | None) -> str:
    """A compression ratio for people."""
    return "sends nothing" if value is None else f"{value:,.4g}x" if value < 1000 else f"{value:,.0f}x"
