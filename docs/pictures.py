"""The pictures of the first page and the gallery, from the tables of result pages.

    python docs/pictures.py
"""

import re
from pathlib import Path

from matplotlib.ticker import LogLocator

from jgc.lab.report.plots import bytes_against_score
from jgc.lab.report.runs import find, pool
from jgc.lab.report.seconds import draw as draw_over_time, measured
from jgc.lab.shared.pictures import BLUE, RED, new_figure, save_figure

FOLDER = Path(__file__).parent
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
HOSTS = {  # the row of the table, and its name in the picture
    "jgc topk": "jgc: top-k, 0.1 %",
    "jgc powersgd": "jgc: PowerSGD, rank 1",
    "jgc lgc_ps": "jgc: LGC",
    "PyTorch DDP, PowerSGD rank 1": "PyTorch: PowerSGD, rank 1",
    "PyTorch DDP, top-k 0.1 %, fused, int32": "PyTorch: top-k, 0.1 %",
    "PyTorch DDP, fp16 hook": "PyTorch: float16",
    "PyTorch DDP f32": "PyTorch: uncompressed",
    "jgc dense": "jgc: uncompressed",
}
EIGHT_HOSTS = {  # the column of the table, and its name in the picture
    1: "jgc: top-k, 0.1 %",
    2: "jgc: ScaleCom, 0.1 %",
    3: "jgc: top-k, 0.2 %, bfloat16",
    5: "PyTorch: PowerSGD, rank 1",
    4: "plain JAX: top-k, 0.1 %",
}
LONG_RUNS = {
    "baseline": "uncompressed",
    "topk_1bit_all_learned": "top-k, 1 bit,\nlearned positions",
    "lgc_ps": "LGC,\njgc's settings",
    "lgc_ps_paper": "LGC, paper",
    "dgc_paper": "DGC, paper",
    "gradiveq_paper": "GradiVeQ, paper",
    "scalecom_paper": "ScaleCom, paper",
    "qsgd": "QSGD, 4 bits",
}
LOCAL_STEPS = {  # the first are shown on the gallery's picture
    "adamw": "AdamW",
    "diloco_30": "DiLoCo",
    "diloco_4bit": "DiLoCo, 4 bits",
    "muloco_4bit": "MuLoCo, 4 bits",
    "demo": "DeMo",
    "powersgd": "PowerSGD",
    "topk": "top-k, 1.6 %",
    "sparseloco_30": "SparseLoCo",
    "sparseloco_10": "SparseLoCo, H = 10",
    "diloco_10": "DiLoCo, H = 10",
    "muloco_30": "MuLoCo",
    "muloco_4bit_feedback": "MuLoCo, 4 bits, feedback",
    "muloco_2bit": "MuLoCo, 2 bits",
    "muloco_2bit_feedback": "MuLoCo, 2 bits, feedback",
    "diloco_nvfp4_feedback_two_shot": "DiLoCo, NVFP4, feedback, two shots",
    "diloco_4bit_ring": "DiLoCo, 4 bits, ring",
    "diloco_4bit_two_shot": "DiLoCo, 4 bits, two shots",
    "diloco_4bit_hadamard": "DiLoCo, 4 bits, Hadamard",
    "diloco_4bit_feedback": "DiLoCo, 4 bits, feedback",
    "diloco_2bit": "DiLoCo, 2 bits",
    "diloco_2bit_feedback": "DiLoCo, 2 bits, feedback",
    "diloco_mxfp4": "DiLoCo, MXFP4",
    "diloco_mxfp4_hadamard": "DiLoCo, MXFP4, Hadamard",
    "streaming": "Streaming DiLoCo",
    "powersgd_rank2": "PowerSGD, rank 2",
    "powersgd_alternate": "PowerSGD, one all-reduce",
    "powersgd_alternate_rank8": "PowerSGD, rank 8, one all-reduce",
    "sparseloco_10_256": "SparseLoCo, H = 10, 6.2 %",
    "sparseloco_30_256": "SparseLoCo, 6.2 %",
    "sparseloco_30_no_feedback": "SparseLoCo, no feedback",
    "demo_equal": "DeMo, few bytes",
    "topk_equal": "top-k, 0.02 %",
    "ef21": "EF21, 1.6 %",
    "klt": "klt, local steps",
    "klt_refresh": "klt, local steps, new bases",
    "lgc_ps": "LGC, local steps",
    "adamw_one_node": "AdamW, one node",
}
SHOWN = 9


def rows(page: str) -> dict[str, list[str]]:
    """The cells of a page's table rows by their first cell; of equal ones the first."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {cells[0].strip("`"): cells[1:] for cells in reversed(lines)}


def numbers(cell: str) -> list[float]:
    """The numbers of a cell, such as a median and its interval."""
    return [float(x.replace(",", "")) for x in re.findall(r"[\d.,]*\d", cell)]


def two_hosts() -> None:
    """Seconds added to a step between two hosts."""
    table = rows((FOLDER / "results/network/two_hosts.md").read_text())
    added({label: table[row][2] for row, label in HOSTS.items()}, "two", (0.015, 12))


def eight_hosts() -> None:
    """Seconds added to a step between eight hosts."""
    page = (FOLDER / "results/network/README.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| 8 | 100mbit"))
    cells = row.strip("| ").split(" | ")
    added({label: cells[column + 1] for column, label in EIGHT_HOSTS.items()}, "eight", (0.15, 1.5))


def added(cells: dict[str, str], hosts: str, limits: tuple[float, float]) -> None:
    """Seconds added to a step at 100 Mbit/s: a dot at the median, a line over its 90 % interval."""
    figure = new_figure(7, 1.2 + 0.3 * len(cells))
    axes = figure.subplots()
    for i, (label, cell) in enumerate(cells.items()):
        median, low, high = numbers(cell)
        colour = BLUE if label.startswith("jgc") else RED
        axes.plot([low, high], [i, i], color=colour, linewidth=2.5)
        axes.plot(median, i, "o", color=colour)
        text = f"{median:.3f}" if median < 1 else f"{median:.1f}"
        axes.annotate(text, (high, i), (7, -4), textcoords="offset points")
    axes.set(xscale="log", xlim=limits, xlabel="seconds added to a step (log scale)")
    axes.set_title(f"A ResNet-18 on {hosts} hosts, 100 Mbit/s")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(cells)), cells)
    axes.invert_yaxis()
    finish(figure, axes, f"{hosts}_hosts.png")


def long_runs() -> None:
    """Accuracy over the bytes of a step."""
    table, points = rows((FOLDER / "results/long_runs/README.md").read_text()), {}
    for row, label in LONG_RUNS.items():
        cells = table[row]
        value, unit = cells[4].split(" (")[0].split()
        points[label] = float(value) * UNITS[unit], numbers(cells[2])[0]
    scatter(points, ("bytes up from a node in a step", "test accuracy, %"), "ResNet-20 on CIFAR-10", "step_bytes.png")


def local_steps() -> None:
    """Validation loss over the bytes of a run."""
    table, shown = rows((FOLDER / "results/local_steps/README.md").read_text()), list(LOCAL_STEPS.items())[:SHOWN]
    points = {label: (1e6 * numbers(table[row][3])[0], numbers(table[row][0])[0]) for row, label in shown}
    scatter(points, ("bytes up from all nodes in the run", "validation loss, nats"), "A GPT of 0.8M", "run_bytes.png")


def local_steps_page() -> None:
    """The pictures of `jgc report` on that page's runs, with the methods' names instead of the rows'."""
    folder = FOLDER / "results/local_steps"
    groups = pool(find([folder / "rows"])[0], by_folder=True, baseline="adamw")
    seconds = measured(folder / "seconds.json", groups)
    named = [group._replace(label=LOCAL_STEPS[group.label], baseline=LOCAL_STEPS["adamw"]) for group in groups]
    bytes_against_score(named, folder / "bytes.png")
    timed = {rate: {LOCAL_STEPS[row]: s for row, s in of_rows.items()} for rate, of_rows in seconds.items()}
    draw_over_time(named, folder / "seconds.png", timed)


def scatter(points: dict[str, tuple[float, float]], labels: tuple[str, str], title: str, name: str) -> None:
    """Named points over bytes; the first is the baseline."""
    figure = new_figure(7, 4.4)
    axes = figure.subplots()
    for i, (label, (x, y)) in enumerate(points.items()):
        axes.plot(x, y, "o", color=BLUE if i else RED)
        offset, ha, va = ((7, 0), "left", "center") if i else ((0, 7), "center", "bottom")
        axes.annotate(label, (x, y), offset, textcoords="offset points", ha=ha, va=va)
    axes.set(xscale="log", xlabel=f"{labels[0]} (log scale)", ylabel=labels[1], title=title)
    axes.xaxis.set_major_formatter(lambda x, _: size(x))
    axes.margins(x=0.12, y=0.08)
    finish(figure, axes, name)


def size(count: float) -> str:
    """A number of bytes with its unit.

    >>> size(1e4)
    '10 kB'
    """
    unit = max((u for u in UNITS if UNITS[u] <= max(count, 1)), key=UNITS.__getitem__)
    return f"{count / UNITS[unit]:g} {unit}"


def finish(figure, axes, name: str) -> None:
    """Write a picture next to this file."""
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, FOLDER / name)


if __name__ == "__main__":
    two_hosts()
    eight_hosts()
    long_runs()
    local_steps()
    local_steps_page()
