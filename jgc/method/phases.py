"""The phase of a step, and the common schedule of several methods."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Any

from jgc.checks.misuse import check_compressor
from jgc.types import Nodes, Phase, State

DENSE = "dense"
"""The value of a phase that sends everything uncompressed. Memories get `complete=True` in it."""


def single(value: Hashable = "compressed") -> tuple[Phase, ...]:
    """The schedule of a method with one phase."""
    return (Phase(str(value), 0, value),)


def in_sequence(*spans: tuple[str, int]) -> tuple[Phase, ...]:
    """A schedule from names and lengths in steps, without empty phases; the last never ends.

    Example:
      >>> [(p.name, p.start) for p in in_sequence(("dense", 2), ("top-k", 0), ("compressed", 0))]
      [('dense', 0), ('compressed', 2)]

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
        start += int(steps)  # of NumPy it may be, which JSON cannot write
    return tuple(schedule)


def phase_at(schedule: Sequence[Phase], step: int) -> Phase:
    """The phase that a step belongs to.

    Raises:
      TypeError: a compressor instead of its schedule.
      ValueError: a negative step.

    Example:
      >>> phase_at(in_sequence(("dense", 2), ("compressed", 0)), 2).name
      'compressed'
    """
    if hasattr(schedule, "schedule"):
        raise TypeError("phase_at takes a schedule: give compressor.schedule")
    if step < 0:
        raise ValueError(f"steps count from 0, got step {step}")
    return schedule[bisect_right([phase.start for phase in schedule], step) - 1]


def phase_after(compressor: Any, before: Phase, step: int, state: State, nodes: Nodes) -> Phase:
    """The phase of `step`, given the phase of the step before it and the state after that step.

    Example:
      >>> import jax, jgc
      >>> compressor, nodes = jgc.compress.topk(warmup_steps=2), jgc.make_nodes(1)
      >>> phase = phase_at(compressor.schedule, 0)
      >>> state = compressor.init(jax.random.key(0), {"w": jax.numpy.zeros(3)}, nodes)
      >>> phase_after(compressor, phase, 2, state, nodes).name
      'top-k'
    """
    if not hasattr(compressor, "schedule"):
        check_compressor(compressor)
    if compressor.next_phase is None:
        return phase_at(compressor.schedule, step)
    return compressor.next_phase(before, step, state, nodes)


def as_json(phase: Phase) -> list[Any]:
    """A phase as lists and scalars for JSON."""
    return [phase.name, phase.start, phase.value, [as_json(part) for part in phase.parts]]


def from_json(saved: Sequence[Any]) -> Phase:
    """The inverse of `as_json`.

    Example:
      >>> from_json(as_json(Phase("compressed", 5, ("compressed", (8, 16)))))
      Phase(name='compressed', start=5, value=('compressed', (8, 16)), parts=())
    """
    name, start, value, parts = saved
    return Phase(name, start, _frozen(value), tuple(from_json(part) for part in parts))


def _frozen(x: Any) -> Hashable:
    return tuple(_frozen(item) for item in x) if isinstance(x, list | tuple) else x


def combined(parts: Sequence[Phase], start: int, leading: int) -> Phase:
    """The common phase of groups: the tuple of their values, and the name of `parts[leading]`."""
    return Phase(parts[leading].name, start, tuple(part.value for part in parts), tuple(parts))


def together(schedules: Sequence[Sequence[Phase]]) -> tuple[Phase, ...]:
    """The common schedule of several groups: a phase's value is the tuple of the groups' values.

    A phase is named after the schedule with the most phases, and if that name is not unique, also
    after its first step: "dense, from step 100".
    """
    starts = sorted({phase.start for schedule in schedules for phase in schedule})
    leading = leader_of(schedules)
    phases = [
        combined([phase_at(schedule, start) for schedule in schedules], start, leading)
        for start in starts
    ]
    names = [phase.name for phase in phases]
    for i, phase in enumerate(phases):
        if names.count(phase.name) > 1:
            phases[i] = phase._replace(name=f"{phase.name}, from step {phase.start}")
    return tuple(phases)


def phase_names(phase: Phase) -> tuple[str, ...]:
    """The names of the groups' phases in a common one."""
    return tuple(part.name for part in phase.parts)


def leader_of(schedules: Sequence[Sequence[Phase]]) -> int:
    """Index of the schedule with the most phases; of equal ones the last, `per_layer`'s default."""
    return max(range(len(schedules)), key=lambda i: (len(schedules[i]), i))
