"""From steps to phases."""

import pytest
from hypothesis import given, strategies as st

from jgc.method.phases import in_sequence, phase_at, single, together

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def _schedule(lengths):
    return in_sequence(*((f"phase {i}", n) for i, n in enumerate(lengths)))


@given(lengths, st.integers(0, 25))
def test_last_phase_lasts_forever(lengths, step):
    names = [f"phase {i}" for i, n in enumerate(lengths[:-1]) for _ in range(n)]
    expected = names[step] if step < len(names) else f"phase {len(lengths) - 1}"
    assert phase_at(_schedule(lengths), step).name == expected


@given(st.lists(lengths, min_size=1, max_size=3), st.integers(0, 25))
def test_the_phase_of_several_groups_is_the_tuple_of_their_phases(groups, step):
    schedules = [_schedule(group) for group in groups]
    common = together(schedules)
    assert common[0].start == 0
    assert phase_at(common, step).value == tuple(phase_at(schedule, step).value for schedule in schedules)
    assert sorted({phase.start for phase in common}) == [phase.start for phase in common]


def test_a_common_phase_has_the_name_of_the_longest_schedule():
    assert [p.name for p in together([single(), in_sequence(("dense", 2), ("top-k", 0))])] == ["dense", "top-k"]


def test_negative_phase_length_is_named():
    with pytest.raises(ValueError, match="the dense phase must last 0 or more steps, got -1"):
        in_sequence(("dense", -1), ("top-k", 0))


def test_negative_step_is_named():
    with pytest.raises(ValueError, match="steps count from 0, got step -1"):
        phase_at(in_sequence(("dense", 2), ("top-k", 0)), -1)
