"""`python -m jgc` with turns of equal length instead of learned ones, to show the effect of learning.

    python docs/results/learned_positions/no_learning.py compare ...
"""

import sys

from jgc.lab.commands import main
from jgc.selection import due_blocks
from jgc.selection.due_blocks import Cut, Rates
from jgc.types import Array


def in_turn(rates: Rates, blocks: Array, sent: Array, cut: Cut, nodes: int) -> Rates:
    """The rates after a step that searched `blocks`: the longer ago a block was searched, the more it is due."""
    return rates._replace(due=rates.due.at[blocks].set(0) + 1)


if __name__ == "__main__":
    due_blocks.after = in_turn
    sys.exit(main())
