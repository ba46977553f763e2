"""Nodes of a run as generators, interleaved by a seed, on a bucket in memory and a clock that nobody
waits for. One simulation of three nodes and eight rounds takes some milliseconds."""

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from stand_ins import Bytes, Faults, Halves, History, Left, MemoryDisk, N, Process

from jgc.rounds.arithmetic import Sgd
from jgc.rounds.bucket import BucketError
from jgc.rounds.context import Context, RoundsError, Rules
from jgc.rounds.lists import read_list
from jgc.rounds.messages import opened, packed_message
from jgc.rounds.names import by_round, close_name, message_name
from jgc.rounds.node_disk import NoDisk
from jgc.rounds.protocol import Member
from jgc.rounds.replay import advanced, read_checkpoint
from jgc.rounds.requests import Get, Wait, answer, perform

SETTINGS = {"method": "halves", "size": N}


class World:
    """A run of some nodes.

    Attributes:
      gone: errors that ended a process, by node.
      outcomes: of every exchange, by node.
      moved: f64[n], what a node has handed to `exchange`, by node.
      leaves: where a node gets Ctrl-C once: the round, and "steps" or "exchange".
    """

    def __init__(self, seed: int, rounds=8, rules=None, faults=None, disks=True, tokens=None, n=N):
        self.random, self.rounds = random.Random(seed), rounds
        self.rules = rules or Rules(
            quorum=2, start=2, grace=10.0, checkpoint_every=3, retained=4, timeout=500
        )
        self.faults, self.disks, self.tokens = faults or Faults(), disks, tokens or {}
        self.bucket, self.now, self.processes = Bytes(), 0.0, []
        self.disk = defaultdict(MemoryDisk)
        self.digests: dict[int, str] = {}
        self.outcomes, self.gone, self.events = defaultdict(list), {}, []
        self.moved = defaultdict(lambda: np.zeros(N))
        self.leaves: dict[str, tuple[int, str]] = {}
        self.lossy: set[str] = set()  # nodes that lost something, and said so
        self.counted_cache: dict[int, Any] = {}
        self.waits, self.nodes = defaultdict(list), set()
        self.spread = 1.0  # of the time that local steps take, relative to their mean
        self.latency = 0.0  # of every request, in seconds; 0: see `Faults`
        self.requests = defaultdict(Counter)  # of a node's processes, by type
        self.costs = defaultdict(dict)  # (began, ended, requests) of exchanges, by round and node
        self.returned = 0  # messages that did not count and were compared with what came back

    # --- nodes -----------------------------------------------------------------------------------------

    def start(
        self, node, at=0.0, rounds=None, pace=1.0, coder=None, outer=None, settings=None, disk=True
    ):
        """Start a process of a node."""
        process = Process(node, None)
        self.nodes.add(node)
        context = Context(
            node, coder or Halves(), outer or Sgd(), self.rules, clock=lambda: self.now,
            say=lambda text: self.events.append((self.now, node, text)),
            spawn=lambda steps: self._add(Process(node, steps), self.now),
        )  # fmt: skip
        disk = self.disk[node] if self.disks and disk else NoDisk()
        incarnation = f"{self.random.getrandbits(64):016x}"
        process.member = Member(context, lambda run: disk, incarnation)
        process.again = lambda at: self.start(node, at, rounds, pace, coder, outer, settings)
        process.steps = self._life(process, rounds or self.rounds, pace, settings or SETTINGS)
        self._add(process, at)
        return process

    def _life(self, process, rounds, pace, settings):
        member, node = process.member, process.node
        outcome = yield from member.join(np.zeros(N, np.float32), settings)
        self._note(process, outcome)
        try:
            while member.shared.number < rounds:
                process.inside = "steps"
                yield Wait(pace * (1 + self.spread * (self.random.random() - 0.5)))
                if self._flips(node, member.shared.number):
                    theta = np.nextafter(member.shared.theta, np.float32(9))
                    member.shared = member.shared._replace(theta=theta, digest=f"wrong {self.now}")
                process.inside = "exchange"
                yield from self._exchange(process)
            process.inside = ""
            yield from member.leave()
        except Left:
            settled, process.inside = process.inside == "steps", ""
            yield from member.leave(settled)
            process.again(self.now + 100 * self.random.random())

    def _exchange(self, process):
        member, node = process.member, process.node
        difference = self._difference(node)
        self.moved[node] += difference
        before = member.flying, member.memory, member.carry
        began, requests = self.now, Counter(self.requests[node])
        outcome = yield from member.exchange(difference, self.tokens.get(node, 100))
        self.waits[node].append(self.now - began)
        self.costs[outcome.round][node] = began, self.now, self.requests[node] - requests
        if not (outcome.counted or outcome.discarded):
            self._check_returned(member, difference, *before)
        self._note(process, outcome)

    def _leaves_here(self, process):
        here = process.member.shared.number, process.inside
        return self.leaves.get(process.node) == here and bool(self.leaves.pop(process.node))

    def _flips(self, node, number):
        return node == "a" and self.random.random() < self.faults.ulp

    def _difference(self, node):
        return np.array([self.random.gauss(0, 1) for _ in range(N)], np.float32)

    # --- scheduler -------------------------------------------------------------------------------------

    def _add(self, process, at):
        process.wake = max(at, self.now)
        self.processes.append(process)

    def run(self, limit=50_000.0):
        """Step processes in an order that the seed chooses, until all have ended."""
        while alive := [x for x in self.processes if x.alive]:
            ready = [x for x in alive if x.wake <= self.now]
            if not ready:
                self.now = min(x.wake for x in alive)
                assert self.now < limit, f"a hang: {self.events[-5:]}"
                continue
            self._step(self.random.choice(ready))
        return self

    def _step(self, process):
        chance = self.random.random
        if not process.carried_out:
            self._carry_out(process)
            return
        if process.member is not None and process.request is not None:
            if chance() < self.faults.killed:
                self.kill(process)
                process.again(self.now + 100 * chance())
                return
            if chance() < self.faults.stopped:
                process.wake = self.now + 150 * chance()
                return
            waits = process.inside and isinstance(process.request, Wait)
            if waits and (chance() < self.faults.left or self._leaves_here(process)):
                process.error = Left()
        try:
            error, value = process.error, process.value
            process.error = process.value = None
            process.request = process.steps.throw(error) if error else process.steps.send(value)
        except StopIteration:
            process.alive = False
            return
        except RoundsError as error:
            process.alive = False
            self.gone.setdefault(process.node, []).append(error)
            return
        self._send(process)

    def _send(self, process):
        chance = self.random.random
        if isinstance(process.request, Wait):
            process.wake = self.now + process.request.seconds
            return
        if process.member is not None:
            count = len(process.request.names) if isinstance(process.request, Get) else 1
            self.requests[process.node][type(process.request).__name__] += count
        if chance() < self.faults.lost:
            process.error = BucketError("the bucket does not answer")
        elif self.latency or chance() < self.faults.slow:
            process.carried_out = False
            process.wake = self.now + self._half_way()
        else:
            self._carry_out(process)

    def _carry_out(self, process):
        slow, process.carried_out = not process.carried_out, True
        chance = self.random.random
        try:
            process.value = answer(process.request, self.bucket)
        except BucketError as error:
            process.error = error
        if process.node is None:
            process.alive = False  # the request of a process that was killed
        if chance() < self.faults.unanswered:
            process.error = BucketError("the answer was lost")
        if slow:
            process.wake = self.now + self._half_way()

    def _half_way(self):
        """Seconds from here to the bucket, or back."""
        return self.latency / 2 or self.faults.longest / 2 * self.random.random()

    def kill(self, process):
        """Kill a process, with those of its background. A request on its way may still arrive."""
        for other in [x for x in self.processes if x.node == process.node and x.alive]:
            if other is process or other.member is None:
                other.alive = False
                if not other.carried_out:
                    late = Process(None, iter(()))
                    late.request, late.carried_out = other.request, False
                    self._add(late, other.wake)

    # --- what must hold --------------------------------------------------------------------------------

    def _note(self, process, outcome):
        member, node = process.member, process.node
        if outcome is not None:
            self.outcomes[node].append(outcome)
            self._rubbish(outcome.number)
        shared = member.shared
        assert self.digests.setdefault(shared.number, shared.digest) == shared.digest, "invariant 1"
        if (outcome is not None and outcome.discarded) or any(
            who == node and "residual" in text for _, who, text in self.events
        ):
            self.lossy.add(node)
        self.check_conserved(node, member)

    def _check_returned(self, member, difference, flying, memory, carry):
        """Invariant 3: a message that does not count comes back exactly."""
        if flying is None:
            self.returned += 1
            for name, x in memory.items():
                np.testing.assert_array_equal(member.memory[name], x, err_msg="invariant 3")
            np.testing.assert_array_equal(member.carry, difference + carry, err_msg="invariant 3")

    def check_conserved(self, node, member):
        """Invariants 3 and 5: what a node has moved = what lists count + residual + carry."""
        if node in self.lossy or (not self.disks and self.faults.killed):
            return
        total = self.counted(node, member.shared.number) + member.memory["residual"] + member.carry
        scale = max(1.0, np.abs(self.moved[node]).max())
        np.testing.assert_allclose(
            total, self.moved[node], atol=3e-6 * scale, err_msg=f"invariant 3, {node}"
        )

    def counted(self, node, number):
        """f64[n]: what the lists before round `number` count of a node."""
        total = np.zeros(N)
        for closed in self.lists()[:number]:
            for entry in (x for x in closed.members if x.node == node):
                data = self.bucket.history[message_name(closed.round, node, entry.attempt)]
                total += Halves().decode(closed.round, opened(data, None)[1])
        return total

    def lists(self):
        """All lists that were made, in order."""
        rounds = by_round({name: 0 for name in self.bucket.history if name.endswith("/close")})
        for number in sorted(rounds):
            if number not in self.counted_cache:
                data = self.bucket.history[f"rounds/{number:08d}/close"]
                self.counted_cache[number] = read_list(data, self.run_token, number, None)
        return [self.counted_cache[number] for number in sorted(rounds)]

    @property
    def run_token(self):
        return opened(self.bucket.history["run.json"], None)[0]["run"]

    def check(self):
        """The invariants that need the whole history."""
        lists = self.lists()
        assert [x.round for x in lists] == list(range(len(lists))), "invariant 4: a list a round"
        assert all(close_name(x.round) in self.bucket.objects for x in lists), "lists are kept"
        seen = set()
        for closed in lists:
            assert list(closed.nodes) == sorted(set(closed.nodes)), "invariant 4: each node once"
            assert len(closed.members) >= 1
            assert self.rules.total is None or closed.round < self.rules.total, "after the last round"
            for entry in closed.members:
                assert entry.sha256 not in seen, "invariant 4: a message counts once"
                seen.add(entry.sha256)
        # invariant 2: the first checkpoint and the lists give the digest of every round
        context = Context(
            "reader", Halves(), Sgd(), self.rules, run=self.run_token, say=lambda text: None
        )
        checkpoints = {
            name: read_checkpoint(data, self.run_token, None)
            for name, data in self.bucket.history.items() if name.startswith("checkpoint/")
        }  # fmt: skip
        shared = checkpoints["checkpoint/00000000"]
        replayed = [shared.digest]
        for closed in lists:
            shared, _ = perform(advanced(context, shared, closed, {}), History(self.bucket))
            replayed.append(shared.digest)
        assert all(replayed[number] == x for number, x in self.digests.items()), "invariant 2"
        # a replay from any other checkpoint is the same: it begins at the same bits
        assert all(replayed[x.number] == x.digest for x in checkpoints.values()), "invariant 2"

    def _rubbish(self, number):
        """Objects that no node should trip over."""
        if self.random.random() >= self.faults.rubbish:
            return
        messages = [name for name in self.bucket.objects if name.endswith(".msg")]
        kind, node = self.random.randrange(7), self.random.choice(sorted(self.nodes))
        name = message_name(number, node, self.random.randrange(2))
        other = self.bucket.objects[self.random.choice(messages)] if messages else b""
        fields = {
            "positions": np.arange(3, dtype=np.int32),
            "values": np.full(3, np.nan, np.float16),
        }
        data = {
            0: other[: len(other) // 2], 1: other, 2: b"", 3: b"x" * 500,
            4: packed_message("other run", node, "1", number, 1, "", fields, None),
            5: packed_message(self.run_token, "mallory", "1", number, 1, "", fields, None),
            6: b"of a round that nobody is in",
        }[kind]  # fmt: skip
        other = {5: message_name(number, "mallory"), 6: message_name(number + 9, node)}
        self.bucket.create(other.get(kind, name), data)
