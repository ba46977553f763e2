"""Invariants 7 and 8: how soon a node that comes back counts, what a stopped one costs the others, and
the requests of a quiet round."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from simulated import SETTINGS, Rules, World
from stand_ins import N, Process
from test_interleavings import EXAMPLES, seeds

from jgc.rounds.requests import Wait

FEW = settings(EXAMPLES, max_examples=10)


def _killed(world, process, after, away):
    """Kill a process after some seconds, and start it again; notes where it joined."""
    node = process.node

    def steps():
        yield Wait(after)
        world.kill(process)
        yield Wait(away)
        counted = len(world.outcomes[node])
        again = world.start(node, at=world.now)
        note = world._note

        def joined(other, outcome):
            if other is again and not world.joined:
                world.joined.append((other.member.shared.number, counted))
            note(other, outcome)

        world._note = joined

    world.joined = []
    world._add(Process("hand", steps()), 0.0)


@FEW
@given(seed=seeds)
def test_a_node_that_comes_back_is_counted_within_two_rounds(seed):
    world = World(seed, rounds=20, rules=Rules(quorum=2, start=3, grace=10, checkpoint_every=3))
    process = [world.start(node) for node in "abc"][2]
    _killed(world, process, world.random.uniform(3, 9), world.random.uniform(0.1, 8))
    world.run().check()
    ((number, before),) = world.joined
    first = min(x.round for x in world.outcomes["c"][before:] if x.counted)
    assert first - number <= 1, "invariant 7"


LATENCY = 0.1
PAUSES = 0.05  # seconds that a node waits between looks, in all


@pytest.mark.parametrize("count", [2, 3, 8])
def test_requests_and_latencies_of_a_quiet_round(count):
    rules = Rules(quorum=count, start=count, grace=1e6, checkpoint_every=100, retained=100, poll=(0.01, 1.0))
    world = World(0, rules=rules)
    world.latency, world.spread = LATENCY, 0.0
    for node in "abcdefgh"[:count]:
        world.start(node)
    world.run().check()
    for number in range(1, world.rounds):  # nodes join round 0 one by one
        costs = world.costs[number].values()
        assert len(costs) == count
        seconds = max(ended for _, ended, _ in costs) - max(began for began, _, _ in costs)
        assert seconds <= 5 * LATENCY + PAUSES, "invariant 8"
        for _, _, requests in costs:
            assert set(requests) <= {"Create", "Get", "List"}
            assert requests["Create"] <= 2 and requests["List"] <= 3, "invariant 8"
            assert requests["Get"] <= count - 1 + 2, "invariant 8"
        # one of them makes the list, and the others do not try
        assert sum(requests["Create"] for _, _, requests in costs) == count + 1


STEPS = 5.0  # seconds of a round's local steps


def _overlapping(world, process, rounds):
    """The life of a node whose exchanges run while its next local steps do, as `overlap=1` has it."""
    member, node = process.member, process.node
    yield from member.join(np.zeros(N, np.float32), SETTINGS)
    exchange = None
    while member.shared.number < rounds:
        yield Wait(STEPS)
        began = world.now
        while exchange is not None and exchange.alive:
            yield Wait(0.01)
        world.waits[node].append(world.now - began)
        exchange = Process(node, member.exchange(world._difference(node), 100), member)
        world._add(exchange, world.now)
    while exchange.alive:
        yield Wait(0.01)
    yield from member.leave()


def _stopped(world, node, after, seconds):
    """SIGSTOP of a node after some seconds, for some seconds."""

    def steps():
        yield Wait(after)
        for process in world.processes:
            if process.node == node:
                process.wake = max(process.wake, world.now) + seconds

    world._add(Process("hand", steps()), 0.0)


@FEW
@given(seed=seeds, seconds=st.floats(5, 60), grace=st.sampled_from([3.0, 9.0]))
def test_with_overlap_a_stopped_node_costs_nothing_but_a_grace_above_the_step_time(seed, seconds, grace):
    rules = Rules(quorum=2, start=4, grace=grace, poll=(0.05, 0.5), patience=0.3, retained=100)
    world = World(seed, rules=rules)
    for node in "abcd":
        process = world.start(node, at=world.random.uniform(0, 1))
        process.steps = _overlapping(world, process, rounds=22)
    _stopped(world, "d", world.random.uniform(20, 30), seconds)
    world.run()
    spared = [sum(world.waits[node][2:]) for node in "abc"]  # they start one by one
    if grace < STEPS:
        assert max(spared) < 0.5, "a node that is not hit has waited"
    elif seconds > 2 * grace:
        assert grace - STEPS - 0.5 < min(spared) and max(spared) < grace - STEPS + 2
