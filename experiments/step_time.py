"""`python -m experiments step_time`: seconds of LGC's phases next to the paper's Table V, and the pieces of `lgc_ps`.

Each piece is compiled by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.papers.reported import SECONDS
from jgc.compress import METHODS
from jgc.compress.lgc import autoencoder as ae
from jgc.lab.bench import methods
from jgc.lab.bench.costs import Costs, milliseconds, whole_step
from jgc.lab.shared.machine import describe
from jgc.lab.shared.page import check_repeats, publish
from jgc.lab.shared.random_data import variables_of
from jgc.lab.shared.tables import table
from jgc.lab.shared.timing import Times, rounds_shown
from jgc.layout.pack import Packing, make_packing
from jgc.method.memory import accumulated, make_memory
from jgc.selection.entries import Sparse, scatter
from jgc.selection.selector import Selector
from jgc.training.errors import values_of_the_user


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step in each phase of LGC next to the paper's Table V, and of the pieces of `lgc_ps`.

    Nothing is sent over a network. All layers are compressed alike, and no data set is needed.

        python -m experiments step_time --workload cifar10_resnet20 --alpha 0.005 --repeats 5

        | method | phase | ours, s | paper, s | ours, of the dense step | paper, of its dense phase |
        | lgc_ps | top-k | 0.834 | 1.6 | 1.61 | 1.60 |
        | lgc_ps | compressed | 0.507 | 0.6 | 0.98 | 0.60 |
    """

    workload: str = "cifar10_resnet20"
    """model, batch and settings"""
    nodes: int = 8
    """data-parallel nodes"""
    repeats: int = 15
    """rounds; medians are shown"""
    alpha: float | None = None
    """share of each layer that is selected; the workload's if not given"""
    output: Path | None = None
    """Markdown file to write as well"""

    def run(self, line: str) -> None:
        """Measure, and print the page."""
        check_repeats(self.repeats)
        with values_of_the_user():
            costs = methods.measure(self.workload, self.nodes, self.repeats, tuple(SECONDS), self.alpha)
            config = methods.configured(METHODS["lgc_ps"], self.workload, self.nodes, self.alpha)
            packing = make_packing(variables_of(config)["params"])
            pieces = rounds_shown(lgc_pieces(packing, self.nodes, config.compressor.alpha), self.repeats)
        publish("Time of a step", markdown(costs, pieces, describe()), self.output, line)


def markdown(costs: Costs, pieces: dict[str, Times], machine: str) -> str:
    """The page."""
    return "\n\n".join([
        f"`{costs.workload}`, {costs.values:,} parameters, {costs.nodes} nodes, all layers alike; {machine}.",
        "The paper's Table V: ResNet50 on ImageNet, 8 nodes on four RTX 2080 Ti, sending included. Ours: medians of "
        f"{costs.repeats} rounds; nothing is sent.",
        table_v(costs),
        "## Pieces of `lgc_ps`, each compiled by itself",
        table(["piece", "ms"], [[name, milliseconds(times)] for name, times in pieces.items()]),
    ]) + "\n"  # fmt: skip


def table_v(costs: Costs) -> str:
    """The phases that the paper timed, in multiples of its dense step and of ours."""
    rows, dense = [], np.median(whole_step(costs.rows[0], costs))
    for row in costs.rows:
        reported = SECONDS.get(row.method, {})
        if row.phase in reported:
            step, seconds = np.median(whole_step(row, costs)), reported[row.phase]
            ratios = [f"{step / dense:.2f}", f"{seconds / reported['dense']:.2f}"]
            rows.append([row.method, row.phase, f"{step:.3f}", f"{seconds:.1f}", *ratios])
    head = ["method", "phase", "ours, s", "paper, s", "ours, of the dense step", "paper, of its dense phase"]
    return table(head, rows)


def lgc_pieces(packing: Packing, nodes: int, alpha: float) -> dict[str, Callable[[], Any]]:
    """The pieces of `lgc_ps` on all K nodes of one device, each compiled by itself."""
    selector = Selector(alpha)
    mu, n = sum(selector.counts(packing.layers)), packing.size
    key = jax.random.key(0)
    v = jax.random.normal(key, (nodes, n))
    positions = jax.vmap(lambda v: selector.positions(v, packing.layers))(v)
    x = jax.random.normal(key, (nodes, mu))
    z = jnp.pad(x, ((0, 0), (0, ae.padded(mu) - mu)))
    weights = ae.init(key, mu, nodes)
    optimiser = optax.adam(1e-3)
    trained = ae.Trained(weights, optimiser.init(weights))
    code = ae.encode(weights.encoder, z[0])
    memory = make_memory(True, 0.9)
    local = jax.vmap(lambda v: memory.init(n))(v)

    def remember(local, g, positions):
        v, local = memory.compensate(accumulated(memory, local, g, False), g, False)
        return memory.update(local, v, Sparse(positions, v[positions]), False)

    pieces: dict[str, tuple[Callable, tuple]] = {
        "memory (accumulate, update), all nodes": (jax.vmap(remember), (local, v, positions)),
        "selection (top-k per layer), all nodes": (
            jax.vmap(lambda v: selector.positions(v, packing.layers)),
            (v,),
        ),
        "encoder, one node": (ae.encode, (weights.encoder, z[0])),
        "decoders, all nodes": (jax.vmap(ae.decode, in_axes=(0, None, 0)), (weights.decoders, code, z)),
        "scatter of the mean": (lambda p, x: scatter(Sparse(p, x), n), (positions, x)),
        "one training step of the autoencoder": (
            lambda trained, z: ae.train(
                trained, optimiser, lambda w: ae.losses(w, z, z, jnp.int32(0)), 1.0, 0.5
            ),
            (trained, z),
        ),
    }
    return {name: partial(jax.jit(fn), *args) for name, (fn, args) in pieces.items()}
