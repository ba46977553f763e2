"""Bytes of a phase, with local steps of a round: H steps, in which every fragment is exchanged once."""

from collections.abc import Sequence

from jgc.loops.fragments import take
from jgc.method.messages import added
from jgc.training.steps.costs import PhaseCost, phase_cost
from jgc.training.steps.step import Parts, TrainState
from jgc.types import Phase, Wire


def costs_of(parts: Parts, state: TrainState) -> tuple[PhaseCost, ...]:
    """The cost of every phase of the schedule, of a step or of a round."""
    return tuple(cost_of_phase(parts, phase, state) for phase in parts.compressor.schedule)


def cost_of_phase(parts: Parts, phase: Phase, state: TrainState) -> PhaseCost:
    """The cost of a step in a phase; with local steps that of a round."""
    if parts.local is None:
        return phase_cost(parts.compressor, phase, state.params, parts.nodes)
    return joined([cost_of_exchange(parts, i, phase, state) for i in range(parts.local.fragments)])


def cost_of_exchange(parts: Parts, fragment: int, phase: Phase, state: TrainState) -> PhaseCost:
    """The cost of the exchange of one fragment."""
    assert parts.local is not None
    part = take(state.params, parts.local.leaves(state.params)[fragment])
    return phase_cost(parts.exchanged, phase, part, parts.nodes)


def joined(costs: Sequence[PhaseCost]) -> PhaseCost:
    """The cost of several exchanges in one phase."""
    if len(costs) == 1:
        return costs[0]
    sizes = (sum(column) for column in zip(*(cost[3:] for cost in costs), strict=True))
    wires = _joined([cost.wire for cost in costs]), _joined([cost.apart for cost in costs])
    return PhaseCost(costs[0].phase, *wires, *sizes)


def _joined(wires: Sequence[Wire]) -> Wire:
    physical = tuple(sent for wire in wires for sent in wire.physical)
    return Wire(
        added([wire.logical for wire in wires]), physical, added([wire.once for wire in wires]), wires[0].devices
    )
