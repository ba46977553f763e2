"""From a step to its phase, and from several schedules to one."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence

from jgc.types import Phase


def single(value: Hashable = "compressed") -> tuple[Phase, ...]:
    """The schedule of a method with one phase."""
    return (Phase(str(value), 0, value),)


def in_sequence(*spans: tuple[str, int]) -> tuple[Phase, ...]:
    """A schedule from names and lengths in steps; the last phase never ends, empty ones are left out.

    Example:
      >>> in_sequence(("dense", 2), ("top-k", 0), ("compressed", 0))
      (Phase(name='dense', start=0, value='dense'), Phase(name='compressed', start=2, value='compressed'))

    Raises:
      ValueError: a length is negative.
    """
    schedule, start = [], 0
    for i, (name, steps) in enumerate(spans):
        if steps < 0:
            raise ValueError(f"the {name} phase must last 0 or more steps, got {steps}")
        last = i == len(spans) - 1
        if steps or last:
            schedule.append(Phase(name, start, name))
        start += steps
    return tuple(schedule)


def phase_at(schedule: Sequence[Phase], step: int) -> Phase:
    """The phase that a step belongs to.

    Example:
      >>> phase_at(in_sequence(("dense", 2), ("compressed", 0)), 2).name
      'compressed'
    """
    return schedule[bisect_right([phase.start for phase in schedule], step) - 1]


def together(schedules: Sequence[Sequence[Phase]]) -> tuple[Phase, ...]:
    """The common schedule of several groups of leaves: a phase's value is the tuple of theirs.

    A phase is named after the schedule with the most phases.
    """
    starts = sorted({phase.start for schedule in schedules for phase in schedule})
    leading = max(schedules, key=len)
    return tuple(
        Phase(phase_at(leading, start).name, start, tuple(phase_at(schedule, start).value for schedule in schedules))
        for start in starts
    )
