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
    (0, "1  on_node\none node"),
    (1, "2  aggregate\nthe skeleton"),
    (1, "3  plan_of_step\nthe groups"),
    (2, "4  compensated\nv = r + g"),
    (3, "5  encode_\nwith_sent\nthe method"),
    (4, "6  largest_\nin_ranges\npositions"),
    (5, "7  encode_\nvalues\n1 to 32 bits"),
    (5, "8  elias_fano.\nencode\n12 bits each"),
    (6, "9  all_gather_\ndict: words\nof all nodes"),
    (3, "10  mean\nof messages"),
    (2, "11  settled\nr = v - sent"),
    (0, "optimiser\ngets the mean"),
]
BLUE = "#1f4e8c"


def draw(path: Path) -> None:
    """Rooms are rows, time runs to the right."""
    figure, axes = plt.subplots(figsize=(13, 6.2))
    for row, (name, colour) in enumerate(ROOMS):
        axes.axhspan(-row - 0.45, -row + 0.45, color=colour, zorder=0)
        axes.text(-0.75, -row, f"jgc/{name}", ha="right", va="center", fontsize=11, family="monospace")
    for i, (row, text) in enumerate(STEPS):
        corner, style = (i - 0.44, -row - 0.3), {"fc": "white", "ec": BLUE, "zorder": 3}
        axes.add_patch(FancyBboxPatch(corner, 0.88, 0.6, boxstyle="round,pad=0.02", **style))
        axes.text(i, -row, text.replace("  ", " ", 1), ha="center", va="center", fontsize=7.2, zorder=4)
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
