"""A node of rounds in a user's loop: the object that `jgc.rounds.join` returns."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jgc.checks.argument_types import fits
from jgc.rounds.arithmetic import usable
from jgc.rounds.bucket import Bucket
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.outcome import Outcome
from jgc.rounds.protocol import Member
from jgc.rounds.requests import Requests, perform
from jgc.types import PyTree

log = logging.getLogger("jgc.rounds")
EAGER = "eager"


class Rounds:
    """A node of a run; `join` makes it.

    Attributes:
      params: the shared parameters as this node knows them, a tree like the argument of `join`.
      last: the `Outcome` of the last completed exchange; None before the first.
      coming: the round of the next local steps; with overlap, the exchange before may be under way.
    """

    def __init__(
        self, bucket: Bucket, member: Member, coder: CompressorCoder, params: PyTree,
        settings: Mapping[str, Any], overlap: bool, merge: float | str,
        pause: Callable[[float], Any],
    ):  # fmt: skip
        self.bucket, self.member, self.leaves = bucket, member, coder.leaves
        self.overlap, self.merge = overlap, merge
        self._eager = member.context.outer.init(coder.size)  # momentum of this node's shares
        self._like, self._pause, self._settled = params, pause, True
        # separate threads for exchanges and checkpoints, which never delay messages
        self._exchanges = ThreadPoolExecutor(1, "jgc-rounds")
        self._background = ThreadPoolExecutor(1, "jgc-rounds-checkpoint")
        member.context.spawn = lambda steps: self._background.submit(self._quietly, steps)
        theta = self.leaves.vector(params)
        if not usable(theta):
            raise ValueError("params must be finite and below 1e15: a run would begin with them")
        coder.compile()  # before joining: from then on the others wait
        self._flying: Future[Outcome] | None = None
        steps = member.join(theta, settings)
        self.last: Outcome | None = perform(steps, bucket, pause)
        # where the local steps of this round began
        self._start = self.leaves.rounded(member.shared.theta)
        self.coming = member.shared.number

    @property
    def params(self) -> PyTree:
        """The shared parameters. With overlap, local steps begin at those of `exchange`."""
        return self.leaves.tree(self.member.shared.theta, self._like)

    @property
    def node(self) -> str:
        """This node's name."""
        return self.member.context.node

    @property
    def number(self) -> int:
        """The number of closed rounds in the shared parameters."""
        return self.member.shared.number

    def payload_bytes(self, number: int) -> int:
        """Bytes of the payload of a message of round `number`; its header comes on top."""
        shapes = self.member.context.coder.shapes(number).values()
        return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in shapes)

    @property
    def run(self) -> str:
        """The run's token, in `run.json`."""
        return self.member.context.run

    def exchange(self, params: PyTree, tokens: int) -> tuple[PyTree, Outcome | None]:
        """Send this node's progress, and apply that of all nodes.

        Args:
          params: this node's parameters after its local steps.
          tokens: its weight in the mean, such as the number of tokens that it has used.

        Returns:
          The parameters from which the next local steps begin, and the outcome: of this round, with
          overlap of the round before (None in the first).

        Raises:
          RoundsError: `Twin`, `Timeout`, or lost objects; with overlap, of the thread.
          ValueError: a tree unlike `params` of `join`, or negative tokens.
        """
        if not (fits(int, tokens) and 0 <= tokens < 2**53):
            raise ValueError(
                f"tokens must be a whole number of at least 0, below 2**53, got {tokens!r}"
            )
        moved = self._start - self.leaves.vector(params)
        self._like = params
        if not self.overlap:
            self.last = self._exchanged(moved, int(tokens))
            self._start = self.leaves.rounded(self.member.shared.theta)
            self.coming = self.member.shared.number
            return self.params, self.last
        outcome = self._landed()
        theta, self.coming = self.member.shared.theta, self.member.shared.number + 1
        self._flying = self._exchanges.submit(self._exchanged, moved, int(tokens))
        start = self._ahead(theta, moved) if usable(moved) else theta
        self._start = self.leaves.rounded(start)
        return self.leaves.tree(self._start, self._like), outcome

    def _ahead(self, theta: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """f32[n]: where local steps go on while the mean with `moved` is on its way.

        "eager" is Kale et al. 2025, "Eager Updates for Overlapped Communication and Computation in
        DiLoCo" (arXiv 2502.12996): a node's outer gradient has its share of this round and the
        others' of the round before. SGD's steps add up, so that is an outer step from the shared
        parameters with only this node's share.

        Differs from the paper:
          1. A node has a second momentum, of its shares; the shared momentum is equal on all nodes.
          2. All members of the last list have equal shares, whatever their tokens.
        """
        if self.merge != EAGER:
            return theta - np.float32(self.merge) * moved
        share = moved / np.float32(max(1, len(self.member.members)))
        start, self._eager = self.member.context.outer.step(theta, share, self._eager)
        return start

    def leave(self, params: PyTree = None) -> None:
        """Wait for the exchange that is under way, and tell the others not to wait for this node.

        The message of an exchange that raised stays on the node's disk, as does the progress of
        `params`, after local steps without an exchange; both go with the node's next message.
        """
        try:
            self._landed()
            self._background.shutdown(wait=True)  # a checkpoint that is being written
            moved = None if params is None else self._start - self.leaves.vector(params)
            steps = self.member.leave(self._settled, moved)
            perform(steps, self.bucket, self._pause)
        finally:
            self.member.disk.close()
            self._exchanges.shutdown(wait=False)

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if error_type is None:
            self.leave()
        else:
            self.member.disk.close()

    def _exchanged(self, moved: np.ndarray, tokens: int) -> Outcome:
        steps: Requests[Outcome] = self.member.exchange(moved, tokens)
        self._settled = False
        outcome = perform(steps, self.bucket, self._pause)
        self._settled = True
        return outcome

    def _landed(self) -> Outcome | None:
        """The outcome of the exchange that is under way; an error of its thread is raised here."""
        flying, self._flying = self._flying, None
        if flying is None:
            return None
        self.last = flying.result()
        return self.last

    def _quietly(self, steps: Requests[None]) -> None:
        try:
            perform(steps, self.bucket, self._pause)
        except Exception as error:  # a failed checkpoint must not end the training
            log.warning("checkpoint: %s", error)
