"""`python -m jgc` with turns of equal length in place of learned ones: what learning adds to learned positions.

    python docs/results/learned_positions/no_learning.py compare ...
"""

import sys

from jgc.compress.sparse import turns
from jgc.compress.sparse.turns import Cut, Turns
from jgc.lab.commands import main
from jgc.types import Array


def in_turn(known: Turns, blocks: Array, sent: Array, cut: Cut, nodes: int) -> Turns:
    """The turns after a step that searched `blocks`: the longer ago a block was searched, the more it is due."""
    return known._replace(due=known.due.at[blocks].set(0) + 1)


if __name__ == "__main__":
    turns.taken = in_turn
    sys.exit(main())
