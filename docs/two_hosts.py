"""docs/two_hosts.png: the first page's picture, from the first table of results/network/two_hosts.md.

    python docs/two_hosts.py
"""

import re
from pathlib import Path

from jgc.lab.shared.pictures import BLUE, RED, new_figure, save_figure

FOLDER = Path(__file__).parent
ROWS = {  # the row of the table, and its name in the picture
    "jgc topk": "jgc: top-k, 0.1 %",
    "jgc powersgd": "jgc: PowerSGD, rank 1",
    "jgc lgc_ps": "jgc: LGC",
    "PyTorch DDP, PowerSGD rank 1": "PyTorch: PowerSGD, rank 1",
    "PyTorch DDP, top-k 0.1 %, fused, int32": "PyTorch: top-k, 0.1 %",
    "PyTorch DDP, fp16 hook": "PyTorch: float16",
    "PyTorch DDP f32": "PyTorch: uncompressed",
    "jgc dense": "jgc: uncompressed",
}


def added() -> dict[str, tuple[float, float, float]]:
    """Seconds added to a step by method at 100 Mbit/s: the median and its 90 % interval."""
    section = re.split(r"^## ", (FOLDER / "results/network/two_hosts.md").read_text(), flags=re.M)[1]
    rows = re.findall(r"^\| (.+?) \| \d+ \| [^|]+ \| ([\d.]+) \[([\d.]+), ([\d.]+)\]", section, re.M)
    return {name: (float(median), float(low), float(high)) for name, median, low, high in rows}


def draw() -> None:
    """A dot at the median, a line over its interval."""
    values, figure = added(), new_figure(7, 3.6)
    axes = figure.subplots()
    for i, (row, label) in enumerate(ROWS.items()):
        median, low, high = values[row]
        colour = BLUE if label.startswith("jgc") else RED
        axes.plot([low, high], [i, i], color=colour, linewidth=2.5)
        axes.plot(median, i, "o", color=colour)
        text = f"{median:.3f}" if median < 1 else f"{median:.1f}"
        axes.annotate(text, (high, i), (7, -4), textcoords="offset points")
    axes.set(xscale="log", xlim=(0.015, 12), xlabel="seconds added to a step (log scale)")
    axes.set_title("A ResNet-18 on two hosts, 100 Mbit/s")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_yticks(range(len(ROWS)), ROWS.values())
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, FOLDER / "two_hosts.png")


if __name__ == "__main__":
    draw()
