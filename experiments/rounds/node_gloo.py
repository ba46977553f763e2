"""A node's process that meets the others in collectives over Gloo: `jgc.local_steps`.

python -m experiments.rounds.node_gloo '{"cell": {...}, "host": 0, "hosts": 4, ...}'
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jgc
from experiments.rounds.cells import MESSAGES
from experiments.rounds.node import Node, serve
from experiments.rounds.training import training_of
from jgc.lab.bench.network.worker_jax import NO_HEARTBEAT
from jgc.types import PyTree


class GlooNode(Node):
    """See `Node`."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        self.training = training_of(self.cell, options["data_dir"])

    def join(self) -> dict[str, Any]:
        cell, outer = self.cell, self.cell.outer
        self.nodes = jgc.make_nodes(cell.nodes)
        local = jgc.local_steps(
            self.training.inner,
            optax.sgd(outer.rate, outer.momentum or None, nesterov=bool(outer.momentum)),
            MESSAGES[cell.method].compressor, cell.every, self.nodes,
        )  # fmt: skip
        init, self.step = local.make_step(self.training.loss)
        params, key = jax.tree.map(np.asarray, self.training.params), jax.random.key(cell.seed)
        state = init(key, params)._replace(step=cell.every - 1)  # so that an exchange is due, too
        jax.block_until_ready(self.step(state, self._batch(0))[0].params)
        self.state = init(key, params)
        sent = list(local.bytes_per_round(params).values())[-1]
        return {
            "seconds": 0.0, "payload": sent.node, "version": f"jax {jax.__version__}",
            "data": self.training.data.text.name,
        }  # fmt: skip

    def inner(self, step: int) -> None:
        self.state, self.metrics = self.step.inner(self.state, self._batch(step))
        jax.block_until_ready(self.state.own)

    def exchange(self) -> None:
        self.state, _ = self.step.exchange(self.state, self.metrics)
        jax.block_until_ready((self.state.params, self.state.own))
        self.done += 1

    def shared(self) -> PyTree:
        return jax.tree.map(lambda x: np.array(x.addressable_data(0)), self.state.params)

    def validation_loss(self) -> Callable[[PyTree], float]:
        return self.training.validation_loss()

    def digest(self) -> str:
        return repr(
            [float(np.abs(x, dtype=np.float64).sum()) for x in jax.tree.leaves(self.shared())]
        )

    def _batch(self, step: int) -> PyTree:
        """[K, b, T] of all nodes; this process makes its part."""
        seed, data = self.cell.seed, self.training.data

        def part(hosts: slice) -> PyTree:
            chosen = [data.batch(seed, host, step) for host in range(self.cell.nodes)[hosts]]
            return tuple(map(np.stack, zip(*chosen, strict=True)))

        return jgc.place_parts(part, self.nodes)


def connect(options: dict[str, Any]) -> None:
    """Meet the other hosts' processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        options["coordinator"], options["hosts"], options["host"],
        heartbeat_timeout_seconds=NO_HEARTBEAT,
    )  # fmt: skip
    jax.devices()


if __name__ == "__main__":
    serve(GlooNode, connect)
