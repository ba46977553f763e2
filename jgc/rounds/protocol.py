"""The protocol of one node, as generators of `jgc.rounds.requests`: join a run, exchange, leave.

Rules

  a. The list of a round is the only authority on the messages that count.
  b. A round is closed once all expected nodes have sent (the members of the last list, and those
     that have announced themselves), or a quorum has and the grace is over on the closer's clock.
     Round 0 has no last list: its grace begins once `start` nodes are announced or have sent.
  c. A list names one digest of theta, that of most messages; of two nodes that differ, that of the
     writer of checkpoints. A node with a different digest heals.
  d. Any node may close a round, also one that is in no list.
  e. A node whose message does not count adds it back, exactly, applies all lists that exist, and
     announces itself.
  f. Mean and outer step run in one fixed order (`jgc.rounds.arithmetic`).
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jgc.rounds import replay
from jgc.rounds.arithmetic import Shared, Vector, usable
from jgc.rounds.closing import Closed, closed_round
from jgc.rounds.context import Context, Forgotten, RoundsError, Twin, persistently
from jgc.rounds.lists import DISSENT, OUTLIER, RoundList
from jgc.rounds.messages import packed_message, sealed, sha256_of
from jgc.rounds.names import node_name
from jgc.rounds.node_disk import Disk, NoDisk, Pending
from jgc.rounds.opening import opened_run
from jgc.rounds.outcome import LATE, Outcome, without_a_list
from jgc.rounds.requests import Create, Requests


class Member:
    """A node of a run."""

    def __init__(
        self, context: Context, open_disk: Callable[[str], Disk | NoDisk] = lambda run: NoDisk(),
        incarnation: str = "",
    ):  # fmt: skip
        self.context = context
        self.incarnation = incarnation or secrets.token_hex(8)
        self.open_disk, self.disk = open_disk, NoDisk()  # type: Any, Any
        self.shared: Shared  # the newest that it knows
        self.memory = context.coder.first()  # of the method: a residual, or nothing
        self.carry = np.zeros(context.coder.size, np.float32)  # unsent, besides the memory
        self.members: frozenset[str] = frozenset()  # of the newest list that it knows
        self.twins, self.has_sent, self.outliers, self.unusable = 0, False, 0, False
        self.lost = 0  # how often a part of this node's work was lost, which is logged each time
        self.began = context.clock()  # local steps
        # a message of an open round that all others have left; memory and carry do not include it
        self.flying: Pending | None = None

    def join(self, theta: Vector, settings: Mapping[str, Any]) -> Requests[Outcome | None]:
        """Take part from now on, with the newest shared state and the progress on this node's disk.

        `theta` f32[n] are the parameters if this node is the first, `settings` plain values that
        must be equal on all nodes. Returns the outcome of the round in which this node was killed,
        if that was still open.
        """
        self.context.run = run = yield from opened_run(self.context, theta, settings)
        self.disk = self.open_disk(run)
        self._go_on_from((yield from replay.resumed(self.context)))
        pending = self.disk.read()
        outcome = None if pending is None else (yield from self._resume(pending))
        yield from self._announce_here()
        self.context.joined, self.began = True, self.context.clock()
        return outcome

    def exchange(self, difference: Vector, tokens: int) -> Requests[Outcome]:
        """One round: send this node's difference theta - parameters, f32[n]; apply the mean.

        A message that was too late for its round goes into the next one, without local steps in
        between. Otherwise a node that is behind by more than the grace would stay behind.
        """
        over, before = self.context.rules.over, None
        if self.flying is not None:
            flying = self.flying
            if usable(difference):  # on disk before anything is awaited, like every movement
                flying = self._stored(flying.with_further(difference))
                difference = np.zeros_like(difference)
            before = yield from self._finish(flying)
        if over(self.shared.number):
            return before or self._unsent(difference)
        pending = self._begin(difference, tokens)
        outcome = (yield from self._finish(pending, unless_left=before is not None)) or before
        assert outcome is not None
        if outcome.reason == LATE and not (self.flying or over(self.shared.number)):
            again = self._begin(np.zeros_like(difference), tokens)
            outcome = (yield from self._finish(again, unless_left=True)) or outcome
        return outcome

    def _unsent(self, difference: Vector) -> Outcome:
        """After the last round: the movement stays in the carry, which `leave` writes to disk."""
        if kept := usable(difference):
            self.carry = self.carry + difference
        number = self.shared.number
        return without_a_list(number, f"all {number} rounds are closed", self.shared, not kept)

    def leave(self, settled: bool = True, moved: Vector | None = None) -> Requests[None]:
        """Nobody waits for this node any longer. Its unsent progress stays on its disk.

        Not `settled`: an exchange did not end; the disk has its message. `moved`: unsent, f32[n].
        """
        moved = moved if moved is not None and usable(moved) else np.zeros_like(self.carry)
        if settled and self.flying is not None:
            self._stored(self.flying.with_further(moved))
        elif settled:
            self.carry = self.carry + moved
            self._stored(Pending(self.shared.number, None, self.memory, self.memory, self.carry))
        yield from self._announce("left")
        self.disk.close()

    def _begin(self, difference: Vector, tokens: int) -> Pending:
        """The message of this round, on disk before it is in the bucket."""
        number, context = self.shared.number, self.context
        self.unusable = not usable(difference)
        if self.unusable:
            text = "this node's parameters are not finite; it goes on from the shared ones"
            context.say(f"round {number}: {text}")
            self.lost += 1
            difference, tokens = np.zeros_like(difference), 0  # a message, so that nobody waits
        total = difference + self.carry
        noise = int(sha256_of(f"{context.seed} {context.node} {number}".encode())[:8], 16)
        fields, after = context.coder.encode(number, self.memory, total, noise)
        data = packed_message(
            context.run, context.node, self.incarnation, number, tokens, self.shared.digest, fields,
            context.secret,
        )  # fmt: skip
        return self._stored(Pending(number, data, self.memory, after, total, sha256_of(data)))

    def _finish(self, pending: Pending, unless_left: bool = False) -> Requests[Outcome | None]:
        """From a message to the next shared state.

        None if all others have left meanwhile, and `unless_left`: the message then waits for them.
        """
        context, seconds = self.context, self.context.clock() - self.began
        try:
            closed = yield from closed_round(
                context, pending.round, pending.data, self.members, seconds, unless_left
            )
        except Forgotten as error:
            self.flying = None
            return (yield from self._begin_anew(pending, str(error)))
        if closed is None:
            self.flying = pending
            self._kept(pending, counted=False)
            return None
        self.flying = None
        self._check_twin(closed)
        self.members = frozenset(closed.list.nodes)
        skipped = yield from self._apply(closed)
        counted, reason, discarded = self._settle(pending, closed, skipped)
        if not counted:
            yield from self._catch_up()
        yield from self._announce_here()
        self._write_checkpoint(closed.list)
        return Outcome(
            pending.round, closed.list.nodes, counted, reason,
            dict(closed.list.left_out) | skipped, closed.waited, closed.list.by,
            self.shared.digest, self.shared.number, discarded,
        )  # fmt: skip

    def _apply(self, closed: Closed) -> Requests[dict[str, str]]:
        """Apply the list; returns the members that all nodes skip."""
        context = self.context
        try:
            self.shared, skipped = yield from replay.advanced(
                context, self.shared, closed.list, closed.data
            )
            return skipped
        except replay.Diverged:
            self._go_on_from((yield from replay.healed(context, closed.list)))
        except Forgotten:
            self._go_on_from((yield from replay.resumed(context)))
        return {}

    def _settle(
        self, pending: Pending, closed: Closed, skipped: Mapping[str, str]
    ) -> tuple[bool, str, bool]:
        """Memory and carry after a round: (counted, why not, whether something is lost)."""
        node = self.context.node
        if closed.list.counts(node, pending.sha256) and node not in skipped:
            counted = closed.list.weighs(node, pending.sha256)
            self._kept(pending, counted)
            self.outliers = 0
            if self.unusable:
                return False, "its parameters were not finite", True
            return counted, "" if counted else "it has no tokens", False
        reason = skipped.get(node) or closed.list.left_out.get(node, "")
        if node in skipped or reason.startswith(OUTLIER):
            # back in the residual it would be an outlier in every round; two in a row show that the
            # residual itself is at fault
            self.outliers += 1
            self.carry = pending.since()
            self.memory = pending.before if self.outliers < 2 else self.context.coder.first()
            self.lost += 1
            return False, reason, True
        self._kept(pending, counted=False)
        if self.unusable:
            return False, "its parameters were not finite", True
        if reason == DISSENT:
            return False, reason, False
        if closed.twin:
            return False, "an earlier process of this node had sent in this round", False
        return False, LATE if closed.sent else "not sent", False

    def _kept(self, pending: Pending, counted: bool) -> None:
        """Set memory and carry, which were computed for both cases before the message was sent."""
        self.memory = pending.after if counted else pending.before
        self.carry = pending.since() if counted else pending.difference + pending.since()

    def _check_twin(self, closed: Closed) -> None:
        """Stop if a different process sends under this node's name.

        A restarted process meets a message of its former life once, before it sends. Of two live
        processes, one is first in the second round; the other stops.
        """
        self.twins = self.twins + 1 if closed.twin else 0
        if closed.twin and (self.twins > 1 or self.has_sent):
            raise Twin(
                f"a different process sends as {self.context.node!r}: this one stops; give one of "
                "them a different name"
            )
        self.has_sent = self.has_sent or closed.sent

    def _go_on_from(self, newest: replay.Newest) -> None:
        self.shared, lists = newest
        if lists:
            self.members = frozenset(lists[-1].nodes)

    def _catch_up(self) -> Requests[None]:
        """Apply all lists that exist: one list a round would leave this node behind."""
        try:
            for closed in (yield from replay.lists_from(self.context, self.shared.number)):
                self.members = frozenset(closed.nodes)
                self.shared, _ = yield from replay.advanced(self.context, self.shared, closed, {})
        except replay.Diverged:
            self._go_on_from((yield from replay.healed(self.context, closed)))
        except Forgotten:
            self._go_on_from((yield from replay.resumed(self.context)))

    def _begin_anew(self, pending: Pending, why: str) -> Requests[Outcome]:
        """Go on from a checkpoint, without memory and last message, which may count or not."""
        context = self.context
        context.say(f"{context.node} was away too long: {why}; its residual is lost")
        self.memory, self.carry = context.coder.first(), pending.since()
        self.lost += 1
        self._go_on_from((yield from replay.resumed(context)))
        yield from self._announce_here()
        reason = "away for longer than rounds are kept"
        return without_a_list(pending.round, reason, self.shared, discarded=True)

    def _resume(self, pending: Pending) -> Requests[Outcome | None]:
        """Set memory and carry after a restart, by the list of the round in which it was killed."""
        context, node = self.context, self.context.node
        if pending.round > self.shared.number:
            raise RoundsError(
                f"the bucket forgets: this node was in round {pending.round}, and the bucket ends "
                f"before round {self.shared.number + 1}"
            )
        if pending.difference.size != context.coder.size:
            self.lost += 1
            return None
        if pending.round == self.shared.number and pending.data is not None:
            return (yield from self._finish(pending, unless_left=True))
        counted = False
        for number in range(pending.round, self.shared.number):
            closed = yield from replay.list_of(context, number)
            if closed is None or (number > pending.round and closed.counts(node)):
                disk = f"its disk is of round {pending.round}"
                context.say(f"{node} comes back without its residual: {disk}")
                self.lost += 1
                return None
            if number == pending.round:
                counted = closed.weighs(node, pending.sha256)
                if not counted and closed.left_out.get(node, "").startswith(OUTLIER):
                    self.lost += 1
                    return None
        self._kept(pending, counted)
        return None

    def _stored(self, pending: Pending) -> Pending:
        try:
            self.disk.write(pending)
        except OSError as error:
            node = self.context.node
            self.context.say(f"{node} cannot keep its residual on disk: {error.strerror}")
        return pending

    def _announce_here(self) -> Requests[None]:
        """Announce this node unless it is a member: the others wait for members anyway."""
        if self.context.node not in self.members:
            yield from self._announce("here")

    def _announce(self, suffix: str) -> Requests[None]:
        """Tell the others to wait for this node in this round ("here"), or not ("left")."""
        header = {"kind": "notice", "run": self.context.run, "incarnation": self.incarnation}
        name = node_name(self.shared.number, self.context.node, suffix)
        yield from persistently(self.context, Create(name, sealed(header, {}, self.context.secret)))

    def _write_checkpoint(self, closed: RoundList) -> None:
        """Write a checkpoint if it is this node's turn, in the background."""
        number, every = closed.round + 1, self.context.rules.checkpoint_every
        due = number % every == 0 or closed.dissent
        if due and closed.writer == self.context.node and self.shared.number == number:
            self.context.spawn(replay.write_checkpoint(self.context, self.shared))
