"""A node's process that meets the others in a bucket: `jgc.rounds`.

python -m experiments.rounds.node_bucket '{"cell": {...}, "host": 0, "hosts": 4, ...}'
"""

import time
from collections.abc import Callable
from typing import Any

import jax

import jgc.rounds
from experiments.rounds.cells import MESSAGES
from experiments.rounds.node import Node, serve
from experiments.rounds.trace import TracedBucket
from experiments.rounds.training import training_of

FOREVER = 3600.0  # the grace: no node is left out because the machine is slow


class BucketNode(Node):
    """See `Node`."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        self.training = training_of(self.cell, options["data_dir"])
        bucket = jgc.rounds.open_bucket(options["url"], **options["store"])
        self.bucket: Any = TracedBucket(bucket)

    def join(self) -> dict[str, Any]:
        cell, outer = self.cell, self.cell.outer
        self.step, self.params = self.training.make_step(), self.training.params
        self.state = self.training.inner.init(self.params)
        jax.block_until_ready(self.step(self.params, self.state, self._batch(0)))
        began = time.monotonic()
        self.rounds = jgc.rounds.join(
            self.bucket, node=f"n{self.host}", params=self.params,
            compressor=MESSAGES[cell.method].compressor,
            outer=jgc.rounds.Sgd(outer.rate, outer.momentum), overlap=cell.overlap,
            merge=outer.merge if cell.overlap else None, folder=self.folder / f"disk-{self.host}",
            settings={"every": cell.every}, seed=cell.seed, start=cell.nodes, grace=FOREVER,
        )  # fmt: skip
        self.params = self.rounds.params
        seconds, payload = time.monotonic() - began, self.rounds.payload_bytes(0)
        return {
            "seconds": seconds, "payload": payload, "version": f"jax {jax.__version__}",
            "data": self.training.data.text.name,
        }  # fmt: skip

    def inner(self, step: int) -> None:
        new = self.step(self.params, self.state, self._batch(step))
        self.params, self.state = jax.block_until_ready(new)

    def exchange(self) -> float | None:
        tokens = self.cell.every * self.training.data.tokens
        self.params, outcome = self.rounds.exchange(self.params, tokens)
        return None if outcome is None else outcome.waited

    def leave(self) -> None:
        self.rounds.leave()

    def shared(self) -> Any:
        return self.rounds.member.shared.theta  # a new array each round

    def validation_loss(self) -> Callable[[Any], float]:
        loss, leaves = self.training.validation_loss(), self.rounds.leaves
        return lambda theta: loss(leaves.tree(theta, self.params))

    def digest(self) -> str:
        return self.rounds.member.shared.digest

    @property
    def coming(self) -> int:
        return self.rounds.coming

    @property
    def closed(self) -> int:
        return self.rounds.number

    def counts(self) -> tuple[int, ...]:
        return tuple(self.bucket.counts)

    def requests(self) -> list[Any]:
        return self.bucket.requests

    def _batch(self, step: int) -> Any:
        return self.training.data.batch(self.cell.seed, self.host, step)


if __name__ == "__main__":
    serve(BucketNode)
