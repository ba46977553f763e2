"""docs/inside.png: the way of a gradient through the rooms of jgc.

    python docs/inside.py
"""

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

ROOMS = [("loops, nodes", "#e8eef7"), ("method", "#fdeedd"), ("layout", "#eaf5e6"), ("compress", "#f6e6ef"),
         ("selection", "#fff7d6"), ("wire", "#e6f4f4"), ("comm", "#ececec")]  # fmt: skip
STEPS = [
    (0, "1  gradient\nof each\nnode"),
    (0, "2  on_node\none node"),
    (1, "3  aggregate\nskeleton"),
    (1, "4  plan_of_\nstep"),
    (6, "5  any_true\nthe flag"),
    (2, "6  compen-\nsated\nv = r + g"),
    (3, "7  encode_\nwith_sent"),
    (4, "8  largest_\nin_ranges"),
    (5, "9  encode_\nvalues"),
    (5, "10  elias_\nfano.encode"),
    (6, "11  all_\ngather_dict"),
    (3, "12  mean"),
    (2, "13  settled\nr = v - sent"),
    (0, "14  updated\noptimiser"),
]
BLUE = "#1f4e8c"


def draw(path: Path) -> None:
    """Rooms are rows, time runs to the right."""
    figure, axes = plt.subplots(figsize=(13, 5.6))
    for row, (name, colour) in enumerate(ROOMS):
        axes.axhspan(-row - 0.45, -row + 0.45, color=colour, zorder=0)
        axes.text(-0.75, -row, f"jgc/{name}", ha="right", va="center", fontsize=11, family="monospace")
    for i, (row, text) in enumerate(STEPS):
        corner, style = (i - 0.44, -row - 0.3), {"fc": "white", "ec": BLUE, "zorder": 3}
        axes.add_patch(FancyBboxPatch(corner, 0.88, 0.6, boxstyle="round,pad=0.02", **style))
        axes.text(i, -row, text.replace("  ", " ", 1), ha="center", va="center", fontsize=8.4, zorder=4)
    for i, ((a, _), (b, _)) in enumerate(pairwise(STEPS)):
        axes.annotate("", (i + 1 - 0.46, -b), (i + 0.46, -a), zorder=2,
                      arrowprops={"arrowstyle": "->", "color": BLUE, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
    axes.set_xlim(-0.7, len(STEPS) - 0.4)
    axes.set_ylim(-len(ROOMS) + 0.4, 0.6)
    axes.axis("off")
    figure.subplots_adjust(left=0.12, right=0.995, top=0.99, bottom=0.01)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
