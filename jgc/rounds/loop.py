"""Rounds in a user's loop: `join`, and the object that it returns."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jgc.checks.argument_types import fits
from jgc.rounds.arithmetic import Outer, Sgd, settings_of, usable
from jgc.rounds.bucket import Bucket, open_bucket
from jgc.rounds.coder import CompressorCoder
from jgc.rounds.context import Context, Rules, check_rules
from jgc.rounds.messages import secret_of_environment
from jgc.rounds.names import check_node
from jgc.rounds.node_disk import Disk, NoDisk
from jgc.rounds.opening import compared_run
from jgc.rounds.outcome import Outcome
from jgc.rounds.protocol import Member
from jgc.rounds.requests import Requests, perform
from jgc.types import Compressor, PyTree

log = logging.getLogger("jgc.rounds")
EAGER = "eager"


def _prepared(
    bucket: Any, node: str, params: PyTree, compressor: Compressor, outer: Any = None,
    settings: Any = None, seed: int = 0, **rules: Any,
) -> tuple[Bucket, Context, CompressorCoder, dict[str, Any]]:  # fmt: skip
    """Check arguments, without a request; bucket, context, coder, and values equal on all nodes."""
    check_node(node)
    rules.setdefault("start", rules.get("quorum", 1))
    unknown = sorted(rules.keys() - set(Rules._fields))
    if unknown:
        known = ", ".join(Rules._fields)
        raise TypeError(f"join has no argument {unknown[0]!r}; rules are {known}")
    chosen, outer = Rules(**rules), Sgd() if outer is None else outer
    check_rules(chosen)
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be a whole number from 0 to 2**32 - 1, got {seed!r}")
    coder = CompressorCoder(compressor, params, seed)
    alike = {**coder.settings, **settings_of(outer), "quorum": chosen.quorum}
    alike |= _plain(settings or {}, alike)
    store = open_bucket(bucket) if isinstance(bucket, str | os.PathLike) else bucket
    context = Context(node, coder, outer, chosen, secret_of_environment(), seed, say=log.warning)
    return store, context, coder, alike


def _plain(settings: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """A user's settings, which must survive JSON and may not replace jgc's."""
    plain = {}
    for name, value in settings.items():
        value = value.item() if isinstance(value, np.generic) else value
        finite = isinstance(value, float) and np.isfinite(value)
        is_plain = value is None or isinstance(value, int | str) or finite
        if not (isinstance(name, str) and is_plain):
            raise ValueError(
                f"settings[{name!r}] must be a finite number, a string, True, False or None, got "
                f"{value!r}"
            )
        if name in taken:
            raise ValueError(f"settings may not have {name!r}: jgc compares its value already")
        plain[name] = value
    return plain


def _check_overlap(overlap: int, merge: float | str | None, outer: Outer | None) -> None:
    if overlap not in (0, 1):
        raise ValueError(f"overlap must be 0 or 1 round, got {overlap!r}")
    if merge is not None and not overlap:
        raise ValueError(f"merge={merge} does nothing without overlap=1")
    if merge == EAGER and not isinstance(outer or Sgd(), Sgd):
        raise ValueError(
            f'merge="eager" needs jgc.rounds.Sgd outside, whose steps add up, got {outer}'
        )
    share = 0.0 if merge is None or merge == EAGER else merge
    if isinstance(share, str) or not (fits(float, share) and 0 <= share <= 1):
        raise ValueError(f'merge must be in [0, 1] or "eager", got {merge!r}')


def check(
    bucket: str | os.PathLike | Bucket, *, overlap: int = 0, merge: float | str | None = None,
    folder: str | os.PathLike | None = None, pause: Callable[[float], Any] | None = None,
    **arguments: Any,
) -> str | None:  # fmt: skip
    """The token of the run that `join` would take part in; None if it would begin one.

    One request, which changes nothing: call it before a long compilation. It takes the arguments
    of `join`; `folder` and `pause` are not used, and the parameters may be shapes. Raises the
    errors of `join`.
    """
    del folder, pause
    _check_overlap(overlap, merge, arguments.get("outer"))
    store, context, _, alike = _prepared(bucket, **arguments)
    return perform(compared_run(context, alike), store)


def join(
    bucket: str | os.PathLike | Bucket, *, node: str, params: PyTree, compressor: Compressor,
    outer: Outer | None = None, overlap: int = 0, merge: float | str | None = None,
    folder: str | os.PathLike | None = None, settings: Mapping[str, Any] | None = None,
    seed: int = 0, pause: Callable[[float], Any] = time.sleep, **rules: Any,
) -> "Rounds":  # fmt: skip
    """Take part in a run that lives in a bucket; the first node begins it.

    Compile the training step before: others wait for this node from now on.

    Args:
      bucket: a URL or a folder (see `open_bucket`), or an open bucket.
      node: this node's name, unique in the run and the same after a restart.
      params: the parameters. Those of the first node count; others only need the same shapes.
      compressor: of `jgc.compress`: topk, qsgd, natural, onebit, cast or dense.
      outer: `Sgd` or `AdamW` of `jgc.rounds`; by default `Sgd(0.7, momentum=0.9)`.
      overlap: 1 to exchange in a thread while the next round's steps run.
      merge: with overlap, the fraction of its movement in a round that a node keeps until the mean
        with it arrives, by default 1; or "eager": its share of the mean goes through the outer step
        immediately, and the others' shares follow.
      folder: where the node keeps its residual, so that it survives a kill; None for nowhere.
      settings: further plain values that must be equal on all nodes, such as local steps a round.
      seed: of random rounding; the same on all nodes.
      pause: waits for some seconds. Its exceptions end `join` or `exchange`; call `leave` then.
      rules: `quorum`, `grace`, `start`, `timeout`, ... of `jgc.rounds.Rules`.

    Raises:
      NoBucket: no such bucket, no credentials, or no obstore.
      RoundsError: a run with other settings, lost objects, or two processes with one name.
      ValueError: a setting out of range, or a method that communicates while it encodes.
    """
    _check_overlap(overlap, merge, outer)
    merge = 1.0 if merge is None else merge
    store, context, coder, alike = _prepared(
        bucket, node, params, compressor, outer, settings, seed, **rules
    )
    member = Member(context, lambda run: NoDisk() if folder is None else Disk(folder, run, node))
    return Rounds(store, member, coder, params, alike, bool(overlap), merge, pause)


class Rounds:
    """A node of a run; `join` makes it.

    Attributes:
      params: the shared parameters as this node knows them, a tree like the argument of `join`.
      last: the `Outcome` of the newest exchange that has ended; None before the first.
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
        self._start = member.shared.theta  # where the local steps of this round began
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
            self._start, self.coming = self.member.shared.theta, self.member.shared.number
            return self.params, self.last
        outcome = self._landed()
        theta, self.coming = self.member.shared.theta, self.member.shared.number + 1
        self._flying = self._exchanges.submit(self._exchanged, moved, int(tokens))
        self._start = self._ahead(theta, moved) if np.isfinite(moved).all() else theta
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
