"""`python -m experiments exchanges`: the error of the mean by gather, ring and two shots, as nodes are added.

The gradients are normally distributed. A share of their variance may be common to all nodes, as the
signal of a gradient is; the rest differs from node to node, as the noise of its batch does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgc import compress
from jgc.compress import step_on_nodes
from jgc.compress.quantized.quantize import REDUCING, Quantising
from jgc.lab.bench.network.methods import settings
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import check_output, publish
from jgc.lab.shared.progress import each
from jgc.lab.shared.tables import table
from jgc.nodes.layouts import as_one_per_device
from jgc.training.errors import UserError, values_of_the_user
from jgc.training.output.table import size
from jgc.types import Compressor, Nodes

EXCHANGES = ("gather", *REDUCING)


@dataclass(frozen=True)
class Exchanges:
    """Error of the mean of codes by gather, ring and two shots, and bytes, as nodes are added.

    Of normally distributed gradients; nothing is trained, and all nodes are on one device.

        python -m experiments exchanges --methods qsgd:bits=4 --nodes 2 16 64

        | method | in common | nodes | gather | ring | two_shot | ring / gather | two_shot / gather |
        | qsgd:bits=4 | 0 % | 16 | 0.190 | 0.601 | 0.264 | 3.17 | 1.39 |
    """

    methods: tuple[str, ...] = ("qsgd:bits=4",)
    """methods that send a code for every value, with settings after colons"""
    nodes: tuple[int, ...] = (2, 4, 8, 16, 64)
    """numbers of data-parallel nodes"""
    common: tuple[float, ...] = (0.0, 0.5)
    """shares of the gradients' variance that all nodes have in common"""
    draws: int = 400
    """means of the same gradients with other random numbers"""
    values: int = 32_768
    """numbers in a gradient"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Measure, and print the page."""
        for name, least in (("nodes", 2), ("draws", 1), ("values", 1)):
            values = np.atleast_1d(getattr(self, name))
            if not values.size or values.min() < least:
                raise UserError(f"--{name} must be at least {least}, got {' '.join(map(str, values)) or 'none'}")
        if not self.common or not all(0 <= share <= 1 for share in self.common):
            raise UserError(f"--common must be shares from 0 to 1, got {' '.join(map(str, self.common)) or 'none'}")
        check_output(self.output)
        if not self.methods:
            raise UserError("--methods must name at least one method")
        for method in self.methods:
            with values_of_the_user():
                compressors_of(method)
        cases = [Case(method, count) for method in self.methods for count in self.nodes]
        measured = partial(measure, common=self.common, values=self.values, draws=self.draws)
        rows = [row for rows in each(cases, measured, str) for row in rows]
        publish("Error of the mean by exchange", markdown(rows, self.values, self.draws), self.output, line)


class Case(NamedTuple):
    """A method and a number of nodes."""

    method: str
    nodes: int

    def __str__(self) -> str:
        return f"{self.method}, {self.nodes} nodes"


class Row(NamedTuple):
    """A case with one share in common: relative errors of the mean, and bytes sent, by exchange."""

    case: Case
    common: float
    errors: dict[str, float]
    sent: dict[str, float]


def compressors_of(method: str) -> dict[str, Compressor]:
    """The method by each exchange.

    Raises:
      UserError: an unknown method or setting, or a method that sends no code for every value.

    Example:
      >>> list(compressors_of("qsgd:bits=4"))
      ['gather', 'ring', 'two_shot']
    """
    if not isinstance(settings(method), Quantising):
        names = (name for name, entry in compress.METHODS.items() if issubclass(entry.settings, Quantising))
        raise UserError(f"exchanges of codes are settings of {', '.join(names)}, got {method!r}")
    return {name: compress.build(settings(f"{method}:exchange={name}")) for name in EXCHANGES}


def measure(case: Case, common: Sequence[float], values: int, draws: int) -> list[Row]:
    """The errors of one case by share in common: root mean square over draws, of the mean's norm."""
    shapes, nodes = {"w": jax.ShapeDtypeStruct((values,), jnp.float32)}, Nodes(case.nodes, case.nodes)
    rows = [Row(case, share, {}, {}) for share in common]
    for name, compressor in compressors_of(case.method).items():
        phase = compressor.schedule[-1].value
        error_of = jax.jit(partial(relative_error, compressor, nodes, draws))
        wire = compressor.wire(phase, shapes, as_one_per_device(nodes))
        sent = float(sum(message.bytes for message in wire.physical if message.field != "flag"))
        for row in rows:
            row.errors[name] = float(error_of(gradients(case.nodes, row.common, values)))
            row.sent[name] = sent
    return rows


def gradients(nodes: int, common: float, values: int) -> jax.Array:
    """Normally distributed gradients f32[K, n] with a share of their variance in common."""
    random = np.random.default_rng(nodes)
    shared, apart = random.standard_normal((1, values)), random.standard_normal((nodes, values))
    return jnp.float32(np.sqrt(common) * shared + np.sqrt(1 - common) * apart)


def relative_error(compressor: Compressor, nodes: Nodes, draws: int, g: jax.Array) -> jax.Array:
    """Root mean square over draws of the error of g's aggregate, relative to the norm of its mean."""
    mean = jnp.mean(g, axis=0)
    state = compressor.init(jax.random.key(0), {"w": mean}, nodes)
    step = step_on_nodes(compressor.aggregate, compressor.schedule[-1].value, nodes)

    def square(key):
        return jnp.sum((step(key, {"w": g}, state)[0]["w"] - mean) ** 2)

    squares = jax.lax.map(square, jax.random.split(jax.random.key(1), draws))
    return jnp.sqrt(jnp.mean(squares) / jnp.sum(mean**2))


def markdown(rows: Sequence[Row], values: int, draws: int) -> str:
    """The page: errors and bytes of every case."""
    others = EXCHANGES[1:]
    head = ["method", "in common", "nodes", *EXCHANGES, *(f"{name} / gather" for name in others),
            *(f"{name} sends" for name in EXCHANGES)]  # fmt: skip
    cells = [
        [
            row.case.method, f"{row.common:.0%}", str(row.case.nodes),
            *(f"{row.errors[name]:.4f}" for name in EXCHANGES),
            *(f"{row.errors[name] / row.errors['gather']:.2f}" for name in others),
            *(size(row.sent[name]) for name in EXCHANGES),
        ]
        for row in rows
    ]  # fmt: skip
    return (
        f"Relative error of the decoded mean over nodes, root mean square over {draws} draws, of {values:,} normally "
        "distributed values; in common: the share of their variance that all nodes have in common. Bytes are those "
        f"that a node sends in a step, one node on each device. {describe()}.\n\n{table(head, cells)}\n"
    )
