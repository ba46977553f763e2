"""The protocol's invariants for any order of requests, with faults (`simulated` has the invariants)."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from simulated import Faults, Rules, World
from stand_ins import Bytes

from jgc.rounds.bucket import BucketError
from jgc.rounds.context import RoundsError, Twin
from jgc.rounds.protocol import Member
from jgc.rounds.requests import Wait

EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(EXAMPLES, max_examples=1000)
seeds = st.integers(0, 2**32 - 1)
FAULTS = {
    "none": Faults(),
    "slow": Faults(slow=0.3),
    "lossy": Faults(lost=0.1, unanswered=0.1, slow=0.1),
    "kills": Faults(killed=0.01, slow=0.1),
    "stops": Faults(stopped=0.02, slow=0.1),
    "leaves": Faults(left=0.1, slow=0.1),
    "rubbish": Faults(rubbish=0.5),
    "ulp": Faults(ulp=0.05),
    "all": Faults(0.05, 0.05, 0.1, 0.005, 0.01, 0.02, 0.2),
}


def _run(name: str, seed: int, disks: bool = True) -> World:
    # one wrong node of two has no majority against it
    count = 3 + seed % 2 if name == "ulp" else 2 + seed % 3
    quorum, start = (2, count) if name == "ulp" else (1 + seed % 2, 2)
    rules = Rules(
        quorum=quorum, start=start, grace=10, checkpoint_every=3, retained=4, timeout=500,
        total=(None, 8)[seed // 6 % 2],
    )  # fmt: skip
    world = World(seed, rounds=8, rules=rules, faults=FAULTS[name], disks=disks)
    for node in "abcd"[:count]:
        world.start(node, at=world.random.uniform(0, 5))
    world.run().check()
    assert not world.gone
    return world


@pytest.mark.parametrize("name", FAULTS)
@EXAMPLES
@given(seed=seeds)
def test_invariants_hold_in_any_order(name, seed):
    _run(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@MANY
@given(seed=seeds)
def test_invariants_hold_in_thousands_of_orders(name, seed):
    _run(name, seed)


@EXAMPLES
@given(seed=seeds)
def test_killed_nodes_without_a_disk_come_back_without_their_residual(seed):
    _run("kills", seed, disks=False)


@EXAMPLES
@given(seed=seeds)
def test_without_faults_every_message_counts(seed):
    world = World(seed, rules=Rules(quorum=3, start=3, grace=10))
    for node in "abc":
        world.start(node, at=world.random.uniform(0, 5))
    world.run().check()
    assert all(x.counted for outcomes in world.outcomes.values() for x in outcomes)
    assert [len(x.members) for x in world.lists()] == [3] * world.rounds


@EXAMPLES
@given(seed=seeds)
def test_rubbish_under_a_name_costs_no_message(seed):
    world = World(seed, rules=Rules(quorum=3, start=3, grace=1e6), faults=Faults(rubbish=0.9, slow=0.1))
    for node in "abc":
        world.start(node)
    world.run().check()
    assert [x.nodes for x in world.lists()] == [("a", "b", "c")] * world.rounds
    assert world.events and all("is left out" in text for _, _, text in world.events)


@EXAMPLES
@given(seed=seeds, wrong=st.sampled_from("ab"))
def test_two_nodes_that_differ_go_on_from_the_writer(seed, wrong):
    world = World(seed, rules=Rules(quorum=2, start=2, grace=10, patience=0.1))
    world._flips = lambda node, number: (node, number) == (wrong, 3)
    for node in "ab":
        world.start(node)
    world.run()  # its digests are compared; `check` would not hold where the wrong bit is the writer's
    assert [x.nodes for x in world.lists()] == [("a",) if i == 3 else ("a", "b") for i in range(8)]


@EXAMPLES
@given(seed=seeds)
def test_a_node_that_dies_before_round_0_ends_costs_a_grace(seed):
    world = World(seed, rules=Rules(quorum=2, start=3, grace=10, timeout=40))
    world.start("a")
    world.start("b", at=world.random.uniform(0, 5))
    dead = world.start("c", at=30.0)
    dead.steps = _cut(dead.steps, 60, until=Wait)  # its first local step: it has announced itself
    world.run().check()
    assert world.lists()[0].nodes == ("a", "b") and "rounds/00000000/c.here" in world.bucket.history
    assert max(world.waits["a"]) < 30 + 10 + 15


@pytest.mark.parametrize("total", [None, 8])
@EXAMPLES
@given(seed=seeds)
def test_nodes_that_all_leave_in_the_last_round_end_it_together(total, seed):
    """b's message waits in the bucket; it ends that round, and may not wait for one that nobody else enters."""
    world = World(seed, rounds=8, rules=Rules(quorum=2, start=2, grace=10, timeout=500, total=total))
    world.leaves = {"a": (7, "steps"), "b": (7, "exchange")}
    for node, pace in (("a", 30), ("b", 1)):
        world.start(node, pace=pace)
    world.run().check()
    assert not world.leaves and not world.gone
    assert len(world.lists()) == 8


@EXAMPLES
@given(seed=seeds)
def test_a_late_node_sends_nothing_after_the_last_round(seed):
    world = World(seed, rounds=3, rules=Rules(quorum=1, start=2, grace=10, total=3))
    world.start("a")
    slow = world.start("b", pace=100)
    world.run().check()
    assert len(world.lists()) == 3 and slow.member.shared.number == 3
    np.testing.assert_allclose(slow.member.carry + slow.member.memory["residual"] + world.counted("b", 3),
                               world.moved["b"], atol=1e-5)  # fmt: skip


@EXAMPLES
@given(seed=seeds)
def test_a_message_far_from_the_others_is_left_out(seed):
    world = World(seed, rules=Rules(quorum=2, start=3, grace=10))
    plain = world._difference
    world._difference = lambda node: plain(node) * np.float32(
        1000 if node == "b" and len(world.outcomes["b"]) == 4 else 1
    )
    for node in "abc":
        world.start(node)
    world.run().check()
    (closed,) = [x for x in world.lists() if "b" in x.left_out]
    assert closed.round == 4 and "times the median" in closed.left_out["b"]
    assert [x.reason for x in world.outcomes["b"] if not x.counted] == [closed.left_out["b"]]


@EXAMPLES
@given(seed=seeds)
def test_a_node_that_cannot_write_sees_the_rounds_of_the_others(seed):
    world = World(seed, rules=Rules(quorum=2, start=3, grace=10, timeout=100))
    create, refused = world.bucket.create, []

    def full(name, data):
        if name.endswith("/c.msg") and 2 <= int(name.split("/")[1]) < 5:
            refused.append(name)
            raise BucketError("the bucket is full")
        return create(name, data)

    world.bucket.create = full
    for node in "abc":
        world.start(node)
    world.run().check()
    assert {x.reason for x in world.outcomes["c"] if not x.counted} == {"not sent"} and refused
    assert world.returned >= 1  # messages that `World._check_returned` has compared


@EXAMPLES
@given(seed=seeds)
def test_the_result_does_not_depend_on_the_order(seed):
    def digests(order):
        world = World(order, rules=Rules(quorum=3, start=3, grace=1e6), faults=Faults(slow=0.3))
        moves = {node: World(seed + i).random for i, node in enumerate("abc")}
        world._difference = lambda node: _draw(moves[node])
        for node in "abc":
            world.start(node)
        return world.run().digests

    assert digests(seed) == digests(seed + 1)


def _draw(generator):
    return np.array([generator.gauss(0, 1) for _ in range(6)], np.float32)


@EXAMPLES
@given(seed=seeds)
def test_exactly_one_of_two_processes_with_one_name_goes_on(seed):
    world = World(seed, rules=Rules(quorum=1, start=2, grace=10, patience=0.1))
    world.start("a")
    twins = [world.start("b", at=at, disk=False) for at in (0, world.random.uniform(0, 5))]
    world.lossy.add("b")  # the invariant is of one process, and here are two
    world.run().check()
    assert [type(x) for x in world.gone.get("b", [])] == [Twin]
    assert sum(x.member.shared.number == world.rounds for x in twins) == 1


@EXAMPLES
@given(seed=seeds, pace=st.sampled_from([1.0, 60.0]))
def test_a_newcomer_is_counted_within_two_rounds_and_stays(seed, pace):
    """Also where local steps take longer than the grace, and it begins in the middle of a round."""
    world = World(seed, rounds=12, rules=Rules(quorum=2, start=2, grace=10, checkpoint_every=3))
    world.spread = 0.1
    world.start("a", pace=pace)
    world.start("b", pace=pace)
    world.start("c", at=pace * world.random.uniform(3, 5), pace=pace)
    world.run().check()
    assert all(x.counted for x in world.outcomes["c"][:-1])  # the others may have left before its last
    first = min(x.round for x in world.outcomes["c"])
    joined = min(int(x.split("/")[1]) for x in world.bucket.history if x.endswith("/c.here"))
    assert first - joined <= 1


@EXAMPLES
@given(seed=seeds)
def test_a_dead_node_costs_the_others_one_grace(seed):
    world = World(seed, rounds=10, rules=Rules(quorum=2, start=3, grace=10))
    for node in "ab":
        world.start(node)
    world.start("c", rounds=4).again = None
    dead = world.processes[-1]
    dead.steps = _cut(dead.steps, 60)
    world.run().check()
    for node in "ab":
        assert sum(wait > 9 for wait in world.waits[node]) <= 1


def _cut(steps, requests, until=()):
    """A process that dies after some requests, or at one of a type, without a word."""
    value = None
    for _ in range(requests):
        try:
            request = steps.send(value)
        except StopIteration:
            return
        if isinstance(request, until):
            return
        value = yield request


def test_a_run_with_other_settings_is_refused():
    world = World(0, rules=Rules(quorum=1, start=1))
    world.start("a")
    world.start("b", at=1.0, settings={"method": "thirds", "size": 6})
    world.run()
    (error,) = world.gone["b"]
    assert isinstance(error, RoundsError)
    assert str(error) == (
        "the bucket has a run with other settings: method='halves', here 'thirds'"
    )


def _never_back(self, pending, counted):
    self.memory, self.carry = pending.after, 0 * pending.difference


def _without_the_list(self, pending):
    yield from ()
    self.memory, self.carry = pending.before, pending.difference


@pytest.mark.parametrize("rule, broken, name", [
    ("_kept", _never_back, "stops"), ("_resume", _without_the_list, "kills"),
])  # fmt: skip
def test_a_broken_rule_is_seen(rule, broken, name, monkeypatch):
    monkeypatch.setattr(Member, rule, broken)
    with pytest.raises(AssertionError, match="invariant 3"):
        for seed in range(30):
            _run(name, seed)


def test_a_list_that_can_be_replaced_is_seen(monkeypatch):
    create_once = Bytes.create

    def create(self, name, data):
        if not name.endswith("/close"):
            return create_once(self, name, data)
        self.objects[name] = self.history[name] = data
        return True

    monkeypatch.setattr(Bytes, "create", create)
    with pytest.raises(AssertionError, match="invariant"):
        for seed in range(60):
            _run("stops", seed)
