"""Draw added.png from h100.csv and torch.csv: `python docs/results/gpu/picture.py`."""

import csv
from pathlib import Path

from jgc.lab.shared.pictures import BLUE, RED, new_figure, save_figure

FOLDER = Path(__file__).parent
SHOWN = {
    "dense": "uncompressed",
    "qsgd": "QSGD, 4 bits",
    "topk:selection=chunks": "top-k, by chunks",
    "topk": "top-k",
    "topk:value_code=1bit": "top-k, 1-bit values",
    "powersgd": "PowerSGD, rank 1",
    "powersgd:rank=4": "PowerSGD, rank 4",
    "lgc_ps": "LGC",
}


def rows(name: str) -> list[dict[str, str]]:
    """The lines of a CSV file of this folder."""
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file))


def draw() -> None:
    """Milliseconds by method: jgc's whole aggregate, and what PyTorch's hooks add to a step."""
    ours = {row["method"]: float(row["ms"]) for row in rows("h100.csv") if row["model"] == "gpt25m"}
    steps = {row["step"]: float(row["ms"]) for row in rows("torch.csv")}
    plain = (steps["plain"] + steps["plain again"]) / 2
    bars = [(f"jgc: {label}", ours[name], BLUE) for name, label in SHOWN.items()]
    hooks = ("bf16", "PowerSGD, rank 1", "PowerSGD, rank 4")
    bars += [(f"PyTorch: {name.replace('bf16', 'bfloat16')}", steps[name] - plain, RED) for name in hooks]
    figure = new_figure(9, 4.2)
    axes = figure.subplots()
    labels, values, colours = zip(*bars, strict=True)
    drawn = axes.barh(labels, values, color=colours)
    axes.bar_label(drawn, [f"{value:.1f}" for value in values], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds added to a step of a transformer of 25M parameters on one H100")
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, FOLDER / "added.png")


if __name__ == "__main__":
    draw()
