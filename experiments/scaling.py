"""`python -m experiments scaling`: bytes that a node sends in a step as nodes are added.

N nodes, one on each device, have a payload P each. A ring sends 2 (N - 1) / N P: codes are summed, or decoded,
summed and encoded again, at every hop. A gather sends (N - 1) P: every node gets every code. A ring pads its N segments
to equal lengths; the padding has a separate column.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from matplotlib.ticker import FuncFormatter, NullFormatter

from jgc import compress
from jgc.lab.shared.page import publish
from jgc.lab.shared.pictures import COLOURS, MARKERS, new_figure
from jgc.lab.shared.random_data import variables_of
from jgc.lab.shared.tables import table
from jgc.layout.pack import make_packing
from jgc.nodes.layouts import as_one_per_device
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.output.table import size
from jgc.training.run.folder import write_figure
from jgc.training.settings.config import Config, resolve
from jgc.types import Compressor, Nodes, PyTree
from jgc.wire.account import sent_by

BITS, BUCKET = 4, 512


@dataclass(frozen=True)
class Scaling:
    """Bytes that a node sends in a step as nodes are added: rings, all-reduce and gathers.

    They follow from the model's shapes: nothing is trained.

        python -m experiments scaling --workload cifar10_resnet20 --nodes 2 4 8 16

        | bytes a step and node | 2 nodes | 4 nodes | 8 nodes | 16 nodes |
        | uncompressed, all-reduce | 1.08 MB | 1.62 MB | 1.89 MB | 2.02 MB |
        | top-k, 0.1 %, gather | 1.48 kB | 4.43 kB | 10.3 kB | 22.1 kB |
    """

    workload: str = "cifar10_resnet20"
    """which model"""
    nodes: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16)
    """numbers of data-parallel nodes"""
    alpha: float = 0.001
    """share of each layer that top-k selects"""
    output: Path | None = None
    """Markdown file to write as well, with a picture of the same name"""

    def run(self, line: str) -> None:
        """Count, and print the page."""
        if not self.nodes or min(self.nodes) < 2:
            counts = " ".join(map(str, self.nodes)) or "none"
            raise UserError(f"--nodes must be numbers of at least 2, got {counts}")
        with values_of_the_user():
            shapes = shapes_of(self.workload)
            points = measure(shapes, sorted(set(self.nodes)), self.alpha)
        title = f"{self.workload}: bytes of a step as nodes are added"
        publish("Bytes of a step as nodes are added", markdown(points, self.workload, shapes), self.output, line,
                partial(draw, points=points, title=title),
                "Bytes that a node sends in a step over the number of nodes")  # fmt: skip


class Scheme(NamedTuple):
    """A method and how its codes travel.

    Attributes:
      name: for people.
      compressor: its last phase counts.
      gathers: whether each node gets all payloads; if not, they are summed on the way.
      unit: bytes that a ring cannot divide: a message is longer than P / N by less than that. 0 for no ring.
    """

    name: str
    compressor: Compressor
    gathers: bool
    unit: float

    def ideal(self, payload: float, nodes: int) -> Fraction:
        """Bytes that a node sends without padding."""
        return Fraction(payload) * (nodes - 1) * (1 if self.gathers else Fraction(2, nodes))


class Point(NamedTuple):
    """Bytes of a scheme in a step."""

    scheme: Scheme
    nodes: int
    payload: float  # of a node, P
    sent: Fraction  # by a node's device, the program's collectives

    @property
    def padding(self) -> float:
        """Bytes sent beyond the payload."""
        return float(self.sent - self.scheme.ideal(self.payload, self.nodes))


def schemes(alpha: float) -> tuple[Scheme, ...]:
    """The schemes to compare; alpha is the share that top-k sends."""
    bucket = BITS * BUCKET / 8 + 4
    return (
        Scheme("uncompressed, all-reduce", compress.dense(), False, 0),
        Scheme("uncompressed, ring", compress.dense(algorithm="ring"), False, 4),
        Scheme(f"QSGD, {BITS} bits, gather", compress.qsgd(bits=BITS, bucket=BUCKET), True, 0),
        Scheme(
            f"QSGD, {BITS} bits, ring", compress.qsgd(bits=BITS, bucket=BUCKET, exchange="ring"), False, bucket
        ),
        Scheme("GradiVeQ, all-reduce", compress.gradiveq(), False, 0),
        Scheme("GradiVeQ, ring", compress.gradiveq(algorithm="ring"), False, 2 * 4),  # codes, and all other leaves
        Scheme(f"top-k, {100 * alpha:g} %, gather", compress.topk(alpha=alpha), True, 0),
    )  # fmt: skip


def shapes_of(workload: str) -> PyTree:
    """Shapes of a workload's parameters."""
    config = resolve(Config(compressor=compress.Dense(), workload=workload))
    return jax.eval_shape(partial(variables_of, config))["params"]


def measure(shapes: PyTree, counts: Sequence[int], alpha: float) -> list[Point]:
    """Every scheme with every number of nodes.

    Args:
      shapes: of the parameters.
      counts: numbers of nodes, each at least 2.
      alpha: share that top-k selects.
    """
    out = []
    for scheme in schemes(alpha):
        compressor = scheme.compressor
        for count in counts:
            nodes = as_one_per_device(Nodes(count, count))
            wire = compressor.wire(compressor.schedule[-1].value, shapes, nodes)
            sent = sum((message.bytes for message in wire.physical if message.field != "flag"), Fraction(0))
            out.append(Point(scheme, count, sent_by("worker", wire), sent))
    return out


def markdown(points: Sequence[Point], workload: str, shapes: PyTree) -> str:
    """The page: bytes by number of nodes, and each point with its padding."""
    n, counts = make_packing(shapes).size, sorted({point.nodes for point in points})
    by_name = _by_scheme(points)
    wide = [[name, *(size(float(point.sent)) for point in series)] for name, series in by_name.items()]
    lines = [_line(point, n) for series in by_name.values() for point in series]
    detail = ["", "nodes", "payload P", "sent", "of it padding", "share", "dense ring / sent"]
    rings = [series[0].scheme for series in by_name.values() if series[0].scheme.unit]
    bounds = ", ".join(f"{scheme.unit:.0f} ({scheme.name})" for scheme in rings)
    return (
        f"`{workload}`, {n:,} parameters ({size(4 * n)}), last phase of each method, one node on each device: bytes "
        "that one node sends in a step, by the collectives of the traced step, without the flag that every "
        "method has.\n\n"
        f"{table(['bytes a step and node', *(f'{count} nodes' for count in counts)], wide)}\n\n"
        f"{_crossings(by_name, n)}\n\n"
        "`qsgd` in a ring decodes, adds and quantises again at every hop. `gradiveq` sums codes as they are, here with "
        "the largest d that its settings allow; in a run lambda decides, and d is no larger. Its other leaves go "
        "uncompressed.\n\n"
        "Padding is the excess over 2 (N - 1) / N P, or over (N - 1) P for a gather. A ring sends 2 (N - 1) messages, "
        f"each longer than P / N by less than the bytes that the ring cannot divide: {bounds}.\n\n"
        f"{table(detail, lines)}\n"
    )


def _line(point: Point, n: int) -> list[str]:
    sent, counts = float(point.sent), (point.payload, float(point.sent), point.padding)
    compared = (f"{100 * point.padding / sent:.2f} %", f"{_dense(point.nodes, n) / sent:.3g}x")
    return [point.scheme.name, str(point.nodes), *(f"{count:,.0f}" for count in counts), *compared]


def _by_scheme(points: Sequence[Point]) -> dict[str, list[Point]]:
    out: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.nodes):
        out.setdefault(point.scheme.name, []).append(point)
    order = list(dict.fromkeys(point.scheme.name for point in points))
    return {name: out[name] for name in order}


def _dense(nodes: int, n: int) -> float:
    """Bytes of an uncompressed ring of n values without padding."""
    return 4.0 * n * 2 * (nodes - 1) / nodes


def _crossings(by_name: dict[str, list[Point]], n: int) -> str:
    """The number of nodes from which a gather sends more than the uncompressed ring: (N - 1) P > 2 (N - 1) / N 4 n."""
    parts = [
        f"{name} from {math.floor(8 * n / series[0].payload) + 1:,} nodes on"
        for name, series in by_name.items() if series[0].scheme.gathers
    ]  # fmt: skip
    return f"A gather sends more than the uncompressed ring: {'; '.join(parts)}."


def draw(path: Path, points: Sequence[Point], title: str) -> None:
    """Draw bytes over nodes; for a ring also without padding."""
    figure = new_figure(8.5, 5.4)
    axes = figure.subplots()
    counts = sorted({point.nodes for point in points})
    for i, (name, series) in enumerate(_by_scheme(points).items()):
        scheme, sent = series[0].scheme, [float(point.sent) for point in series]
        colour = COLOURS[i % len(COLOURS)]
        if scheme.unit or scheme.gathers:
            axes.plot(counts, sent, color=colour, linewidth=1.4, marker=MARKERS[i], markersize=6, label=name)
        else:  # only a marker: the line would hide a ring's
            axes.plot(counts, sent, color=colour, linestyle="", marker="o", markersize=11, label=name,
                      markerfacecolor="none")  # fmt: skip
        if scheme.unit:
            ideal = [float(scheme.ideal(point.payload, point.nodes)) for point in series]
            axes.plot(counts, ideal, color="black", linewidth=0.9, linestyle=":", zorder=5)
    axes.plot([], [], color="black", linewidth=0.9, linestyle=":", label="2 (N - 1) / N payload, of each ring")
    axes.set(title=title, xlabel="nodes, N, one on each device", ylabel="bytes that a node sends in a step")
    axes.set_yscale("log")
    axes.set_xticks(counts)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    write_figure(path, figure)
